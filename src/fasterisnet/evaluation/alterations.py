"""Pictures with another background or without their object, for the causal tests.

Images and masks as in `backgrounds`. An erased object is covered with the mean colour of all backgrounds, so that its
place tells nothing of its own background.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fasterisnet.backgrounds import Palette, before, blurred, grown, uncovered
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


def boxes_around(mask: Tensor) -> Tensor:
    """The smallest upright rectangle around each object."""
    rows, columns = mask.any(-1, keepdim=True), mask.any(-2, keepdim=True)
    return _between(rows, -2) & _between(columns, -1)


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
        ground = images if name == "object_erased" else uncovered(others, other_masks)
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


def _between(hit: Tensor, dim: int) -> Tensor:
    """True from the first hit to the last one."""
    whole = hit.int()
    return (whole.cumsum(dim) > 0) & (whole.flip(dim).cumsum(dim).flip(dim) > 0)


def _noise(number: int, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))
