"""One batch, what the log wants to know of it, and what is measured after an epoch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fasterisnet.data.loader import Loader
from fasterisnet.evaluation.attention import logits_of
from fasterisnet.losses.classification import class_weights
from fasterisnet.losses.masks import Masks
from fasterisnet.methods import Method, Step
from fasterisnet.methods.base import zero_loss
from fasterisnet.runs.folder import Row
from fasterisnet.training.distributed import VALIDATION, Place

PARTS = ("classification", "background", "foreground")
SUMS = (*PARTS, "heatmap", "correct", "samples", "with_mask", "skipped")


class LoggedStep(Step):
    """A step that returns the loss to train, and sums for the log instead of averages. weights: of the classes."""

    weights: Tensor | None

    def __init__(self, model: torch.nn.Module, method: Method, weights: Tensor | None = None) -> None:
        super().__init__(model, method)
        self.register_buffer("weights", weights, persistent=False)

    @property
    def sums(self) -> tuple[str, ...]:
        """The names of what is added up over batches: those of all methods, then this method's own."""
        return (*SUMS, *self.method.counts)

    def forward(
        self, images: Tensor, labels: Tensor, masks: Masks = None, shares: tuple[float, float] = (1.0, 1.0)
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the numbers called `sums`.

        shares: of the samples and of the masked samples that this process has, in units of an equal share. With them
        the mean over the processes is the loss of the whole batch, whoever got more of it or of its masks.
        """
        if len(images) == 0:
            return zero_loss(self.model), torch.zeros(len(self.sums), dtype=torch.float64)
        with class_weights(self.weights):
            parts = super().forward(images, labels, masks)
        masked = 0 if parts.skipped else parts.samples - parts.without_mask
        maps = torch.stack([parts.background, parts.foreground, parts.heatmap]).detach().cpu().double()
        maps = torch.zeros_like(maps) if parts.skipped else maps * masked
        sums = torch.cat([parts.classification.detach().cpu().double().view(1) * parts.samples, maps])
        counts = (correct(parts.logits, labels), parts.samples, masked, int(parts.skipped))
        total = parts.total
        if shares != (1.0, 1.0) and not parts.skipped:
            total = self.method.combine(shares[0] * parts.classification, shares[1] * parts.heatmap)
        return total, torch.cat([sums, torch.tensor(counts, dtype=torch.float64), parts.counts.detach().cpu().double()])


def correct(logits: Tensor, labels: Tensor) -> int:
    """How many samples are decided right, of those that were decided; several labels count only if all of them are."""
    if logits.numel() == 0:
        return 0
    if labels.ndim == 2 or logits.shape[1] == 1:
        return int(((logits > 0) == (labels.reshape(logits.shape) > 0.5)).all(1).sum())
    return int((logits.argmax(1) == labels).sum())


def averages(sums: Tensor, prefix: str, step: LoggedStep) -> Row:
    """Sums as the means of the log: classification over all samples, the rest over those with a mask."""
    method, named = step.method, dict(zip(step.sums, sums.tolist(), strict=True))
    samples, masked = max(named["samples"], 1), max(named["with_mask"], 1)
    means = {key: named[key] / (samples if key == "classification" else masked) for key in (*PARTS, "heatmap")}
    row: Row = {f"{prefix}_loss": method.combine(means["classification"], means["heatmap"])}
    more = {"accuracy": named["correct"] / samples, **method.measured(step.model, named)}
    return {**row, **{f"{prefix}_{key}": value for key, value in {**{k: means[k] for k in PARTS}, **more}.items()}}


def validate(place: Place, step: LoggedStep, loader: Loader, last: int) -> Row:
    """The method's own loss, with the same draws and the same P, that of the last epoch, after every epoch."""
    place.agree(step.model)
    step.method.set_epoch(last)
    step.model.eval()
    sums = torch.zeros(len(step.sums), dtype=torch.float64)
    with torch.no_grad(), place.fabric.autocast():
        for i, batch in enumerate(loader.epoch(0)):
            place.seed(step.method, VALIDATION, 0, i)
            place.draws(step.method, *loader.batches.shared(i))
            sums = sums + step(*place.moved(*batch))[1].cpu()
    total = place.added(sums)
    row = averages(total, "val", step)
    broken = total[SUMS.index("skipped")] > 0  # relevance was not finite: such a network is not the best
    return {**row, "val_loss": math.inf} if broken and not math.isnan(row["val_loss"]) else row


def watch(place: Place, model: torch.nn.Module, loaders: dict[str, Loader]) -> Row:
    """Accuracy on the watched splits: for curves, never for choosing."""
    model.eval()
    return {f"{name}_accuracy": _accuracy(place, model, loader) for name, loader in loaders.items()}


def _accuracy(place: Place, model: torch.nn.Module, loader: Loader) -> float:
    counts: Tensor = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad(), place.fabric.autocast():
        for batch in loader.epoch(0):
            images, labels, _ = place.moved(*batch)
            counts = counts + torch.tensor([correct(logits_of(model, images), labels), len(labels)])
    right, samples = place.added(counts).tolist()
    return right / samples
