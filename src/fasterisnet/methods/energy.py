"""Energy: the share of relevance that lies outside of the mask is punished."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fasterisnet.lrp import rules
from fasterisnet.lrp.explain import relevance_maps
from fasterisnet.lrp.targets import Target
from fasterisnet.lrp.trace import Trace
from fasterisnet.methods.background import Background
from fasterisnet.methods.base import register_method
from fasterisnet.methods.guided import Penalised, Terms, mean_over, true_classes

TINY = 1e-10


class OfLabel(Penalised):
    """A term on the map of what the label says: its logit, with several labels the sum of theirs.

    rule: any of `explain`. epsilon, box: as for the ISNets; the gradient takes no box.
    """

    explainers: ClassVar[tuple[str, ...]] = ("epsilon", "zplus", "gradient")

    def __init__(
        self,
        penalty: float | None = None,
        rule: str = "epsilon",
        *,
        epsilon: float = 0.01,
        box: tuple[Any, Any] | None = None,
        augment: Background | None = None,
        **common: Any,
    ) -> None:
        super().__init__(penalty, augment=augment, **common)
        self.rule, self.epsilon = rule, epsilon
        self.box = None if rule == "gradient" else box
        rules.table(rule, epsilon)  # refuses what is none

    @property
    def table(self) -> rules.RuleTable:
        """The rule by its table."""
        return rules.table(self.rule, self.epsilon)

    def of_label(self, labels: Tensor) -> Target:
        """What is explained."""

        def score(logits: Tensor) -> Tensor:
            if logits.shape[1] == 1:
                return logits[:, 0]
            return torch.where(true_classes(logits, labels), logits, 0).sum(1)

        return score

    def logits_and_map(self, model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """In one forward pass; differentiable if gradients are on."""
        trace = Trace(model, images, [self.table], box=self.box)
        with trace.open():
            maps = relevance_maps(trace, self.table, self.of_label(labels), create_graph=torch.is_grad_enabled())
            return trace.logits, maps["input"]


@register_method("energy")
class Energy(OfLabel):
    """The share of the label's relevance that lies outside of the mask is punished.

    `L_C + penalty * mean over samples of (1 - sum |R| inside / sum |R|)`.
    """

    def terms(
        self, model: nn.Module, images: Tensor, labels: Tensor, mask: Tensor, include: Tensor
    ) -> tuple[Tensor, Terms]:
        logits, maps = self.logits_and_map(model, images, labels)
        absolute = maps.abs()
        outside = (absolute * ~mask).flatten(1).sum(1) / (absolute.flatten(1).sum(1) + TINY)
        background = mean_over(outside, include)
        return logits, (background, background.detach() * 0, background)
