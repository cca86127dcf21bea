"""Extended GAIN: Grad-CAM has to cover the object, and nothing else."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fasterisnet.errors import InputError
from fasterisnet.losses import is_multi_label
from fasterisnet.lrp.explain import observing
from fasterisnet.lrp.logits import logits_in
from fasterisnet.lrp.small_maps import SmallMaps
from fasterisnet.methods.background import Background
from fasterisnet.methods.base import register_method
from fasterisnet.methods.cam import class_activation, enlarged, last_map, logits_and_maps, normalised
from fasterisnet.methods.guided import Guided, Terms, mean_over, true_classes

SHARPNESS, MIDDLE = 10.0, 0.5
MiningScore = Literal["logit", "probability"]


@register_method("gain")
class GAIN(Guided):
    """Grad-CAM of the true class has to be like the mask, and to cover all that speaks for it (extended GAIN).

    `L_C + mining_weight * score of the label in x * (1 - T) + supervision_weight * MSE(cam, mask)`, cam normalised from
    0 to 1 and `T = sigmoid(10 (cam - 0.5))`; with several labels the mean over those present, with a single logit the
    one that speaks for the label. `parts.background` is the MSE, `parts.foreground` the score.
    cam_layer: the module whose maps are used (default: the last with maps). exact: the gradient of the loss, through
    the weights of the CAM as well; False takes them for constants. mining_score: the label's logit (as the paper's),
    or its probability, which is bounded below.
    """

    explainers: ClassVar[tuple[str, ...]] = ("gradcam",)

    def __init__(
        self,
        mining_weight: float = 1.0,
        supervision_weight: float = 100.0,
        *,
        cam_layer: str | None = None,
        exact: bool = True,
        mining_score: MiningScore = "logit",
        augment: Background | None = None,
        **common: Any,
    ) -> None:
        super().__init__(augment, **common)
        for name, value in (("mining_weight", mining_weight), ("supervision_weight", supervision_weight)):
            if not 0 <= value < float("inf"):
                raise InputError(f"{name} is {value}; it has to be zero or a positive number.")
        if mining_score not in ("logit", "probability"):
            raise InputError(f"mining_score is {mining_score!r}; it has to be logit or probability.")
        self.mining_weight, self.supervision_weight = mining_weight, supervision_weight
        self.cam_layer, self.exact = cam_layer, exact
        self.mining_score: MiningScore = mining_score

    def begin(self, model: nn.Module, images: Tensor) -> list[str]:
        """Says which maps are used."""
        layer = self.layer(model, images)
        with torch.enable_grad(), observing(model):
            maps = logits_and_maps(model, images, layer)[1]
        count, *size = maps.shape[1:]
        return [f"Grad-CAM at '{layer}': {count} maps of {' x '.join(map(str, size))}."]

    def layer(self, model: nn.Module, images: Tensor) -> str:
        """The module whose maps are used."""
        return self.cam_layer or last_map(model, images)

    def combine(self, classification: Any, heatmap: Any) -> Any:
        """The weights are inside of the second."""
        return classification + heatmap

    def terms(
        self, model: nn.Module, images: Tensor, labels: Tensor, mask: Tensor, include: Tensor
    ) -> tuple[Tensor, Terms]:
        learning = torch.is_grad_enabled()
        inside = mask.any(1, keepdim=True).to(images)
        with torch.enable_grad():
            logits, maps = logits_and_maps(model, images.detach().requires_grad_(), self.layer(model, images))
            scores, present = self._scores(logits, labels)
        order = present.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        counts = present.sum(1)
        supervision, mining = torch.zeros_like(logits[:, 0]), torch.zeros_like(logits[:, 0])
        for number in range(int((counts * include).max())):
            which, meant = order[:, number : number + 1], include & (counts > number)
            with torch.enable_grad():
                score = torch.where(meant, scores.gather(1, which)[:, 0], 0).sum()
                cam = normalised(
                    enlarged(class_activation(maps, score, create_graph=learning and self.exact), images.shape[2:])
                )
            error = (cam - inside).square().flatten(1).mean(1)
            again = self._without(model, images, torch.sigmoid(SHARPNESS * (cam - MIDDLE)), meant)
            again = self._mined(again, labels).gather(1, which)[:, 0]
            supervision = supervision + torch.where(meant, error / counts, 0)
            mining = mining + torch.where(meant, again / counts, 0)
        background, foreground = mean_over(supervision, include), mean_over(mining, include)
        return logits, (background, foreground, self.mining_weight * foreground + self.supervision_weight * background)

    def _without(self, model: nn.Module, images: Tensor, soft: Tensor, meant: Tensor) -> Tensor:
        """Logits of the images without what the CAM shows; running statistics are those of whole images."""
        seen = images * (1 - soft * meant.view(-1, *[1] * (images.ndim - 1)))
        with observing(model), SmallMaps():
            return logits_in(model(seen))

    def _scores(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A score for every class, and which classes are there; of a single logit, that of the label alone."""
        present = true_classes(logits, labels)
        if logits.shape[1] == 1:
            return torch.where(present, logits, -logits), torch.ones_like(present)
        return logits, present

    def _mined(self, logits: Tensor, labels: Tensor) -> Tensor:
        scores, _ = self._scores(logits, labels)
        if self.mining_score == "logit":
            return scores
        return scores.sigmoid() if logits.shape[1] == 1 or is_multi_label(logits, labels) else scores.softmax(1)
