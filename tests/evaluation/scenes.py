"""Pictures and networks whose answer to "does it look at the background?" is known."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLASSES, SIZE = 3, 16


def scenes(count: int = 90, seed: int = 0, *, told: bool = True) -> tuple[Tensor, Tensor, list[int]]:
    """Images, masks and labels: the class is the colour of a square in the middle and, if `told`, of the top left
    corner as well; everything else is dim noise.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    images = 0.3 * torch.rand(count, CLASSES, SIZE, SIZE, generator=generator)
    rows = torch.arange(count)
    images[rows, labels, 5:11, 5:11] += 0.6
    if told:
        images[rows, labels, :2, :2] += 0.6
    masks = torch.zeros(count, 1, SIZE, SIZE, dtype=torch.bool)
    masks[:, :, 5:11, 5:11] = True
    return images, masks, labels.tolist()


class Reader(nn.Module):
    """Names the brightest colour of a part of the picture, and sees nothing else."""

    def __init__(self, where: tuple[slice, slice]) -> None:
        super().__init__()
        weight = torch.zeros(CLASSES, CLASSES, SIZE, SIZE)
        area = torch.zeros(SIZE, SIZE)
        area[where] = 1
        for c in range(CLASSES):
            weight[c, c] = 20 * area / area.sum()
        self.linear = nn.Linear(CLASSES * SIZE * SIZE, CLASSES, bias=False)
        self.linear.weight.data = weight.flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.flatten(1))


class Constant(nn.Module):
    """Always says the same."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([2.0, 1.0, 0.0]))

    def forward(self, images: Tensor) -> Tensor:
        return self.bias.expand(len(images), -1)


def corner_reader() -> nn.Module:
    return Reader((slice(0, 2), slice(0, 2)))


def object_reader() -> nn.Module:
    return Reader((slice(5, 11), slice(5, 11)))


def random_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(CLASSES, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(CLASSES)
    ).eval()


def constant_network() -> nn.Module:
    return Constant()
