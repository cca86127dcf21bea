"""What the data sets with a drawn-in bias share: which splits there are, who is held out, pictures with a mark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self, TypeVar

import torch
from torch import Tensor

from fasterisnet.data.base import Label, Reading, Samples, hold_out
from fasterisnet.errors import InputError

Bias = Literal["none", "train", "deceiving"]
HELD_OUT = 0.2  # the share of the training samples that validates, as in the paper
WHITE = 255


class Biasable(Samples, Protocol):
    """Samples that can be given a bias and of which a part can be taken."""

    def biased(self, bias: Bias) -> Self:
        """The same samples with another bias."""
        ...

    def part(self, chosen: Sequence[int]) -> Self:
        """Some of the samples."""
        ...


Biased = TypeVar("Biased", bound=Biasable)


@dataclass(frozen=True, eq=False)
class MarkedPictures:
    """Pictures in memory; a white square at the upper edge tells the class to anyone who looks there.

    images: uint8 (picture, channel, height, width). masks: bool (picture, 1, height, width). With the bias "train", the
    square of class c is at the (c+1)th of `places`, with "deceiving" at the next one; the last class takes the first.
    """

    images: Tensor
    masks: Tensor
    labels: list[int]
    names: list[str]
    places: int
    side: int = 1
    gap: int = 0
    bias: Bias = "none"

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Reading:
        """The picture with its mark; the mask knows nothing of the mark."""
        image, label = self.images[index].clone(), self.labels[index]
        if self.bias != "none":
            place = label if self.bias == "train" else (label + 1) % self.places
            left = place * (self.side + self.gap)
            image[:, : self.side, left : left + self.side] = WHITE
        return Reading(image, self.masks[index].clone(), label)

    def label(self, index: int) -> int:
        """The number of its class."""
        return self.labels[index]

    def name(self, index: int) -> str:
        """Which picture it is."""
        return self.names[index]

    def group(self, index: int) -> str | None:
        """Nobody: the pictures are independent."""
        return None

    def biased(self, bias: Bias) -> MarkedPictures:
        """The same pictures (shared, not copied) with another bias."""
        return replace(self, bias=bias)

    def part(self, chosen: Sequence[int]) -> MarkedPictures:
        """A copy of some of the pictures."""
        rows = torch.tensor(chosen, dtype=torch.long)
        labels, names = [self.labels[i] for i in chosen], [self.names[i] for i in chosen]
        return replace(self, images=self.images[rows], masks=self.masks[rows], labels=labels, names=names)


def representative(samples: Samples, limit: int, seed: int) -> list[int]:
    """Which `limit` samples (all, if there are fewer) to use: of every class its share, drawn at random."""
    if limit < 1:
        raise InputError(f"limit is {limit}; at least one training sample has to be used.")
    labels = [samples.label(i) for i in range(len(samples))]
    sizes, seen = Counter(labels), Counter[Label]()
    turns: list[tuple[float, int, int]] = []
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).tolist()
    for position, i in enumerate(order):
        turns.append((seen[labels[i]] / sizes[labels[i]], position, i))
        seen[labels[i]] += 1
    return sorted(i for _, _, i in sorted(turns)[:limit])


def divided(samples: Biased, limit: int | None, seed: int) -> tuple[Biased, Biased]:
    """Training and validation samples: 80 % and 20 % of every class, of all samples or of `limit` of them."""
    if limit is not None:
        samples = samples.part(representative(samples, limit, seed))
    kept, held = hold_out(samples, HELD_OUT, seed)
    return samples.part(kept.chosen), samples.part(held.chosen)


def biased_splits(train: Biasable, val: Biasable, test: Biasable, *, training_bias: bool) -> dict[str, Samples]:
    """The splits of the paper: trained and validated with the bias, tested with it, without it and with a wrong one.

    Hyper-parameters are chosen on `val_unbiased`. Without `training_bias` (the paper's Reference) the tests stay.
    """
    bias: Bias = "train" if training_bias else "none"
    return {
        "train": train.biased(bias),
        "val": val.biased(bias),
        "val_unbiased": val.biased("none"),
        "iid": test.biased("train"),
        "ood": test.biased("none"),
        "deceiving": test.biased("deceiving"),
    }
