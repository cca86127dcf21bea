"""Networks small enough to train in minutes on two cores: for demos, tests and experiments without a GPU."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from fasterisnet.errors import InputError


def small_network(classes: int = 10, channels: int = 3, widths: Sequence[int] = (32, 64, 128)) -> nn.Sequential:
    """Two convolutions with batch norm and ReLU for every width, the first halving the image; then the mean and a head.

    The first layer sees 7 x 7 pixels, as in a ResNet: details at the border, and where they are, are not overlooked.
    """
    if not widths:
        raise InputError("widths is empty; it has to hold at least one width, as in (32, 64).")
    layers: list[nn.Module] = []
    inputs = channels
    for position, width in enumerate(widths):
        size = 7 if position == 0 else 3
        layers += [nn.Conv2d(inputs, width, size, 2, size // 2, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def half_resnet18(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """ResNet18 with half the channels in every layer: a quarter of its cost; parts have torchvision's names."""
    block = importlib.import_module("torchvision.models.resnet").BasicBlock
    parts: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(channels, 32, 7, 2, 3, bias=False),
        "bn1": nn.BatchNorm2d(32),
        "relu": nn.ReLU(inplace=True),
        "maxpool": nn.MaxPool2d(3, 2, 1),
        "layer1": nn.Sequential(block(32, 32), block(32, 32)),
    }
    for stage, width in ((2, 64), (3, 128), (4, 256)):
        shortcut = nn.Sequential(nn.Conv2d(width // 2, width, 1, 2, bias=False), nn.BatchNorm2d(width))
        parts[f"layer{stage}"] = nn.Sequential(block(width // 2, width, 2, shortcut), block(width, width))
    parts |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(256, classes)}
    for part in nn.Sequential(*parts.values()).modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(OrderedDict(parts))
