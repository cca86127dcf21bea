"""C1 and C2, the natural range of a heatmap's total relevance, measured on a plain classifier."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fasterisnet.errors import InputError, NonFiniteError
from fasterisnet.losses.gwrp import full_precision
from fasterisnet.writing import write_text

VANISHED = 1e-12
FORMAT = 1


@full_precision
def total_relevance(heatmaps: Tensor) -> Tensor:
    """`sum |R|` over channel and space of every (sample, map), without gradient: what the calibration measures."""
    return heatmaps.detach().abs().flatten(2).sum(-1)


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


@dataclass(eq=False)
class RunningMoments:
    """Welford's mean and sample deviation over the first dimension, in float64 on the CPU; picklable.

    `squares` is the sum of squared distances from the mean.
    """

    count: int = 0
    mean: Tensor = field(default_factory=_zero)
    squares: Tensor = field(default_factory=_zero)

    def update(self, values: Tensor) -> None:
        """Take in a batch (sample, map) or (sample, ...); every position keeps its own moments."""
        if values.ndim == 0:
            raise InputError("Moments need a batch (sample, ...), but a single number was given.")
        values = values.detach().cpu().double()
        if len(values):
            mean = values.mean(0)
            self.merge(RunningMoments(len(values), mean, (values - mean).square().sum(0)))

    def merge(self, other: "RunningMoments") -> None:
        """Take in what another process has seen; the result is that of one pass over all values."""
        if other.count == 0:
            return
        if self.count and self.mean.shape != other.mean.shape:
            raise InputError(
                f"Moments of shape {tuple(self.mean.shape)} and {tuple(other.mean.shape)} cannot be merged; "
                "measure the same maps everywhere."
            )
        count = self.count + other.count
        delta = other.mean - self.mean
        self.squares = self.squares + other.squares + delta.square() * (self.count * other.count / count)
        self.mean = self.mean + delta * (other.count / count)
        self.count = count

    @property
    def deviation(self) -> Tensor:
        """Sample standard deviation (n - 1)."""
        if self.count < 2:
            raise InputError(f"A deviation needs at least two samples, but {self.count} was measured.")
        return (self.squares / (self.count - 1)).sqrt()


def range_from_moments(moments: RunningMoments, depth: str = "input") -> tuple[Tensor, Tensor]:
    """`C1 = max(M/5, M-3S)`, `C2 = min(25*C1, M+3S)` (paper: c1, c2).

    Relevance that vanished or exploded is an error.
    """
    mean, deviation = moments.mean, moments.deviation
    c1 = torch.maximum(mean / 5, mean - 3 * deviation)
    c2 = torch.minimum(25 * c1, mean + 3 * deviation)
    bad = ~(c1.isfinite() & c2.isfinite() & (c1 >= VANISHED))
    if bad.any():
        where = int(bad.reshape(-1).nonzero()[0])
        m, s, low = (float(t.reshape(-1)[where]) for t in (mean, deviation, c1))
        raise NonFiniteError(
            f"The total relevance of map {where} at depth {depth!r} vanished or exploded: mean M = {m:g}, deviation "
            f"S = {s:g}, C1 = {low:g}. Its gradients do so as well: check that inputs are finite and scaled, give the "
            "model batch normalisation or another initialisation, or lower the learning rate; then calibrate again."
        )
    return c1, c2


class Range(NamedTuple):
    """C1 and C2 of every map at one depth; goes straight into `heatmap_loss(heatmaps, masks, *range)`."""

    c1: tuple[float, ...]
    c2: tuple[float, ...]


@dataclass(frozen=True)
class Ranges:
    """The calibration of a run: a `Range` for every supervised depth, by name."""

    depths: Mapping[str, Range]

    def __post_init__(self) -> None:
        if not self.depths:
            raise InputError("A calibration needs C1 and C2 for at least one depth, but it has none.")
        for name, (c1, c2) in self.depths.items():
            if not c1 or len(c1) != len(c2):
                raise InputError(
                    f"Depth {name!r} must have one C1 and one C2 per map, but has {len(c1)} and {len(c2)}."
                )
            if not all(VANISHED <= low <= high < math.inf for low, high in zip(c1, c2, strict=True)):
                raise InputError(
                    f"Depth {name!r} must have finite C1 and C2 with {VANISHED} <= C1 <= C2, but has {c1} and {c2}."
                )

    @classmethod
    def from_moments(cls, moments: Mapping[str, RunningMoments]) -> Self:
        """Turn what was measured at each depth into its range."""
        ranges = {depth: range_from_moments(measured, depth) for depth, measured in moments.items()}
        return cls({d: Range(*(tuple(bound.reshape(-1).tolist()) for bound in pair)) for d, pair in ranges.items()})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON; a reader sees the old file or the whole new one, never a part."""
        content = {"format": FORMAT, "depths": {name: {"c1": c1, "c2": c2} for name, (c1, c2) in self.depths.items()}}
        write_text(path, json.dumps(content, indent=2, allow_nan=False))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote and refuse anything else."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(_depths(content))
        except FileNotFoundError as error:
            raise InputError(f"There is no calibration at {path}. Calibrate first, or correct the path.") from error
        except (ValueError, OverflowError) as error:
            raise InputError(
                f"{path} is not a calibration written by this version: {error} Calibrate again."
            ) from error


def _depths(content: Any) -> dict[str, Range]:
    """Check the content of a calibration file and return its depths."""
    if not isinstance(content, dict) or content.keys() != {"format", "depths"} or content["format"] != FORMAT:
        raise InputError(f'It must hold exactly "format": {FORMAT} and "depths".')
    if not isinstance(content["depths"], dict):
        raise InputError('"depths" must map the name of each depth to its "c1" and "c2".')
    depths: dict[str, Range] = {}
    for name, bounds in content["depths"].items():
        if not isinstance(bounds, dict) or bounds.keys() != {"c1", "c2"} or not all(map(_numbers, bounds.values())):
            raise InputError(f'Depth {name!r} must hold exactly "c1" and "c2", each a list of numbers.')
        depths[name] = Range(*(tuple(float(value) for value in bounds[key]) for key in ("c1", "c2")))
    return depths


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) for value in values)
