"""A CSV manifest, row by row: what its columns mean is told in `folder.py`."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fasterisnet.data.boxes import Box
from fasterisnet.data.pictures import readable
from fasterisnet.data.reader import kind_of, owner
from fasterisnet.errors import InputError
from fasterisnet.files import read_file

LABEL_PREFIX = "label:"
LARGEST = 2**31  # bytes of a table
LONGEST = 100  # letters of the name of a split
GROUPS = ("group", "patient", "patient_id", "patientid", "subject", "subject_id")  # columns that say whose it is
OTHERS = ("image", "mask", "site", "slice", "x", "y", "w", "h")

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Columns:
    """What the columns of a manifest are called; group: None for that of `GROUPS` which is there."""

    label: str = "label"
    split: str = "split"
    group: str | None = None


class Record(NamedTuple):
    """One image as listed: the names of its classes (one, unless the task is multi-label), its files, whose and of
    which hospital it is, and which slice of a file that has several.
    """

    image: str
    split: str
    labels: tuple[str, ...]
    mask: str | None = None
    boxes: tuple[Box, ...] = ()
    group: str | None = None
    site: str | None = None
    slice: int | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return self.named(self.image)

    def named(self, path: str) -> str:
        """A file of it, its mask say, for messages."""
        return readable(path) + ("" if self.slice is None else f", slice {self.slice}")

    def expanded(self) -> Iterator[Record]:
        """With what the header of a medical file tells, one for each slice; slices of a file belong together."""
        known = owner(self.image)
        parts = [part for part in (known.site, known.patient) if part]
        group = self.group or (" / ".join(parts) if known.patient else None)
        record = self._replace(group=group, site=self.site or known.site)
        if known.slices == 1 or self.slice is not None:
            yield record
            return
        for number in range(known.slices):
            yield record._replace(slice=number, group=group or self.image)


def is_manifest(path: str, columns: Columns) -> bool:
    """An `index.csv` may be about anything."""
    try:
        Table(path, columns)
    except InputError:
        return False
    return True


class RowError(InputError):
    """A row of a manifest that cannot be used."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Table:
    """A CSV whose columns are understood; commas, semicolons or tabs separate them, as its first line shows."""

    def __init__(self, path: AnyPath, columns: Columns) -> None:
        self.path = path
        if os.path.exists(path) and not os.path.isfile(path):
            raise InputError(f"{readable(path)}: is not a file.")
        try:
            text = read_file(path, LARGEST).decode("utf-8-sig")
        except OSError as error:
            raise InputError(f"{readable(path)}: cannot be read ({error.strerror}).") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{readable(path)}: is not text in UTF-8 ({error}); save it as such.") from error
        separator = max(",;\t", key=text.partition("\n")[0].count)
        self.reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        header = [cell.strip() for cell in next(self.rows(), (1, []))[1]]
        self.width = len(header)
        self.place = {name.lower(): i for i, name in enumerate(header) if name}
        self.classes = {
            name[len(LABEL_PREFIX) :].strip(): i
            for i, name in enumerate(header)
            if name.lower().startswith(LABEL_PREFIX)
        }
        self.label, self.split = columns.label.lower(), columns.split.lower()
        owners = [columns.group.lower()] if columns.group else [name for name in GROUPS if name in self.place]
        self.group = owners[0] if owners else ""
        self._check(header)
        if owners[1:]:
            raise InputError(
                f"{readable(path)}: has the columns {' and '.join(owners)}, which all say whose an image is; keep one."
            )
        used = {*OTHERS, self.label, self.split, self.group}
        self.unused = [name for name in self.place if name not in used and not name.startswith(LABEL_PREFIX)]

    def _check(self, header: list[str]) -> None:
        needed = ["image", self.split, *([self.group] if self.group else []), *([] if self.classes else [self.label])]
        missing = [f"'{name}'" for name in needed if name not in self.place]
        if missing:
            raise InputError(
                f"{readable(self.path)}: lacks the column {' and '.join(missing)}. A manifest has image, split, label "
                f"(or one '{LABEL_PREFIX}NAME' for each class) and, if wanted, mask, group, x, y, w, h; this one has "
                f"{readable(', '.join(header))[:200] or 'none'}."
            )
        if self.classes and self.label in self.place:
            raise InputError(
                f"{readable(self.path)}: has the column '{self.label}' and columns '{LABEL_PREFIX}NAME'; keep one kind."
            )
        if len(self.place) < sum(map(bool, header)):
            raise InputError(f"{readable(self.path)}: two columns have the same name; rename one.")

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """The rows that are not empty, with their line; the header is the first."""
        try:
            for cells in self.reader:
                if any(cell.strip() for cell in cells):
                    yield self.reader.line_num, cells
        except csv.Error as error:
            raise InputError(f"{readable(self.path)}, line {self.reader.line_num}: is not CSV ({error}).") from error

    def record(self, cells: list[str], root: str) -> Record:
        """What a row says."""
        if len(cells) > self.width:
            raise RowError("row", f"has {len(cells)} cells, but there are {self.width} columns; quote commas")
        cells = [cell.strip() for cell in cells] + [""] * (self.width - len(cells))
        values = {name: cells[i] for name, i in self.place.items()}
        if not values["image"]:
            raise RowError("row", "names no image")
        if not values[self.split]:
            raise RowError("no split", readable(values["image"]))
        check_split(values[self.split])
        image = os.path.join(root, values["image"])
        mask = os.path.join(root, values["mask"]) if values.get("mask") else None
        return Record(
            image=image,
            split=values[self.split],
            labels=self._labels(values, cells),
            mask=mask,
            boxes=() if mask else _box([values.get(name, "") for name in ("x", "y", "w", "h")]),
            group=values.get(self.group) or None,
            site=values.get("site") or None,
            slice=_slice(values.get("slice", "")) if kind_of(image) != "picture" else None,
        )

    def _labels(self, values: dict[str, str], cells: list[str]) -> tuple[str, ...]:
        if not self.classes:
            if values[self.label].lower() in ("", "nan"):  # what a table program writes for nothing
                raise RowError("label", "has no label")
            return (values[self.label],)
        for name, i in self.classes.items():
            if _number(cells[i]) not in (0, 1):
                raise RowError("label", f"has '{readable(cells[i]):.40}' for '{readable(name)}' instead of 0 or 1")
        return tuple(name for name, i in self.classes.items() if _number(cells[i]) == 1)


def check_split(name: str) -> None:
    """Splits give files and columns their names."""
    if not name.isprintable() or name.startswith(".") or any(c in "/\\" for c in name) or len(name) > LONGEST:
        raise RowError(
            "row", f"has the split '{readable(name):.40}'; a split is a word, without slashes, dots before it"
        )


def _box(cells: list[str]) -> tuple[Box, ...]:
    if not any(cells):
        return ()
    numbers = [number for cell in cells if (number := _number(cell)) is not None]
    if len(numbers) < len(cells):
        raise RowError("row", f"needs a number for each of x, y, w, h, not '{readable(', '.join(cells)):.60}'")
    x, y, width, height = numbers
    return (Box(x, y, width, height),)


def _slice(cell: str) -> int | None:
    if cell and not cell.isdecimal():
        raise RowError("row", f"has the slice '{readable(cell):.40}'; slices are counted from 0")
    return int(cell) if cell else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
