"""Two classifiers on the same samples, or over the same seeds: which is better, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fasterisnet.errors import InputError
from fasterisnet.evaluation.intervals import Estimate, Groups, average, of_draws

DRAWS = 100_000


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

    Shares of the four outcomes have a flat Dirichlet prior; with groups, the interval is that of the bootstrap over
    groups, and the probability that of a normal distribution with its spread.
    """
    if first.shape != second.shape or first.ndim != 1 or len(first) == 0:
        raise InputError(
            f"Two classifiers are compared on the same samples; they have {tuple(first.shape)}, {tuple(second.shape)}."
        )
    first, second = first.bool(), second.bool()
    a, b, both = int((first & ~second).sum()), int((second & ~first).sum()), int((first & second).sum())
    value = (a - b) / len(first)
    if groups is None:
        counts = np.array([a, b, both, len(first) - a - b - both]) + 1.0
        drawn = np.random.default_rng(seed).dirichlet(counts, DRAWS)
        estimate = of_draws(drawn[:, 0] - drawn[:, 1], value)
        # P(Beta(a + 1, b + 1) > 1/2), as a sum of binomial chances
        probability = math.fsum(_chances(a + b + 1)[: a + 1])
    else:
        found = average(first.double() - second.double(), groups, seed=seed)
        assert found is not None
        estimate = found
        score = value / estimate.sd if estimate.sd > 0 else math.copysign(math.inf, value) if value else 0.0
        probability = 0.5 * math.erfc(-score / math.sqrt(2))
    return Paired(estimate, probability, mcnemar(a, b), a, b)


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
