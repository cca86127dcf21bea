"""Ablations: the same losses on Gradient*Input instead of LRP."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fasterisnet.lrp.targets import Probability, Target
from fasterisnet.methods.base import register_method
from fasterisnet.methods.isnet import ISNet
from fasterisnet.methods.original import Original


@register_method("grad-input")
class GradInput(Original):
    """Ablation: Gradient*Input of every logit instead of LRP (paper: Gradient ISNet)."""

    default_weight: ClassVar[float] = 0.9
    rate: ClassVar[float] = 0.25
    rules_used: ClassVar[tuple[str, ...]] = ("gradient",)
    uses_box: ClassVar[bool] = False
    explainers: ClassVar[tuple[str, ...]] = ("gradient",)


@register_method("softmax-grad-input")
class SoftmaxGradInput(ISNet):
    """Ablation: Gradient*Input of the highest softmax probability."""

    default_depths = False
    default_weight: ClassVar[float] = 0.9
    rate: ClassVar[float] = 0.25
    rules_used: ClassVar[tuple[str, ...]] = ("gradient",)
    uses_box: ClassVar[bool] = False
    explainers: ClassVar[tuple[str, ...]] = ("gradient",)
    multi_label: ClassVar[bool] = False

    def targets(self, logits: Tensor) -> list[tuple[str, Target]]:
        return [("gradient", Probability(logits.detach().argmax(1)))]
