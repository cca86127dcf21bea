"""Interval estimates of shares and means; samples of one group (a patient, a source) count as one piece of evidence."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fasterisnet.errors import InputError

MASS = 0.95
DRAWS = 2000
PAIRED_DRAWS = 20_000
Groups = Sequence[Hashable | None]
Numbers = NDArray[np.float64]


class Estimate(NamedTuple):
    """A number of the test (None if it has none), the mean and sd of what is believed of it, and the 95 % interval."""

    value: float | None
    mean: float
    sd: float
    low: float
    high: float


def highest_density(draws: Numbers, mass: float = MASS) -> tuple[float, float]:
    """The shortest interval that holds `mass` of the draws."""
    ordered = np.sort(draws)
    held = min(len(ordered), int(np.ceil(mass * len(ordered))))
    widths = ordered[held - 1 :] - ordered[: len(ordered) - held + 1]
    first = int(widths.argmin())
    return float(ordered[first]), float(ordered[first + held - 1])


def of_draws(draws: Numbers, value: float | None) -> Estimate:
    """What draws of a posterior say of a number."""
    return Estimate(value, float(draws.mean()), float(draws.std()), *highest_density(draws))


def share(hits: Tensor | Sequence[bool], groups: Groups | None = None) -> Estimate | None:
    """A share of samples, with the Beta posterior of a flat prior; None of no samples.

    Samples of one group are alike, so the sample counts for as many as would have the variance that is seen between
    the groups (Korn and Graubard's effective size), or for as many as there are groups if all agree.
    """
    values = torch.as_tensor(hits).double().numpy()
    if not len(values):
        return None
    p = float(values.mean())
    size = _effective_size(values, groups)
    a, b = 1 + p * size, 1 + (1 - p) * size
    low, high = _beta_interval(a, b)
    return Estimate(p, a / (a + b), float(np.sqrt(a * b / (a + b) ** 2 / (a + b + 1))), low, high)


def difference(first: Tensor, second: Tensor, groups: Groups | None = None, *, seed: int = 0) -> Estimate | None:
    """How much larger one share is than another of the same samples (1 or 0 each; NaN left out).

    Only samples that differ tell: the shares of `first alone`, `second alone` and the rest have a flat Dirichlet prior.
    """
    counts = paired_counts(first, second, groups)
    if counts is None:
        return None
    drawn = np.random.default_rng(seed).dirichlet(counts + 1, PAIRED_DRAWS)
    return of_draws(drawn[:, 0] - drawn[:, 1], float((counts[0] - counts[1]) / counts.sum()))


def paired_counts(first: Tensor, second: Tensor, groups: Groups | None = None) -> Numbers | None:
    """Samples of `first alone`, `second alone` and the rest, as many as they are worth (see `share`)."""
    steps = (first.double() - second.double()).numpy()
    known = np.isfinite(steps)
    if not known.any():
        return None
    chosen = None if groups is None else [g for g, kept in zip(groups, known.tolist(), strict=True) if kept]
    steps = steps[known]
    shares = np.array([(steps > 0).mean(), (steps < 0).mean(), (steps == 0).mean()])
    return shares * _effective_size(steps, chosen)


def average(values: Tensor | Sequence[float], groups: Groups | None = None, *, seed: int = 0) -> Estimate | None:
    """The mean of numbers, with the bootstrap interval over groups (over samples if there are none); NaN left out."""
    numbers = torch.as_tensor(values).double()
    return ratio(numbers, torch.ones_like(numbers), groups, seed=seed)


def ratio(parts: Tensor, wholes: Tensor, groups: Groups | None = None, *, seed: int = 0) -> Estimate | None:
    """The sum of some numbers over the sum of others, with the same interval; None if the second sum is 0."""
    part, whole = parts.double().numpy(), wholes.double().numpy()
    known = np.isfinite(part) & np.isfinite(whole)
    if whole[known].sum() == 0:
        return None
    names = np.unique(_numbered(groups, len(part))[known], return_inverse=True)[1]
    above, below = np.bincount(names, part[known]), np.bincount(names, whole[known])
    generator = np.random.default_rng(seed)
    drawn = np.empty(DRAWS)
    for begin, end in _chunks(DRAWS, len(below)):
        chosen = generator.integers(0, len(below), (end - begin, len(below)))
        with np.errstate(invalid="ignore"):
            drawn[begin:end] = above[chosen].sum(1) / below[chosen].sum(1)
    return of_resamples(drawn, float(part[known].sum() / whole[known].sum()))


def bootstrap(
    statistic: Callable[[Tensor], float], count: int, groups: Groups | None = None, *, draws: int = DRAWS, seed: int = 0
) -> Estimate:
    """Any statistic, with the percentile interval over resampled groups; draws without a value are left out.

    statistic: from the numbers of the samples that were drawn (a sample may be there several times).
    """
    if count < 1:
        raise InputError("There is no sample to resample.")
    found = np.array([statistic(chosen) for chosen in resamples(count, groups, draws, seed)])
    return of_resamples(found, statistic(torch.arange(count)))


def of_resamples(found: Numbers, value: float) -> Estimate:
    """What resamples say of a statistic: its percentile interval."""
    found = found[np.isfinite(found)]
    if not len(found):
        return Estimate(None, np.nan, np.nan, np.nan, np.nan)
    low, high = np.quantile(found, [(1 - MASS) / 2, (1 + MASS) / 2])
    known = value if np.isfinite(value) else None
    return Estimate(known, float(found.mean()), float(found.std()), float(low), float(high))


def resamples(count: int, groups: Groups | None, draws: int, seed: int) -> Iterator[Tensor]:
    """Samples drawn with replacement, groups as wholes."""
    generator = np.random.default_rng(seed)
    if groups is None:
        yield from (torch.from_numpy(generator.integers(0, count, count)) for _ in range(draws))
        return
    names = _numbered(groups, count)
    order = np.argsort(names, kind="stable")
    members = np.split(order, np.unique(names[order], return_index=True)[1][1:])
    for _ in range(draws):
        chosen = generator.integers(0, len(members), len(members))
        yield torch.from_numpy(np.concatenate([members[i] for i in chosen]))


def as_json(content: Any) -> Any:
    """Estimates as dicts, numbers that are none as null."""
    if isinstance(content, Estimate):
        return {key: as_json(value) for key, value in content._asdict().items()}
    if isinstance(content, dict):
        return {str(key): as_json(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [as_json(value) for value in content]
    if isinstance(content, float):
        return content if np.isfinite(content) else None
    return content


def _effective_size(values: Numbers, groups: Groups | None) -> float:
    """The variance of independent samples over that of the mean, which is seen between the groups."""
    if groups is None:
        return len(values)
    names = _numbered(groups, len(values))
    count = int(names.max()) + 1
    if count == len(values):
        return len(values)
    residuals = np.bincount(names, values - values.mean())
    variance = count / max(count - 1, 1) * float((residuals**2).sum()) / len(values) ** 2
    if variance == 0:
        return count
    return float(np.clip(values.var() / variance, 1, len(values)))


def _numbered(groups: Groups | None, count: int) -> NDArray[np.int64]:
    """The number of each sample's group; a sample whose group is None is one of its own."""
    if groups is None:
        return np.arange(count)
    if len(groups) != count:
        raise InputError(f"There are {len(groups)} groups for {count} samples; give one for each.")
    numbers: dict[Hashable, int] = {}
    keys = (("sample", i) if g is None else ("group", g) for i, g in enumerate(groups))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _chunks(total: int, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of about four million numbers."""
    step = max(1, 4_000_000 // max(width, 1))
    for begin in range(0, total, step):
        yield begin, min(total, begin + step)


@lru_cache(maxsize=4096)
def _beta_interval(a: float, b: float) -> tuple[float, float]:
    """The highest-density interval of a Beta distribution that is flat or has one peak."""
    from scipy.special import betaincinv

    below = np.linspace(0, 1 - MASS, 1001)
    low, high = betaincinv(a, b, below), betaincinv(a, b, np.minimum(below + MASS, 1))
    shortest = int((high - low).argmin())
    return float(low[shortest]), float(high[shortest])
