"""A network small enough to train in minutes on two cores: for demos and tests."""

from __future__ import annotations

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
