"""One batch, and what the log wants to know of it."""

from __future__ import annotations

import torch
from torch import Tensor

from fasterisnet.methods import ISNet, Step
from fasterisnet.methods.base import Masks
from fasterisnet.methods.calibrate import zero_loss
from fasterisnet.training.run import Row

PARTS = ("classification", "background", "foreground")
SUMS = (*PARTS, "heatmap", "correct", "samples", "with_mask", "skipped")


class LoggedStep(Step):
    """A step that returns the loss to train, and sums for the log instead of averages."""

    @property
    def weight(self) -> float:
        """P in the current epoch."""
        return self.method.weight if isinstance(self.method, ISNet) else 0.0

    def forward(
        self, images: Tensor, labels: Tensor, masks: Masks = None, shares: tuple[float, float] = (1.0, 1.0)
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the numbers called SUMS.

        shares: of the samples and of the masked samples that this process has, in units of an equal share. With them
        the mean over the processes is the loss of the whole batch, whoever got more of it or of its masks.
        """
        if len(images) == 0:
            return zero_loss(self.model), torch.zeros(len(SUMS), dtype=torch.float64)
        parts = super().forward(images, labels, masks)
        masked = 0 if parts.skipped else parts.samples - parts.without_mask
        maps = torch.stack([parts.background, parts.foreground, parts.heatmap]).detach().cpu().double()
        maps = torch.zeros_like(maps) if parts.skipped else maps * masked
        sums = torch.cat([parts.classification.detach().cpu().double().view(1) * parts.samples, maps])
        counts = (correct(parts.logits, labels), parts.samples, masked, int(parts.skipped))
        total = parts.total
        if shares != (1.0, 1.0) and not parts.skipped:
            total = (1 - self.weight) * shares[0] * parts.classification + self.weight * shares[1] * parts.heatmap
        return total, torch.cat([sums, torch.tensor(counts, dtype=torch.float64)])


def correct(logits: Tensor, labels: Tensor) -> int:
    """How many samples are decided right; several labels count only if all of them are."""
    if labels.ndim == 2 or logits.shape[1] == 1:
        return int(((logits > 0) == (labels.reshape(logits.shape) > 0.5)).all(1).sum())
    return int((logits.argmax(1) == labels).sum())


def averages(sums: Tensor, prefix: str, weight: float) -> Row:
    """Sums as the means of the log: classification over all samples, the rest over those with a mask."""
    named = dict(zip(SUMS, sums.tolist(), strict=True))
    samples, masked = max(named["samples"], 1), max(named["with_mask"], 1)
    means = {key: named[key] / (samples if key == "classification" else masked) for key in (*PARTS, "heatmap")}
    row: Row = {f"{prefix}_loss": (1 - weight) * means["classification"] + weight * means["heatmap"]}
    return {**row, **{f"{prefix}_{key}": means[key] for key in PARTS}, f"{prefix}_accuracy": named["correct"] / samples}
