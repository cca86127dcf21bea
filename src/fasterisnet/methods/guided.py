"""What methods share that guide a network with masks: preparation, precision, and steps that have no meaning."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fasterisnet.errors import InputError, NonFiniteError
from fasterisnet.losses import Masks, classification_loss, fitting_masks, has_foreground
from fasterisnet.lrp import rules
from fasterisnet.lrp.check import first_bad_layer
from fasterisnet.lrp.explain import check_inputs
from fasterisnet.lrp.logits import plain
from fasterisnet.methods.background import Background
from fasterisnet.methods.base import HALF, Method, Parts, zero_loss

PATIENCE = 10
Terms = tuple[Tensor, Tensor, Tensor]


class Guided(Method):
    """The classification loss and a term that masks decide; samples without a mask count for the first only.

    augment: changes the images in training (`BackgroundSwap()`); validation sees them as they are.
    """

    rules_used: ClassVar[tuple[str, ...]] = ("gradient",)
    needs_masks: ClassVar[bool] = True

    epsilon: float = 0.01

    def __init__(self, augment: Background | None = None, **common: Any) -> None:
        super().__init__(**common)
        if augment is not None and not isinstance(augment, Background):
            raise InputError(f"augment is {augment!r}; it takes BackgroundSwap(), BackgroundErase() or MaskedInput().")
        self.augment = augment
        self.skipped = self._skipped_in_a_row = 0

    @abstractmethod
    def terms(
        self, model: nn.Module, images: Tensor, labels: Tensor, mask: Tensor, include: Tensor
    ) -> tuple[Tensor, Terms]:
        """Logits, and (background, foreground, heatmap): the last is the mean over samples of what the method adds.

        include: one bool a sample, whether it has a mask; only those are meant.
        """

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, masks: Masks = None) -> Parts:
        """The loss of one batch, differentiable for every parameter."""
        check_inputs(model, images)
        images, labels = plain(images), plain(labels)
        if torch.is_autocast_enabled(images.device.type) and images.dtype in HALF:
            images = images.float()  # autocast takes half images for weights of float32, this pass does not
        mask = fitting_masks(masks, images)
        training = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(training):
            images = images.clone() if images.is_inference() else images
            if self.augment is not None and training:
                images = self.augment.altered(images, mask, self)
            return self._loss(model, images, labels, mask)

    def _loss(self, model: nn.Module, images: Tensor, labels: Tensor, mask: Tensor) -> Parts:
        include = has_foreground(mask)
        with without_autocast(images):
            logits, (background, foreground, heatmap) = self.terms(model, images, labels, mask, include)
            classification = self.classify(logits, labels)
            total = self.combine(classification, heatmap)
        parts = Parts(
            total, classification, background, foreground, heatmap, len(images),
            without_mask=int((~include).sum()), logits=self.shown(logits),
        )  # fmt: skip
        if not bool(torch.isfinite(total.detach())):
            return self._skip(parts, model, images)
        self._skipped_in_a_row = 0
        return parts

    def _skip(self, parts: Parts, model: nn.Module, images: Tensor) -> Parts:
        """A step whose relevance is not finite has no gradient worth taking; many in a row end the run."""
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= PATIENCE:
            layer = first_bad_layer(model, images, rules.table(self.rules_used[0], self.epsilon))
            raise NonFiniteError(
                f"Relevance was not finite in {self._skipped_in_a_row} steps in a row; first bad layer: '{layer}'. "
                "Lower the learning rate, clip gradients (norm 1), or calibrate C1 and C2 again."
            )
        parts.total = zero_loss(model).to(parts.total)
        parts.skipped = True
        return parts


class Penalised(Guided):
    """`L_C + penalty * term`, the term a mean over samples with a mask."""

    default_penalty: ClassVar[float] = 1.0

    def __init__(self, penalty: float | None = None, *, augment: Background | None = None, **common: Any) -> None:
        super().__init__(augment, **common)
        self.penalty = self.default_penalty if penalty is None else penalty
        if not 0 <= self.penalty < float("inf"):
            raise InputError(f"penalty is {self.penalty}; it has to be zero or a positive number.")

    def combine(self, classification: Any, heatmap: Any) -> Any:
        """`L_C + penalty * term`."""
        return classification + self.penalty * heatmap


def mean_over(values: Tensor, include: Tensor) -> Tensor:
    """The mean of the values (one a sample) of the chosen samples; zero, with a history, of none."""
    return torch.where(include, values, 0).sum() / include.sum().clamp(min=1)


def true_classes(logits: Tensor, labels: Tensor) -> Tensor:
    """Which classes are present, bool (sample, class); of a single logit: whether it speaks for what is there."""
    classification_loss(logits.detach(), labels)  # refuses labels that do not fit
    if labels.ndim == 2 or logits.shape[1] == 1:
        return labels.reshape(logits.shape) > 0.5
    return torch.arange(logits.shape[1], device=labels.device) == labels.unsqueeze(1)


def without_autocast(images: Tensor) -> AbstractContextManager[Any]:
    """Half precision is too narrow for heatmaps: under autocast this pass runs in float32.

    In bf16 the loss is within a few percent, but its gradient points elsewhere: cosine 0.1 to 0.8 to the exact one.
    """
    half = torch.is_autocast_enabled(images.device.type)
    return torch.autocast(images.device.type, enabled=False) if half else nullcontext()
