"""U-Net + classifier: a segmenter learns the masks; then a classifier learns from what it leaves of the images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from fasterisnet.errors import InputError
from fasterisnet.losses import (
    Masks,
    fitting_masks,
    has_foreground,
    intersection_over_union,
    segmentation_loss,
)
from fasterisnet.lrp.logits import logits_in, plain
from fasterisnet.lrp.small_maps import SmallMaps
from fasterisnet.methods.base import Method, Parts, register_method
from fasterisnet.models.unets import SegmentedClassifier, unet

Empty = Literal["black", "whole"]
THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(1, 20))


@register_method("unet-classifier")
class UNetClassifier(Method):
    """A U-Net is trained on the masks and frozen, then a classifier on the images with a background of zero.

    segmenter: the U-Net's encoder, a name of segmentation-models-pytorch. segmentation_epochs: how many of the epochs
    the U-Net gets; 0 for half of a run that tells its length (`plan`). Its best epoch and the threshold of its output
    are those of the highest mean intersection over union. empty: what goes in where it finds no foreground, a black
    image or the whole one.
    """

    needs_masks: ClassVar[bool] = True
    shaping: ClassVar[tuple[str, ...]] = ("segmenter", "empty")
    idle: ClassVar[bool] = True
    counts: ClassVar[tuple[str, ...]] = (*(f"overlap above {t}" for t in THRESHOLDS), "empty")

    def __init__(
        self, segmentation_epochs: int = 0, segmenter: str = "resnet18", empty: Empty = "black", **common: Any
    ) -> None:
        super().__init__(**common)
        if segmentation_epochs < 0:
            raise InputError(f"segmentation_epochs is {segmentation_epochs}; it must not be negative.")
        self.segmentation_epochs, self.segmenter, self.empty = segmentation_epochs, segmenter, empty
        self.first_stage = segmentation_epochs

    @classmethod
    def network(cls, model: nn.Module, channels: int, size: int, **shape: Any) -> nn.Module:
        """The model behind a U-Net."""
        shape = {"segmenter": "resnet18", "empty": "black", **shape}
        if shape["empty"] not in get_args(Empty):
            raise InputError(f"empty is {shape['empty']!r}; it has to be one of {', '.join(get_args(Empty))}.")
        return SegmentedClassifier(unet(shape["segmenter"], channels, size), model, whole=shape["empty"] == "whole")

    # --- stages ----------------------------------------------------------------------------------------------------

    @property
    def segmenting(self) -> bool:
        """Whether the U-Net is trained in this epoch, not the classifier."""
        if not self.first_stage:
            raise InputError("segmentation_epochs is 0, for half of the epochs: call plan(epochs), or give a number.")
        return self.epoch < self.first_stage

    def plan(self, epochs: int) -> list[int]:
        """Two stages: the U-Net, and the classifier."""
        self.first_stage = self.segmentation_epochs or epochs // 2
        if not 0 < self.first_stage < epochs:
            raise InputError(
                f"Of {epochs} epochs {self.first_stage} would train the segmenter (segmentation_epochs) and "
                f"{epochs - self.first_stage} the classifier; both need at least one."
            )
        return [self.first_stage]

    def outputs(self, model: nn.Module, images: Tensor) -> Any:
        """Of the part that is trained."""
        network = _checked(model)
        return network.segmenter(images) if self.segmenting else network(images)

    def epoch_begins(self, model: nn.Module) -> None:
        """What is not trained is frozen."""
        network = _checked(model)
        network.segmenter.requires_grad_(self.segmenting)
        network.classifier.requires_grad_(not self.segmenting)

    def epoch_ends(self, model: nn.Module, row: Mapping[str, float]) -> str:
        """Takes the threshold of the highest IoU; says how good it is, and where nothing was found."""
        if self.segmenting:
            _checked(model).threshold.fill_(row["val_threshold"])
        nothing = f", no foreground in {row['train_empty']:g} training and {row['val_empty']:g} validation images"
        nothing += f" ({self.empty} to the classifier)"
        found = f"segmenter: IoU {row['val_iou']:.3f} above {row['val_threshold']:g}"
        return found + (nothing if row["train_empty"] or row["val_empty"] else "")

    def score(self, row: Mapping[str, float]) -> float:
        """The U-Net's best epoch has the highest IoU, the classifier's the lowest loss."""
        return -row["val_iou"] if self.segmenting else row["val_loss"]

    # --- the loss --------------------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, masks: Masks = None) -> Parts:
        """L_S of the U-Net in the first stage, where samples without a mask are left out, then L_C."""
        network = _checked(model)
        images, labels = plain(images), plain(labels)
        mask = fitting_masks(masks, images).any(1, keepdim=True)
        include = has_foreground(mask)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.segmenting):
            drawn = network.segmenter(images)
            segmentation = segmentation_loss(drawn, mask, include)
        classification, logits = segmentation.detach() * 0, torch.empty(0)
        if not self.segmenting:
            with SmallMaps():
                logits = logits_in(network.classifier(network.masked(images, network.above(drawn))))
            classification = self.classify(logits, labels)
        zero = classification.detach() * 0
        return Parts(
            self.combine(classification, segmentation), classification, zero, zero, segmentation, len(images),
            without_mask=int((~include).sum()), logits=self.shown(logits),
            counts=self._counted(network, drawn.detach(), mask, include),
        )  # fmt: skip

    def combine(self, classification: Any, heatmap: Any) -> Any:
        """One after the other."""
        return heatmap if self.segmenting else classification

    @staticmethod
    def _counted(network: SegmentedClassifier, drawn: Tensor, mask: Tensor, include: Tensor) -> Tensor:
        chances = drawn.sigmoid()
        overlaps = [(intersection_over_union(chances > t, mask) * include).sum() for t in THRESHOLDS]
        return torch.stack([*overlaps, (~has_foreground(network.above(drawn))).sum().float()])

    def measured(self, model: nn.Module, sums: Mapping[str, float]) -> dict[str, float]:
        """While the U-Net learns, at the best threshold; then at the one it was frozen with."""
        masked, used = max(sums["with_mask"], 1), float(_checked(model).threshold)
        overlaps = {t: sums[name] / masked for t, name in zip(THRESHOLDS, self.counts, strict=False)}
        best = max(overlaps, key=overlaps.__getitem__) if self.segmenting else _nearest(used)
        return {
            "segmentation": sums["heatmap"] / masked, "iou": overlaps[best], "threshold": best, "empty": sums["empty"],
        }  # fmt: skip


def _nearest(threshold: float) -> float:
    return min(THRESHOLDS, key=lambda t: abs(t - threshold))


def _checked(model: nn.Module) -> SegmentedClassifier:
    if not isinstance(model, SegmentedClassifier):
        raise InputError(
            f"The method {UNetClassifier.name} trains a segmenter and a classifier in one; make the model with "
            f"UNetClassifier.network(model, channels, size) of the {type(model).__name__}."
        )
    return model
