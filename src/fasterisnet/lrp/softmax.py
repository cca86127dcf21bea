"""A softmax, by its own name or as `exp(s - logsumexp(s))`."""

from __future__ import annotations

from torch import Tensor

from fasterisnet.lrp.kernels import wide
from fasterisnet.lrp.kinds import PERMUTING, Edge, edges, kind, shape, signed, source
from fasterisnet.lrp.layers import operand
from fasterisnet.lrp.step import Step


def softmax_zplus(at: Step) -> None:
    """Relevance of a weight is that of its score, before anything was added to all scores at once."""
    for form, by in at.flow.items():
        edge = _unshifted(at, at.edge(0), at.saved("dim")) if form == "R" else at.edge(0)
        at.send(edge, form, by[0] if form == "R" else at.ordinary(by)[0])


def softmax_by_hand(at: Step) -> bool:
    """`y = exp(s - logsumexp(s))` as the softmax that it is: `G_s = y (G - sum(y G))`. False if it is none."""
    scores, dim = _scores(at)
    if dim is None or at.walk.wants(at.edge(0)):
        return False
    y = wide(at.saved("result"))
    for form, by in at.flow.items():
        if form == "R":
            at.send(_unshifted(at, scores, dim), form, by[0])
        else:
            at.send(scores, form, y * (by[0] - (y * by[0]).sum(dim, keepdim=True)))
    return True


def _scores(at: Step) -> tuple[Edge, int | None]:
    """What a softmax in steps is taken of, and along which dimension."""
    below = source(at.edge(0))[0] if at.kind == "Exp" else None
    if below is not None and kind(below) == "LogSoftmax":
        return edges(below)[0], signed(below._saved_dim)
    if below is None or kind(below) != "Sub" or below._saved_alpha != 1 or not all(at.walk.active(below)):
        return at.edge(0), None
    scores, subtracted = edges(below)
    total = source(subtracted, PERMUTING)[0]
    if total is None or kind(total) != "Logsumexp" or len(total._saved_dim) != 1:
        return scores, None
    size = shape(scores)
    dim = signed(total._saved_dim[0]) % len(size)
    alike = source(edges(total)[0]) == source(scores) and shape(subtracted) == (*size[:dim], 1, *size[dim + 1 :])
    return scores, dim if alike else None


def _unshifted(at: Step, edge: Edge, dim: int) -> Edge:
    """Scores without what is the same for all that a softmax compares, such as their maximum."""
    size = shape(edge)
    dim = dim % len(size) - len(size)
    while (node := source(edge)[0]) is not None and kind(node) in ("Add", "Sub") and not at.walk.wants(edge):
        shifted = [e for i, e in enumerate(edges(node)) if shape(e) == size and _alike(operand(node, 1 - i), dim)]
        if len(shifted) != 1 or source(shifted[0])[0] not in at.walk.reached:
            break
        edge = shifted[0]
    return edge


def _alike(shift: Tensor | float, dim: int) -> bool:
    """Whether something is the same along a dimension."""
    return not isinstance(shift, Tensor) or shift.ndim < -dim or shift.shape[dim] == 1 or shift.stride(dim) == 0
