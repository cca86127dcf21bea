"""`check_data`: everything that is wrong with a data set, in one table, before anyone trains for a day.

Fatal is what would stop a training or make its result wrong without a sign of it: files that cannot be read or do not
fit together, masks that leave open what is foreground, two images that share one mask, labels that cannot be understood
or contradict each other, a class the network never sees, and a patient of train or val in another split.

A warning is what a sound data set may contain. An image without mask, or with an empty one, takes part in the
classification only; a full mask leaves no background to punish; a test without one of the classes is still a test. The
same picture in two splits, or a patient in two tests, may be meant: tests with and without a bias often share pictures.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fasterisnet.data.base import Samples, Source, has_mask
from fasterisnet.data.findings import Counts, about_classes, about_files, about_lists, about_samples
from fasterisnet.data.listing import NO_TRAIN, Finding, Listing, list_data
from fasterisnet.data.manifest import AnyPath, Columns, Record
from fasterisnet.data.pictures import Window, readable
from fasterisnet.data.reader import Reader
from fasterisnet.data.sources import is_own, open_source, own_arguments
from fasterisnet.errors import InputError, UsageError

Severity = Literal["fatal", "warning"]
EXAMPLES = 3
_WIDTHS = {"severity": 8, "count": 7, "problem": 25, "what to do": 60}
_GAP = "  "
_WIDTH = sum(_WIDTHS.values()) + len(_GAP) * (len(_WIDTHS) - 1)


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
    "window": Kind("unknown black and white", "fatal", "Give --window low,high in these values, or --window auto."),
    "labels": Kind("mask is a label map", "fatal", "Say with --foreground which labels are the object."),
    "shared": Kind("two images, one mask", "fatal", "Rename one image, or name masks a.jpg.png and a.png.png."),
    "among": Kind("mask among the images", "fatal", "Put masks into DIR/masks/<split>/<class>/, named like the image."),
    "two labels": Kind("image with two labels", "fatal", "Keep one; for several at once use 'label:' columns."),
    "box": Kind("unusable box", "fatal", "Boxes need a size and have to lie in the image."),
    "group": Kind("group in two splits", "fatal", "Keep all images of a patient in one split."),
    "group of tests": Kind("group in two tests", "warning", "No harm, unless the tests are taken together."),
    "not trained": Kind("class not in train", "fatal", "Add images of the class to train, or remove it elsewhere."),
    "no mask": Kind("image without mask", "warning", "Used for classification only; add masks if you can."),
    "unmasked": Kind("class without masks", "warning", "Its background is never punished; add masks of this class."),
    "empty": Kind("empty mask", "warning", "Counts as no mask; mark the foreground."),
    "full": Kind("full mask", "warning", "Leaves no background to punish; mark the foreground only."),
    "soft": Kind("mask with soft edges", "warning", "Cut in the middle; better save 0 and 255 only."),
    "inverted": Kind("masks may be inverted", "warning", "White has to be the object, black the background."),
    "pages": Kind("file of several pictures", "warning", "The first is used; save each that is meant as a file."),
    "turned": Kind("turned image, mask not", "warning", "EXIF turns the image; see that the mask fits it upright."),
    "unused": Kind("unused gray values", "warning", "Read with --window low,high or --window auto."),
    "one site": Kind("class of one site", "warning", "The site gives it away; add the class from other sites."),
    "mask without image": Kind(
        "mask without image", "warning", "Name a mask like its image, in masks/<split>/<class>/."
    ),
    "not tested": Kind("class not in a split", "warning", "Its scores will be missing there."),
    "duplicate": Kind("same image in two splits", "warning", "Remove it from one split, or the test is too easy."),
    "two classes": Kind("same image, two classes", "warning", "One label is wrong; remove one of the files."),
    "repeated": Kind("image listed twice", "warning", "Remove one row, or it counts double."),
    "no split": Kind("row without split", "warning", "Left out; name a split if it should be used."),
    "column": Kind("column not used", "warning", "Known: image mask label split patient site slice x y w h."),
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
    masks: dict[str, int] = field(default_factory=dict)

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

    @property
    def missing(self) -> str:
        """One line: how many images have a usable mask, empty if all have."""
        parts = [f"{readable(name)} {self.masks.get(name, 0):,} of {n:,}" for name, n in self.splits.items()]
        return f"Usable masks: {', '.join(parts)}." if self.masks != self.splits else ""

    def found(self, kind: str) -> Row | None:
        """The row of one kind of problem."""
        return next((row for row in self.rows if row.problem == KINDS[kind].problem), None)

    def __str__(self) -> str:
        kinds = [sum(row.severity == severity for row in self.rows) for severity in ("fatal", "warning")]
        verdict = f"Kinds of problems: {kinds[0]} fatal, {kinds[1]} warnings." if self.rows else "No problems found."
        start = re.compile(r"(?<![^\s('])" + re.escape(readable(self.root).rstrip(os.sep) + os.sep))
        table = _table([(row, [start.sub("", example) for example in row.examples]) for row in self.rows])
        ends = [*textwrap.wrap(f"{readable(self.root)}:", _WIDTH), *textwrap.wrap(f"{self.summary}.", _WIDTH)]
        ends += [*textwrap.wrap(self.missing, _WIDTH), verdict]
        return "\n".join([*table, *ends])


def check_data(
    data: AnyPath,
    *,
    columns: Columns | None = None,
    boxes: AnyPath | None = None,
    foreground: Sequence[int] | str | None = None,
    window: Window | str | None = None,
    workers: int | None = None,
    seed: int = 0,
    decode: bool = True,
) -> Report:
    """Reads every file of a data set and reports what is wrong with it; raises nothing for what it finds there.

    data: whatever `open_source` opens. The other arguments are those of `open_folder`, for data of one's own; workers:
    threads that decode, one for each processor if None. decode: False is for a data set known by name, of which only
    the lists are looked at then.
    """
    workers = os.cpu_count() or 1 if workers is None else workers
    if workers < 1:
        raise InputError(f"workers is {workers}; at least one has to do the reading.")
    counts = Counts()
    about: Iterable[Finding]
    given = {"boxes": boxes, "foreground": foreground or None, "window": window or None}
    if is_own(data):
        path, options = own_arguments(data, given)
        reader = Reader(options.get("foreground", ()), options.get("window"))
        try:
            listing = list_data(path, columns=columns, boxes=options.get("boxes"))
        except InputError as error:
            listing = _unopened(path, error)
        rank = {split: i for i, split in enumerate(listing.splits)}
        listing.records.sort(key=lambda record: rank[record.split])
        about = about_files(listing, reader, workers, counts, EXAMPLES)
    else:
        try:
            source = open_source(os.fspath(data), seed=seed, **given)
        except UsageError:
            raise
        except InputError as error:
            listing, about = _unopened(data, error), ()
        else:
            listing, places = _of_source(data, source)
            about = about_samples(listing, places, workers, counts) if decode else ()
            if not decode:
                kept = (record for record, place in zip(listing.records, places, strict=True) if has_mask(*place))
                counts.masks.update(record.split for record in kept)
    findings = [*listing.broken, *listing.odd, *about_lists(listing), *about, *about_classes(counts)]
    by_kind: dict[str, list[str]] = defaultdict(list)
    for finding in findings:
        by_kind[finding.kind].append(finding.message)
    rows = [
        Row(kind.problem, kind.severity, len(by_kind[key]), by_kind[key][:EXAMPLES], kind.advice)
        for key, kind in KINDS.items()
        if key in by_kind
    ]
    splits = {split: sum(record.split == split for record in listing.records) for split in listing.splits}
    masks = {split: counts.masks[split] for split in splits}
    return Report(listing.root, rows, len(listing.records), listing.classes, splits, masks)


def _unopened(data: AnyPath, error: InputError) -> Listing:
    return Listing(os.fspath(data), broken=[Finding("cannot be opened", str(error).removesuffix("."))])


def _of_source(data: AnyPath, source: Source) -> tuple[Listing, list[tuple[Samples, int]]]:
    """A data set known by name, listed as files are, and where each of its samples is."""
    places: list[tuple[Samples, int]] = []
    listing = Listing(os.fspath(data), list(source.classes), multi_label=source.multi_label)
    for split, samples in source.splits.items():
        site = getattr(samples, "source", lambda _: None)
        for i in range(len(samples)):
            label = samples.label(i)
            chosen = [label] if isinstance(label, int) else [k for k, value in enumerate(label) if value]
            labels = tuple(source.classes[k] for k in chosen)
            group = None if split in source.copies else samples.group(i)
            listing.records.append(Record(samples.name(i), split, labels, group=group, site=site(i) or None))
            places.append((samples, i))
    return listing, places


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
