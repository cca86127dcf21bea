"""What is said when a run begins: on what it computes, with which data and method, and where its log goes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from lightning.fabric import Fabric
from torch import nn

from fasterisnet.data.base import Samples, Source, has_mask
from fasterisnet.data.pictures import readable
from fasterisnet.losses.gwrp import decay_for
from fasterisnet.methods import Method, options_of
from fasterisnet.methods.base import WITHOUT_EFFECT
from fasterisnet.runs.config import Config
from fasterisnet.runs.folder import Run
from fasterisnet.runs.report import usable_masks

if TYPE_CHECKING:
    from fasterisnet.training.data import Splits

NAMED = 10  # classes that are counted by name


def header(config: Config, model: nn.Module, method: Method, splits: Splits, fabric: Fabric) -> list[str]:
    """A line for each subject."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    board = f", TensorBoard: {config.out}/tensorboard" if config.tensorboard else ""
    tests = {name: s for name, s in splits.source.splits.items() if name not in ("train", config.validation)}
    return [
        f"Device: {_device(fabric)}, precision {config.precision}",
        f"Model: {config.model}, {parameters:,} parameters, {config.channels} x {config.size} x {config.size} px",
        f"Method: {_method(method, config.size)}",
        *[_split(config, name, samples, splits.source) for name, samples in {**splits.samples, **tests}.items()],
        f"Log: {config.out}/metrics.csv{board}",
    ]


def _device(fabric: Fabric) -> str:
    kind = fabric.device.type
    name = f" ({torch.cuda.get_device_name(fabric.device)})" if kind == "cuda" else ""
    return f"{kind}{name}" + (f", {fabric.world_size} processes" if fabric.world_size > 1 else "")


def _method(method: Method, size: int) -> str:
    """Its name and its options, as they are used; size: of the images, from which an automatic d follows."""
    shown = []
    for option in (name for name in options_of(type(method)) if name not in WITHOUT_EFFECT):
        value = getattr(method, option, None)
        if option == "decay" and value == "auto":
            shown.append(f"d {decay_for(size**2):.4g}")
        elif option == "box":
            shown.append("zB" if value is not None else "no zB")
        elif isinstance(value, bool | int | float | str | list | tuple) and option != "ranges":
            names = {"heatmap_weight": "P", "decay": "d", "background_weight": "w1", "foreground_weight": "w2"}
            shown.append(f"{names.get(option, option)} {value}")
    return f"{method.name} ({', '.join(shown)})" if shown else method.name


def _split(config: Config, name: str, samples: Samples, source: Source) -> str:
    """How many samples there are, of each class, and with masks: usable ones where that is known."""
    counts: Counter[int] = Counter()
    masked = 0
    for i in range(len(samples)):
        label = samples.label(i)
        counts.update([label] if isinstance(label, int) else [k for k, there in enumerate(label) if there])
        masked += has_mask(samples, i)
    usable, images = usable_masks(Run(config.out), name) or (masked, 0)
    masked = min(masked, usable) if images == len(samples) else masked
    classes = [f"{readable(source.classes[k])} {counts[k]:,}" for k in range(len(source.classes))]
    if len(classes) > NAMED:
        few, many = min(counts.values(), default=0), max(counts.values(), default=0)
        classes = [f"{len(classes)} classes of {few:,} to {many:,}"]
    share = f"masks for {masked / max(len(samples), 1):.0%}" if masked else "no masks"
    return f"  {readable(name)}: {len(samples):,} samples ({', '.join(classes)}), {share}"
