"""What is measured after an epoch: the validation loss, which chooses weights, and accuracies, which do not."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fasterisnet.evaluation.attention import logits_of
from fasterisnet.training.batches import Loader
from fasterisnet.training.placing import VALIDATION, Place
from fasterisnet.training.run import Row
from fasterisnet.training.step import SUMS, LoggedStep, averages, correct


def validate(place: Place, step: LoggedStep, loader: Loader) -> Row:
    """The method's own loss, with the same draws and the same (last) P after every epoch."""
    place.agree(step.model)
    step.method.set_epoch(place.config.epochs - 1)
    step.model.eval()
    sums = torch.zeros(len(SUMS), dtype=torch.float64)
    with torch.no_grad(), place.fabric.autocast():
        for i, batch in enumerate(loader.epoch(0)):
            place.seed(step.method, VALIDATION, 0, i)
            place.draws(step.method, *loader.batches.shared(i))
            sums = sums + step(*place.moved(*batch))[1].cpu()
    total = place.added(sums)
    row = averages(total, "val", step.weight)
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
