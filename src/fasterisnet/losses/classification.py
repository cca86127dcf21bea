"""The classification loss, for class indices, one logit and several labels at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fasterisnet.errors import InputError

_ROUNDING = 1e-4  # of a sum of probabilities
_WEIGHTS: ContextVar[Tensor | None] = ContextVar("weights", default=None)


@contextmanager
def class_weights(weights: Tensor | None) -> Iterator[None]:
    """In this block `classification_loss` counts a sample by the weight of its class, whatever method computes it.

    The sum is divided by the number of samples, not by that of their weights, so that parts of a batch add up to it.
    """
    before = _WEIGHTS.set(weights)
    try:
        yield
    finally:
        _WEIGHTS.reset(before)


def is_multi_label(logits: Tensor, labels: Tensor) -> bool:
    """Whether labels are (batch, classes) with classes > 1: several may be true at once."""
    return logits.shape[1] > 1 and isinstance(labels, Tensor) and labels.ndim == 2


def are_chances(outputs: Tensor) -> bool:
    """Whether outputs are probabilities of classes rather than logits."""
    return len(outputs) > 0 and bool((outputs >= 0).all()) and bool(((outputs.sum(1) - 1).abs() < _ROUNDING).all())


def classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy for class indices, binary cross entropy for one logit or for multi-label targets."""
    if not isinstance(labels, Tensor):
        raise InputError(f"labels is a {type(labels).__name__}; it has to be a tensor.")
    if logits.ndim != 2:
        raise InputError(f"The model returned a tensor of shape {tuple(logits.shape)}; it has to be (batch, classes).")
    if labels.shape[:1] != logits.shape[:1]:
        raise InputError(f"Labels have shape {tuple(labels.shape)} for {logits.shape[0]} images; give one for each.")
    if len(logits) == 0:
        raise InputError("The batch has no sample, so there is no mean loss; leave empty batches out.")
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    count = logits.shape[1]
    if count == 1 or labels.ndim == 2:
        if _WEIGHTS.get() is not None:
            raise InputError("Class weights are for class indices, not for one logit or several labels at once.")
        targets = labels.reshape(len(labels), -1).to(logits.dtype)
        if targets.shape != logits.shape:
            raise InputError(
                f"Labels of shape {tuple(labels.shape)} do not fit {count} outputs; multi-label targets are "
                "(batch, classes), class indices are (batch,)."
            )
        if not bool(((targets >= 0) & (targets <= 1)).all()):
            raise InputError("Labels of a binary or multi-label task have to lie between 0 and 1.")
        return F.binary_cross_entropy_with_logits(logits, targets)
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.ndim != 1:
        raise InputError(
            f"Labels are {labels.dtype} of shape {tuple(labels.shape)}; for {count} classes give integers (batch,), "
            "or a (batch, classes) tensor of zeros and ones for a multi-label task."
        )
    if bool(((labels < 0) | (labels >= count)).any()):
        raise InputError(
            f"Labels reach from {int(labels.min())} to {int(labels.max())}, but the model has {count} outputs: "
            f"they have to be 0 to {count - 1}."
        )
    labels, weights = labels.long(), _WEIGHTS.get()
    if weights is None:
        return F.cross_entropy(logits, labels)
    return (F.cross_entropy(logits, labels, reduction="none") * weights.to(logits)[labels]).mean()
