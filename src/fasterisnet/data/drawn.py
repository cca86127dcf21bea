"""Simple shapes drawn on noise, with a mark that gives the shape away: a biased data set that needs no files."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fasterisnet.data.base import Source
from fasterisnet.data.biased import MarkedPictures, biased_splits
from fasterisnet.errors import InputError

# Where a shape is, in coordinates that run from -1 to 1 (x to the right, y down).
SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "disc": lambda x, y: x**2 + y**2 <= 0.9,
    "cross": lambda x, y: (torch.minimum(x.abs(), y.abs()) <= 0.25) & (torch.maximum(x.abs(), y.abs()) <= 0.95),
    "triangle": lambda x, y: (2 * x.abs() <= y + 0.95) & (y <= 0.85),
    "bar": lambda x, y: (x.abs() <= 0.95) & (y.abs() <= 0.3),
    "ring": lambda x, y: (x**2 + y**2 <= 0.9) & (x**2 + y**2 >= 0.3),
    "column": lambda x, y: (x.abs() <= 0.3) & (y.abs() <= 0.95),
    "square": lambda x, y: torch.maximum(x.abs(), y.abs()) <= 0.85,
    "corner": lambda x, y: (torch.maximum(x.abs(), y.abs()) <= 0.9) & ((x <= -0.4) | (y >= 0.4)),
}
SMALLEST = 16
PARTS = ("train", "val", "test")
TEST_STREAM = 2**31 - 1  # of random numbers


def drawn_source(
    *, classes: int = 3, size: int = 32, per_class: int = 60, training_bias: bool = True, seed: int = 0
) -> Source:
    """Shapes of any place, size and colour on noise; a white square at the upper edge is tied to the class.

    per_class: training pictures of a shape; a third as many validate and test. seed: for the training and validation
    pictures; the test pictures are always the same.
    """
    if not 2 <= classes <= len(SHAPES):
        raise InputError(f"Pictures of {classes} classes cannot be drawn; there are 2 to {len(SHAPES)} shapes.")
    if size < SMALLEST or per_class < 1:
        raise InputError(
            f"{per_class} pictures a class of {size} pixels cannot be drawn; draw at least 1 of {SMALLEST} pixels."
        )
    few = max(1, per_class // 3)
    train, val, test = (
        _draw(part, classes, size, count, stream)
        for part, count, stream in zip(PARTS, (per_class, few, few), (2 * seed, 2 * seed + 1, TEST_STREAM), strict=True)
    )
    return Source(list(SHAPES)[:classes], biased_splits(train, val, test, training_bias=training_bias))


def _draw(part: str, classes: int, size: int, per_class: int, stream: int) -> MarkedPictures:
    """Pictures whose shapes stay below the row of marks."""
    generator = torch.Generator().manual_seed(stream)
    count, side = classes * per_class, size // 10
    labels = torch.arange(classes).repeat(per_class)

    def between(low: Tensor | float, high: Tensor | float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    radius = between(0.2 * size, 0.4 * size, count)
    x = between(radius, size - radius, count).view(-1, 1, 1)
    y = between(radius + side + 1, size - radius, count).view(-1, 1, 1)
    grid = torch.arange(size) + 0.5
    right = ((grid - x) / radius.view(-1, 1, 1)).expand(-1, size, size)
    down = ((grid.view(-1, 1) - y) / radius.view(-1, 1, 1)).expand(-1, size, size)
    inside = torch.stack([shape(right, down) for shape in list(SHAPES.values())[:classes]], dim=1)
    masks = inside[torch.arange(count), labels].unsqueeze(1)

    colour, level = between(120, 230, count, 3, 1, 1), between(10, 60, count, 3, 1, 1)
    noise = between(-1, 1, count, 3, size, size)
    pixels = torch.where(masks, colour + 15 * noise, level + 30 * noise).round().clamp(0, 255)
    names = [f"drawn {part} picture {number}" for number in range(count)]
    return MarkedPictures(pixels.to(torch.uint8), masks, labels.tolist(), names, places=classes, side=side, gap=1)
