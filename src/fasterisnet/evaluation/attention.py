"""Where a classifier looks, measured: relevance in the background, and decisions that change with it.

Maps and images are (sample, channel, space...), masks the same or (sample, space...), 1 = foreground. A sample whose
mask is empty has no known background: its value is NaN, or it is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fasterisnet.errors import InputError
from fasterisnet.losses import has_foreground, prepare_masks
from fasterisnet.lrp.small_maps import SmallMaps

Fill = float | Sequence[float] | Tensor | None


class Change(NamedTuple):
    """What another background does: mean absolute change of a logit, share of decisions that changed, over how many
    samples (those with a mask).
    """

    logits: float
    decisions: float
    samples: int


def background_mass(maps: Tensor, masks: Tensor) -> Tensor:
    """`sum |R| outside the mask / sum |R|` of every sample; NaN without a mask, or if the map is zero or not finite."""
    mask = _mask(masks, maps)
    absolute = maps.detach().double().abs()
    outside = (absolute * ~mask).flatten(1).sum(1)
    return _where_masked(outside / absolute.flatten(1).sum(1), mask)


def highest_pixel_inside(maps: Tensor, masks: Tensor) -> Tensor:
    """1 if the pixel of highest `|R|` (summed over channels) is foreground, else 0; NaN as in `background_mass`."""
    mask = _mask(masks, maps).any(1).flatten(1)
    pixels = maps.detach().double().abs().sum(1).flatten(1)
    inside = mask.gather(1, pixels.argmax(1, keepdim=True))[:, 0].double()
    total = pixels.sum(1)
    return _where_masked(inside.where(total.isfinite() & (total > 0), torch.nan), mask)


def change_when_background_erased(
    model: nn.Module, images: Tensor, masks: Tensor, *, fill: Fill = None, multi_label: bool = False
) -> Change:
    """Every background replaced by one colour: `fill` (a number, or one a channel), or the mean of all backgrounds."""

    def erased(kept: Tensor, mask: Tensor) -> Tensor:
        colour = _mean_background(kept, mask, together=True) if fill is None else _colour(fill, kept)
        return torch.where(mask, kept, colour)

    return _change(model, images, masks, erased, multi_label)


def change_when_background_swapped(
    model: nn.Module, images: Tensor, masks: Tensor, *, seed: int = 0, multi_label: bool = False
) -> Change:
    """Every sample before the background of another sample of the batch, drawn at random.

    Where the other sample's own foreground would show, it is covered with the mean colour of its background. Give
    shuffled batches: among samples of one class, backgrounds that give the class away are swapped for their like.
    """

    def swapped(kept: Tensor, mask: Tensor) -> Tensor:
        if len(kept) < 2:
            raise InputError(f"Backgrounds can be swapped among two samples with a mask or more; there is {len(kept)}.")
        order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(seed)).to(kept.device)
        other = torch.empty_like(order)
        other[order] = order.roll(1)
        backgrounds = torch.where(mask, _mean_background(kept, mask, together=False), kept)
        return torch.where(mask, kept, backgrounds[other])

    return _change(model, images, masks, swapped, multi_label)


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
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(images):
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InputError(f"The model returned {shape} for {len(images)} images; logits have to be (sample, class).")
    return logits


def decisions(logits: Tensor, multi_label: bool = False) -> Tensor:
    """The highest class; of one logit 0 or 1; of a multi-label task a bool for each class."""
    if multi_label:
        return logits > 0
    return (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(1)


@torch.no_grad()
def _change(
    model: nn.Module, images: Tensor, masks: Tensor, altered: Callable[[Tensor, Tensor], Tensor], multi_label: bool
) -> Change:
    mask = _mask(masks, images)
    known = has_foreground(mask)
    kept, mask = images[known], mask[known]
    if len(kept) == 0:
        raise InputError("None of the images has a mask, so nothing is known to be background.")
    with evaluating(model):
        before, after = logits_of(model, kept), logits_of(model, altered(kept, mask))
    changed = (decisions(before, multi_label) != decisions(after, multi_label)).reshape(len(kept), -1).any(1)
    return Change(float((after - before).abs().double().mean()), float(changed.double().mean()), len(kept))


def _mean_background(images: Tensor, mask: Tensor, *, together: bool) -> Tensor:
    """The mean colour outside the masks, of all samples together or of each; 0 where there is no background."""
    dims = (0, *range(2, images.ndim)) if together else tuple(range(2, images.ndim))
    outside = (~mask).expand_as(images)
    return (images * outside).sum(dims, keepdim=True) / outside.sum(dims, keepdim=True).clamp(min=1)


def _colour(fill: float | Sequence[float] | Tensor, images: Tensor) -> Tensor:
    colour = torch.as_tensor(fill, dtype=images.dtype, device=images.device).flatten()
    if colour.numel() not in (1, images.shape[1]):
        raise InputError(f"fill has {colour.numel()} numbers for images of {images.shape[1]} channels.")
    return colour.view(1, -1, *[1] * (images.ndim - 2))


def _mask(masks: Tensor, maps: Tensor) -> Tensor:
    """Masks as bool (sample, 1 or channel, space...)."""
    if maps.ndim < 3:
        raise InputError(f"Maps and images have to be (sample, channel, space...), not {tuple(maps.shape)}.")
    mask = prepare_masks(masks, maps.shape[2:]).to(maps.device)
    if len(mask) != len(maps) or mask.shape[1] not in (1, maps.shape[1]):
        raise InputError(f"Masks of shape {tuple(masks.shape)} do not fit maps or images of {tuple(maps.shape)}.")
    return mask


def _where_masked(values: Tensor, mask: Tensor) -> Tensor:
    return values.where(has_foreground(mask) & values.isfinite(), torch.nan)
