"""The range that images live in: what zB has to know of the data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fasterisnet.errors import InputError

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TOLERANCE = 0.01  # of the box: for rounding, also where images were normalised in half precision


def normalised_box(mean: Sequence[float], std: Sequence[float]) -> tuple[list[float], list[float]]:
    """The box that images of [0, 1] live in after `(x - mean)/std`: what zB has to know of the data.

    Takes one mean and one deviation a channel; returns the lowest and the highest value of every channel.

    Example:
        >>> normalised_box([0.5], [0.5])
        ([-1.0], [1.0])
    """
    if len(mean) != len(std) or not all(s > 0 for s in std):
        raise InputError(f"mean is {list(mean)} and std is {list(std)}; give one of each a channel, with std above 0.")
    pairs = list(zip(mean, std, strict=True))
    return [(0 - m) / s for m, s in pairs], [(1 - m) / s for m, s in pairs]


def check_inside(images: Tensor, low: Tensor, high: Tensor) -> None:
    """Raises if images leave the box, saying which normalisation would fit them; low and high are shaped like them."""
    values = images.detach()
    slack = TOLERANCE * torch.maximum(high - low, low.abs() + high.abs())
    outside = (values < low - slack) | (values > high + slack)
    if not bool(outside.any()):
        return
    sample = int(outside.flatten(1).any(1).nonzero()[0])
    raise InputError(
        f"images reach from {values.min():.3g} to {values.max():.3g}, but box says that they lie between "
        f"{low.min():.3g} and {high.max():.3g} (first outside: sample {sample}); zB would be wrong. {_fitting(values)}"
    )


def _fitting(values: Tensor) -> str:
    """What to write instead."""
    if bool((values >= 0).all()) and values.max() <= 1:
        return "They look like images of [0, 1]: use box=(0, 1)."
    if values.min() >= -1 and values.max() <= 1:
        return "They look like images of [-1, 1]: use box=(-1, 1)."
    if values.shape[1] == len(IMAGENET[0]) and values.ndim > 2:
        edges = (torch.tensor(edge).to(values).view(-1, *[1] * (values.ndim - 2)) for edge in normalised_box(*IMAGENET))
        low, high = edges
        if bool(((values >= low - 0.01) & (values <= high + 0.01)).all()):
            mean, std = (list(numbers) for numbers in IMAGENET)
            return f"They look normalised as for ImageNet: use box=fasterisnet.normalised_box({mean}, {std})."
    if values.min() >= 0 and values.max() <= 255:
        return "They look like bytes: divide them by 255, or use box=(0, 255)."
    return (
        "Use box=fasterisnet.normalised_box(mean, std) with the mean and std they were normalised with, "
        "box=(lowest, highest) that an image can hold, or box=None for no zB."
    )
