"""Images with masks from a folder or a CSV manifest.

A folder:    DIR/<split>/<class>/name.png (any image format); its mask DIR/masks/<split>/<class>/name.png (or
             name.png.png, where name.jpg is there too), or its boxes DIR/boxes/<split>/<class>/name.xml (Pascal VOC).
             Every folder in DIR but those two is a split.
A manifest:  a CSV with the columns image, split and label; or, for several labels an image, a column `label:NAME` with
             0 or 1 for each class. Optional: mask (path, may be empty), group or patient (or patient_id, subject,
             subject_id), site, slice (of a medical file, from 0), and x, y, w, h (a box). Paths are relative to the
             CSV. Rows with an empty split are left out; rows that repeat an image add their box.
             It may lie in DIR as `manifest.csv` (or `index.csv`), and is used instead of the folders then.
Boxes:       a COCO file (DIR/annotations.json, or any other that is named) gives outlines or boxes to images without
             mask, by `file_name`: a path relative to DIR or the end of one. Those named like the class of the image
             count; if there are none, all do.
Medical:     DICOM (any name) and NIfTI (.nii, .nii.gz) need the extra `medical`. Each slice of a file is a sample, and
             all of them are a group; DICOM's hospital and patient are one too, unless a manifest names the group.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from fasterisnet.data.base import BadImageError, Label, Reading, Samples, Source
from fasterisnet.data.boxes import Box, boxes_of, boxes_to_mask, opencv, read_coco, read_voc, refine
from fasterisnet.data.manifest import AnyPath, Columns, Record, RowError, Table, is_manifest
from fasterisnet.data.pictures import Window, is_image_name, readable, stem_of
from fasterisnet.data.reader import Reader, is_image_file
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


class FolderSamples:
    """One split of files, decoded when asked for. Holds plain lists, so worker processes can have a copy."""

    def __init__(
        self,
        records: Sequence[Record],
        labels: Sequence[Label],
        *,
        refine_boxes: bool = False,
        reader: Reader | None = None,
    ) -> None:
        self.records, self.labels, self.refine_boxes = list(records), list(labels), refine_boxes
        self.reader = reader or Reader()

    def __len__(self) -> int:
        return len(self.records)

    def read(self, index: int) -> Reading:
        """The sample as it is stored; boxes come as a mask."""
        record = self.records[index]
        image = self.reader.image(record.image, record.slice)
        return Reading(image, self._mask(record, image), self.labels[index])

    def _mask(self, record: Record, image: Tensor) -> Tensor | None:
        if record.mask is not None:
            mask = self.reader.mask(record.mask, record.slice).clear(record.mask)
            if mask.shape[1:] != image.shape[1:]:
                raise BadImageError(
                    f"{size_mismatch(record, image, mask)}; make the mask anew in the size of the image."
                )
            return mask
        if not record.boxes:
            return None
        try:
            mask = boxes_to_mask(record.boxes, *image.shape[1:])
        except InputError as error:
            raise BadImageError(f"{record.name}: {error}") from error
        outlined = any(box.outline is not None for box in record.boxes)
        return refine(image, mask) if self.refine_boxes and not outlined else mask

    def label(self, index: int) -> Label:
        """Its label."""
        return self.labels[index]

    def name(self, index: int) -> str:
        """The path of its image."""
        return self.records[index].name

    def group(self, index: int) -> str | None:
        """Whom it belongs to."""
        return self.records[index].group

    def source(self, index: int) -> str | None:
        """The hospital it comes from, if known."""
        return self.records[index].site

    def has_mask(self, index: int) -> bool:
        """Whether there is a mask or a box, whatever is in it."""
        return self.records[index].mask is not None or bool(self.records[index].boxes)


def size_mismatch(record: Record, image: Tensor, mask: Tensor) -> str:
    """What to say of a mask that is not as large as its image."""
    sizes = [f"{picture.shape[2]} x {picture.shape[1]}" for picture in (mask, image)]
    return f"{readable(record.mask or '')}: the mask is {sizes[0]}, but {record.name} is {sizes[1]}"


def open_folder(
    path: AnyPath,
    *,
    classes: Sequence[str] | None = None,
    columns: Columns | None = None,
    boxes: AnyPath | None = None,
    refine_boxes: bool = False,
    foreground: Sequence[int] = (),
    window: Window | None = None,
) -> Source:
    """A data set from a folder or a CSV manifest, as described above.

    classes: those of a trained model, in its order; then no train split is needed. boxes: a COCO file. refine_boxes:
    tighten boxes by GrabCut, each time an image is read (tenths of a second; needs OpenCV). foreground, window: see
    `Reader`.
    """
    reader = Reader(tuple(foreground), window)
    return _source(list_data(path, columns=columns, boxes=boxes), classes, refine_boxes, reader)


def _source(listing: Listing, classes: Sequence[str] | None, refine_boxes: bool, reader: Reader) -> Source:
    """The listing as a data set, if nothing keeps it from being one."""
    broken = [finding for finding in listing.broken if classes is None or finding.kind != NO_TRAIN]
    if broken:
        check = f"`fasterisnet data check {readable(listing.root)}` lists all"
        more = f" There are {len(broken) - 1} more problems; {check}." if broken[1:] else ""
        raise InputError(f"{broken[0].message}.{more}")
    names = listing.classes if classes is None else list(classes)
    differing = set(names) ^ set(listing.classes) if listing.multi_label else set(listing.classes) - set(names)
    if differing:
        raise InputError(
            f"{readable(listing.root)}: the data has the classes {', '.join(listing.classes)}; wanted are "
            f"{', '.join(names)}. They differ in {', '.join(sorted(differing))}."
        )
    if refine_boxes:
        opencv()
    place = {name: i for i, name in enumerate(names)}
    splits: dict[str, Samples] = {}
    for split in listing.splits:
        records = [record for record in listing.records if record.split == split]
        labels: list[Label] = [
            tuple(float(name in record.labels) for name in names) if listing.multi_label else place[record.labels[0]]
            for record in records
        ]
        splits[split] = FolderSamples(records, labels, refine_boxes=refine_boxes, reader=reader)
    return Source(names, splits, listing.multi_label)


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
