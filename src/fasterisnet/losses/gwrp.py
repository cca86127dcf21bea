"""Global Weighted Ranked Pooling: a weighted mean that listens to the largest values most."""

import math
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from fasterisnet.errors import InputError

POOLED_SHARE = 0.02  # of a map, what `auto` listens to
P = ParamSpec("P")
R = TypeVar("R")


def full_precision(function: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """Let `function` see its first tensor in float32 or wider, and switch autocast off while it runs."""

    @wraps(function)
    def wrapped(values: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast(values.device.type, enabled=False):
            return function(values if values.dtype == torch.float64 else values.float(), *args, **kwargs)

    return wrapped


def decay_for(pixels: int, share: float = POOLED_SHARE) -> float:
    """The d whose weights add up to this share of the pixels of a map: as many of the largest count, about."""
    return 1 - 1 / max(share * pixels, 1)


@full_precision
def gwrp(values: Tensor, decay: float, start_dim: int = -1, *, size: int | None = None) -> Tensor:
    """GWRP: pools all dimensions from `start_dim` on: `sum_i d^i v_(i) / sum_i d^i` with `v_(0) >= v_(1) >= ...`.

    `decay` d = 1 is the mean, d = 0 the maximum. Ranks whose weight is below float precision are not sorted, which
    changes the result by less than one rounding of the largest value. `size`: how many values there are in all, if
    zeros that rank last were left out.
    """
    if not 0 <= decay <= 1:
        raise InputError(f"The GWRP decay d must lie between 0 (maximum) and 1 (mean), but it is {decay}.")
    values = values.flatten(start_dim)
    given = values.shape[-1]
    if given == 0:
        raise InputError(f"GWRP needs at least one value to pool, but the values have shape {tuple(values.shape)}.")
    if decay == 1:
        return values.sum(-1) / (size or given)
    if decay == 0:
        return values.amax(-1)
    ranked = values.topk(_ranks_that_count(given, decay, values.dtype)).values
    return (ranked * _weights(size or given, decay, ranked)).sum(-1)


def _ranks_that_count(n: int, decay: float, dtype: torch.dtype) -> int:
    """Smallest k with `d^k <= float precision`: all later ranks together weigh no more than that."""
    return min(n, math.ceil(math.log(torch.finfo(dtype).eps) / math.log(decay)))


def _weights(n: int, decay: float, ranked: Tensor) -> Tensor:
    """`d^i / sum_{j<n} d^j` of the kept ranks; the sum runs over all n and is `(1 - d^n) / (1 - d)`."""
    total = math.expm1(n * math.log(decay)) / (decay - 1)
    exponents = torch.arange(ranked.shape[-1], dtype=torch.float64)
    return (decay**exponents / total).to(ranked)
