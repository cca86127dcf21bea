"""Right for the Right Reasons: input gradients in the background are punished."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet.losses import is_multi_label
from fasterisnet.lrp.logits import logits_in
from fasterisnet.lrp.small_maps import SmallMaps
from fasterisnet.methods.base import register_method
from fasterisnet.methods.guided import Penalised, Terms, mean_over


@register_method("rrr")
class RRR(Penalised):
    """Input gradients of the log-probabilities are punished in the background (Right for the Right Reasons).

    `L_C + penalty * mean over samples of sum over the background of (d/dx sum_c log P_c)^2`. With one logit, and with
    several labels at once, the probabilities of both outcomes of every class are in the sum.
    """

    default_penalty: ClassVar[float] = 1000.0
    explainers: ClassVar[tuple[str, ...]] = ("gradient",)

    def terms(
        self, model: nn.Module, images: Tensor, labels: Tensor, mask: Tensor, include: Tensor
    ) -> tuple[Tensor, Terms]:
        training = torch.is_grad_enabled()
        with torch.enable_grad(), SmallMaps():
            x = images.detach().requires_grad_()
            logits = logits_in(model(x.clone()))
            score = log_probabilities(logits, labels).sum()
            (gradient,) = torch.autograd.grad(score, x, create_graph=training)
        outside = (gradient.square() * ~mask).flatten(1).sum(1)
        background = mean_over(outside, include)
        return logits, (background, background.detach() * 0, background)


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """`log P` of every class, (sample, class); of binary questions `log P + log (1 - P)`."""
    if logits.shape[1] == 1 or is_multi_label(logits, labels):
        return F.logsigmoid(logits) + F.logsigmoid(-logits)
    return F.log_softmax(logits, 1)
