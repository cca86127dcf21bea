"""Pictures with another background or without their object, for the causal tests.

Images are (sample, channel, height, width) as the network sees them, masks bool (sample, 1, height, width), True where
the object is. The object of a borrowed background is covered with its surroundings, so that no outline of it stays; an
erased object with the mean colour of all backgrounds, so that its place tells nothing of its own background.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fasterisnet.errors import InputError

Label = int | tuple[float, ...]

TESTS = {
    "mixed_same": "background of another image of the same class",
    "mixed_random": "background of an image of a random class",
    "mixed_other": "background of an image of another class",
    "background_mean": "background erased: one colour",
    "background_blur": "background erased: blurred",
    "background_noise": "background erased: noise",
    "object_erased": "object erased, with the box around it",
    "object_erased_other": "object erased, background of another class",
    "object_swapped": "object of another class on the same background",
}
DONORS = {
    "mixed_same": "same", "mixed_random": "random", "mixed_other": "other", "object_erased_other": "other",
    "object_swapped": "other",
}  # fmt: skip
LEAST = 0.02  # of the image has to be background, or there is nothing to exchange
CELLS = 8  # a blurred background has 8 x 8 colours


class Palette(NamedTuple):
    """The colours of all backgrounds, a number for each channel (1, channel, 1, 1)."""

    mean: Tensor
    sd: Tensor
    low: Tensor
    high: Tensor


def fill_in(images: Tensor, known: Tensor) -> Tensor:
    """Unknown pixels from the known ones around them: averages over ever larger cells, smoothly enlarged; 0 of none."""
    if bool(known.all()) or min(images.shape[-2:]) == 1:
        return torch.where(known, images, _mean(images, known))
    height, width = images.shape[-2:]
    return torch.where(known, images, _smooth(images, known, (math.ceil(height / 2), math.ceil(width / 2))))


def grown(mask: Tensor) -> Tensor:
    """The mask and a narrow margin (1/64 of the picture), where object and background are mixed."""
    width = max(1, max(mask.shape[-2:]) // 64)
    return F.max_pool2d(mask.float(), 2 * width + 1, stride=1, padding=width) > 0


def boxes_around(mask: Tensor) -> Tensor:
    """The smallest upright rectangle around each object."""
    rows, columns = mask.any(-1, keepdim=True), mask.any(-2, keepdim=True)
    return _between(rows, -2) & _between(columns, -1)


def before(images: Tensor, masks: Tensor, donors: Tensor, donor_masks: Tensor) -> Tensor:
    """The objects of `images` before the backgrounds of `donors`, whose own objects are covered."""
    return torch.where(masks, images, fill_in(donors, ~grown(donor_masks)))


def blurred(images: Tensor, masks: Tensor) -> Tensor:
    """The backgrounds alone, as a few smooth colours."""
    height, width = images.shape[-2:]
    return _smooth(images, ~grown(masks), (min(CELLS, height), min(CELLS, width)))


def altered(
    name: str,
    images: Tensor,
    masks: Tensor,
    donors: tuple[Tensor, Tensor],
    palette: Palette,
    numbers: Sequence[int] = (),
) -> Tensor:
    """The images as a test shows them; donors: other images with their masks; numbers: the samples', for the noise."""
    others, other_masks = donors
    if name.startswith("mixed"):
        return before(images, masks, others, other_masks)
    if name == "object_swapped":
        return before(others, other_masks, images, masks)
    box = boxes_around(grown(masks))
    if name.startswith("object_erased"):
        ground = images if name == "object_erased" else fill_in(others, ~grown(other_masks))
        return torch.where(box, palette.mean.to(images), ground)
    if name == "background_mean":
        ground = palette.mean.to(images).expand_as(images)
    elif name == "background_blur":
        ground = blurred(images, masks)
    elif name == "background_noise":
        noise = torch.stack([_noise(number, images.shape[1:]) for number in numbers]).to(images)
        ground = (palette.mean + palette.sd * noise).clamp(palette.low, palette.high).to(images)
    else:
        raise InputError(f"There is no test '{name}'; there are {', '.join(TESTS)}.")
    return torch.where(masks, images, ground)


def has_background(masks: Tensor) -> Tensor:
    """Which samples have an object and enough around it."""
    return masks.flatten(1).any(1) & ((~grown(masks)).flatten(1).double().mean(1) >= LEAST)


def partners(labels: Sequence[Label], usable: Sequence[bool], *, seed: int = 0) -> dict[str, list[int]]:
    """For every sample another one of the same class, of a random class and of another class; -1 if there is none."""
    generator = torch.Generator().manual_seed(seed)
    by_class: dict[Label, list[int]] = {}
    for i, label in enumerate(labels):
        if usable[i]:
            by_class.setdefault(label, []).append(i)
    classes = sorted(by_class, key=str)
    place = {i: k for members in by_class.values() for k, i in enumerate(members)}

    def drawn(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    def another(choices: Sequence[Label], i: int) -> int:
        """A sample of one of some classes, but not sample i itself."""
        if not choices:
            return -1
        label = choices[drawn(len(choices))]
        members = by_class[label]
        if label != labels[i]:
            return members[drawn(len(members))]
        found = drawn(len(members) - 1)
        return members[found + (found >= place[i])]

    chosen: dict[str, list[int]] = {kind: [-1] * len(labels) for kind in ("same", "random", "other")}
    for i, label in enumerate(labels):
        if usable[i]:
            own = [label] if len(by_class[label]) > 1 else []
            rest = [c for c in classes if c != label]
            chosen["same"][i] = another(own, i)
            chosen["random"][i] = another(own + rest, i)
            chosen["other"][i] = another(rest, i)
    return chosen


def palette_of(images: Tensor, masks: Tensor) -> Palette:
    """The colours of the backgrounds of some images."""
    outside = ~grown(masks).transpose(0, 1).flatten()
    colours = images.transpose(0, 1).flatten(1)[:, outside].double()
    if not colours.shape[1]:
        colours = images.transpose(0, 1).flatten(1).double()
    shape = (1, -1, 1, 1)
    parts = (colours.mean(1), colours.std(1, correction=0), colours.amin(1), colours.amax(1))
    return Palette(*(part.to(images.dtype).view(shape) for part in parts))


def _smooth(images: Tensor, known: Tensor, cells: tuple[int, int]) -> Tensor:
    """The mean of what is known in each of some cells, smoothly enlarged; cells in which nothing is are filled in."""
    weight = F.adaptive_avg_pool2d(known.to(images.dtype), cells)
    coarse = F.adaptive_avg_pool2d(images * known, cells) / weight.clamp(min=1e-12)
    return F.interpolate(fill_in(coarse, weight > 0), images.shape[-2:], mode="bilinear", align_corners=False)


def _mean(images: Tensor, known: Tensor) -> Tensor:
    return (images * known).sum((-2, -1), keepdim=True) / known.sum((-2, -1), keepdim=True).clamp(min=1)


def _between(hit: Tensor, dim: int) -> Tensor:
    """True from the first hit to the last one."""
    whole = hit.int()
    return (whole.cumsum(dim) > 0) & (whole.flip(dim).cumsum(dim).flip(dim) > 0)


def _noise(number: int, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))
