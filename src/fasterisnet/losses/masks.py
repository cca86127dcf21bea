"""Masks as the losses use them: one bool for every pixel of the maps, 1 = foreground and 0 = background."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from fasterisnet.errors import InputError

Masks = Tensor | Sequence[Tensor | None] | None
_COUNT = "There are {} masks for {} images; give one for each, None or an empty mask for an image without."


def has_foreground(masks: Tensor) -> Tensor:
    """One bool per sample: False for an empty mask, whose sample belongs in the classification loss only."""
    return (masks != 0).flatten(1).any(dim=1)


def gathered_masks(masks: Masks, images: Tensor) -> Tensor:
    """One tensor of masks; a sample without one (None) gets an empty mask."""
    if masks is None:
        return torch.zeros(len(images), 1, *images.shape[2:], dtype=torch.bool, device=images.device)
    if isinstance(masks, Tensor):
        found = masks
    elif not isinstance(masks, list | tuple):
        raise InputError(f"masks is a {type(masks).__name__}; give a tensor, or a list of tensors and None.")
    else:
        if len(masks) != len(images):
            raise InputError(_COUNT.format(len(masks), len(images)))
        odd = next((type(m).__name__ for m in masks if not isinstance(m, Tensor | None)), None)
        if odd is not None:
            raise InputError(f"masks is a list with a {odd}; give a tensor, or a list of tensors and None.")
        empty = next((torch.zeros_like(m) for m in masks if m is not None), None)
        if empty is None:
            return gathered_masks(None, images)
        try:
            found = torch.stack([empty if m is None else m for m in masks])
        except RuntimeError as error:
            raise InputError(f"The masks of a batch have to share one shape and type: {error}") from error
    if len(found) != len(images):
        raise InputError(_COUNT.format(len(found), len(images)))
    return found.as_subclass(Tensor).to(images.device)


def fitting_masks(masks: Masks, images: Tensor) -> Tensor:
    """The masks of a batch as a method takes them: bool (sample, channel, space...), of one channel or the images'."""
    if masks is None:
        _warn_none()
    found = prepare_masks(gathered_masks(masks, images), images.shape[2:])
    if found.shape[1] > 1 and found.numel() and bool((found.sum(1) == 1).all()):
        raise InputError(
            f"Masks of shape {tuple(found.shape)} have every pixel in exactly one channel, as the classes of a "
            "segmentation do; give the channel of the object alone, as in masks[:, 1:2]."
        )
    if found.shape[1] in (1, images.shape[1]):
        return found
    if not bool((found == found[:, :1]).all()):
        raise InputError(
            f"Masks of shape {tuple(found.shape)} do not fit images of shape {tuple(images.shape)}: they need one "
            f"channel, or the {images.shape[1]} of the images."
        )
    return found[:, :1]


def prepare_masks(masks: Tensor, size: Sequence[int]) -> Tensor:
    """Masks as bool (sample, channel, *size), whatever their dtype; resized with a warning if their size differs."""
    if masks.ndim not in (len(size) + 1, len(size) + 2):
        raise InputError(
            f"Masks for heatmaps of size {tuple(size)} must have {len(size) + 1} dimensions (sample, space...) or "
            f"{len(size) + 2} (sample, channel, space...), but they have shape {tuple(masks.shape)}."
        )
    if 0 in masks.shape[-len(size) :]:
        raise InputError(f"Masks of shape {tuple(masks.shape)} have no pixel; give None for an image without a mask.")
    masks = _binary(masks if masks.ndim == len(size) + 2 else masks.unsqueeze(1))
    if masks.shape[2:] != tuple(size):
        _warn_resized(tuple(masks.shape[2:]), tuple(size))
        masks = resize_masks(masks, size)
    return masks


def resize_masks(masks: Tensor, size: Sequence[int]) -> Tensor:
    """Resize the last `len(size)` dimensions: shrinking keeps a cell foreground if any of its pixels is
    (adaptive max pooling), enlarging repeats the nearest pixel.
    """
    if len(size) > masks.ndim or min(size, default=0) < 1:
        raise InputError(f"Masks of shape {tuple(masks.shape)} cannot be resized to {tuple(size)}.")
    resized = masks
    for dim, new in zip(range(masks.ndim - len(size), masks.ndim), size, strict=True):
        old = resized.shape[dim]
        if new > old:
            nearest = (2 * torch.arange(new, device=masks.device) + 1) * old // (2 * new)
            resized = resized.index_select(dim, nearest)
        elif new < old:
            rows = resized.movedim(dim, -1)
            pooled = nn.functional.adaptive_max_pool1d(rows.reshape(1, -1, old).float(), new)
            resized = pooled.reshape(*rows.shape[:-1], new).movedim(-1, dim)
    return resized.to(masks.dtype)


def _binary(masks: Tensor) -> Tensor:
    """Masks of 0 and 1, or of 0 and 255, as bool."""
    if masks.dtype == torch.bool or masks.numel() == 0:
        return masks.bool()
    strange = (masks != 0) & (masks != (255 if (masks == 255).any() else 1))
    if strange.any():
        sample = int(strange.flatten(1).any(dim=1).nonzero()[0])
        raise InputError(
            "Masks must be binary, 0 for background and 1 (or everywhere 255) for foreground, but "
            f"{strange.double().mean():.2%} of the pixels are neither, for example "
            f"{masks[strange][0].item():g} in sample {sample}. Threshold them first: `masks >= 0.5`, "
            "or `masks >= 128` for 8-bit images."
        )
    return masks != 0


@cache
def _warn_none() -> None:
    warnings.warn(
        "No masks were given to a method that needs them, so nothing but the classification loss is left of it: "
        "method.loss(model, images, labels, masks). (Shown once.)",
        stacklevel=4,
    )


@cache
def _warn_resized(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    warnings.warn(
        f"Masks of size {old} were resized to {new}, the size of the heatmaps. If that is intended, call "
        "`resize_masks` first; otherwise give images and masks the same transform. (Shown once.)",
        stacklevel=2,
    )
