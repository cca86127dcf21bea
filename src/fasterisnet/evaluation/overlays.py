"""Heatmaps over images, as pixels: red for a class, blue against it, the outline of the mask in green."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fasterisnet.errors import InputError
from fasterisnet.losses import prepare_masks

POSITIVE, NEGATIVE, OUTLINE = (0.86, 0.08, 0.10), (0.10, 0.25, 0.90), (0.05, 0.60, 0.20)
LEGIBLE = 224  # pixels; smaller pictures are enlarged, every pixel a square
PALEST = 0.55  # black of the image under a heatmap, so that colours show on it
GAMMA = 0.7  # below 1: weak relevance shows too
LUMA = (0.299, 0.587, 0.114)


def overlay(image: Tensor, heatmap: Tensor, mask: Tensor | None = None, *, bound: float | None = None) -> Tensor:
    """The map over the image in grey, uint8 (3, height, width): red for, blue against, the mask outlined in green.

    image: (channel, height, width), in [0, 1] or else stretched to it. heatmap: the same, or (height, width). bound:
    relevance drawn in full colour, by default that of the strongest 0.1 % of the pixels. Tiny images are enlarged.
    """
    pixels = _pixels(heatmap)
    if tuple(pixels.shape) != tuple(image.shape[-2:]):
        raise InputError(f"A map of {tuple(heatmap.shape)} cannot be laid over an image of {tuple(image.shape)}.")
    largest = _strongest(pixels) if bound is None else bound
    grey = _enlarged((_rgb(image) * torch.tensor(LUMA).view(3, 1, 1)).sum(0, keepdim=True))
    strength = _enlarged((pixels / largest if largest > 0 else pixels).unsqueeze(0))
    picture = coloured(grey, strength)
    if mask is not None:
        picture = torch.where(_outline(_enlarged(_one_mask(mask, image))), torch.tensor(OUTLINE).view(3, 1, 1), picture)
    return _bytes(picture)


def with_outline(image: Tensor, mask: Tensor | None) -> Tensor:
    """The image itself, uint8 (3, height, width), with the border of the mask in green; tiny images are enlarged."""
    picture = _enlarged(_rgb(image))
    if mask is not None:
        picture = torch.where(_outline(_enlarged(_one_mask(mask, image))), torch.tensor(OUTLINE).view(3, 1, 1), picture)
    return _bytes(picture)


def coloured(grey: Tensor, strength: Tensor) -> Tensor:
    """Red or blue over a pale grey, the more the stronger; (3, height, width)."""
    pale = PALEST + (1 - PALEST) * grey
    opacity = strength.abs().clamp(max=1) ** GAMMA
    colour = torch.where(strength > 0, *(torch.tensor(rgb).view(3, 1, 1) for rgb in (POSITIVE, NEGATIVE)))
    return pale * (1 - opacity) + colour * opacity


def _strongest(pixels: Tensor) -> float:
    """What the strongest 0.1 % of the pixels reach (one pixel, if tiny): one of them shall not make the others pale."""
    absolute = pixels.abs().flatten()
    count = max(1, len(absolute) // 1000)
    return float(absolute.topk(count).values[-1]) or float(absolute.max())


def _pixels(heatmap: Tensor) -> Tensor:
    """Relevance of each pixel: its channels together."""
    found = heatmap.detach().float().cpu()
    found = found.sum(0) if found.ndim == 3 else found
    if found.ndim != 2 or not bool(found.isfinite().all()):
        wrong = "not finite" if found.ndim == 2 else f"of shape {tuple(heatmap.shape)}"
        raise InputError(f"A heatmap is {wrong}; it has to be finite, (channel, height, width) or (height, width).")
    return found


def _rgb(image: Tensor) -> Tensor:
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        raise InputError(f"An image has shape {tuple(image.shape)}; it has to be (1 or 3 channels, height, width).")
    values = image.detach().float().cpu() / (255 if image.dtype == torch.uint8 else 1)
    low, high = float(values.min()), float(values.max())
    if low < -1e-3 or high > 1 + 1e-3:
        values = (values - low) / max(high - low, 1e-12)
    return values.clamp(0, 1).expand(3, -1, -1)


def _enlarged(picture: Tensor) -> Tensor:
    factor = max(1, round(LEGIBLE / max(picture.shape[-2:])))
    return picture.repeat_interleave(factor, -2).repeat_interleave(factor, -1)


def _one_mask(mask: Tensor, image: Tensor) -> Tensor:
    masks = prepare_masks(mask.detach().cpu().unsqueeze(0), image.shape[-2:])
    return masks[0].any(0, keepdim=True)


def _outline(mask: Tensor) -> Tensor:
    """The pixels just outside the mask."""
    width = max(1, max(mask.shape[-2:]) // 110)
    grown = F.max_pool2d(mask.float(), 2 * width + 1, stride=1, padding=width)
    return (grown > 0) & ~mask


def _bytes(picture: Tensor) -> Tensor:
    return (picture.clamp(0, 1) * 255).round().to(torch.uint8)
