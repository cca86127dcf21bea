"""What processes that share a batch tell each other, so that together they compute what one would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

if TYPE_CHECKING:
    from fasterisnet.methods.base import Method


def together(method: Method) -> int:
    """How many processes have a part of this method's batch; one that has none has nothing to do with it."""
    return method.share[1] if distributed.is_available() and distributed.is_initialized() else 1


def exchanged(mine: Tensor, method: Method, lengths: Sequence[int] | None = None) -> list[Tensor]:
    """What each of them has, in their order. lengths: of their parts, if they differ."""
    rank, processes = method.share[0], together(method)
    if processes == 1:
        return [mine]
    mine = mine.contiguous()
    shapes = [(len(mine) if lengths is None else lengths[other], *mine.shape[1:]) for other in range(processes)]
    parts = [mine if other == rank else mine.new_empty(shape) for other, shape in enumerate(shapes)]
    others = [other for other in range(processes) if other != rank]
    messages = [distributed.P2POp(distributed.isend, mine, other) for other in others]
    messages += [distributed.P2POp(distributed.irecv, parts[other], other) for other in others]
    for request in distributed.batch_isend_irecv(messages):
        request.wait()
    return parts


def mean_of_all(means: Tensor, count: int, method: Method) -> Tensor:
    """Means over `count` samples of this process, as means over those of all."""
    sums = torch.stack(exchanged(torch.cat([means * count, means.new_tensor([count])]), method)).sum(0)
    return sums[:-1] / sums[-1].clamp(min=1)
