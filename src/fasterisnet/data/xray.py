"""Chest X-rays of several hospitals: in training a class comes from one of them, in the tests from others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from fasterisnet.data.base import Reading, Samples, Source
from fasterisnet.data.files import Files
from fasterisnet.errors import InputError

CLASSES = ["normal", "pneumonia", "covid"]
INDEX = "index.csv"
SPLITS = {"train": "train", "val": "val", "iid": "iid", "ood": "ood", "deceive": "deceiving"}  # theirs and ours


class Xray(NamedTuple):
    """A picture: the file, the file of its lung mask (empty for none), diagnosis, patient and hospital."""

    image: str
    mask: str
    label: int
    patient: str
    source: str


@dataclass(frozen=True, eq=False)
class Xrays:
    """X-rays with the lungs as the foreground; those of a patient are a group."""

    files: Files
    pictures: list[Xray]

    def __len__(self) -> int:
        return len(self.pictures)

    def read(self, index: int) -> Reading:
        """The gray picture and its lungs."""
        picture = self.pictures[index]
        image = self.files.image(picture.image)
        return Reading(image, self.files.mask(picture.mask, image) if picture.mask else None, picture.label)

    def label(self, index: int) -> int:
        """The number of the diagnosis."""
        return self.pictures[index].label

    def name(self, index: int) -> str:
        """The file of the picture."""
        return self.pictures[index].image

    def group(self, index: int) -> str | None:
        """The patient."""
        return self.pictures[index].patient or None

    def has_mask(self, index: int) -> bool:
        """Whether its lungs were drawn."""
        return bool(self.pictures[index].mask)

    def source(self, index: int) -> str:
        """The hospital or collection the picture comes from."""
        return self.pictures[index].source


def xray_source(folder: str | Path, *, split: Literal["mixed", "covid"] = "mixed") -> Source:
    """X-rays of a folder with `index.csv`, `images/` and `masks/`, the last two unpacked or in a tar archive.

    split: "mixed" ties every class to a source in training, "covid" only covid (closer to the paper). The `ood` test
    has other sources for every class, the `deceiving` one pictures whose source was tied to another class.
    """
    if split not in ("mixed", "covid"):
        raise InputError(f"The split of the X-rays is {split!r}; it has to be 'mixed' or 'covid'.")
    files, column = Files(folder), f"split_{split}"
    parts: dict[str, list[Xray]] = {name: [] for name in SPLITS}
    for number, row in enumerate(files.table(INDEX, ("image", "mask", "label", "patient", "source", column)), start=1):
        if not row[column]:
            continue
        for key, known in ((column, list(SPLITS)), ("label", CLASSES)):
            if row[key] not in known:
                where = f"{files.where(INDEX)}: row {number}"
                raise InputError(f"{where} has the {key} '{row[key]}'; it has to be one of {', '.join(known)}.")
        label = CLASSES.index(row["label"])
        parts[row[column]].append(Xray(row["image"], row["mask"], label, row["patient"], row["source"]))
    if not parts["train"]:
        raise InputError(f"{files.where(INDEX)}: has no picture with {column} 'train'; fetch the data again.")
    files.require(name for pictures in parts.values() for p in pictures for name in (p.image, p.mask) if name)
    splits: dict[str, Samples] = {SPLITS[name]: Xrays(files, pictures) for name, pictures in parts.items() if pictures}
    return Source(list(CLASSES), splits)
