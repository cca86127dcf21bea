"""Two classifiers on the same samples, or over the same seeds: which is better, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fasterisnet.errors import InputError
from fasterisnet.evaluation.intervals import Estimate, Groups, difference, paired_counts


class Paired(NamedTuple):
    """difference: accuracy of the first minus that of the second; probability: that the first is better; p: McNemar's,
    exact and two-sided. only_first, only_second: samples that one of them alone got right.
    """

    difference: Estimate
    probability: float
    p: float
    only_first: int
    only_second: int


class Seeds(NamedTuple):
    """The same over runs: difference of the means, probability that the first is better."""

    difference: Estimate
    probability: float


def compare(first: Tensor, second: Tensor, groups: Groups | None = None, *, seed: int = 0) -> Paired:
    """first, second: for every sample whether it was right. Only samples that one alone got right tell them apart.

    The shares of what can happen have a flat Dirichlet prior; samples count for as many as their groups are worth.
    """
    if first.shape != second.shape or first.ndim != 1 or len(first) == 0:
        raise InputError(
            f"Two classifiers are compared on the same samples; they have {tuple(first.shape)}, {tuple(second.shape)}."
        )
    from scipy.special import betainc

    estimate, counts = difference(first, second, groups, seed=seed), paired_counts(first, second, groups)
    assert estimate is not None and counts is not None
    probability = float(betainc(counts[1] + 1, counts[0] + 1, 0.5))  # that Beta(first alone + 1, second + 1) > 1/2
    first, second = first.bool(), second.bool()
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    return Paired(estimate, probability, mcnemar(only_first, only_second), only_first, only_second)


def mcnemar(only_first: int, only_second: int) -> float:
    """The two-sided exact p: how often a fair coin is as one-sided as the samples that only one got right."""
    tosses, fewer = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * math.fsum(_chances(tosses)[: fewer + 1]))


def compare_seeds(first: Sequence[float], second: Sequence[float]) -> Seeds | None:
    """Results of two methods, seed by seed: Student's t over the differences. None of fewer than two seeds."""
    if len(first) != len(second):
        raise InputError(f"There are {len(first)} and {len(second)} results; give those of the same seeds.")
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    count = len(differences)
    if count < 2:
        return None
    from scipy.special import stdtr, stdtrit

    mean, sd = float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(count)
    reach = float(stdtrit(count - 1, 0.975)) * sd
    probability = float(stdtr(count - 1, mean / sd)) if sd > 0 else 0.5 + 0.5 * float(np.sign(mean))
    return Seeds(Estimate(mean, mean, sd, mean - reach, mean + reach), probability)


def _chances(tosses: int) -> list[float]:
    """Of 0, 1, 2, ... heads among tosses of a fair coin."""
    heads = torch.arange(tosses + 1, dtype=torch.float64)
    log = math.lgamma(tosses + 1) - torch.lgamma(heads + 1) - torch.lgamma(tosses - heads + 1)
    return (log - tosses * math.log(2)).exp().tolist()
