"""What rules that look at single contributions have to know of a step's surroundings: is it a part of something?"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from torch import Tensor

from fasterisnet.errors import RuleError
from fasterisnet.lrp.gates import as_affine, constant_of, unscaled
from fasterisnet.lrp.kinds import (
    GROUPS,
    MOVING,
    PERMUTING,
    SUMS,
    Edge,
    Node,
    descend,
    edges,
    kind,
    shape,
    signed,
    signs,
    source,
)
from fasterisnet.lrp.layers import CLASSES, Active, layer
from fasterisnet.lrp.masks import one_number
from fasterisnet.lrp.same import same
from fasterisnet.lrp.step import Step
from fasterisnet.lrp.units import CENTRING, Unit, constants, scaled_at, unit

SLICING = frozenset({"Split", "SplitWithSizes", "Slice", "Unbind", "Select", "IndexSelect", "Index"})
PADDED = PERMUTING | {"ConstantPadNd"}
MEANS = frozenset("Mean Sum VarMean StdMean AvgPool1D AvgPool2D AvgPool3D AdaptiveAvgPool1D AdaptiveAvgPool2D".split())


def is_written_out(at: Step, edge: Edge) -> bool:
    """Whether something is a layer by hand: the sum of products with weights of both signs."""
    node = source(edge, PERMUTING)[0]
    product = source(edges(node)[0], PERMUTING)[0] if node is not None and kind(node) == "Sum" else None
    if product is None or kind(product) != "Mul" or sum(at.walk.active(product)) != 1:
        return False
    weight = constant_of(product, "Mul", at.walk.active(product).index(True))
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
        below, scaled = behind_scales(edge, active)[:2] if on and found is None and not whole else (edge, False)
        if found is not None:
            read.append(found.layer.edge)
            shapes.add((type(found.layer), found.weight.shape[1:]))
        elif scaled:  # a layer of single channels
            read.append(below)
        elif on:
            return False
    whence = [source(edge, PADDED)[0] for edge in read]
    if len(read) < 2 or any(n is None for n in whence):
        return False
    if whole and all(n is whence[0] for n in whence):
        return len(shapes) == 1
    cut = [source(edge, PADDED | SLICING) for edge in read]
    return all(kind(n) in SLICING for n in whence) and all(same(edge, cut[0]) for edge in cut)


def behind_scales(edge: Edge, active: Active) -> tuple[Edge, bool, int]:
    """What steps of constants started from; whether one of them multiplies every channel by its number, and how many
    of them multiply by anything but a number."""
    scaled, scales = False, 0
    while (node := source(edge, PERMUTING)[0]) is not None and kind(node) not in CENTRING:
        position = scaled_at(node, active)
        if position is None and kind(node) == "Mul" and sum(active(node)) == 1:
            position = active(node).index(True)  # `t[:, i:i+1] * w[:, i]`: one channel for all
        step = None if position is None else constants(node, position)
        if position is None or step is None:
            break
        scales += step[0] is not None and one_number(step[0].detach()) is None
        scaled = scaled or each_channel(step[0], shape((node, 0))) or shape(edges(node)[position]) != shape((node, 0))
        edge = edges(node)[position]
    return edge, scaled, scales


def each_channel(scale: Tensor | None, size: Sequence[int]) -> bool:
    """Whether a constant has a number for each channel, as far as its shape tells."""
    of_samples = scale is not None and scale.ndim == len(size) > 1 and scale.shape[0] > 1
    return scale is not None and not of_samples and sum(n > 1 for n in scale.shape) == 1


def warn_of_parts(at: Step, edge: Edge, below: Container[Node] | None = None) -> None:
    """Says that a scale or batch norm is no longer one with the layer in front of it, because that one is in parts."""
    edge, scaled, scales = behind_scales(edge, at.walk.active)
    which = "a layer" if below is None else "the first layer"
    if scaled and (of_parts(at, edge, cut=True, below=below) or (below is None and is_written_out(at, edge))):
        at.warn(f"follows parts of {which}; it is taken for a step of its own, not for one with the layer.")
    elif scales > 1 and at.kind in ("Mul", "Div") and shape(edge) == shape((at.node, 0)):
        own, (step, _) = (
            unit(edge, at.walk.active, reads=below),
            constants(at.node, at.active.index(True)) or (None, None),
        )
        if own is not None and own.behind(step, None, shape(edge)) is not None:
            at.warn(f"scales {which} behind a mask, as of dropout; it is taken for a step of its own.")


def announce_parts(at: Step) -> None:
    """Says that a sum may be a layer in parts, or a norm."""
    needs, active = at.table.needs_values, at.walk.active
    added = at.node if at.kind in SUMS else source(at.edge(0))[0]
    stacked = added is not None and kind(added) in ("Stack", "Cat") and sums_over(at.node, added._saved_dim)
    joins = added is not None and (added is at.node or stacked) and sum(active(added)) > 1
    groups = joins and (needs or at.walk.box is not None) and of_groups(added, active)
    if groups and (needs or any(unit(edge, active, reads=at.walk.affine) is not None for edge in edges(added))):
        at.warn("adds layers that read parts of one tensor, like a layer in parts; it takes them for several.")
    mean, subtracted = mean_beside(at) if at.kind in SUMS and sum(at.active) == 2 else (None, False)
    if mean is not None and is_over_batch(at, mean):
        at.warn("has a mean over the batch beside its values: relevance of one sample reaches the others.")
    elif subtracted and at.table.in_R:
        at.warn("subtracts a mean of the same values: z+ knows normalisations of torch, not those in parts.")
    if (needs or at.walk.box is not None) and is_written_out(at, (at.node, 0)):
        first = None if needs else unit(source(at.edge(0), PERMUTING), active, reads=at.walk.affine)
        if needs or first is not None:
            at.warn("adds up products with weights, a layer in parts; it takes each product for a step of its own.")


def whole_unit(at: Step) -> Unit | None:
    """The unit that ends at a step, said to be in parts where it is; None too if relevance inside was asked for."""
    found = unit((at.node, 0), at.walk.active)
    if found is None:
        warn_of_parts(at, (at.node, 0))
    return None if found is None or (GROUPS[at.kind] == "product" and asked_inside(at, found.inside)) else found


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
    """Whether zeros are added."""
    if at.kind not in SUMS or at.note is None or sum(at.active) != 1:
        return False
    position = at.active.index(True)
    number = one_number(constant_of(at.node, at.kind, position))
    return number is not None and number * signs(at.node)[1 - position] == 0


def number_of(at: Step) -> float:
    """The one number that something is multiplied with; NaN if it is another step."""
    return as_affine(at.node, at.kind, at.active.index(True))[0] if sum(at.active) == 1 else math.nan


def mean_beside(at: Step) -> tuple[Node | None, bool]:
    """The mean that one operand of a sum is of the other one, times a number or not, and whether it is subtracted."""
    for this, other in ((1, 0), (0, 1)):
        number, edge = unscaled(at.edge(this), at.walk.active, MOVING)
        edge = source(edge, MOVING)
        if edge[0] is None or kind(edge[0]) not in MEANS:
            continue
        below, values = (source(e, PERMUTING) for e in (edges(edge[0])[0], at.edge(other)))
        if below == values and math.prod(shape(edge)) < math.prod(shape(values)):
            return edge[0], bool(number * math.prod(signs(at.node)) < 0)
    return None, False


def is_over_batch(at: Step, mean: Node) -> bool:
    """Whether a mean is one of several samples."""
    size, samples = shape(edges(mean)[0]), shape(at.walk.root)[:1]
    return kind(mean) in ("Mean", "Sum", "VarMean", "StdMean") and samples == size[:1] != (1,) and sums_over(mean, 0)


def sums_over(node: Node, dim: int) -> bool:
    """Whether a sum or a mean is taken along a dimension, among others or not."""
    count, dims = len(shape(edges(node)[0])), getattr(node, "_saved_dim", None)
    return not dims or any(signed(d) % count == signed(dim) % count for d in dims)
