"""The method of a run, its data and how its images are prepared, from its options."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fasterisnet import methods
from fasterisnet.data.base import Source
from fasterisnet.data.preparing import Preparation
from fasterisnet.data.sources import open_source
from fasterisnet.methods import ISNet, Standard
from fasterisnet.training.config import Config

NAMES: dict[str, type[ISNet]] = {
    "original": methods.Original,
    "dual": methods.Dual,
    "selective": methods.Selective,
    "stochastic": methods.Stochastic,
    "grad-input": methods.GradInput,
    "softmax-grad-input": methods.SoftmaxGradInput,
}


def build_method(config: Config, preparation: Preparation) -> ISNet | Standard:
    """The method a run asks for; C1 and C2 are still missing."""
    if config.method == "standard":
        return Standard()
    kind = NAMES[config.method]
    options: dict[str, Any] = (
        {"maps_at_once": config.maps_at_once or None} if issubclass(kind, methods.Original) else {}
    )
    return kind(
        config.heatmap_weight,
        config.decay,
        config.background_weight,
        config.foreground_weight,
        config.e,
        epsilon=config.epsilon,
        box=preparation.box if config.zb else None,
        deep_supervision=config.deep_supervision,
        **options,
    )


def preparation_of(config: Config) -> Preparation:
    """How images become network input in this run."""
    window = tuple(config.window) if isinstance(config.window, list) else config.window
    return Preparation(
        config.size, config.channels, tuple(config.mean), tuple(config.std), config.fit, config.equalise,  # pyright: ignore[reportArgumentType]
        config.augmentation, window,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """What updates the weights; momentum is SGD's."""
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), **common)
    return torch.optim.SGD(model.parameters(), momentum=config.momentum, **common)


def source_of(config: Config) -> Source:
    """The data of a run, read as its options say."""
    return open_source(
        config.data, seed=config.seed, refine_boxes=config.refine_boxes or None, foreground=config.foreground or None,
        window=config.window,
    )  # fmt: skip
