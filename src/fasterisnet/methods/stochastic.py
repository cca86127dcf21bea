"""The Stochastic ISNet: a class drawn for every sample."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fasterisnet.lrp.targets import Logit, Target
from fasterisnet.methods.base import register_method
from fasterisnet.methods.isnet import ISNet


@register_method("stochastic")
class Stochastic(ISNet):
    """One map a sample: its highest logit with probability 1/2, each of the others with 1/(2(C-1)).

    Paper: StochasticISNet.
    """

    def targets(self, logits: Tensor) -> list[tuple[str, Target]]:
        return [("epsilon", Logit(self.draw(logits)))]

    def draw(self, logits: Tensor) -> Tensor:
        """The class explained for each sample."""
        highest = logits.detach().argmax(1)
        count = logits.shape[1]
        if count == 1:
            return highest
        chance = self.drawn(torch.rand, len(logits)).to(logits.device)
        other = self.drawn(partial(torch.randint, 1, count), len(logits))
        return torch.where(chance < 0.5, highest, (highest + other.to(logits.device)) % count)
