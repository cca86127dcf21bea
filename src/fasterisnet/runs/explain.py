"""Heatmaps of image files by one trained run, or several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fasterisnet.data.manifest import Record
from fasterisnet.data.pictures import readable, stem_of
from fasterisnet.data.reader import Reader, is_image_file
from fasterisnet.data.sources import read_window
from fasterisnet.errors import InputError, UsageError
from fasterisnet.evaluation.figures import heatmap_figure, is_own_figure, save_figure
from fasterisnet.lrp.explain import explain
from fasterisnet.lrp.logits import logits_in
from fasterisnet.runs.folder import Run
from fasterisnet.runs.report import viewable
from fasterisnet.runs.spelling import nearest


def explain_files(
    runs: Sequence[str | Path],
    images: Sequence[str | Path],
    out: str | Path,
    *,
    target: str | None = None,
    masks: str | Path | None = None,
    rule: str = "epsilon",
    window: str | None = None,
    trust: bool = False,
    device: torch.device | None = None,
) -> list[Path]:
    """One picture for each image: the image, then the heatmap of every run for the target or its own decision.

    images: files, and folders of them; every slice of a file that has several is one. masks: a folder of masks with the
    same names, or with the same folders in it.
    window: what of files with more than 8 bits is black and white, if not what the run was trained with.
    """
    try:
        seen = None if window is None else read_window(window)
    except (ValueError, TypeError) as error:
        raise UsageError(f"window is '{window}'; it has to be low,high with low below high, or auto.") from error
    found = _found(images)
    places = _places([record for record, _ in found], Path(out), Path(masks) if masks is not None else None)
    networks = [(Path(run).name, *Run(run).load_model(trust=trust)) for run in runs]
    if len({card.prepare.size for _, _, card in networks}) > 1:
        seen_by = ", ".join(f"{readable(name)} sees {card.prepare.size} px" for name, _, card in networks)
        raise UsageError(f"Runs that are shown side by side have to see images of one size: {seen_by}.")
    device = device or torch.device("cpu")
    for _, model, _ in networks:
        model.to(device)
    first = Run(runs[0])
    reader = Reader(tuple(first.config.foreground) if first.path("config.yaml").is_file() else ())
    for (record, below), place in zip(found, places, strict=True):
        mask = _mask_of(record, masks, below, reader)
        maps, texts, shown = {}, [], None
        for name, model, card in networks:
            picture = Reader(window=seen or card.prepare.window).image(record.image, record.slice)
            if mask is not None and mask.shape[1:] != picture.shape[1:]:
                sizes = [f"{found.shape[2]} x {found.shape[1]}" for found in (mask, picture)]
                raise InputError(f"{record.name} is {sizes[1]}, but its mask {sizes[0]}; make it in the same size.")
            prepared, outline = card.prepare(picture, mask)
            batch = prepared.unsqueeze(0).to(device)
            with torch.no_grad():
                logits = logits_in(model(batch))[0].cpu()
            chosen = int(logits.argmax()) if target is None else _index(target, card.classes)
            label = _unique(name, maps)
            box = card.box if rule == "epsilon" else None
            maps[label] = explain(model, batch, chosen, rule=rule, box=box).cpu()
            chance = logits.sigmoid() if card.multi_label else logits.softmax(0)
            texts.append(f"{label}: {card.classes[chosen]} {chance[chosen]:.0%}")
            shown = shown or (viewable(batch.cpu(), card), outline.unsqueeze(0) if mask is not None else None)
        pixels, outlines = shown or (None, None)
        title = "\n".join([Path(record.name).name, *map(readable, texts)])
        figure = heatmap_figure(pixels, maps, outlines, titles=[title])  # pyright: ignore[reportArgumentType]
        save_figure(figure, place)
    return places


def _places(images: list[Record], out: Path, masks: Path | None) -> list[Path]:
    """Where the pictures go; a file that this program did not write, an image above all, is never replaced."""
    taken: set[str] = set()
    places = []
    inputs = {Path(record.image).resolve() for record in images}
    for record in images:
        stem = stem_of(Path(record.image).name) + ("" if record.slice is None else f"-slice{record.slice}")
        stem = _unique(stem, taken)
        taken.add(stem)
        place = out / f"{stem}.png"
        if place.exists() and (place.resolve() in inputs or not is_own_figure(place)):
            raise UsageError(f"{place} is there and no picture that this command may replace; choose another --out.")
        places.append(place)
    if masks is not None and out.exists() and out.resolve() == masks.resolve():
        raise UsageError(f"{out} is the folder of the masks; choose another --out.")
    return places


def _found(images: Sequence[str | Path]) -> list[tuple[Record, Path]]:
    """Images, each with the folder it lies in below the one that was named."""
    found: list[tuple[Record, Path]] = []
    for place in map(Path, images):
        inside = sorted(p for p in place.rglob("*") if p.is_file() and is_image_file(p)) if place.is_dir() else []
        if place.is_dir() and not inside:
            raise UsageError(f"{place} has no image files in it.")
        if not inside and not place.is_file():
            raise UsageError(f"{place} is not an image file or a folder of them.")
        for path in inside or [place]:
            below = path.relative_to(place).parent if inside else Path()
            found += ((record, below) for record in Record(str(path), "", ()).expanded())
    return found


def _mask_of(record: Record, masks: str | Path | None, below: Path, reader: Reader) -> torch.Tensor | None:
    if masks is None:
        return None
    if not Path(masks).is_dir():
        raise UsageError(f"{masks} is not a folder of masks.")
    stem, there = stem_of(Path(record.image).name), Path(masks) / below
    there = there if there.is_dir() else Path(masks)
    found = sorted(p for p in there.iterdir() if stem_of(p.name) == stem and is_image_file(p))
    return reader.mask(found[0], record.slice).clear(found[0]) if found else None


def _index(target: str, classes: list[str]) -> int:
    if target not in classes:
        raise UsageError(f"There is no class '{target}'{nearest(target, classes)}")
    return classes.index(target)


def _unique(name: str, taken: set[str] | dict[str, object]) -> str:
    """A name that is not taken yet."""
    if name not in taken:
        return name
    return next(f"{name}-{i}" for i in range(2, len(taken) + 3) if f"{name}-{i}" not in taken)
