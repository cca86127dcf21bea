"""Data for the examples: bars, lying or standing, and a bright pixel at the top that gives the answer away."""

import torch
from torch import Tensor, nn


def drawn(count: int, lie: int = 0, dims: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Images in [0, 1], labels and masks; with `lie` the pixel tells of the other class."""
    labels, masks = torch.arange(count) % 2, torch.zeros(count, 1, *[16] * dims)
    for mask, label, start in zip(masks, labels.tolist(), torch.randint(3, 7, (count, dims)).tolist(), strict=True):
        place = [slice(s + 2, s + 5) for s in start]
        place[-1 - label] = slice(start[-1 - label], start[-1 - label] + 7)
        mask[0][tuple(place)] = 1
    images = 0.6 * masks + 0.2 * torch.rand(masks.shape)
    top = images[(slice(None), 0, *[0] * (dims - 1))]
    top[torch.arange(count), 4 + 8 * (labels ^ lie)] = 1
    return images.expand(-1, 3 if dims == 2 else 1, *[-1] * dims), labels, masks


def network() -> nn.Module:
    """A small convolutional classifier of two classes."""
    return nn.Sequential(
        *(nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU()),
        *(nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(24 * 8 * 8, 2)),
    )


@torch.no_grad()
def tell(logits_of, dims: int = 2) -> None:
    """The accuracy with the pixel as in training, and with a pixel that lies."""
    for name, lie in (("i.i.d.", 0), ("deceiving", 1)):
        images, labels, _ = drawn(200, lie, dims)
        print(f"{name}: {(logits_of(images).argmax(1) == labels).float().mean():.3f}")
