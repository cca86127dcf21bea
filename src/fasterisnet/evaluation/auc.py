"""Areas under the ROC curve with intervals: DeLong's for two classes, the bootstrap over groups for more."""

from __future__ import annotations

import math
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from fasterisnet.errors import InputError
from fasterisnet.evaluation.intervals import Estimate, Groups, of_resamples, resamples
from fasterisnet.evaluation.metrics import log_odds, one_versus_one_auc, share_above

AT_ONCE = 1_000_000  # weights in memory
Z = 1.959963984540054  # of 95 %


class Difference(NamedTuple):
    """How much higher the first area is than the second, and the two-sided p of their being equal."""

    estimate: Estimate
    p: float


def delong(scores: Tensor, truth: Tensor) -> Estimate:
    """The area of scores for a yes-or-no truth, with the interval of DeLong, DeLong and Clarke-Pearson (1988)."""
    positive, negative = placements(scores, truth)
    area, sd = float(positive.mean()), _sd(positive, negative)
    return Estimate(area, area, sd, max(0.0, area - Z * sd), min(1.0, area + Z * sd))


def delong_difference(first: Tensor, second: Tensor, truth: Tensor) -> Difference:
    """Two classifiers on the same samples: the difference of their areas, by DeLong's covariance."""
    (a_positive, a_negative), (b_positive, b_negative) = placements(first, truth), placements(second, truth)
    positive, negative = a_positive - b_positive, a_negative - b_negative
    value, sd = float(positive.mean()), _sd(positive, negative)
    p = math.erfc(abs(value) / sd / math.sqrt(2)) if sd > 0 else float(value == 0)
    return Difference(Estimate(value, value, sd, value - Z * sd, value + Z * sd), p)


def placements(scores: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """For each positive sample the share of negatives below it, for each negative that of positives above it."""
    scores, truth = scores.double().reshape(-1), truth.reshape(-1) > 0.5
    if len(scores) != len(truth):
        raise InputError(f"There are {len(scores)} scores for {len(truth)} samples; give one for each.")
    if not bool(truth.any()) or bool(truth.all()):
        raise InputError("An area under the curve needs samples of both kinds; all of these are of one.")
    positive, negative = scores[truth], scores[~truth]
    return 1 - share_above(positive, negative), share_above(negative, positive)


def macro_auc(
    logits: Tensor, truth: Tensor, groups: Groups | None = None, *, draws: int = 1000, seed: int = 0
) -> Estimate:
    """Hand and Till's area over pairs of classes; samples, or groups of them as wholes, are resampled."""
    odds, count = log_odds(logits.double()).round(decimals=9), len(logits)
    found: list[Tensor] = []
    drawn = resamples(count, groups, draws, seed)
    while weights := [torch.bincount(i, minlength=count) for i in islice(drawn, max(1, AT_ONCE // count))]:
        found.append(_weighted(odds, truth, torch.stack(weights).double()))
    areas = torch.cat(found).numpy()
    return of_resamples(areas, float(one_versus_one_auc(logits, truth)))


def _weighted(odds: Tensor, truth: Tensor, weights: Tensor) -> Tensor:
    """`one_versus_one_auc` of many resamples at once; weights: how often each sample is in each, (resample, sample)."""
    count = odds.shape[1]
    sizes = weights.new_zeros(len(weights), count).index_add_(1, truth, weights)
    areas = weights.new_empty(len(weights), count, count)
    for i in range(count):
        values, place = odds[:, i].unique(return_inverse=True)
        own = truth == i
        mine = weights.new_zeros(len(weights), len(values)).index_add_(1, place[own], weights[:, own])
        above = sizes[:, i : i + 1] - mine.cumsum(1) + mine / 2
        beaten = weights.new_zeros(len(weights), count).index_add_(1, truth, above[:, place] * weights)
        areas[:, i] = beaten / (sizes[:, i : i + 1] * sizes)
    pairs = (areas + areas.transpose(1, 2))[:, ~torch.eye(count, dtype=torch.bool)] / 2
    return pairs.nanmean(1)


def _sd(positive: Tensor, negative: Tensor) -> float:
    """Of the mean of the placements; one sample of a kind tells nothing of its spread."""
    parts = [v.var() / len(v) if len(v) > 1 else torch.tensor(0.25) for v in (positive, negative)]
    return math.sqrt(float(sum(parts)))
