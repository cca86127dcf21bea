"""Telling activations by what they compute, not by how they were written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fasterisnet.lrp.gates import BOUNDS, CLAMPS, as_affine, clamped_to, constant_of, is_learned, squashes, unscaled
from fasterisnet.lrp.kinds import ACTIVATIONS, SAME, SUMS, Edge, Node, edges, kind, shape, signs, source, spoken
from fasterisnet.lrp.layers import Active, operand
from fasterisnet.lrp.masks import one_number
from fasterisnet.lrp.record import Note, note, was_seen
from fasterisnet.lrp.same import same


class Activation(NamedTuple):
    """`y = f(x)`, x coming from `edge`. rectifies: it is a ReLU. mirrored: it is `min(x, 0)`."""

    x: Tensor
    y: Tensor
    edge: Edge
    rectifies: bool = False
    mirrored: bool = False


# Those that are run again by another formula: torch cannot differentiate its own hard-sigmoid twice.
FORMULAS: dict[str, Callable[[Node, Tensor], Tensor]] = {
    "Hardsigmoid": lambda n, x: F.hardtanh(x + 3, 0.0, 6.0) / 6,
    "PreluKernel": lambda n, x: torch.where(x > 0, x, n._saved_weight * x),
    "Threshold": lambda n, x: F.threshold(x, n._saved_threshold, operand(n, 2)),
    "RreluWithNoise": lambda n, x: (
        x * torch.where(x > 0, torch.ones_like(x), n._saved_noise)
        if n._saved_training
        else F.leaky_relu(x, (n._saved_lower + n._saved_upper) / 2)
    ),
}
SQUASHING = frozenset({"Sigmoid", "Hardsigmoid", "Tanh"})
OWN = "a product with an own gate"
OF_ONE = ACTIVATIONS - BOUNDS.keys() - {"Relu"}


def run_again(node: Node, x: Tensor) -> Tensor:
    """An activation of x: torch's operation of that name, with the settings that autograd saved under their names."""
    what = kind(node)
    if what in FORMULAS:
        return FORMULAS[what](node, x)
    operation = getattr(torch.ops.aten, spoken(what))
    names = [argument.name for argument in operation.default._schema.arguments[1:]]
    return operation(x, **{name: getattr(node, f"_saved_{name}") for name in names})


# Element-wise steps of functions of one activation, such as `x * tanh(softplus(x))`.
UNARY = ACTIVATIONS | {"Mul", "Div", "Add", "Sub", "Rsub", "Neg", "Exp", "Erf", "Reciprocal", "Log1P", "Expm1", "Abs",
                       "Clone", "ToCopy", "Sqrt", "Rsqrt", "Pow", "Log", "Where", "MaskedFill"}  # fmt: skip

SHIFTING = SUMS | SAME | {"Mul", "Div", "Neg"}


def activation(
    node: Node, active: Active, asked: Callable[..., bool] = lambda *edges: False, halves: bool = True
) -> Activation | None:
    """The activation a node is, together with bounds that lie behind each other, unless relevance in between is asked.

    It is told by its kind, as a mask made of its own values, as a product `x * g(x)`, or as a sum of two `halves`.
    """
    if halves and kind(node) in SUMS and (joined := _of_halves(node, active, asked)) is not None:
        return joined
    if kind(node) in SHIFTING | (OF_ONE & CLAMPS) and (shifted := _shifted(node, active)) is not None:
        return shifted
    found, bounds = _activation(node, active), _bounds(node, active)
    if found is None or bounds is None:
        return found
    edge, x = found.edge, found.x
    while not asked(edge, source(edge)) and (below := source(edge)[0]) is not None and any(active(below)):
        inner, before = _activation(below, active), _bounds(below, active)
        if inner is None or before is None:
            break
        low, high = (min(max(bound, bounds[0]), bounds[1]) for bound in before)
        if (low, high) == before or (kind(below) == "Relu" and low != 0):
            break  # of a ReLU only the result is known
        bounds, x, edge = (low, high), inner.x, inner.edge
    return Activation(x.expand_as(found.y), found.y, edge, bounds == (0, math.inf), bounds == (-math.inf, 0))


def _activation(node: Node, active: Active) -> Activation | None:
    what, found = kind(node), note(node)
    if what == "CopySlices":
        return _in_place(node, found)
    if found is not None and found.selected is not None:
        return _masked(node, found, found.selected, active)
    if what in OF_ONE and not any(active(node)[1:]):
        x = operand(node, 0, "self")
        y = x.clamp(min=0) if _bounds(node, active) == (0, math.inf) else run_again(node, x)
        return Activation(x.expand_as(y), y, edges(node)[0])
    if what == "Relu":
        y = node._saved_result
        return Activation(y, y, edges(node)[0], True)
    if what in BOUNDS:
        return _bounded(node, what, active)
    if what in ("Mul", "Div"):
        return _of_itself(node, what, active)
    return _less_itself(node, active) if what == "Sub" else None


def _bounds(node: Node, active: Active) -> tuple[float, float] | None:
    """The numbers a step clamps its operand to; None if it does something else, or if they are learned."""
    what, found, low, high = kind(node), note(node), None, None
    if found is not None and found.selected is not None:
        return found.bounds
    if what in CLAMPS and (what not in BOUNDS or sum(active(node)) == 1):
        low, high = clamped_to(node, active(node).index(True))
    elif what == "Relu" or _is_relu(node, what):
        low = 0.0
    if (low is None and high is None) or (what not in BOUNDS and any(active(node)[1:])):
        return None
    low, high = -math.inf if low is None else one_number(low), math.inf if high is None else one_number(high)
    return None if low is None or high is None else (float(low), float(high))


def _is_relu(node: Node, what: str) -> bool:
    """Whether the settings of an activation make it a ReLU."""
    if what == "Threshold":
        return node._saved_threshold == 0 and operand(node, 2) == 0
    if what == "PreluKernel":
        return one_number(node._saved_weight) == 0
    slopes = {"LeakyRelu": "_saved_negative_slope", "Elu": "_saved_alpha"}
    return what in slopes and getattr(node, slopes[what]) == 0 and getattr(node, "_saved_scale", 1) == 1


def _in_place(node: Node, found: Note | None) -> Activation | None:
    """A ReLU in place through a view of all of a tensor."""
    size = shape((node, 0))
    if found is None or found.replay is not torch.ops.aten.relu.default or found.operands[0].numel() != math.prod(size):
        return None
    old, places = found.operands[0].reshape(-1), found.places(found.operands[0].device)
    x = torch.zeros_like(old).scatter(0, places, old).view(size)
    return Activation(x, x.clamp(min=0), edges(node)[0], True)


def _bounded(node: Node, what: str, active: Active) -> Activation | None:
    """`max(x, 0)` is a ReLU, with another constant, or `max(x, x/10)`, an activation; of two the winner takes all."""
    a, b = node._saved_self, node._saved_other
    for at, (x, bound) in enumerate(((a, b), (b, a))):
        y, edge, other = BOUNDS[what](x, bound), edges(node)[at], edges(node)[1 - at]
        if not active(node)[at]:
            continue
        if not active(node)[1 - at]:
            return Activation(x.expand_as(y), y, edge)
        if x.shape == y.shape and _steps(other, source(edge), active) is not None:
            return Activation(x, y, edge)
    return None


def _masked(node: Node, found: Note, x: Tensor, active: Active) -> Activation | None:
    """`x * (x > 0)`, `where(x > 0, x, 0)`, `x[x < 0] = 0`: whatever a mask made of x itself leaves of it."""
    at = next((i for i, on in enumerate(active(node)) if on), 0)
    edge = edges(node)[at]
    if (
        found.edge is not None
        and kind(node) in ("IndexPut", "IndexPutImpl", "MaskedScatter")
        and (len(found.operands) == 3 and found.operands[1] is x)
    ):  # z[mask] = x[mask]
        y, edge = torch.where(*found.operands), found.edge
    elif kind(node) == "Where" and len(found.operands) == 3:
        mask, *branches = found.operands
        edge = next((e for e, b in zip(edges(node), branches, strict=True) if b is x), edge)
        if any(on and _steps(e, edge, active) is None for e, on in zip(edges(node), active(node), strict=True)):
            return None
        y = torch.where(mask, *branches)
    else:
        with torch.no_grad():
            kept = node(torch.ones(shape((node, 0)), dtype=x.dtype, device=x.device))
        kept = kept if isinstance(kept, Tensor) else kept[at]
        filled = _filled(found)
        if sum(active(node)) != 1 or kept is None or kept.shape != x.shape or (kind(node) != "Mul" and filled is None):
            return None
        y = x * kept if kind(node) == "Mul" or not filled else x * kept + filled * (1 - kept)
    return Activation(x.expand_as(y), x.clamp(min=0) if found.bounds == (0, math.inf) else y, edge)


def _filled(found: Note) -> float | None:
    """The one number that is put where a mask says so."""
    constants = [one_number(v) for v in found.operands[1:] if not isinstance(v, Tensor) or v.is_floating_point()]
    given = [v for v in constants if v is not None and not isinstance(v, bool)]
    return given[0] if len(given) == 1 else None


def masks_itself(node: Node, found: Note, active: Active) -> bool:
    """Whether a mask was made of the very activation it is laid over."""
    on = [e for e, a in zip(edges(node), active(node), strict=True) if a]
    if found.selected is None and len(on) == 1 and (kind(node) == "Mul" or _filled(found) == 0):
        return False  # set to zero or kept: its derivative is f(x)/x
    return found.selected is not None or any(
        _steps(e, origin, active) is not None for e in on for origin in found.masks
    )


def may_be_masked(node: Node, active: Active) -> bool:
    """Whether something is set to zero or replaced by a mask of its size, and nobody saw what that was made of."""
    what, size = kind(node), shape((node, 0))
    if what not in ("Mul", "Where", "MaskedFill", "MaskedScatter", "IndexPut", "IndexPutImpl") or was_seen(node):
        return False
    if what == "Mul" and sum(active(node)) == 1:
        mask = constant_of(node, what, active(node).index(True))
        constant = not isinstance(mask, Tensor) or mask.shape != size or mask.requires_grad
        return not constant and bool(((mask == 0) | (mask == 1)).all())
    if what.startswith("IndexPut"):
        return any(i is not None and i.dtype == torch.bool and i.shape == size for i in node._saved_indices)
    return what != "Mul" and getattr(node, "_saved_condition" if what == "Where" else "_saved_mask").shape == size


def _of_itself(node: Node, what: str, active: Active) -> Activation | None:
    """`x / g(x)` (softsign), and `x * g(x)` with a squashing function g: SiLU, hard-swish, GELU, Mish by hand."""
    if len(active(node)) < 2 or not all(active(node)):
        return None
    for at in (0, 1) if what == "Mul" else (0,):
        a, other = (node._saved_self, node._saved_other) if at == 0 else (node._saved_other, node._saved_self)
        for number, edge in ((1.0, edges(node)[at]), unscaled(edges(node)[at], active)):
            steps = _steps(edges(node)[1 - at], edge, active)
            if steps is None or (
                steps & SQUASHING and len(steps & (ACTIVATIONS | {OWN})) > 1 and "Softplus" not in steps
            ):
                continue  # a gate of another activation of x is a gate
            if what == "Div" or squashes(edges(node)[1 - at], active):
                return Activation(a / number, a * other if what == "Mul" else a / other, edge)
    return None


def _steps(edge: Edge, x: Edge, active: Active, limit: int = 12) -> frozenset[str] | None:
    """The kinds of step by which an edge is computed from x and constants, element by element; None if it is not.

    `OWN` is among them if something is multiplied with a gate of its own, as SiLU by hand.
    """
    if same(edge, x):
        return frozenset()
    if edge[0] is None or limit == 0 or kind(edge[0]) not in UNARY:
        return None
    below = [e for e, on in zip(edges(edge[0]), active(edge[0]), strict=True) if on]
    found = [_steps(e, x, active, limit - 1) for e in below]
    if not found or any(f is None for f in found):
        return None
    kinds = frozenset({kind(edge[0])}).union(*[f for f in found if f is not None])
    return kinds | {OWN} if kind(edge[0]) == "Mul" and len(below) == 2 and kinds & SQUASHING else kinds


class Half(NamedTuple):
    """`y = f(x)`, which is zero on one side of zero; x: x on the other side, and zero on this one."""

    positive: bool
    x: Tensor
    y: Tensor
    edge: Edge
    inside: list[Edge]


def _of_halves(node: Node, active: Active, asked: Callable[..., bool]) -> Activation | None:
    """`relu(x) - a*relu(-x)`: of one value what is above zero and what is below it, as one activation."""
    if len(active(node)) != 2 or not all(active(node)):
        return None
    a = _half(edges(node)[0], active)
    b = None if a is None else _half(edges(node)[1], active)
    if a is None or b is None or a.positive == b.positive or not same(a.edge, b.edge) or asked(*a.inside, *b.inside):
        return None
    first, second = signs(node)
    y = first * a.y + second * b.y
    return Activation(a.x + b.x, y, a.edge) if a.x.shape == b.x.shape == y.shape else None


def _half(edge: Edge, active: Active) -> Half | None:
    """A multiple of `max(c x, 0)` or `min(c x, 0)`, c a number."""
    (node, _), inside = source(edge), [edge, source(edge)]
    if node is None or sum(active(node)) != 1:
        return None
    what, at = kind(node), active(node).index(True)
    bounds = _bounds(node, active)
    if bounds in ((0, math.inf), (-math.inf, 0)) and (found := _activation(node, active)) is not None:
        number, edge = unscaled(found.edge, active, learned=False)
        return Half((bounds[0] == 0) == (number > 0), found.y / number, found.y, edge, inside)
    if what in ("Neg", "Mul") or (what == "Div" and at == 0):
        half = _half(edges(node)[at], active)
        if half is not None:
            factor = -1 if what == "Neg" else constant_of(node, what, at)
            y = half.y / factor if what == "Div" else half.y * factor
            return half._replace(y=y, inside=[*inside, *half.inside])
    return None


def is_in_parts(node: Node, active: Active) -> bool:
    """Whether a sum is an activation in parts: two functions of one value, each zero where the other is not."""
    if _of_halves(node, active, lambda *edges: False) is not None:
        return True
    (a, in_a), (b, in_b) = (_origin(edge, active) for edge in edges(node)[:2])
    if a != b or not (in_a & ACTIVATIONS and in_b & ACTIVATIONS):
        return False
    first, second = (operand(node, i) for i in range(2))
    return not bool(((first != 0) & (second != 0)).any())


def _origin(edge: Edge, active: Active) -> tuple[Edge, frozenset[str]]:
    """Where something comes from by steps that each take one value, and their kinds."""
    kinds = set()
    while edge[0] is not None and kind(edge[0]) in UNARY and sum(active(edge[0])) == 1:
        found = note(edge[0])
        kinds.add("Threshold" if found is not None and found.masks else kind(edge[0]))
        edge = edges(edge[0])[active(edge[0]).index(True)]
    return edge, frozenset(kinds)


def _shifted(node: Node, active: Active) -> Activation | None:
    """`(tanh(x/2) + 1)/2`, a sigmoid, `2*sigmoid(2*x) - 1`, a tanh, and `clamp(x + 3, 0, 6)/6`, a hard sigmoid."""
    outer, lift, (inner, _) = _line((node, 0), active)
    if inner is None or sum(active(inner)) != 1:
        return None
    scale, offset, edge = _line(edges(inner)[active(inner).index(True)], active)
    bounds = _bounds(inner, active) if kind(inner) in OF_ONE & CLAMPS else None
    if bounds is not None and outer > 0:
        seen = (outer * scale, outer * offset + lift, *(outer * bound + lift for bound in bounds))
        if any(abs(a - b) > 1e-6 for a, b in zip(seen, (1 / 6, 0.5, 0.0, 1.0), strict=True)):
            return None
        x = (operand(inner, 0, "self") - offset) / scale
        return Activation(x, F.hardtanh(x + 3, 0.0, 6.0) / 6, edge)
    half = kind(inner) == "Tanh"
    same_line = (outer, lift, scale, offset) == ((0.5, 0.5, 0.5, 0.0) if half else (2.0, -1.0, 2.0, 0.0))
    if kind(inner) not in ("Sigmoid", "Tanh") or not same_line:
        return None
    x = operand(inner, 0) / scale
    return Activation(x, x.sigmoid() if half else x.tanh(), edge)


def _line(edge: Edge, active: Active) -> tuple[float, float, Edge]:
    """`scale*x + offset`: the numbers that steps multiply by and add, and the edge behind them."""
    scale, offset, edge = 1.0, 0.0, source(edge)
    while (node := edge[0]) is not None and kind(node) in SHIFTING and sum(active(node)) == 1:
        at = active(node).index(True)
        a, b = as_affine(node, kind(node), at)
        if math.isnan(a + b) or is_learned(constant_of(node, kind(node), at)):
            break
        scale, offset, edge = scale * a, offset + scale * b, source(edges(node)[at])
    return scale, offset, edge


def _less_itself(node: Node, active: Active) -> Activation | None:
    """`x - tanh(x)`, `x - clamp(x, -1, 1)`, and `x - min(x, 0)`, a ReLU."""
    first, (below, _) = edges(node)[0], edges(node)[-1]
    if below is None or edges(below)[:1] != (first,) or getattr(node, "_saved_alpha", 1) != 1:
        return None
    if kind(below) in OF_ONE and not any(active(below)[1:]):
        x, rectifies = operand(below, 0, "self"), _bounds(below, active) == (-math.inf, 0)
        return Activation(x, x.clamp(min=0) if rectifies else x - run_again(below, x), first, rectifies)
    return None
