"""How well a mask is drawn: the loss that trains a segmenter, and intersection over union."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def segmentation_loss(drawn: Tensor, masks: Tensor, include: Tensor) -> Tensor:
    """L_S: binary cross entropy of every pixel, its mean over the samples that have a mask; zero if none has.

    drawn: logits (sample, 1, height, width). include: one bool per sample.
    """
    drawn = drawn.float() if drawn.dtype in (torch.float16, torch.bfloat16) else drawn
    pixels = F.binary_cross_entropy_with_logits(drawn, masks.to(drawn.dtype), reduction="none")
    return (pixels.flatten(1).mean(1) * include).sum() / include.sum().clamp(min=1)


def intersection_over_union(inside: Tensor, masks: Tensor) -> Tensor:
    """Of every sample; two empty masks agree, so their value is 1."""
    inside, masks = inside.flatten(1).bool(), masks.flatten(1).bool()
    union = (inside | masks).sum(1)
    return torch.where(union > 0, (inside & masks).sum(1) / union.clamp(min=1), 1.0)
