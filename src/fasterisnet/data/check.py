"""`check_data`: everything that is wrong with a data set, in one table, before anyone trains for a day.

Fatal is what would stop a training or make its result wrong without a sign of it: files that cannot be read or do not
fit together, masks whose gray values leave open what is foreground, labels that cannot be understood, a class the
network never sees, and a patient of train or val in another split.

A warning is what a sound data set may contain. An image without mask, or with an empty one, takes part in the
classification only; a full mask leaves no background to punish; a test without one of the classes is still a test. The
same picture in two splits, or a patient in two tests, may be meant: tests with and without a bias often share pictures.
"""

from __future__ import annotations

import hashlib
import os
import re
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from fasterisnet.data.boxes import boxes_to_mask
from fasterisnet.data.decoding import decode_image, decode_mask, is_image_name, read_bytes, readable
from fasterisnet.data.folder import (
    BOXES,
    MASKS,
    NO_TRAIN,
    AnyPath,
    Columns,
    Finding,
    Listing,
    Record,
    list_data,
    size_mismatch,
)
from fasterisnet.errors import InputError

Severity = Literal["fatal", "warning"]
EXAMPLES = 3
AT_ONCE = 4096
_WIDTHS = {"severity": 8, "count": 7, "problem": 25, "what to do": 60}
_GAP = "  "
_WIDTH = sum(_WIDTHS.values()) + len(_GAP) * (len(_WIDTHS) - 1)
_MISNAMED = {"training": "train", "trainval": "train", "valid": "val", "validation": "val", "dev": "val"}


class Kind(NamedTuple):
    """A kind of problem and what helps."""

    problem: str
    severity: Severity
    advice: str


KINDS: dict[str, Kind] = {
    "cannot be opened": Kind("data cannot be opened", "fatal", "Give a folder or CSV as the message says."),
    "layout": Kind("folder without classes", "fatal", "Put images into DIR/<split>/<class>/."),
    NO_TRAIN: Kind("no train split", "fatal", "Name the split to learn from 'train'."),
    "one class": Kind("only one class", "fatal", "Add the images it is to be told from."),
    "row": Kind("broken manifest row", "fatal", "Repair the line of the CSV."),
    "label": Kind("unknown label", "fatal", "Give every row a label; 'label:' columns hold 0 or 1."),
    "box file": Kind("broken box file", "fatal", "Repair or remove the COCO or VOC file."),
    "missing": Kind("missing file", "fatal", "Fetch the file or correct the manifest."),
    "image": Kind("unreadable image", "fatal", "Fetch or export the image again, or remove it."),
    "mask": Kind("unreadable mask", "fatal", "Make the mask again, or remove it."),
    "size": Kind("mask of another size", "fatal", "Make the mask in the size of its image."),
    "gray": Kind("mask is not binary", "fatal", "Save masks as PNG with the values 0 and 255 only."),
    "box": Kind("unusable box", "fatal", "Boxes need a size and have to lie in the image."),
    "group": Kind("group in two splits", "fatal", "Keep all images of a patient in one split."),
    "group of tests": Kind("group in two tests", "warning", "No harm, unless the tests are taken together."),
    "not trained": Kind("class not in train", "fatal", "Add images of the class to train, or remove it elsewhere."),
    "no mask": Kind("image without mask", "warning", "Used for classification only; add masks if you can."),
    "empty": Kind("empty mask", "warning", "Counts as no mask; mark the foreground."),
    "full": Kind("full mask", "warning", "Leaves no background to punish; mark the foreground only."),
    "mask without image": Kind(
        "mask without image", "warning", "Name a mask like its image, in masks/<split>/<class>/."
    ),
    "not tested": Kind("class not in a split", "warning", "Its scores will be missing there."),
    "duplicate": Kind("same image in two splits", "warning", "Remove it from one split, or the test is too easy."),
    "repeated": Kind("image listed twice", "warning", "Remove one row, or it counts double."),
    "no split": Kind("row without split", "warning", "Left out; name a split if it should be used."),
    "split name": Kind("unknown split name", "warning", "Used as a test; rename it if it is meant otherwise."),
    "class name": Kind("classes of similar name", "warning", "Two classes now; use one spelling if they are one."),
    "stray": Kind("file or folder not used", "warning", "Remove it, or put it into the folder of a class."),
}


@dataclass
class Row:
    """One kind of problem: how often it was found, some of the places, what to do."""

    problem: str
    severity: Severity
    count: int
    examples: list[str]
    advice: str


@dataclass
class Report:
    """What `check_data` found. Prints as a table; `fatal` if there is something that must be repaired."""

    root: str
    rows: list[Row] = field(default_factory=list)
    images: int = 0
    classes: list[str] = field(default_factory=list)
    splits: dict[str, int] = field(default_factory=dict)

    @property
    def fatal(self) -> bool:
        """Whether training should not start."""
        return any(row.severity == "fatal" for row in self.rows)

    @property
    def summary(self) -> str:
        """One line: how many images, classes and splits."""
        splits = ", ".join(f"{readable(name)} {count:,}" for name, count in self.splits.items())
        classes = textwrap.shorten(", ".join(map(readable, self.classes)), 60, placeholder=" ...")
        return f"{self.images:,} images, {len(self.classes)} classes ({classes}), splits: {splits or 'none'}"

    def __str__(self) -> str:
        kinds = [sum(row.severity == severity for row in self.rows) for severity in ("fatal", "warning")]
        verdict = f"Kinds of problems: {kinds[0]} fatal, {kinds[1]} warnings." if self.rows else "No problems found."
        start = re.compile(r"(?<![^\s('])" + re.escape(readable(self.root).rstrip(os.sep) + os.sep))
        table = _table([(row, [start.sub("", example) for example in row.examples]) for row in self.rows])
        ends = [*textwrap.wrap(f"{readable(self.root)}:", _WIDTH), *textwrap.wrap(f"{self.summary}.", _WIDTH), verdict]
        return "\n".join([*table, *ends])


def check_data(
    path: AnyPath,
    *,
    columns: Columns | None = None,
    boxes: AnyPath | None = None,
    workers: int | None = None,
) -> Report:
    """Reads every file of a data set and reports what is wrong with it; raises nothing for what it finds there.

    The arguments are those of `open_folder`; workers: threads that decode, one for each processor if None.
    """
    workers = os.cpu_count() or 1 if workers is None else workers
    if workers < 1:
        raise InputError(f"workers is {workers}; at least one has to do the reading.")
    try:
        listing = list_data(path, columns=columns, boxes=boxes)
    except InputError as error:
        listing = Listing(os.fspath(path), broken=[Finding("cannot be opened", str(error).removesuffix("."))])
    findings = [*listing.broken, *listing.odd, *_about_lists(listing), *_about_files(listing, workers)]
    by_kind: dict[str, list[str]] = defaultdict(list)
    for finding in findings:
        by_kind[finding.kind].append(finding.message)
    rows = [
        Row(kind.problem, kind.severity, len(by_kind[key]), by_kind[key][:EXAMPLES], kind.advice)
        for key, kind in KINDS.items()
        if key in by_kind
    ]
    counts = {split: sum(record.split == split for record in listing.records) for split in listing.splits}
    return Report(listing.root, rows, len(listing.records), listing.classes, counts)


def _about_lists(listing: Listing) -> Iterator[Finding]:
    """What can be seen without opening an image."""
    yield from _about_names(listing)
    if len(listing.classes) == 1 and not listing.multi_label:
        yield Finding(
            "one class", f"{readable(listing.root)}: every image is of class '{readable(listing.classes[0])}'"
        )
    present: dict[str, set[str]] = defaultdict(set)
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    seen: set[tuple[str, str]] = set()
    for record in listing.records:
        present[record.split].update(record.labels)
        if record.group is not None:
            groups[record.group].setdefault(record.split, record.image)
        if (record.image, record.split) in seen:
            yield Finding("repeated", f"{readable(record.image)}: is listed again in {readable(record.split)}")
        seen.add((record.image, record.split))
    for split, names in present.items():
        for name in listing.classes:
            if name not in names:
                kind = "not trained" if split == "train" else "not tested"
                yield Finding(kind, f"{readable(split)}: has no image of class '{readable(name)}'")
    for group, images in groups.items():
        if len(images) > 1:
            places = " and ".join(f"{readable(image)} ({readable(split)})" for split, image in list(images.items())[:2])
            kind = "group" if "train" in images or "val" in images else "group of tests"
            yield Finding(kind, f"{readable(group)}: {places}")
    yield from _unused(listing)


def _about_names(listing: Listing) -> Iterator[Finding]:
    """Names that look like a slip of the keyboard."""
    for split in listing.splits:
        plain = split.strip().lower()
        meant = _MISNAMED.get(plain, plain)
        if split not in ("train", "val") and meant in ("train", "val"):
            yield Finding("split name", f"{readable(split)}: is it '{meant}'?")
    spelled: dict[str, str] = {}
    for name in listing.classes:
        other = spelled.setdefault(" ".join(name.replace("_", " ").replace("-", " ").casefold().split()), name)
        if other != name:
            yield Finding("class name", f"{readable(other)}: there is also '{readable(name)}'")


def _unused(listing: Listing) -> Iterator[Finding]:
    """Masks and box files in the folder that belong to no image. What a manifest does not name is not asked for."""
    if not listing.from_folders:
        return
    used = {record.mask for record in listing.records}
    stems = {os.path.splitext(os.path.relpath(record.image, listing.root))[0] for record in listing.records}
    for part in (MASKS, BOXES):
        top = os.path.join(listing.root, part)
        for folder, folders, files in os.walk(top):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                path = os.path.join(folder, name)
                known = path in used if part == MASKS else os.path.splitext(os.path.relpath(path, top))[0] in stems
                wanted = is_image_name(name) if part == MASKS else name.lower().endswith(".xml")
                if wanted and not known and not name.startswith("."):
                    yield Finding("mask without image", f"{readable(path)}: there is no image of this name")


class _Examined(NamedTuple):
    findings: list[Finding]
    digest: bytes | None


def _about_files(listing: Listing, workers: int) -> Iterator[Finding]:
    """What shows only when every file is decoded."""
    first: dict[bytes, dict[str, str]] = defaultdict(dict)
    with warnings.catch_warnings(), ThreadPoolExecutor(workers) as pool:
        warnings.simplefilter("ignore")  # Pillow's, of files that it can read nevertheless
        for start in range(0, len(listing.records), AT_ONCE):
            part = listing.records[start : start + AT_ONCE]
            for record, (findings, digest) in zip(part, pool.map(_examine, part), strict=True):
                yield from findings
                if digest is None:
                    continue
                others = [image for split, image in first[digest].items() if split != record.split]
                if others:
                    yield Finding("duplicate", f"{readable(record.image)}: the same as {readable(others[0])}")
                first[digest].setdefault(record.split, record.image)


def _examine(record: Record) -> _Examined:
    """One image and its mask."""
    content, problem = _content(record.image, "image")
    findings = [problem] if problem else []
    image: Tensor | None = None
    digest: bytes | None = None
    if content is not None:
        try:
            image = decode_image(content, record.image)
            digest = hashlib.blake2b(content, digest_size=16).digest()
        except InputError as error:
            findings.append(Finding("image", str(error).removesuffix(".")))
    if record.mask is not None:
        findings += _examine_mask(record, image)
    elif not record.boxes:
        findings.append(Finding("no mask", readable(record.image)))
    elif image is not None:
        try:
            findings += _extent(boxes_to_mask(record.boxes, *image.shape[1:]), record.image)
        except InputError as error:
            findings.append(Finding("box", f"{readable(record.image)}: {error}".removesuffix(".")))
    return _Examined(findings, digest)


def _examine_mask(record: Record, image: Tensor | None) -> list[Finding]:
    path = record.mask or ""
    content, problem = _content(path, "mask")
    if content is None:
        return [problem] if problem else []
    try:
        mask = decode_mask(content, path)
    except InputError as error:
        return [Finding("mask", str(error).removesuffix("."))]
    findings = _extent(mask.foreground, path)
    if not mask.binary:
        findings.append(Finding("gray", f"{readable(path)}: has values other than 0 and 255"))
    if image is not None and image.shape[1:] != mask.foreground.shape[1:]:
        findings.append(Finding("size", size_mismatch(record, image, mask.foreground)))
    return findings


def _content(path: str, kind: str) -> tuple[bytes | None, Finding | None]:
    """The bytes of a file or what keeps them from being read. What is no file (a pipe, say) is left alone."""
    if not os.path.isfile(path):
        there = os.path.exists(path)
        message = f"{readable(path)}: {'is not a file' if there else 'does not exist'}"
        return None, Finding(kind if there else "missing", message)
    try:
        return read_bytes(path), None
    except InputError as error:
        return None, Finding(kind, str(error).removesuffix("."))


def _extent(mask: Tensor, path: str) -> list[Finding]:
    """Whether there is both foreground and background."""
    if not mask.any():
        return [Finding("empty", readable(path))]
    return [Finding("full", readable(path))] if mask.all() else []


def _table(rows: Sequence[tuple[Row, list[str]]]) -> Iterator[str]:
    """A line for each problem, its examples below, each whole on a line of its own; nothing if there are no rows."""
    if not rows:
        return
    yield _GAP.join(name.ljust(width) for name, width in _WIDTHS.items()).rstrip()
    yield "-" * _WIDTH
    for row, examples in rows:
        cells = (row.severity, f"{row.count:,}", row.problem, row.advice)
        yield _GAP.join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS.values(), strict=True)).rstrip()
        more = [f"... and {row.count - len(examples):,} more"] if row.count > len(examples) else []
        yield from (f"    {text}" for text in [*examples, *more])
    yield ""
