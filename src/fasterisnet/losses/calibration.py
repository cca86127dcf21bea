"""C1 and C2, the natural range of a heatmap's total relevance, measured on a plain classifier."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fasterisnet.errors import InputError, NonFiniteError
from fasterisnet.losses.gwrp import full_precision

VANISHED = 1e-12


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
