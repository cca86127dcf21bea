"""The body of a VGG-16 with batch norm, in blocks, of any width."""

from __future__ import annotations

from torch import nn

CONVOLUTIONS = (2, 2, 3, 3, 3)
GROWTH = (1, 2, 4, 8, 8)


def vgg_widths(width: int, depth: int = 5) -> list[int]:
    """Channels of each block; VGG-16 has width 64."""
    return [width * growth for growth in GROWTH[:depth]]


def vgg_blocks(channels: int, widths: list[int]) -> nn.ModuleList:
    """Convolutions, each with batch norm and ReLU; pooling belongs between the blocks."""
    return nn.ModuleList(
        _block(inputs, outputs, count)
        for inputs, outputs, count in zip([channels, *widths], widths, CONVOLUTIONS, strict=False)
    )


def _block(inputs: int, outputs: int, convolutions: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number in range(convolutions):
        layers += [nn.Conv2d(outputs if number else inputs, outputs, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)
