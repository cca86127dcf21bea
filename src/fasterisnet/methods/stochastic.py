"""The Stochastic ISNet: a class drawn for every sample."""

from __future__ import annotations

import torch
from torch import Tensor

from fasterisnet.methods.isnet import ISNet
from fasterisnet.relevance.targets import Logit, Target


class Stochastic(ISNet):
    """One map a sample: its highest logit with probability 1/2, each of the others with 1/(2(C-1))."""

    def targets(self, logits: Tensor) -> list[tuple[str, Target]]:
        return [("epsilon", Logit(self.draw(logits)))]

    def draw(self, logits: Tensor) -> Tensor:
        """The class explained for each sample."""
        highest = logits.detach().argmax(1)
        count = logits.shape[1]
        if count == 1:
            return highest
        device = "cpu" if self.generator is None else self.generator.device
        chance = torch.rand(len(logits), generator=self.generator, device=device).to(logits.device)
        other = torch.randint(1, count, (len(logits),), generator=self.generator, device=device).to(logits.device)
        return torch.where(chance < 0.5, highest, (highest + other) % count)
