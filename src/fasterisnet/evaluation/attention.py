"""Where a classifier looks, measured on heatmaps of any kind: how much of one lies in the background.

Maps and images are (sample, channel, space...), masks the same or (sample, space...), 1 = foreground. A sample whose
mask is empty has no known background: its value is NaN, or it is left out. Sums are made in float64, which not every
device has, so they are made on the CPU and the values are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fasterisnet.errors import InputError
from fasterisnet.losses import has_foreground, prepare_masks
from fasterisnet.lrp.logits import logits_in
from fasterisnet.lrp.small_maps import SmallMaps


def background_mass(maps: Tensor, masks: Tensor) -> Tensor:
    """`sum |R| outside the mask / sum |R|` of every sample; NaN without a mask, or if the map is zero or not finite."""
    mask = _mask(masks, maps)
    absolute = maps.detach().cpu().double().abs()
    outside = (absolute * ~mask).flatten(1).sum(1)
    return _where_masked(outside / absolute.flatten(1).sum(1), mask)


def highest_pixel_inside(maps: Tensor, masks: Tensor) -> Tensor:
    """1 if the pixel of highest `|R|` (summed over channels) is foreground, else 0; NaN as in `background_mass`."""
    mask = _mask(masks, maps).any(1).flatten(1)
    pixels = maps.detach().cpu().double().abs().sum(1).flatten(1)
    inside = mask.gather(1, pixels.argmax(1, keepdim=True))[:, 0].double()
    total = pixels.sum(1)
    return _where_masked(inside.where(total.isfinite() & (total > 0), torch.nan), mask)


def rank_accuracy(maps: Tensor, masks: Tensor) -> Tensor:
    """Of the strongest pixels, as many as the mask has, the share inside the mask; NaN as in `background_mass`."""
    mask = _mask(masks, maps).any(1).flatten(1)
    pixels = maps.detach().cpu().double().abs().sum(1).flatten(1)
    order = pixels.argsort(dim=1, descending=True, stable=True)
    counted = torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)
    inside = (mask.gather(1, order) & counted).sum(1) / mask.sum(1)
    total = pixels.sum(1)
    return _where_masked(inside.double().where(total.isfinite() & (total > 0), torch.nan), mask)


def background_area(masks: Tensor, shape: Sequence[int]) -> Tensor:
    """The background's share of the pixels: the mass that a map indifferent to the object would have there."""
    mask = prepare_masks(masks, tuple(shape)).any(1).cpu()
    return _where_masked((~mask).flatten(1).double().mean(1), mask.unsqueeze(1))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """(sample, class), also of models that return more than logits."""
    with SmallMaps():
        output = model(images)
    logits = logits_in(output)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(images):
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InputError(f"The model returned {shape} for {len(images)} images; logits have to be (sample, class).")
    return logits


def decisions(logits: Tensor, multi_label: bool = False) -> Tensor:
    """The highest class; of one logit 0 or 1; of a multi-label task a bool for each class."""
    if multi_label:
        return logits > 0
    return (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(1)


def _mask(masks: Tensor, maps: Tensor) -> Tensor:
    """Masks as bool (sample, 1 or channel, space...)."""
    if maps.ndim < 3:
        raise InputError(f"Maps and images have to be (sample, channel, space...), not {tuple(maps.shape)}.")
    mask = prepare_masks(masks, maps.shape[2:]).cpu()
    if len(mask) != len(maps) or mask.shape[1] not in (1, maps.shape[1]):
        raise InputError(f"Masks of shape {tuple(masks.shape)} do not fit maps or images of {tuple(maps.shape)}.")
    return mask


def _where_masked(values: Tensor, mask: Tensor) -> Tensor:
    return values.where(has_foreground(mask) & values.isfinite(), torch.nan)
