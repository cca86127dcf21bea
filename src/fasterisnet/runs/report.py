"""What is known of a run when its training is over: the tests, in numbers and in a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fasterisnet.data.base import Label, Samples, Source, readable_part
from fasterisnet.data.loader import PATIENCE, Loader
from fasterisnet.data.pictures import readable
from fasterisnet.data.sources import is_own, open_source
from fasterisnet.errors import InputError
from fasterisnet.evaluation.figures import heatmap_figure, save_figure
from fasterisnet.evaluation.metrics import evaluate
from fasterisnet.files import file_name, read_json, write_text
from fasterisnet.lrp.explain import explain
from fasterisnet.methods import Method, method_class
from fasterisnet.runs.card import Card
from fasterisnet.runs.config import Config, paper_weight
from fasterisnet.runs.folder import Run

SHOWN = 4
FALLEN = 0.6  # of its first value: a background loss above that has not fallen
NEARLY_NOTHING = 0.1  # a background loss below that needs not fall
LOST, TIMES = 0.25, 1.5  # share of what a loss had fallen by, and times its lowest value: above both it came up again


def metrics_of(
    model: torch.nn.Module,
    card: Card,
    samples: Samples,
    *,
    name: str = "",
    batch: int = 32,
    workers: int = 0,
    timeout: float = PATIENCE,
    attention: bool = True,
    explained: int = 0,
    device: Any = None,
    heard: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """All metrics of a network on one split.

    explained: about how many samples have maps measured (0: all). heard: is told of the progress.
    """
    loader = Loader(samples, card.prepare, batch, name=name, workers=workers, timeout=timeout)
    loader.heard = partial(heard, name) if heard is not None else None
    return evaluate(
        model, loader.epoch(0), card.classes, multi_label=card.multi_label, box=card.box, attention=attention,
        share=min(1.0, explained / len(samples)) if explained else 1.0, device=device,
    )  # fmt: skip


@dataclass
class Tests:
    """Metrics and samples by split, and which images and whole splits could not be read."""

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: dict[str, Samples] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def source_for(run: Run, card: Card, data: str = "", *, seed: int | None = None) -> Source:
    """Data to test a run on (its own, if none is named), with masks and windows read as the run reads them.

    Data of the user's own may lack a class of the network; its labels are then numbered as the network's.
    """
    config = run.config if run.path("config.yaml").is_file() or not data else None
    data = data or (config.data if config is not None else "")
    own: dict[str, Any] = {}
    if is_own(data):
        own = {"window": card.prepare.window, "classes": None if card.multi_label else card.classes}
        if config is not None:
            own |= {"foreground": config.foreground or None, "refine_boxes": config.refine_boxes or None}
    return open_source(data, seed=config.seed if seed is None and config is not None else seed or 0, **own)


def check_classes(card: Card, source: Source) -> None:
    """A network can be tested on data with its own classes only."""
    if card.multi_label != source.multi_label:
        kinds = {True: "several labels at once", False: "one label an image"}
        raise InputError(
            f"The network was trained for {kinds[card.multi_label]}, the data has {kinds[source.multi_label]}; give "
            "data of the same kind."
        )
    if card.classes != source.classes:
        raise InputError(
            f"The network knows the classes {', '.join(card.classes)}; the data has {', '.join(source.classes)}. "
            "Name folders or labels alike."
        )


def table(results: dict[str, dict[str, Any]]) -> str:
    """Metrics of several splits, as Markdown."""
    columns = {
        "accuracy": "accuracy", "macro_f1": "macro F1", "macro_auc": "macro AUC", "iou": "IoU",
        "background_mass": "relevance in the background",
    }  # fmt: skip
    if not any("iou" in r for r in results.values()):
        columns.pop("iou")
    lines = [f"| split | samples | {' | '.join(columns.values())} |", "| --- " * (2 + len(columns)) + "|"]
    for name, r in results.items():
        lines.append(f"| {cell(name)} | {r['samples']} | {' | '.join(_shown(r.get(key)) for key in columns)} |")
    empty = {name: r["empty_foreground"] for name, r in results.items() if r.get("empty_foreground")}
    lines += [f"\nNo foreground was found in {n} images of {cell(name)}." for name, n in empty.items()]
    return "\n".join(lines)


def cell(text: str) -> str:
    """A name in a table of Markdown, on one line and in one cell."""
    return readable(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def measured_splits(
    model: torch.nn.Module,
    card: Card,
    splits: Mapping[str, Samples],
    say: Callable[[str], None],
    *,
    skip_bad: bool = False,
    **settings: Any,
) -> Tests:
    """The metrics of every split; settings: of `metrics_of`. skip_bad: images that cannot be read are left out."""
    tests = Tests()
    for name, samples in splits.items():
        usable, problems = readable_part(samples, settings.get("workers", 0)) if skip_bad else (samples, [])
        tests.bad += problems
        if len(usable) == 0:
            say(f"{readable(name)}: none of its images can be read, so there is no test.")
            tests.unreadable.append(name)
            continue
        tests.samples[name] = usable
        tests.results[name] = metrics_of(model, card, usable, name=name, **settings)
    return tests


def write_report(
    run: Run,
    source: Source,
    training_samples: int,
    bad: Sequence[str],
    say: Callable[[str], None],
    device: Any = None,
    *,
    trust: bool = False,
    extended: Sequence[int] = (),
    heard: Callable[[str, int, int], None] | None = None,
) -> None:
    """report.json and report.md with every test split, and heatmaps.png of a few samples of each.

    bad: what is known of images that could not be read. extended: after which epochs the run had ended before.
    """
    config = run.config
    model, card = run.load_model(trust=trust)
    check_classes(card, source)
    model = model.to(device) if device is not None else model
    tests = measured_splits(
        model, card, {name: s for name, s in source.splits.items() if name not in ("train", config.validation)}, say,
        skip_bad=config.on_bad_image == "skip", batch=config.batch, workers=config.workers, explained=config.explained,
        timeout=config.loader_timeout, device=device, heard=heard,
    )  # fmt: skip
    results, bad = tests.results, [*bad, *tests.bad]
    for name, samples in tests.samples.items():
        shown = (f"{key} {_shown(results[name][key])}" for key in ("accuracy", "macro_f1", "macro_auc"))
        say(f"{name}: {', '.join(shown)}")
        picture(run, model, card, samples, f"heatmaps-{file_name(name)}.png", device)
    lines = [
        f"# {config.method}, {config.model}",
        "",
        f"Weights of epoch {card.epoch} of {config.epochs}; validation loss: {_shown(card.validation_loss)}.",
        *[_extended(epoch, config.schedule) for epoch in extended],
        *masks_line(run),
        *background_line(run, say),
        *learning_lines(run, card, say),
        f"Images that could not be read and were skipped: {len(bad)}.",
        *[f"- {text}" for text in bad],
        *[f"The split {cell(name)} has no image that can be read; it was not tested." for name in tests.unreadable],
        "",
        table(results),
    ]
    write_text(run.path("report.md"), "\n".join(lines) + "\n")
    facts = {"epoch": card.epoch, "training_samples": training_samples, "skipped_images": bad}
    facts |= {"extended_after": list(extended)} if extended else {}
    run.write_json("report.json", {**facts, "tests": results})


def _extended(epoch: int, schedule: str) -> str:
    rates = "" if schedule == "constant" else f", with a {schedule} schedule of their own"
    return f"The run had ended after epoch {epoch}; the epochs after it were added later{rates}."


def usable_masks(run: Run, split: str) -> tuple[int, int] | None:
    """How many images of a split had a usable mask when the run began, and of how many; None for older versions."""
    try:
        found = read_json(run.path("data.json"))
        return int(found["masks"][split]), int(found["samples"][split])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def masks_line(run: Run) -> list[str]:
    """How many training images had a mask; nothing for Standard, which needs none, and for runs of older versions."""
    counts = usable_masks(run, "train")
    if counts is None:
        return []
    usable, images = counts
    share = f" {run.config.mask_share:.0%} of them were used." if run.config.mask_share < 1 else ""
    line = f"Training images with a usable mask: {usable:,} of {images:,} ({usable / max(images, 1):.0%}).{share}"
    return [line] if method_class(run.config.method).needs_masks else []


def background_line(run: Run, say: Callable[[str], None]) -> list[str]:
    """Says, at the end and in the report, when the background loss has not fallen, and what to try then."""
    config = run.config
    losses = [float(row["train_background"]) for row in run.rows]
    if not method_class(config.method).needs_ranges or len(losses) < 2:
        return []
    first, last = losses[0], min(losses[-1], losses[0])
    if last <= max(FALLEN * first, NEARLY_NOTHING):
        return []
    weight = paper_weight(config.method) if config.heatmap_weight is None else config.heatmap_weight
    default = "" if config.schedule != "constant" else "--schedule onecycle (the rate was constant), "
    line = (
        f"The background loss L1 has hardly fallen ({first:.2f} in the first epoch, {losses[-1]:.2f} in the last): the "
        f"network still looks at the background. Try, in this order, {default}more --epochs, a smaller --batch "
        f"({config.batch}), a higher --heatmap-weight ({weight}), another --lr ({config.lr:g}); "
        "docs/training.md says more."
    )
    say(line)
    return [line]


def came_apart(rows: Sequence[Mapping[str, Any]], config: Config) -> bool:
    """Whether the loss that a network learns from is far above the lowest there has been; not where P changes it."""
    losses = [float(row["train_loss"]) for row in rows]
    if isinstance(config.heatmap_weight, list) or not losses:
        return False
    lowest = min(losses)
    return losses[-1] - lowest > max(LOST * (losses[0] - lowest), (TIMES - 1) * lowest)


def learning_lines(run: Run, card: Card, say: Callable[[str], None]) -> list[str]:
    """Says when the last epoch is worse than an earlier one by the loss it learned from, and when it only guesses."""
    config, method, lines = run.config, method_class(run.config.method), []
    losses = [float(row["train_loss"]) for row in run.rows]
    if len(losses) < 2:
        return []
    if method.plan is Method.plan and came_apart(run.rows, config):
        lowest = min(losses)
        lines.append(
            f"The training loss came up again, from {lowest:.3g} in epoch {losses.index(lowest) + 1} to "
            f"{losses[-1]:.3g} in the last: the training came apart. The weights are of epoch {card.epoch}. Try a "
            f"lower --lr ({config.lr:g})."
        )
    learned = float(run.rows[-1]["train_classification"])
    guessed = math.log(2 if card.multi_label else len(card.classes))
    if learned >= guessed:
        lines.append(
            f"The classes were not learned: the classification loss of the last epoch is {learned:.3g}, that of "
            f"guessing {guessed:.3g}. Try more --epochs, another --lr ({config.lr:g})"
            f"{', a lower --heatmap-weight' if method.needs_ranges else ''}."
        )
    for line in lines:
        say(line)
    return lines


def picture(run: Run, model: torch.nn.Module, card: Card, samples: Samples, name: str, device: Any = None) -> None:
    """Where the network looked, for a few samples spread over the split."""
    chosen = torch.linspace(0, len(samples) - 1, min(SHOWN, len(samples))).long().tolist()
    images, masks, _ = read(samples, chosen, card)
    maps = explain(model, images.to(device) if device is not None else images, box=card.box).cpu().nan_to_num()
    save_figure(heatmap_figure(viewable(images, card), {card.method: maps}, masks), run.path(name))


def read(samples: Samples, chosen: list[int], card: Card) -> tuple[Tensor, Tensor, list[Label]]:
    """Some samples as the network sees them: images, masks and labels."""
    readings = [samples.read(i) for i in chosen]
    prepared = [card.prepare(r.image, r.mask) for r in readings]
    images, masks = (torch.stack(part) for part in zip(*prepared, strict=True))
    return images, masks, [r.label for r in readings]


def viewable(images: Tensor, card: Card) -> Tensor:
    """Network input back in [0, 1]."""
    preparation = card.prepare
    if not preparation.mean:
        return images
    shape = (1, -1, 1, 1)
    return images * torch.tensor(preparation.std).view(shape) + torch.tensor(preparation.mean).view(shape)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
