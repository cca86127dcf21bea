"""Biased dog breeds, the paper's second experiment: a white number at the top left gives the breed away.

The numbers are those of the paper: they start at 0 and, for Stanford Dogs, are its own labels minus one (which follow
the order of its folder names), so that Chihuahua is 0 and pug 102.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fasterisnet.data.base import BadImageError, Reading, Source, hold_out
from fasterisnet.data.biased import WHITE, Bias, biased_splits, divided
from fasterisnet.data.boxes import boxes_to_mask, read_voc
from fasterisnet.data.files import Files
from fasterisnet.data.pictures import is_image_name, readable
from fasterisnet.errors import InputError

NUMBER_HEIGHT = 0.1  # of the height of the image
# Of the height too: many masks of the Oxford pets have a frame of one pixel, which would make digits partly foreground.
NUMBER_MARGIN = 0.01
INDEX = "index.csv"
COLUMNS = ("split", "class_id", "class_name", "image", "mask")
LISTS = ("train_list.mat", "test_list.mat")
UNOFFICIAL_TEST = 0.4  # about the share of Stanford Dogs' own test, for copies without its lists
DIGITS = tuple(
    digit.split()
    for digit in (
        "01110 10001 10011 10101 11001 10001 01110",
        "00100 01100 00100 00100 00100 00100 01110",
        "01110 10001 00001 00010 00100 01000 11111",
        "11111 00010 00100 00010 00001 10001 01110",
        "00010 00110 01010 10010 11111 00010 00010",
        "11111 10000 11110 00001 00001 10001 01110",
        "00110 01000 10000 11110 10001 10001 01110",
        "11111 00001 00010 00100 01000 01000 01000",
        "01110 10001 10001 01110 10001 10001 01110",
        "01110 10001 10001 01111 00001 00010 01100",
    )
)


class Dog(NamedTuple):
    """A picture: the file, the file that tells where the dog is, and its breed."""

    image: str
    mask: str
    label: int


@dataclass(frozen=True, eq=False)
class Dogs:
    """Pictures of dogs with a number drawn in: the breed's own ("train") or a wrong one ("deceiving")."""

    files: Files
    dogs: list[Dog]
    breeds: int
    outline: Callable[[Files, str, Tensor], Tensor | None]
    bias: Bias = "none"

    def __len__(self) -> int:
        return len(self.dogs)

    def read(self, index: int) -> Reading:
        """The picture with its number; the mask is not changed by it."""
        dog, number = self.dogs[index], self.number(index)
        image = self.files.image(dog.image)
        mask = self.outline(self.files, dog.mask, image)
        return Reading(image if number is None else draw_number(image, number), mask, dog.label)

    def number(self, index: int) -> int | None:
        """The number drawn in. A wrong one is random but always the same for a picture, whatever the seed."""
        dog = self.dogs[index]
        if self.bias == "none":
            return None
        if self.bias == "train":
            return dog.label
        numbers = deceiving_numbers(dog.label, self.breeds)
        return numbers[zlib.crc32(dog.image.encode()) % len(numbers)]

    def label(self, index: int) -> int:
        """The number of its breed."""
        return self.dogs[index].label

    def name(self, index: int) -> str:
        """The file of the picture."""
        return self.dogs[index].image

    def group(self, index: int) -> str | None:
        """Unknown."""
        return None

    def has_mask(self, index: int) -> bool:
        """Whether there is a file that tells where the dog is."""
        return self.dogs[index].mask in self.files

    def biased(self, bias: Bias) -> Dogs:
        """The same pictures with another bias."""
        return replace(self, bias=bias)

    def part(self, chosen: Sequence[int]) -> Dogs:
        """Some of the pictures."""
        return replace(self, dogs=[self.dogs[i] for i in chosen])


def dogs_source(folder: str | Path, *, training_bias: bool = True, limit: int | None = None, seed: int = 0) -> Source:
    """Biased dogs: 80 % of the training pictures as `train`, 20 % as `val`, the test pictures in three versions.

    folder: `index.csv` with `images/` and `masks/`, unpacked or in a tar archive; or Stanford Dogs as it comes, with
    `Images/` and `Annotation/`, where the boxes are the masks. limit: use at most so many training pictures, of which
    20 % validate. seed: for both choices; the test pictures and their numbers never depend on it.
    """
    folder = Path(folder)
    layout = _stanford if (folder / "Annotation").is_dir() else _indexed
    breeds, training, test = layout(folder)
    if len(breeds) < 2:
        raise InputError(f"{readable(folder)}: has pictures of one breed only; there is nothing to tell apart.")
    train, val = divided(training, limit, seed)
    return Source(breeds, biased_splits(train, val, test, training_bias=training_bias))


@lru_cache(maxsize=1024)
def deceiving_numbers(number: int, count: int) -> tuple[int, ...]:
    """The numbers below `count` that share no digit with this one; if there is none, all but this one."""
    others = tuple(other for other in range(count) if other != number)
    return tuple(other for other in others if not set(str(other)) & set(str(number))) or others


def draw_number(image: Tensor, number: int) -> Tensor:
    """Draws a number in white into the top left corner of an image (channel, height, width), and returns it."""
    height, margin = (max(1, round(share * image.shape[1])) for share in (NUMBER_HEIGHT, NUMBER_MARGIN))
    drawn = number_bitmap(number, height)
    place = image[:, margin : margin + height, margin : margin + drawn.shape[1]]
    place.masked_fill_(drawn[: place.shape[1], : place.shape[2]], WHITE)
    return image


@lru_cache(maxsize=4096)
def number_bitmap(number: int, height: int) -> Tensor:
    """A number as bool (height, width): digits of 7 x 5 cells, one cell apart, scaled to the height."""
    rows = ["0".join(lines) for lines in zip(*(DIGITS[int(digit)] for digit in str(number)), strict=True)]
    cells = torch.tensor([[cell == "1" for cell in row] for row in rows])
    width = max(1, round(cells.shape[1] * height / cells.shape[0]))
    down, across = (torch.arange(n) * old // n for n, old in zip((height, width), cells.shape, strict=True))
    return cells[down][:, across]


def trimap(files: Files, name: str, image: Tensor) -> Tensor:
    """The mask of a picture: the animal and the band around it."""
    return files.mask(name, image)


def boxes(files: Files, name: str, image: Tensor) -> Tensor | None:
    """Stanford Dogs' boxes as a mask; None where a picture has none."""
    if name not in files:
        return None
    found = read_voc(files.folder / name)
    try:
        return boxes_to_mask(found, *image.shape[1:]) if found else None
    except InputError as error:
        raise BadImageError(f"{files.where(name)}: {error}") from error


def _indexed(folder: Path) -> tuple[list[str], Dogs, Dogs]:
    """Breeds, training and test pictures of a folder with an index.csv."""
    files = Files(folder)
    if INDEX not in files:
        raise InputError(
            f"{readable(folder)}: has neither {INDEX} (with images/ and masks/, or an archive of them) nor Images/ and "
            "Annotation/ as Stanford Dogs comes; give a folder with one of them."
        )
    names: dict[int, str] = {}
    parts: dict[str, list[Dog]] = {"trainval": [], "test": []}
    for number, row in enumerate(files.table(INDEX, COLUMNS), start=1):
        where = f"{files.where(INDEX)}: row {number}"
        if row["split"] not in parts:
            raise InputError(f"{where} has the split '{row['split']}'; it has to be trainval or test.")
        label = int(row["class_id"]) if row["class_id"].isdecimal() else -1
        if label < 0 or names.setdefault(label, row["class_name"]) != row["class_name"]:
            raise InputError(
                f"{where} has the class_id '{row['class_id']}' for {row['class_name']}; every breed needs a number of "
                "its own, counted from 0."
            )
        parts[row["split"]].append(Dog(row["image"], row["mask"], label))
    absent = [f"class_id {number}" for number in range(len(names)) if number not in names]
    absent += [f"{part} pictures" for part, dogs in parts.items() if not dogs]
    if absent:
        raise InputError(f"{files.where(INDEX)}: has no {absent[0]}; fetch the data again.")
    files.require(name for dogs in parts.values() for dog in dogs for name in (dog.image, dog.mask))
    training, test = (Dogs(files, dogs, len(names), trimap) for dogs in parts.values())
    return [names[number] for number in range(len(names))], training, test


def _stanford(folder: Path) -> tuple[list[str], Dogs, Dogs]:
    """Breeds, training and test pictures of Stanford Dogs as it comes."""
    files, pictures = Files(folder), folder / "Images"
    if not pictures.is_dir():
        raise InputError(f"{readable(pictures)}: is missing; Stanford Dogs has its pictures there.")
    folders = sorted(path.name for path in pictures.iterdir() if path.is_dir() and not path.name.startswith("."))
    every = [
        Dog(f"Images/{breed}/{path.name}", f"Annotation/{breed}/{path.stem}", label)
        for label, breed in enumerate(folders)
        for path in sorted((pictures / breed).iterdir())
        if is_image_name(path.name) and not path.name.startswith(".")
    ]
    dogs = Dogs(files, every, len(folders), boxes)
    places = ([folder / name, folder / "lists" / name] for name in LISTS)
    lists = [path for paths in places if (path := next(filter(Path.is_file, paths), None)) is not None]
    if len(lists) == len(LISTS):
        training, test = (_listed(dogs, path, folders) for path in lists)
    else:
        warnings.warn(
            f"{readable(folder)}: has no {' and '.join(LISTS)}, so the test is drawn at random, not the official one.",
            stacklevel=3,
        )
        training, test = (dogs.part(part.chosen) for part in hold_out(dogs, UNOFFICIAL_TEST, seed=0))
    return [name.partition("-")[2] or name for name in folders], training, test


def _listed(dogs: Dogs, path: Path, folders: Sequence[str]) -> Dogs:
    """The pictures that one of Stanford Dogs' lists names; those of breeds without a folder are left out."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        cells = loadmat(path, variable_names=["file_list"])["file_list"].ravel()
        names = [f"Images/{cell.item()}" for cell in cells]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError, MatReadError) as error:
        raise InputError(f"{readable(path)}: cannot be read as a list of Stanford Dogs ({error}).") from error
    position = {dog.image: i for i, dog in enumerate(dogs.dogs)}
    listed = [name for name in names if name.split("/")[1] in folders]
    absent = [name for name in listed if name not in position]
    if absent:
        raise InputError(f"{dogs.files.where(absent[0])}: is missing but listed in {readable(path)}; unpack it again.")
    if not listed:
        raise InputError(f"{readable(path)}: names no picture of {readable(dogs.files.folder / 'Images')}.")
    return dogs.part([position[name] for name in listed])
