"""Explanation distillation: a student explains itself like a teacher that cannot see the background."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet.errors import InputError
from fasterisnet.lrp.explain import explain
from fasterisnet.methods.base import register_method
from fasterisnet.methods.energy import OfLabel
from fasterisnet.methods.guided import Terms, mean_over

NO_TEACHER = (
    "distillation needs a teacher: a network, or (--teacher) the run folder or weights file of one of the same "
    "architecture and classes, best trained with masked-input."
)


@register_method("distillation")
class Distillation(OfLabel):
    """The student's map of the label is to be that of a frozen teacher that sees the object alone.

    `L_C + penalty * mean over samples of (1 - cos(R of x, R of x * mask in the teacher))`. teacher: a network, or
    weights (a run folder or file) for a copy of the student.
    """

    def __init__(self, *args: Any, teacher: nn.Module | str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(teacher, nn.Module | str | os.PathLike):
            raise InputError(NO_TEACHER)
        self.teacher = teacher
        self._network: nn.Module | None = _frozen(copy.deepcopy(teacher)) if isinstance(teacher, nn.Module) else None

    def begin(self, model: nn.Module, images: Tensor) -> list[str]:
        """Reads the teacher."""
        if self._network is None:
            from fasterisnet.models.weights import load_weights

            network = copy.deepcopy(model)
            left = load_weights(network, str(self.teacher)).left
            if left:
                raise InputError(
                    f"The teacher {self.teacher} has no {left[0]} that fits the model: give one of this architecture."
                )
            self._network = _frozen(network)
        return [f"Teacher: {self.teacher}."] if isinstance(self.teacher, str | os.PathLike) else []

    def terms(
        self, model: nn.Module, images: Tensor, labels: Tensor, mask: Tensor, include: Tensor
    ) -> tuple[Tensor, Terms]:
        if self._network is None:
            self.begin(model, images)
        assert self._network is not None
        logits, maps = self.logits_and_map(model, images, labels)
        teacher = self._network.to(images.device, images.dtype)
        wanted = explain(teacher, images * mask, self.of_label(labels), rule=self.table, box=self.box)
        distance = 1 - F.cosine_similarity(maps.flatten(1), wanted.flatten(1), dim=1)
        background = mean_over(distance, include)
        return logits, (background, torch.zeros_like(background.detach()), background)


def _frozen(network: nn.Module) -> nn.Module:
    return network.requires_grad_(False).eval()
