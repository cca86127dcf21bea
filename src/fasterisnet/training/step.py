"""One batch, and what the log wants to know of it."""

from __future__ import annotations

import torch
from torch import Tensor

from fasterisnet.methods import Step
from fasterisnet.methods.base import Masks
from fasterisnet.training.run import Row

PARTS = ("loss", "classification", "background", "foreground")
SUMS = (*PARTS, "correct", "samples", "with_mask", "skipped")


class LoggedStep(Step):
    """A step that returns the loss to train, and sums for the log instead of averages."""

    def forward(self, images: Tensor, labels: Tensor, masks: Masks = None) -> tuple[Tensor, Tensor]:
        """The loss, and the numbers called SUMS."""
        parts = super().forward(images, labels, masks)
        masked = parts.samples - parts.without_mask
        values = torch.stack([parts.total, parts.classification, parts.background, parts.foreground])
        sums = values.detach().cpu().double() * torch.tensor([parts.samples, parts.samples, masked, masked])
        counts = (correct(parts.logits, labels), parts.samples, masked, int(parts.skipped))
        return parts.total, torch.cat([sums, torch.tensor(counts, dtype=torch.float64)])


def correct(logits: Tensor, labels: Tensor) -> int:
    """How many samples are decided right; several labels count only if all of them are."""
    if labels.ndim == 2 or logits.shape[1] == 1:
        return int(((logits > 0) == (labels.reshape(logits.shape) > 0.5)).all(1).sum())
    return int((logits.argmax(1) == labels).sum())


def averages(sums: Tensor, prefix: str) -> Row:
    """Sums as the means of the log."""
    named = dict(zip(SUMS, sums.tolist(), strict=True))
    counts = {"background": named["with_mask"], "foreground": named["with_mask"]}
    row: Row = {f"{prefix}_{key}": named[key] / max(counts.get(key, named["samples"]), 1) for key in PARTS}
    return {**row, f"{prefix}_accuracy": named["correct"] / max(named["samples"], 1)}
