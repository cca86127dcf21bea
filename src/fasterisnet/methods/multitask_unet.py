"""Multi-task U-Net: one network that classifies and draws the mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from fasterisnet.errors import InputError
from fasterisnet.losses import (
    Masks,
    fitting_masks,
    has_foreground,
    intersection_over_union,
    segmentation_loss,
)
from fasterisnet.lrp.logits import plain
from fasterisnet.methods.base import Method, Parts, register_method
from fasterisnet.models.unets import Multitasking


@register_method("multitask-unet")
class MultitaskUNet(Method):
    """A U-Net with a classifier on its bottleneck: `P L_S + (1-P) L_C`; samples without a mask count for L_C only."""

    needs_masks: ClassVar[bool] = True
    default_model: ClassVar[str] = "multitask_unet"
    counts: ClassVar[tuple[str, ...]] = ("overlap",)

    def __init__(self, segmentation_weight: float = 0.99, **common: Any) -> None:
        super().__init__(**common)
        if not 0 <= segmentation_weight <= 1:
            raise InputError(f"segmentation_weight (P) is {segmentation_weight}; it has to lie between 0 and 1.")
        self.segmentation_weight = segmentation_weight

    @classmethod
    def network(cls, model: nn.Module, channels: int, size: int, **shape: Any) -> nn.Module:
        """The model, if it draws masks."""
        _checked(model)
        return model

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, masks: Masks = None) -> Parts:
        """`P L_S + (1-P) L_C`."""
        images, labels = plain(images), plain(labels)
        mask = fitting_masks(masks, images).any(1, keepdim=True)
        include = has_foreground(mask)
        logits, drawn = self.outputs(model, images)
        classification = self.classify(logits, labels)
        segmentation = segmentation_loss(drawn, mask, include)
        zero = classification.detach() * 0
        overlap = (intersection_over_union(drawn.detach() > 0, mask) * include).sum().view(1)
        return Parts(
            self.combine(classification, segmentation), classification, zero, zero, segmentation, len(images),
            without_mask=int((~include).sum()), logits=self.shown(logits), counts=overlap,
        )  # fmt: skip

    def outputs(self, model: nn.Module, images: Tensor) -> Any:
        """Logits and masks."""
        return _checked(model).both(images)

    def combine(self, classification: Any, heatmap: Any) -> Any:
        """`P L_S + (1-P) L_C`."""
        return self.segmentation_weight * heatmap + (1 - self.segmentation_weight) * classification

    def measured(self, model: nn.Module, sums: Mapping[str, float]) -> dict[str, float]:
        masked = max(sums["with_mask"], 1)
        return {"segmentation": sums["heatmap"] / masked, "iou": sums["overlap"] / masked}

    def epoch_ends(self, model: nn.Module, row: Mapping[str, float]) -> str:
        return f"IoU {row['val_iou']:.3f}"


def _checked(model: nn.Module) -> Multitasking:
    if not isinstance(model, Multitasking):
        raise InputError(
            f"The method {MultitaskUNet.name} trains a network that draws masks, which a {type(model).__name__} does "
            "not; leave the model out, or take one of multitask_unet and multitask_unet_small."
        )
    return model
