"""What rules that look at single contributions have to know of a step's surroundings: is it a part of something?"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from torch import Tensor

from fasterisnet.errors import RuleError
from fasterisnet.lrp.gates import as_affine
from fasterisnet.lrp.kinds import MOVING, PERMUTING, Edge, Node, descend, edges, kind, shape, source
from fasterisnet.lrp.layers import CLASSES, Active, layer
from fasterisnet.lrp.step import Step
from fasterisnet.lrp.units import CENTRING, constants, scaled_at, unit

SLICING = frozenset({"Split", "SplitWithSizes", "Slice", "Unbind", "Select", "IndexSelect", "Index"})


def is_written_out(at: Step, edge: Edge) -> bool:
    """Whether something is a layer by hand: the sum of products with weights of both signs."""
    node = source(edge, PERMUTING)[0]
    product = source(edges(node)[0], PERMUTING)[0] if node is not None and kind(node) == "Sum" else None
    if product is None or kind(product) != "Mul" or sum(at.walk.active(product)) != 1:
        return False
    weight = product._saved_other if at.walk.active(product)[0] else product._saved_self
    return isinstance(weight, Tensor) and bool((weight < 0).any())


def adds_layer(at: Step) -> bool:
    """Whether `a + value * layer * scale` was added to something in one step."""
    if at.kind not in ("Addcmul", "Addcdiv") or not at.is_active(0) or sum(at.active) != 2:
        return False
    edge = at.edge(at.active.index(True, 1))
    return unit(edge, at.walk.active) is not None or of_parts(at, edge, cut=True)


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
    read: list[Edge] = []
    shapes = set()
    for edge, on in zip(edges(node), active(node), strict=True):
        found = unit(edge, active) if on else None
        below, scaled = behind_scales(edge, active) if on and found is None and not whole else (edge, False)
        if found is not None:
            read.append(found.layer.edge)
            shapes.add((type(found.layer), found.weight.shape[1:]))
        elif scaled:  # a layer of single channels
            read.append(below)
        elif on:
            return False
    whence = [source(edge, PERMUTING)[0] for edge in read]
    if len(read) < 2 or any(n is None for n in whence):
        return False
    if whole and all(n is whence[0] for n in whence):
        return len(shapes) == 1
    cut = [source(edge, PERMUTING | SLICING)[0] for edge in read]
    return all(kind(n) in SLICING for n in whence) and all(n is cut[0] for n in cut)


def behind_scales(edge: Edge, active: Active) -> tuple[Edge, bool]:
    """What steps of constants started from, and whether one of them multiplies every channel by its number."""
    scaled = False
    while (node := source(edge, PERMUTING)[0]) is not None and kind(node) not in CENTRING:
        position = scaled_at(node, active)
        step = None if position is None else constants(node, position)
        if position is None or step is None:
            break
        scaled = scaled or each_channel(step[0], shape((node, 0)))
        edge = edges(node)[position]
    return edge, scaled


def each_channel(scale: Tensor | None, size: Sequence[int]) -> bool:
    """Whether a constant has a number for each channel, as far as its shape tells."""
    of_samples = scale is not None and scale.ndim == len(size) > 1 and scale.shape[0] > 1
    return scale is not None and not of_samples and sum(n > 1 for n in scale.shape) == 1


def warn_of_parts(at: Step, edge: Edge, below: Container[Node] | None = None) -> None:
    """Says that a scale or batch norm is no longer one with the layer in front of it, because that one is in parts."""
    edge, scaled = behind_scales(edge, at.walk.active)
    if scaled and (of_parts(at, edge, cut=True, below=below) or (below is None and is_written_out(at, edge))):
        which = "a layer" if below is None else "the first layer"
        at.warn(f"follows parts of {which}; it is taken for a step of its own, not for one with the layer.")


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
