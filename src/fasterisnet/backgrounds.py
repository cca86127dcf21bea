"""Backgrounds of pictures: exchanged, filled in, blurred, and their colours.

Images are (sample, channel, height, width) as the network sees them, masks bool (sample, 1, height, width), True where
the object is. The object of a borrowed background is covered with its surroundings, so that no outline of it stays.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

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


def uncovered(images: Tensor, masks: Tensor) -> Tensor:
    """The backgrounds alone: objects covered with what is around them."""
    return fill_in(images, ~grown(masks))


def feathered(masks: Tensor, width: int) -> Tensor:
    """How much of the object is seen at each pixel: 1 inside the mask, falling to 0 within `width` pixels around it."""
    near = F.avg_pool2d(masks.float(), 2 * width + 1, stride=1, padding=width)
    return torch.where(masks, 1.0, (2 * near).clamp(max=1))


def painted(images: Tensor, masks: Tensor, ground: Tensor, feather: int = 0) -> Tensor:
    """The objects of `images` before other backgrounds.

    In a feathered border the object's own colours, never its old background, go over into the new one.
    """
    if feather == 0:
        return torch.where(masks, images, ground)
    alpha = feathered(masks, feather).to(images)
    return alpha * fill_in(images, masks) + (1 - alpha) * ground


def before(images: Tensor, masks: Tensor, donors: Tensor, donor_masks: Tensor) -> Tensor:
    """The objects of `images` before the backgrounds of `donors`, whose own objects are covered."""
    return painted(images, masks, uncovered(donors, donor_masks))


def blurred(images: Tensor, masks: Tensor) -> Tensor:
    """The backgrounds alone, as a few smooth colours."""
    height, width = images.shape[-2:]
    return _smooth(images, ~grown(masks), (min(CELLS, height), min(CELLS, width)))


def has_background(masks: Tensor) -> Tensor:
    """Which samples have an object and enough around it."""
    return masks.flatten(1).any(1) & ((~grown(masks)).flatten(1).double().mean(1) >= LEAST)


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
