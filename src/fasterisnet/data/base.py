"""What every data set looks like from the outside: splits of samples that can be read one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fasterisnet.errors import InputError, UsageError

Label = int | tuple[float, ...]


class BadImageError(InputError):
    """An image or mask file that cannot be decoded; the message starts with its path."""


class Reading(NamedTuple):
    """One sample as it is stored: image uint8 (channel, height, width), mask bool (1, height, width) or None."""

    image: Tensor
    mask: Tensor | None
    label: Label


class Samples(Protocol):
    """One split. `label` and `group` (a patient, say; None if unknown) need no decoding; `name` is for messages."""

    def __len__(self) -> int: ...
    def read(self, index: int) -> Reading: ...
    def label(self, index: int) -> Label: ...
    def name(self, index: int) -> str: ...
    def group(self, index: int) -> str | None: ...


@dataclass(frozen=True)
class Source:
    """A data set: its classes and its splits (`train`, maybe `val`, and tests). Labels of a multi-label task are
    tuples with a number for each class, others the index of the class.

    copies: of a split that holds the samples of another one again, with other marks or none, which other one that is.
    """

    classes: list[str]
    splits: dict[str, Samples]
    multi_label: bool = False
    copies: dict[str, str] = field(default_factory=dict)

    def split(self, name: str) -> Samples:
        """The samples of one split."""
        if name not in self.splits:
            raise UsageError(f"There is no split '{name}'; the data has {', '.join(self.splits) or 'none'}.")
        return self.splits[name]


def present(samples: Samples, classes: int) -> set[int]:
    """The classes that samples have, by number."""
    found: set[int] = set()
    for i in range(len(samples)):
        label = samples.label(i)
        found |= {label} if isinstance(label, int) else {k for k in range(classes) if label[k]}
    return found


def has_mask(samples: Samples, index: int) -> bool:
    """Whether a sample should have a mask, as far as its split can tell without decoding; those that cannot, have."""
    told = getattr(samples, "has_mask", None)
    return True if told is None else bool(told(index))


class Subset:
    """Some of the samples of a split."""

    def __init__(self, samples: Samples, chosen: Sequence[int]) -> None:
        self.samples, self.chosen = samples, list(chosen)

    def __len__(self) -> int:
        return len(self.chosen)

    def read(self, index: int) -> Reading:
        """The sample as it is stored."""
        return self.samples.read(self.chosen[index])

    def label(self, index: int) -> Label:
        """Its label."""
        return self.samples.label(self.chosen[index])

    def name(self, index: int) -> str:
        """Its name for messages."""
        return self.samples.name(self.chosen[index])

    def group(self, index: int) -> str | None:
        """Whom it belongs to."""
        return self.samples.group(self.chosen[index])

    def has_mask(self, index: int) -> bool:
        """Whether it should have a mask."""
        return has_mask(self.samples, self.chosen[index])


def readable_part(samples: Samples, workers: int = 1) -> tuple[Samples, list[str]]:
    """The samples whose files can be read, and what is wrong with the others; decodes every file."""

    def problem(index: int) -> str | None:
        try:
            samples.read(index)
        except BadImageError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(max(workers, 1)) as pool:
        problems = list(pool.map(problem, range(len(samples))))
    found = [text for text in problems if text is not None]
    return (Subset(samples, [i for i, text in enumerate(problems) if text is None]) if found else samples), found


class FewerMasks(Subset):
    """The same samples, a part of them without their masks: what masks are worth can be measured."""

    def __init__(self, samples: Samples, share: float, seed: int) -> None:
        super().__init__(samples, range(len(samples)))
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
        self.masked = set(order[: round(share * len(samples))].tolist())

    def read(self, index: int) -> Reading:
        """The sample as it is stored, its mask only if it belongs to the share."""
        reading = super().read(index)
        return reading if index in self.masked else reading._replace(mask=None)

    def has_mask(self, index: int) -> bool:
        """Whether it should have a mask and belongs to the share."""
        return index in self.masked and super().has_mask(index)


def balanced(samples: Samples, seed: int) -> Subset:
    """Every class as often as the most frequent one: all images of a rare class again and again, and some once more."""
    members: dict[int, list[int]] = {}
    for i in range(len(samples)):
        label = samples.label(i)
        if not isinstance(label, int):
            raise UsageError("Samples of several labels at once cannot be balanced; take --sampling natural.")
        members.setdefault(label, []).append(i)
    generator = torch.Generator().manual_seed(seed)
    most = max(map(len, members.values()))
    chosen: list[int] = []
    for label in sorted(members):
        own = members[label]
        times, rest = divmod(most, len(own))
        some = torch.randperm(len(own), generator=generator)[:rest].tolist()
        chosen += own * times + [own[k] for k in some]
    return Subset(samples, sorted(chosen))


def hold_out(samples: Samples, share: float, seed: int) -> tuple[Subset, Subset]:
    """Two parts, the second with about `share` of every class; a group (patient) is never in both."""
    if not 0 < share < 1:
        raise InputError(f"The share held out for validation is {share}; it has to lie between 0 and 1.")
    together: dict[object, list[int]] = {}
    for i in range(len(samples)):
        group = samples.group(i)
        together.setdefault(("sample", i) if group is None else ("group", group), []).append(i)
    by_class: dict[Label, list[list[int]]] = {}
    for members in together.values():
        by_class.setdefault(samples.label(members[0]), []).append(members)
    generator = torch.Generator().manual_seed(seed)
    kept: list[int] = []
    held: list[int] = []
    for label in sorted(by_class, key=str):
        groups = by_class[label]
        wanted = share * sum(map(len, groups))
        order = torch.randperm(len(groups), generator=generator).tolist()
        taken, all_held = 0, True
        for position, i in enumerate(order):
            last = position == len(order) - 1
            part = held if taken + len(groups[i]) / 2 <= wanted and not (last and all_held) else kept
            taken += len(groups[i]) if part is held else 0
            all_held = all_held and part is held
            part.extend(groups[i])
    if not held or not kept:
        raise InputError(
            f"{len(samples)} training samples are too few to hold out {share:.0%} of them for validation; "
            "add a 'val' split."
        )
    return Subset(samples, sorted(kept)), Subset(samples, sorted(held))
