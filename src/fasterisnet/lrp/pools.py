"""LRP-z+ through sums and means: layers whose weights are never negative."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fasterisnet.lrp.kernels import wide
from fasterisnet.lrp.kinds import descend, edges, kind, shape
from fasterisnet.lrp.layers import operand, through
from fasterisnet.lrp.parts import announce_parts
from fasterisnet.lrp.step import Step
from fasterisnet.lrp.units import before, constants, scaled_at

threshold_backward = torch.ops.aten.threshold_backward
WHOLE = frozenset({"Mean", "Sum", "Nansum"})
WITH_MEAN = frozenset({"VarMean", "StdMean"})


class _MeanAlone(Step):
    """The mean of `var_mean`, as if it had been computed alone."""

    def __init__(self, at: Step) -> None:
        super().__init__(at.walk, at.node, {form: {0: by[1]} for form, by in at.flow.items()})
        self.ends_start = not self.is_score

    def ordinary(self, by: dict[int, Tensor]) -> Sequence[Tensor | None]:
        return super().ordinary({1: by[0]})


def pool_zplus(at: Step, scale: Tensor | None = None) -> None:
    """A layer with weights A >= 0: `s = R_y/(A x+ + eps)`, `R_x = x+ (A^T s)`. Sums of sums are one sum.

    scale: a constant behind it, which makes its weights `scale A`.
    """
    at = _MeanAlone(at) if at.kind in WITH_MEAN else at
    pools = [at]
    while at.kind in WHOLE and kind(pools[-1].edge(0)[0]) in WHOLE and not at.walk.wants(pools[-1].edge(0)):
        pools.append(Step(at.walk, pools[-1].edge(0)[0], at.flow))
    last = pools[-1]
    known = None if last.note is None else last.note.tensors
    xs = [
        wide(known[i] if known else operand(last.node, i, "self")) if on else None for i, on in enumerate(last.active)
    ]

    def pooled(values: Sequence[Tensor | None]) -> Tensor:
        found = last.forward(values)
        for pool in pools[-2::-1]:
            found = pool.forward([found])
        return found if scale is None else found * scale

    positive = [None if x is None else x.relu() for x in xs]
    s = at.over(pooled(positive), lambda: pooled(xs))
    back: Sequence[Tensor | None] = [s if scale is None else s * scale]
    for pool in pools:
        back = pool.ordinary({0: back[0]})  # type: ignore[dict-item]
    for position, (t, x) in enumerate(zip(back, positive, strict=False)):
        if t is not None and x is not None:
            at.share(last.edge(position), partial(torch.mul, t, x), partial(threshold_backward, t, x, 0))


def mean_zplus(at: Step, at_sum: int) -> bool:
    """A constant behind a sum makes a mean of it: the stabiliser is that of the mean. False if there is no sum."""
    path, (node, number) = descend(at.edge(at_sum))
    asked = at.walk.wants(at.edge(at_sum), *[(n, 0) for n in path], (node, number))
    if node is None or kind(node) not in WHOLE or scaled_at(at.node, at.walk.active) != at_sum or asked:
        return False
    scale, shift = constants(at.node, at_sum) or (None, None)
    each = before(path, scale, shape((at.node, 0)))
    if each is None or shift is not None or shape(edges(node)[0]) == shape((node, 0)) or bool((each <= 0).any()):
        return False
    inner = Step(at.walk, node, {form: {0: through(path, by[0])} for form, by in at.flow.items()})
    announce_parts(inner)
    pool_zplus(inner, each)
    return True
