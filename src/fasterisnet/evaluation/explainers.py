"""Maps of where a network looks, by several ways that have nothing in common, for its own decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fasterisnet.errors import UsageError
from fasterisnet.evaluation.attention import decisions, logits_of
from fasterisnet.evaluation.rollout import rollout
from fasterisnet.lrp.explain import explain
from fasterisnet.methods import METHODS
from fasterisnet.methods.cam import enlarged, grad_cam

STEPS = 16
CELLS = 8

EXPLAINERS = {
    "epsilon": "LRP, epsilon rule",
    "zplus": "LRP, z+ rule",
    "gradient": "gradient times input",
    "integrated": "integrated gradients",
    "gradcam": "Grad-CAM",
    "occlusion": "occlusion",
    "rollout": "attention rollout",
}
DEFAULT = ("epsilon", "integrated")


def trained_with(method: str | None) -> tuple[str, ...]:
    """The explainers whose maps a training method optimises, so that they may look better than the network is.

    A method that is not known here may have been trained with any.
    """
    if not method:
        return ()
    return METHODS[method].explainers if method in METHODS else tuple(EXPLAINERS)


def heatmaps(name: str, model: nn.Module, images: Tensor, *, box: tuple[Any, Any] | None = None) -> Tensor:
    """Relevance of every pixel for the class that each image is taken for, shaped like the images."""
    if name not in EXPLAINERS:
        raise UsageError(f"There is no explainer '{name}'; there are {', '.join(EXPLAINERS)}.")
    own = {
        "integrated": _integrated, "gradcam": _grad_cam, "occlusion": _occlusion, "rollout": rollout,
    }.get(name)  # fmt: skip
    if own is not None:
        return own(model, images)
    return explain(model, images, rule=name, box=box if name == "epsilon" else None)


def _integrated(model: nn.Module, images: Tensor) -> Tensor:
    """Integrated gradients from the image of zeros, the middle of each of 16 steps."""
    decided = _decided(model, images)
    total = torch.zeros_like(images)
    for step in range(STEPS):
        point = (images * ((step + 0.5) / STEPS)).requires_grad_()
        score = _scores(logits_of(model, point), decided).sum()
        if score.requires_grad:
            found = torch.autograd.grad(score, point, allow_unused=True)[0]
            total = total if found is None else total + found
    return total * images / STEPS


def _grad_cam(model: nn.Module, images: Tensor) -> Tensor:
    """Grad-CAM at the network's last maps, enlarged; every channel of a pixel has its share."""
    decided = _decided(model, images)
    cam = grad_cam(model, images, lambda logits: _scores(logits, decided))
    return (enlarged(cam, images.shape[2:]) / images.shape[1]).expand_as(images).contiguous()


@torch.no_grad()
def _occlusion(model: nn.Module, images: Tensor) -> Tensor:
    """How much the decided class's logit falls when a cell is covered with the image's mean colour."""
    return covered(lambda batch: logits_of(model, batch), images)


def covered(predict: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """`occlusion` for anything that answers to images."""
    logits = predict(images)
    decided = decisions(logits)
    at_first, colour = _scores(logits, decided), images.mean((-2, -1), keepdim=True)
    maps = torch.zeros_like(images)
    rows, columns = (torch.arange(side).mul(CELLS).div(side, rounding_mode="floor") for side in images.shape[-2:])
    for row in range(CELLS):
        for column in range(CELLS):
            cell = ((rows == row)[:, None] & (columns == column)[None]).to(images.device)
            if bool(cell.any()):
                shown = torch.where(cell, colour, images)
                fall = (at_first - _scores(predict(shown), decided)).to(images).view(-1, 1, 1, 1)
                maps = torch.where(cell, fall / cell.sum() / images.shape[1], maps)
    return maps


def _decided(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return decisions(logits_of(model, images))


def _scores(logits: Tensor, decided: Tensor) -> Tensor:
    """The logit that speaks for the decision."""
    if logits.shape[1] == 1:
        return logits[:, 0] * (2 * decided.to(logits) - 1)
    return logits.gather(1, decided[:, None])[:, 0]
