"""What all methods share: one call that turns a batch into a loss, and the parts it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet.errors import InputError
from fasterisnet.lrp.small_maps import SmallMaps

Masks = Tensor | Sequence[Tensor | None] | None


@dataclass
class Parts:
    """A loss and what it is made of. `total` is what is trained; the others can be logged, or trained on their own.

    without_mask: samples that took part in the classification loss only. skipped: the step has no meaning because
    relevance was not finite; `total` is then zero. logits: detached, for metrics.
    """

    total: Tensor
    classification: Tensor
    background: Tensor
    foreground: Tensor
    heatmap: Tensor
    samples: int
    without_mask: int = 0
    skipped: bool = False
    logits: Tensor = field(repr=False, default_factory=lambda: torch.empty(0))


class Method(Protocol):
    """A way to train a classifier."""

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, masks: Masks = None) -> Parts:
        """The loss of one batch, differentiable for every parameter of the model."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Tells schedules where training is."""
        ...


class Step(nn.Module):
    """A model and its method as one module: its forward is the whole training step, as distributed training needs it.

    Wrap this, not the model, in DistributedDataParallel: relevance passes must happen inside the wrapped forward.
    """

    def __init__(self, model: nn.Module, method: Method) -> None:
        super().__init__()
        self.model = model
        self.method = method

    def forward(self, images: Tensor, labels: Tensor, masks: Masks = None) -> Parts:
        return self.method.loss(self.model, images, labels, masks)


def is_multi_label(logits: Tensor, labels: Tensor) -> bool:
    """Whether labels are (batch, classes) with classes > 1: several may be true at once."""
    return logits.shape[1] > 1 and isinstance(labels, Tensor) and labels.ndim == 2


def classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy for class indices, binary cross entropy for one logit or for multi-label targets."""
    if not isinstance(labels, Tensor):
        raise InputError(f"labels is a {type(labels).__name__}; it has to be a tensor.")
    if labels.shape[:1] != logits.shape[:1]:
        raise InputError(f"Labels have shape {tuple(labels.shape)} for {logits.shape[0]} images; give one for each.")
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    count = logits.shape[1]
    if count == 1 or labels.ndim == 2:
        targets = labels.reshape(len(labels), -1).to(logits.dtype)
        if targets.shape != logits.shape:
            raise InputError(
                f"Labels of shape {tuple(labels.shape)} do not fit {count} outputs; multi-label targets are "
                "(batch, classes), class indices are (batch,)."
            )
        if bool(((targets < 0) | (targets > 1)).any()):
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
    return F.cross_entropy(logits, labels)


class Standard:
    """The plain classifier: cross entropy, masks ignored."""

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, masks: Masks = None) -> Parts:
        """The classification loss alone."""
        with SmallMaps():
            output = model(images)
        logits = getattr(output, "logits", output)
        loss = classification_loss(logits, labels)
        zero = loss.detach() * 0
        return Parts(loss, loss, zero, zero, zero, samples=len(images), logits=logits.detach())

    def set_epoch(self, epoch: int) -> None:
        """Nothing here changes over time."""

    def __repr__(self) -> str:
        return "Standard()"


_COUNT = "There are {} masks for {} images; give one for each, None or an empty mask for an image without."


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
        empty = next((torch.zeros_like(m) for m in masks if m is not None), None)
        if empty is None:
            return gathered_masks(None, images)
        try:
            found = torch.stack([empty if m is None else m for m in masks])
        except RuntimeError as error:
            raise InputError(f"The masks of a batch have to share one shape and type: {error}") from error
    if len(found) != len(images):
        raise InputError(_COUNT.format(len(found), len(images)))
    return found.to(images.device)


def describe(method: object, **values: Any) -> str:
    """`Name(a=1, b=2)`."""
    return f"{type(method).__name__}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
