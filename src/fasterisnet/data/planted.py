"""A bias planted in any data: a mark in the background whose place and shade tell the class.

On a copy of one's own data that is biased on purpose, it can be measured whether a method ignores the background: the
validation set without marks (`val_unbiased`) judges, and never takes part in a test.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fasterisnet.data.base import Reading, Samples, Source, Subset, hold_out
from fasterisnet.data.biased import HELD_OUT, Bias
from fasterisnet.errors import InputError, UsageError

SHARE = 1 / 14  # of the shorter side that a mark takes
PLACES = 8  # around the picture; more classes are told apart by their shades
AROUND = tuple((0.5 + math.sin(turn) / 2, 0.5 + math.cos(turn) / 2) for turn in (k * math.tau / 8 for k in range(8)))


class Planted(Subset):
    """Samples with a mark for their class ("train"), for the next class ("deceiving") or with none.

    A mark never covers the foreground: where its place is taken it moves to the nearest one that is free. A picture
    without a mask, or without room in its background, gets none.
    """

    def __init__(self, samples: Samples, classes: int, bias: Bias) -> None:
        super().__init__(samples, range(len(samples)))
        self.classes, self.bias = classes, bias

    def read(self, index: int) -> Reading:
        """The picture with its mark; the mask knows nothing of the mark."""
        reading = super().read(index)
        if self.bias == "none" or reading.mask is None or not isinstance(reading.label, int):
            return reading
        shown = reading.label if self.bias == "train" else (reading.label + 1) % self.classes
        return reading._replace(image=marked(reading.image, reading.mask, shown, self.classes))


def marked(image: Tensor, mask: Tensor, shown: int, classes: int) -> Tensor:
    """The image with the mark of class `shown`, or the image itself if its background has no room."""
    height, width = image.shape[-2:]
    side = max(2, round(min(height, width) * SHARE))
    corner = free_place(mask, side, AROUND[shown % PLACES])
    if corner is None:
        return image
    top, left = corner
    picture = image.clone()
    shade = _shade(shown, classes)
    picture[:, top : top + side, left : left + side] = 255 - shade
    if side > 2:  # a frame of the opposite shade, so that it is seen on any ground
        picture[:, top + 1 : top + side - 1, left + 1 : left + side - 1] = shade
    else:
        picture[:, top : top + side, left : left + side] = shade
    return picture


def free_place(mask: Tensor, side: int, wanted: tuple[float, float]) -> tuple[int, int] | None:
    """The upper left corner of a square of background, the nearest to a place given as shares of height and width."""
    height, width = mask.shape[-2:]
    if side > min(height, width):
        return None
    covered = F.max_pool2d(mask.reshape(1, 1, height, width).float(), side, stride=1)[0, 0] > 0
    rows, columns = covered.shape
    down = torch.arange(rows).view(-1, 1) - wanted[0] * (rows - 1)
    across = torch.arange(columns).view(1, -1) - wanted[1] * (columns - 1)
    distance = (down.square() + across.square()).masked_fill(covered, math.inf)
    best = int(distance.argmin())
    return None if bool(covered.all()) else (best // columns, best % columns)


def planted(source: Source, seed: int) -> Source:
    """Data with marks: trained and validated with them, tested with them (iid), without (ood), with wrong ones."""
    if source.multi_label:
        raise UsageError("bias=mark needs one class for each image: a mark cannot stand for several labels at once.")
    count = len(source.classes)
    train, rest = source.split("train"), {name: s for name, s in source.splits.items() if name != "train"}
    if "val" in rest:
        val = rest.pop("val")
    else:
        train, val = hold_out(train, HELD_OUT, seed)
    if rest:
        test = rest.get("test", next(iter(rest.values())))
    else:
        train, test = hold_out(train, HELD_OUT, seed + 1)
    _check_room(train)
    return Source(
        source.classes,
        {
            "train": Planted(train, count, "train"), "val": Planted(val, count, "train"),
            "val_unbiased": Planted(val, count, "none"), "iid": Planted(test, count, "train"),
            "ood": Planted(test, count, "none"), "deceiving": Planted(test, count, "deceiving"),
        },
        copies={"val_unbiased": "val", "ood": "iid", "deceiving": "iid"},
    )  # fmt: skip


def _check_room(samples: Samples, looked_at: int = 50) -> None:
    """Marks that most pictures cannot have are no bias."""
    chosen = torch.linspace(0, len(samples) - 1, min(looked_at, len(samples))).long().tolist()
    without = sum(not _has_room(samples.read(i)) for i in chosen)
    if without > len(chosen) / 2:
        raise InputError(
            f"bias=mark: {without} of {len(chosen)} training images that were looked at have no mask, or no room for a "
            "mark in their background; a bias cannot be planted in this data."
        )


def _has_room(reading: Reading) -> bool:
    if reading.mask is None:
        return False
    side = max(2, round(min(reading.image.shape[-2:]) * SHARE))
    return free_place(reading.mask, side, (0.0, 0.0)) is not None


def _shade(shown: int, classes: int) -> int:
    """White for the first round of places, darker ones for later rounds."""
    rounds = -(-classes // PLACES)
    return 255 - round(255 * (shown // PLACES) / max(rounds, 1))
