"""What can be known to go wrong before a training begins."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from fasterisnet.data.base import Source
from fasterisnet.data.sources import is_own
from fasterisnet.errors import InputError, UsageError
from fasterisnet.methods import ISNet, Standard
from fasterisnet.training.config import Config


def check_data(config: Config, source: Source) -> None:
    """What would make a training worthless, before it begins."""
    folder = Path(config.data)
    if is_own(config.data) and folder.is_dir() and Path(config.out).resolve().is_relative_to(folder.resolve()):
        raise UsageError(f"The run {config.out} would lie inside the data {config.data}; choose an --out elsewhere.")
    if source.multi_label:
        return
    if len(source.classes) < 2:
        raise InputError(f"The data has one class, '{source.classes[0]}': there is nothing to tell apart.")
    samples = source.split("train")
    present = {samples.label(i) for i in range(len(samples))}
    missing = [name for i, name in enumerate(source.classes) if i not in present]
    if missing:
        raise InputError(f"The split 'train' has no image of {', '.join(missing)}; `fasterisnet data check` says more.")


def check_model(config: Config, model: nn.Module, classes: int) -> None:
    """Whether the network takes images of this size and has an output for every class."""
    model.eval()
    images = torch.zeros(1, config.channels, config.size, config.size)
    try:
        with torch.no_grad():
            output = model(images)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UsageError(
            f"The model {config.model} cannot take images of {config.size} px with {config.channels} channels: {error}"
        ) from error
    shape = tuple(getattr(output, "logits", output).shape)
    if shape != (1, classes):
        raise UsageError(f"The model {config.model} has outputs of shape {shape}; it has to be (batch, {classes}).")
    model.train()


def check_method(config: Config, method: ISNet | Standard, model: nn.Module, source: Source) -> None:
    """What the first step after the calibration would find out."""
    if isinstance(method, ISNet) and source.multi_label and not method.multi_label:
        raise UsageError(f"{config.method} explains softmax probabilities, which several labels at once do not have.")
    known = dict(model.named_modules())
    for name in config.deep_supervision if isinstance(config.deep_supervision, list) else []:
        if name not in known:
            raise UsageError(f"deep_supervision names '{name}', which is not a module of the model.")
