"""What a folder or a CSV manifest holds, before anything is decoded; the layouts are told in `folder.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from fasterisnet.data.boxes import Box, boxes_of, read_coco, read_voc
from fasterisnet.data.manifest import AnyPath, Columns, Record, RowError, Table, is_manifest
from fasterisnet.data.pictures import is_image_name, readable, stem_of
from fasterisnet.data.reader import is_image_file
from fasterisnet.errors import InputError

MASKS, BOXES = "masks", "boxes"
MANIFESTS = ("manifest.csv", "index.csv")
LAYOUT = "expected DIR/<split>/<class>/image.png with DIR/masks/<split>/<class>/image.png, or DIR/manifest.csv"
NO_TRAIN = "no train split"


class Finding(NamedTuple):
    """Something wrong with the data: its kind (all are in `check.KINDS`) and a message that starts with a path."""

    kind: str
    message: str


@dataclass
class Listing:
    """What a data set holds, before anything is decoded; `broken` keeps it from being opened, `odd` does not."""

    root: str
    classes: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    multi_label: bool = False
    from_folders: bool = False
    columns: list[str] = field(default_factory=list)
    broken: list[Finding] = field(default_factory=list)
    odd: list[Finding] = field(default_factory=list)

    @property
    def splits(self) -> list[str]:
        """Their names: train, val, then the tests."""
        return sorted({r.split for r in self.records}, key=lambda name: (name != "train", name != "val", name))


def list_data(path: AnyPath, *, columns: Columns | None = None, boxes: AnyPath | None = None) -> Listing:
    """What a folder, a manifest in it, or a CSV file lists."""
    if not os.path.exists(path):
        raise InputError(f"{readable(path)}: cannot be read, there is no such folder or file; {LAYOUT}.")
    if not os.path.isdir(path):
        return list_manifest(path, columns=columns, boxes=boxes)
    default = os.path.join(path, "annotations.json")
    boxes = default if boxes is None and os.path.isfile(default) else boxes
    for name in MANIFESTS:
        manifest = os.path.join(path, name)
        if os.path.isfile(manifest) and (name == MANIFESTS[0] or is_manifest(manifest, columns or Columns())):
            return list_manifest(manifest, columns=columns, boxes=boxes)
    return list_folder(path, boxes=boxes)


def list_folder(path: AnyPath, *, boxes: AnyPath | None = None) -> Listing:
    """The images of DIR/<split>/<class>, each with the mask or boxes of its name."""
    listing = Listing(os.fspath(path), from_folders=True)
    splits = [
        entry for entry in _visible(listing, listing.root) if _is_folder(entry) and entry.name not in (MASKS, BOXES)
    ]
    if not splits:
        raise InputError(f"{readable(path)}: has no folder for a split; {LAYOUT}.")
    for split in splits:
        before = len(listing.records)
        for entry in _visible(listing, split.path):
            if _is_folder(entry):
                _list_class(listing, split.name, entry.name)
            elif is_image_name(entry.name):
                listing.odd.append(Finding("stray", f"{readable(entry.path)}: is not in the folder of a class"))
        if len(listing.records) == before:
            message = f"{readable(split.path)}: holds no class with images; {LAYOUT}; if it is no split, move it away"
            listing.broken.append(Finding("layout", message))
    return _completed(listing, {name for record in listing.records for name in record.labels}, boxes)


def _list_class(listing: Listing, split: str, name: str) -> None:
    """The images of one class in one split."""
    masks = _by_stem(listing, os.path.join(listing.root, MASKS, split, name), is_image_file)
    boxes = _by_stem(
        listing, os.path.join(listing.root, BOXES, split, name), lambda file: file.lower().endswith(".xml")
    )
    folder = os.path.join(listing.root, split, name)
    before = len(listing.records)
    for entry in _visible(listing, folder):
        if _is_folder(entry):
            listing.odd.append(Finding("stray", f"{readable(entry.path)}: is a folder inside a class"))
        elif not is_image_file(entry.path):
            listing.odd.append(Finding("stray", f"{readable(entry.path)}: is not named like an image"))
        else:
            stem = entry.name if entry.name in masks else stem_of(entry.name)
            found: tuple[Box, ...] = ()
            if stem in boxes and stem not in masks:
                try:
                    found = boxes_of(read_voc(boxes[stem]), (name,))
                except InputError as error:
                    listing.broken.append(Finding("box file", str(error).removesuffix(".")))
            listing.records += Record(entry.path, split, (name,), masks.get(stem), found).expanded()
    if len(listing.records) == before:
        listing.odd.append(Finding("stray", f"{readable(folder)}: holds no image"))


def _by_stem(listing: Listing, folder: str, wanted: Callable[[str], bool]) -> dict[str, str]:
    """Files by name without suffix; of two with the same, the PNG, else the first."""
    if not os.path.isdir(folder):
        return {}
    files = [entry for entry in _visible(listing, folder) if not _is_folder(entry) and wanted(entry.path)]
    files.sort(key=lambda entry: (not entry.name.lower().endswith(".png"), entry.name), reverse=True)
    return {_stem(entry.name): entry.path for entry in files}


def _stem(name: str) -> str:
    return os.path.splitext(name)[0] if name.lower().endswith(".xml") else stem_of(name)


def _visible(listing: Listing, folder: str) -> list[os.DirEntry[str]]:
    """What is in a folder, by name, but nothing hidden."""
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        listing.broken.append(Finding("layout", f"{readable(folder)}: cannot be listed ({error.strerror})"))
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Also true for a link to a folder; a link that leads nowhere is none, but no error either."""
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))


def _completed(listing: Listing, classes: set[str], boxes: AnyPath | None) -> Listing:
    """With the boxes of a COCO file, and with what is wrong with the names of classes and splits."""
    listing.classes = sorted(classes)
    for name in (*listing.classes, *listing.splits):
        if name.encode("utf-8", "replace").decode() != name:
            listing.broken.append(Finding("layout", f"{readable(name)}: the name of the class or split is not UTF-8"))
    if listing.records and "train" not in listing.splits:
        there = ", ".join(map(readable, listing.splits))
        listing.broken.append(Finding(NO_TRAIN, f"{readable(listing.root)}: has no split 'train', only: {there}"))
    if boxes is not None:
        _add_boxes(listing, boxes)
    return listing


def looked_for(listing: Listing, record: Record) -> str:
    """Where the mask of an image would have to be, and the nearest that is there."""
    if not listing.from_folders:
        if "mask" in listing.columns:
            return "the column 'mask' of the table is empty"
        near = [name for name in listing.columns if "mask" in name or "seg" in name]
        boxes = "" if near else " (nor x, y, w, h, a box)"
        return f"the table has no column 'mask'{boxes}, but {', '.join(map(readable, near or listing.columns))}"
    part, file = os.path.split(os.path.relpath(record.image, listing.root))
    wanted = os.path.join(MASKS, part, f"{stem_of(file)}.png")
    there = _masks_like(listing.root, stem_of(file))
    near = [*get_close_matches(wanted, there, n=1, cutoff=0.0), "no mask at all"][0]
    return f"there is no {readable(wanted)} (or .jpg, ...); nearest is {readable(near)}"


def _masks_like(root: str, stem: str) -> list[str]:
    """Pictures that may be masks, by their paths in the data: those with the stem in their name, or else all."""
    found: list[str] = []
    for top in sorted(entry.name for entry in os.scandir(root) if entry.is_dir()):
        if any(word in top.lower() for word in ("mask", "seg", "label", "annot")):
            for folder, _, files in os.walk(os.path.join(root, top)):
                paths = (os.path.join(folder, name) for name in files)
                found += (os.path.relpath(path, root) for path in paths if is_image_file(path))
    return sorted(name for name in found if stem in os.path.basename(name)) or sorted(found)[:1000]


def _add_boxes(listing: Listing, path: AnyPath) -> None:
    """Boxes of a COCO file for the images that have neither mask nor box."""
    try:
        found = {os.path.normpath(name): boxes for name, boxes in read_coco(path).items()}
    except InputError as error:
        listing.broken.append(Finding("box file", str(error).removesuffix(".")))
        return
    taken: dict[str, str] = {}
    for i, record in enumerate(listing.records):
        parts = Path(os.path.relpath(record.image, listing.root)).parts
        name = next((end for k in range(len(parts)) if (end := os.path.join(*parts[k:])) in found), None)
        if name is None:
            continue
        if taken.setdefault(name, record.image) != record.image:
            both = f"{readable(taken[name])} and {readable(record.image)}"
            listing.broken.append(
                Finding("box file", f"{readable(path)}: '{readable(name)}' fits {both}; use longer names")
            )
        if record.mask is None and not record.boxes:
            listing.records[i] = record._replace(boxes=boxes_of(found[name], record.labels))
    for name in sorted(found.keys() - taken.keys()):
        listing.odd.append(Finding("mask without image", f"{readable(path)}: there is no image '{readable(name)}'"))


def list_manifest(path: AnyPath, *, columns: Columns | None = None, boxes: AnyPath | None = None) -> Listing:
    """The images a CSV names."""
    table = Table(path, columns or Columns())
    listing = Listing(os.path.dirname(path) or ".", multi_label=bool(table.classes), columns=list(table.place))
    for name in table.unused:
        listing.odd.append(Finding("column", f"{readable(path)}: the column '{readable(name)}'"))
    with_boxes: dict[tuple[object, ...], int] = {}
    for line, cells in table.rows():
        try:
            record = table.record(cells, listing.root)
        except RowError as error:
            finding = Finding(error.kind, f"{readable(path)}, line {line}: {error}")
            (listing.odd if error.kind == "no split" else listing.broken).append(finding)
            continue
        key = (record.image, record.split, record.labels, record.group)
        if record.boxes and key in with_boxes:
            earlier = listing.records[with_boxes[key]]
            listing.records[with_boxes[key]] = earlier._replace(boxes=earlier.boxes + record.boxes)
            continue
        if record.boxes:
            with_boxes[key] = len(listing.records)
        listing.records.append(record)
    if not listing.records and not listing.broken:
        raise InputError(f"{readable(path)}: names no image of any split.")
    listing.records = [part for record in listing.records for part in record.expanded()]
    return _completed(listing, set(table.classes) or {n for record in listing.records for n in record.labels}, boxes)
