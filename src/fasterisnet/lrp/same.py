"""Whether two edges of autograd's graph stand for the same numbers: rearranged alike, or computed twice."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fasterisnet.lrp.kinds import ACTIVATIONS, LINEAR, PERMUTING, SUMS, Edge, Node, descend, edges, kind, shape

CUTTING = PERMUTING | {"Slice", "Select"}
# Nodes that autograd saved everything of, apart from constants that were added.
SAVED = CUTTING | ACTIVATIONS | LINEAR | SUMS | frozenset(
    "Expand Split SplitWithSizes Unbind Index IndexSelect Diagonal Repeat Gather Mul Div Neg Abs Exp".split()
)  # fmt: skip
DEEPEST = 8


def same(a: Edge, b: Edge, of_b: Tensor | None = None) -> bool:
    """Whether every number of a is the one at the same place of b, or of b's numbers `of_b`, which has a's shape."""
    if a[0] is None or b[0] is None:
        return False
    if of_b is None and (a == b or (shape(a) == shape(b) and _twice(a, b))):
        return True
    if shape(a) != (shape(b) if of_b is None else tuple(of_b.shape)):
        return False
    (path_a, below_a), (path_b, below_b) = (descend(e, CUTTING) for e in (a, b))
    if not _twice(below_a, below_b):
        return False
    places_a, places_b = _places(a, path_a), _places(b, path_b)
    return torch.equal(places_a, places_b if of_b is None else places_b[of_b.reshape(-1)])


def _places(edge: Edge, path: list[Node]) -> Tensor:
    """Where an edge's numbers stand in the tensor that a path rearranged, both counted in order."""
    count = math.prod(shape(edge))
    numbers = torch.arange(1, count + 1, dtype=torch.float64, device="cpu").view(shape(edge))
    for node in path:
        numbers = node(numbers)
    numbers = numbers.reshape(-1).long()
    places = numbers.nonzero().squeeze(1)
    return torch.empty(count, dtype=torch.long, device="cpu").scatter_(0, numbers[places] - 1, places)


def _twice(a: Edge, b: Edge, depth: int = 0) -> bool:
    """The same edge, or the same step with the same settings of operands that are the same."""
    if a == b:
        return True
    if a[0] is None or b[0] is None or depth > DEEPEST or a[1] != b[1] or shape(a) != shape(b):
        return False
    what, below_a, below_b = kind(a[0]), edges(a[0]), edges(b[0])
    if what != kind(b[0]) or what not in SAVED or len(below_a) != len(below_b) or not _equal(*map(_settings, (a, b))):
        return False
    return all(x == y or _twice(x, y, depth + 1) for x, y in zip(below_a, below_b, strict=True))


def _settings(edge: Edge) -> list[Any]:
    """What a step was given besides what it is differentiated for."""
    names = [name for name in dir(edge[0]) if name.startswith("_saved_") and name != "_saved_result"]
    found = [getattr(edge[0], name) for name in names]
    if kind(edge[0]) in SUMS and any(node is None for node, _ in edges(edge[0])):
        noted = edge[0].metadata.get("fasterisnet")
        constants = [math.nan] if noted is None else noted.operands[:2]
        found += [c for c in constants if not (isinstance(c, Tensor) and c.requires_grad)]
    return found


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and a == b
    if a.ndim == b.ndim == 0 and not a.requires_grad and not b.requires_grad:
        return bool(a == b)
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)
