"""The Dual ISNet: z+ and epsilon maps of all logits together."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fasterisnet.lrp.targets import Joint, Target
from fasterisnet.methods.base import register_method
from fasterisnet.methods.isnet import ISNet


@register_method("dual")
class Dual(ISNet):
    """Two joint maps over one forward pass, z+ and epsilon: cost independent of the number of classes.

    Paper: DualISNet.
    """

    default_weight: ClassVar[float] = 0.85
    rules_used: ClassVar[tuple[str, ...]] = ("zplus", "epsilon")

    def targets(self, logits: Tensor) -> list[tuple[str, Target]]:
        return [(rule, Joint()) for rule in self.rules_used]
