"""The range that images live in: what zB has to know of the data."""

from __future__ import annotations

from collections.abc import Sequence


def normalised_box(mean: Sequence[float], std: Sequence[float]) -> tuple[list[float], list[float]]:
    """The box that images of [0, 1] live in after `(x - mean)/std`: what zB has to know of the data."""
    pairs = list(zip(mean, std, strict=True))
    return [(0 - m) / s for m, s in pairs], [(1 - m) / s for m, s in pairs]
