"""Whether a classifier that says 80 % is right in 80 % of the cases."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fasterisnet.errors import InputError
from fasterisnet.evaluation.intervals import Estimate, Groups, bootstrap, share

BINS = 15


class Bin(NamedTuple):
    """Answers of about one certainty: how many, how certain on average, how often right."""

    samples: int
    certainty: float
    right: Estimate


class Reliability(NamedTuple):
    """error: the expected calibration error, the mean gap between certainty and accuracy; curve: bins with samples."""

    error: Estimate
    curve: list[Bin]


def reliability(certainty: Tensor, right: Tensor, groups: Groups | None = None, *, bins: int = BINS) -> Reliability:
    """certainty: the probability that each answer was given; right: whether it was. Bins of equal width."""
    if certainty.shape != right.shape or certainty.ndim != 1 or len(certainty) == 0:
        raise InputError(
            f"certainty and right have shapes {tuple(certainty.shape)} and {tuple(right.shape)}; give one a sample."
        )
    certainty, right = certainty.double(), right.double()
    place = (certainty * bins).ceil().long().sub(1).clamp(0, bins - 1)  # (0, 1/15], (1/15, 2/15], ...

    def error(chosen: Tensor) -> float:
        gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, place[chosen], (certainty - right)[chosen])
        return float(gaps.abs().sum() / len(chosen))

    curve = []
    for i in range(bins):
        inside = place == i
        if bool(inside.any()):
            of_bin = (
                None if groups is None else [g for g, chosen in zip(groups, inside.tolist(), strict=True) if chosen]
            )
            found = share(right[inside], of_bin)
            assert found is not None
            curve.append(Bin(int(inside.sum()), float(certainty[inside].mean()), found))
    return Reliability(bootstrap(error, len(certainty), groups, draws=500), curve)
