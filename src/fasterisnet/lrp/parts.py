"""What rules that look at single contributions have to know of a step's surroundings: is it a part of something?"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from torch import Tensor

from fasterisnet.errors import RuleError
from fasterisnet.lrp.gates import as_affine
from fasterisnet.lrp.kinds import BATCH_NORMS, MOVING, PERMUTING, Edge, Node, descend, edges, kind, source
from fasterisnet.lrp.layers import CLASSES, Active, layer
from fasterisnet.lrp.step import Step
from fasterisnet.lrp.units import unit

SLICING = frozenset({"Split", "SplitWithSizes", "Slice", "Unbind", "Select", "IndexSelect", "Index"})


def is_written_out(at: Step, edge: Edge) -> bool:
    """Whether something is a layer by hand: the sum of products with weights of both signs."""
    node = source(edge, PERMUTING)[0]
    product = source(edges(node)[0], PERMUTING)[0] if node is not None and kind(node) == "Sum" else None
    if product is None or kind(product) != "Mul" or sum(at.walk.active(product)) != 1:
        return False
    weight = product._saved_other if at.walk.active(product)[0] else product._saved_self
    return isinstance(weight, Tensor) and bool((weight < 0).any())


def of_parts(at: Step, edge: Edge, cut: bool = False, below: Container[Node] | None = None) -> bool:
    """Whether something was put together from layers without a bias; `cut`: from parts of layers that read `below`."""
    waiting = [(edge, at.walk.is_beside)]
    while waiting:
        edge, parted = waiting.pop()
        _, (node, _) = descend(edge)
        if node is None or not any(at.walk.behind(node)):
            continue
        if kind(node) in CLASSES:
            found = layer(node, at.walk.behind)
            read = found is not None and (below is None or found.edge[0] in below)
            if parted and found is not None and read and (cut or not found.has_bias):
                return True
        elif kind(node) in MOVING or kind(node) == "CopySlices":
            joined = cut and kind(node) in ("Cat", "Stack") and not of_groups(node, at.walk.behind, whole=True)
            parted = parted or not joined
            waiting += [(e, parted) for e, on in zip(edges(node), at.walk.behind(node), strict=True) if on]
    return False


def of_groups(node: Node, active: Active, whole: bool = False) -> bool:
    """Whether layers that meet read parts of one tensor, a layer in groups; `whole`: or all of it, and are alike."""
    read: list[Node] = []
    shapes = set()
    for edge, on in zip(edges(node), active(node), strict=True):
        found = unit(edge, active) if on else None
        if on and found is None:
            return False
        if found is not None:
            read.append(source(found.layer.edge, PERMUTING)[0])
            shapes.add((type(found.layer), found.weight.shape[1:]))
    if len(read) < 2 or any(n is None for n in read):
        return False
    if whole and all(n is read[0] for n in read):
        return len(shapes) == 1
    return all(kind(n) in SLICING and edges(n)[0][0] is edges(read[0])[0][0] for n in read)


def warn_of_parts(at: Step, edge: Edge) -> None:
    """Says that a batch norm is no longer one with the layer in front of it, because that one is in parts."""
    if kind(edge[0]) in BATCH_NORMS and of_parts(at, edges(edge[0])[0], cut=True):
        at.warn("follows parts of a layer; it is taken for a step of its own, not for one with the layer.")


def asked_inside(at: Step, inside: Sequence[Edge]) -> bool:
    """Whether the relevance between the steps of a unit was asked for."""
    return at.walk.wants(*[edge for edge in inside if edge[0] is not at.node])


def one_unit(at: Step, first: Node, inside: Sequence[Edge]) -> None:
    """Refuses to say what the relevance inside a unit is."""
    if asked_inside(at, inside):
        raise RuleError(
            f"Layer '{at.walk.place(first)}' is one unit with the scale, batch norm or activation behind it under "
            "these rules, so it has no relevance of its own; name that module instead."
        )


def adds_nothing(at: Step) -> bool:
    """Whether the number zero is added."""
    added = [] if at.note is None or sum(at.active) != 1 else at.note.operands[:2]
    return any(isinstance(value, int | float) and value == 0 for value in added)


def number_of(at: Step) -> float:
    """The one number that something is multiplied with; NaN if it is another step."""
    if at.kind == "Neg":
        return -1.0
    return as_affine(at.node, at.kind, at.active.index(True))[0] if sum(at.active) == 1 else math.nan


def is_mean_of(at: Step, this: int, other: int) -> bool:
    """Whether one operand of a sum is the mean of the other."""
    node = source(at.edge(this), MOVING)[0]
    if node is None or kind(node) not in ("Mean", "VarMean", "StdMean"):
        return False
    below, values = (source(edge, PERMUTING) for edge in (edges(node)[0], at.edge(other)))
    return below[0] is values[0] and below[1] == values[1]
