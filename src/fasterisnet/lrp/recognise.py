"""Telling activations, gates and normalisers by what they compute, not by how they were written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fasterisnet.lrp.kinds import ACTIVATIONS, MOVING, Edge, Node, edges, kind, shape, source, spoken
from fasterisnet.lrp.layers import Active, operand
from fasterisnet.lrp.record import Note, note

if TYPE_CHECKING:
    from fasterisnet.lrp.walk import Step


class Activation(NamedTuple):
    """`y = f(x)`, x coming from `edge`. rectifies: it is a ReLU. mirrored: it is `min(x, 0)`."""

    x: Tensor
    y: Tensor
    edge: Edge
    rectifies: bool = False
    mirrored: bool = False


# --- activations ---------------------------------------------------------------------------------------------------

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
BOUNDS = {"Maximum": torch.maximum, "Minimum": torch.minimum, "Fmax": torch.fmax, "Fmin": torch.fmin}
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
OFFSETS = frozenset({"Add", "Sub", "Rsub"})
UNARY = ACTIVATIONS | {"Mul", "Div", "Add", "Sub", "Rsub", "Neg", "Exp", "Erf", "Reciprocal", "Log1P", "Expm1", "Abs",
                       "Clone", "ToCopy", "Sqrt", "Rsqrt", "Pow", "Log", "Where", "MaskedFill"}  # fmt: skip


def activation(node: Node, active: Active) -> Activation | None:
    """The activation a node is: by its kind, as a mask made of its own signs, or as a product `x * g(x)`."""
    what, found = kind(node), note(node)
    if what == "CopySlices":
        return _in_place(node, found)
    if found is not None and found.selected is not None:
        return _masked(node, found.selected, active)
    if what in OF_ONE and not (what.startswith("Clamp") and any(active(node)[1:])):
        x = operand(node, 0, "self")
        edge = edges(node)[0]
        rectifies = _rectifies(node, what)
        y = x.clamp(min=0) if rectifies else run_again(node, x)
        edge = edge if rectifies else _without_rectifier(node, edge)
        return Activation(x.expand_as(y), y, edge, rectifies, _mirrors(node, what))
    if what == "Relu":
        y = node._saved_result
        return Activation(y, y, edges(node)[0], True)
    if what in BOUNDS:
        return _bounded(node, what, active)
    if what in ("Mul", "Div"):
        return _of_itself(node, what, active)
    return _tanhshrink(node) if what == "Sub" else None


def _in_place(node: Node, found: Note | None) -> Activation | None:
    """A ReLU in place through a view of all of a tensor."""
    size = shape((node, 0))
    if found is None or found.replay is not torch.ops.aten.relu.default or found.operands[0].numel() != math.prod(size):
        return None
    old, places = found.operands[0].reshape(-1), found.places(found.operands[0].device)
    x = torch.zeros_like(old).scatter(0, places, old).view(size)
    return Activation(x, x.clamp(min=0), edges(node)[0], True)


def _rectifies(node: Node, what: str) -> bool:
    if what == "Threshold":
        return node._saved_threshold == 0 and operand(node, 2) == 0
    upper = getattr(node, "_saved_max", None) if what == "Clamp" else None
    return what in ("Clamp", "ClampMin") and upper is None and _all_zero(node._saved_min)


def _mirrors(node: Node, what: str) -> bool:
    upper_only = what == "ClampMax" or (what == "Clamp" and node._saved_min is None)
    return upper_only and _all_zero(node._saved_max)


def _all_zero(bound: Any) -> bool:
    return bound is not None and bool((torch.as_tensor(bound) == 0).all())


def _without_rectifier(node: Node, edge: Edge) -> Edge:
    """`min(relu(x), 6)` is one activation: the bound behind a ReLU takes the ReLU's place."""
    upper_only = kind(node) in ("ClampMax", "Minimum", "Fmin") or (kind(node) == "Clamp" and node._saved_min is None)
    return _behind_rectifier(edge) if upper_only else edge


def _behind_rectifier(edge: Edge) -> Edge:
    below = source(edge)[0]
    if below is None:
        return edge
    is_relu = kind(below) == "Relu" or (kind(below) in OF_ONE and _rectifies(below, kind(below)))
    return edges(below)[0] if is_relu else edge


def _bounded(node: Node, what: str, active: Active) -> Activation | None:
    """`max(x, 0)` is a ReLU, with another constant, or `max(x, x/10)`, an activation; of two the winner takes all."""
    a, b = node._saved_self, node._saved_other
    for at, (x, bound) in enumerate(((a, b), (b, a))):
        y, edge, other = BOUNDS[what](x, bound), edges(node)[at], edges(node)[1 - at]
        if not active(node)[at]:
            continue
        if what in ("Maximum", "Fmax") and _all_zero(bound) and x.shape == y.shape:
            return Activation(x, y, edge, True)
        if not active(node)[1 - at]:
            mirrored = what in ("Minimum", "Fmin") and _all_zero(bound)
            return Activation(x.expand_as(y), y, _without_rectifier(node, edge), mirrored=mirrored)
        if x.shape == y.shape and _steps(other, source(edge), active) is not None:
            return Activation(x, y, edge)
    return None


def _masked(node: Node, x: Tensor, active: Active) -> Activation | None:
    """`x * (x > 0)`, `where(x > 0, x, 0)`, `x[x < 0] = 0`: ReLUs, if the values say so; another `where` another one."""
    at = next((i for i, on in enumerate(active(node)) if on), 0)
    edge = edges(node)[at]
    with torch.no_grad():
        kept = node(torch.ones(tuple(node._input_metadata[0].shape), dtype=x.dtype, device=x.device))
        kept = kept if isinstance(kept, Tensor) else kept[at]
        alone = isinstance(kept, Tensor) and kept.shape == x.shape and sum(active(node)) == 1
        rectifies = alone and torch.equal(torch.mul(x, kept), x.clamp(min=0))
    if rectifies:
        return Activation(x, x.clamp(min=0), edge, True)
    found = note(node)
    if kind(node) != "Where" or found is None or len(found.operands) != 3:
        return None
    mask, *branches = found.operands
    origin = next((e for e, b in zip(edges(node), branches, strict=True) if b is x), edge)
    if any(on and _steps(e, origin, active) is None for e, on in zip(edges(node), active(node), strict=True)):
        return None
    y = torch.where(mask, *branches)
    return Activation(x.expand_as(y), y, _behind_rectifier(origin))


def masks_itself(node: Node, found: Note, active: Active) -> bool:
    """Whether a mask was made of the very activation it is laid over."""
    if found.selected is None and not found.masks:
        return False
    on = [e for e, a in zip(edges(node), active(node), strict=True) if a]
    filled = [
        v for v in found.operands[1:] if not isinstance(v, Tensor) or (v.is_floating_point() and v.grad_fn is None)
    ]
    if len(on) == 1 and (kind(node) == "Mul" or (filled and all(_all_zero(v) for v in filled))):
        return False  # set to zero or kept: its derivative is f(x)/x
    return found.selected is not None or any(
        _steps(e, origin, active) is not None for e in on for origin in found.masks
    )


def _of_itself(node: Node, what: str, active: Active) -> Activation | None:
    """`x / g(x)` (softsign), and `x * g(x)` with g a squashing function that was shifted: hard-swish, GELU by hand."""
    if len(active(node)) < 2 or not all(active(node)):
        return None
    for at in (0, 1) if what == "Mul" else (0,):
        a, other = (node._saved_self, node._saved_other) if at == 0 else (node._saved_other, node._saved_self)
        x, edge = unscaled(a, edges(node)[at], active)
        steps = _steps(edges(node)[1 - at], edge, active)
        if steps is None or (what == "Mul" and (is_constant(edges(node)[1 - at], active) or not steps & OFFSETS)):
            continue
        low, high = _range(edges(node)[1 - at], active) if what == "Mul" else (0.0, 0.0)
        if low == 0 and high < math.inf:
            return Activation(x, a * other if what == "Mul" else a / other, edge)
    return None


def unscaled(t: Tensor, edge: Edge, active: Active) -> tuple[Tensor, Edge]:
    """A tensor before it was multiplied with numbers, and where it comes from."""
    while (node := source(edge)[0]) is not None and kind(node) in ("Mul", "Div") and sum(active(node)) == 1:
        at = active(node).index(True)
        scale, _ = _affine(node, kind(node), at)
        if math.isnan(scale) or scale == 0:
            break
        t, edge = t / scale, edges(node)[at]
    return t, source(edge)


def _steps(edge: Edge, x: Edge, active: Active, limit: int = 12) -> frozenset[str] | None:
    """The kinds of step by which an edge is computed from x and constants, element by element; None if it is not."""
    if edge[0] is x[0] and edge[1] == x[1]:
        return frozenset()
    if edge[0] is None or limit == 0 or kind(edge[0]) not in UNARY:
        return None
    below = [e for e, on in zip(edges(edge[0]), active(edge[0]), strict=True) if on]
    found = [_steps(e, x, active, limit - 1) for e in below]
    if not found or any(f is None for f in found):
        return None
    return frozenset({kind(edge[0])}).union(*[f for f in found if f is not None])


def is_in_parts(node: Node, active: Active) -> bool:
    """Whether a sum is an activation in parts: two functions of one value, each zero where the other is not."""
    (a, in_a), (b, in_b) = (_origin(edge, active) for edge in edges(node)[:2])
    if a[0] is not b[0] or a[1] != b[1] or not (in_a & ACTIVATIONS and in_b & ACTIVATIONS):
        return False
    first, second = (operand(node, i) for i in range(2))
    return not bool(((first != 0) & (second != 0)).any())


def _origin(edge: Edge, active: Active) -> tuple[Edge, frozenset[str]]:
    """Where something comes from by steps that each take one value, and their kinds."""
    kinds = set()
    while edge[0] is not None and kind(edge[0]) in UNARY and sum(active(edge[0])) == 1:
        kinds.add(kind(edge[0]))
        edge = edges(edge[0])[active(edge[0]).index(True)]
    return edge, frozenset(kinds)


def _tanhshrink(node: Node) -> Activation | None:
    """`x - tanh(x)`."""
    first, second = edges(node)[0], edges(node)[-1]
    if (
        second[0] is None
        or kind(second[0]) != "Tanh"
        or edges(second[0])[0] != first
        or getattr(node, "_saved_alpha", 1) != 1
    ):
        return None
    x = operand(second[0], 0)
    return Activation(x, x - x.tanh(), first)


# --- factors of products -------------------------------------------------------------------------------------------

SIZES = frozenset({"Rsqrt", "Reciprocal", "LinalgVectorNorm", "Norm", "Std", "Var", "StdMean", "VarMean"})
OFFSET_FIRST = frozenset({"Addmm", "Baddbmm", "Addbmm", "Addmv", "Addr", "Addcmul"})


def shares(at: Step) -> list[tuple[int, float]]:
    """How much of the ordinary derivative each operand of a product takes: half, all beside a constant, or none."""
    on = [i for i, a in enumerate(at.active) if a]
    if at.kind in ("Div", "Addcdiv"):
        at_denominator = 1 if at.kind == "Div" else 2
        kept = [i for i in on if i != at_denominator]
        if not kept:
            at.warn()
        return [(i, 1.0) for i in kept or on]
    if at.kind == "Pow":
        if _number(operand(at.node, 1, "exponent")) == 2 and len(on) == 1:
            return [(0, 0.5)]
        at.warn()
    offset = 1 if at.kind in OFFSET_FIRST else 0
    factors = [i for i in on if i >= offset and not (at.kind == "Convolution" and i == 2)]
    constant = [i for i in factors if len(factors) > 1 and is_constant(at.edge(i), at.walk.behind)]
    if len(factors) < 2 or 0 < len(constant) < len(factors):
        return [(i, 1.0) for i in on if i not in constant]
    return [(i, 0.5 if i in factors else 1.0) for i in on]


def is_constant(edge: Edge, active: Active) -> bool:
    """Whether a factor takes no relevance: a gate, or a normaliser."""
    node = _behind_moves(edge, active)
    if node is None:
        return False
    found = note(node)
    if kind(node) in ("Cat", "Stack") or (kind(node) == "CopySlices" and found is not None and found.replay is None):
        return all(is_constant(e, active) for e, on in zip(edges(node), active(node), strict=True) if on)
    if kind(node) == "CopySlices":
        if found is None or found.replay not in GATES:
            return False
        size, _, _, whole, _ = found.view
        return math.prod(size) == math.prod(whole) or shape(_above(edge, node, active)) == tuple(size)
    low, high = _range(edge, active)
    clamped = kind(node) in ("Clamp", "Hardtanh", "ClampMax", "ClampMin", *BOUNDS) and low >= 0 and high <= 1
    if clamped or (math.isclose(low, 0, abs_tol=1e-6) and math.isclose(high, 1, abs_tol=1e-6)):
        return True
    while kind(node) in ("Mul", "Div", "Add", "Clamp", "ClampMin") and sum(active(node)) == 1:
        node = _behind_moves(edges(node)[active(node).index(True)], active)
        if node is None:
            return False
    return kind(node) in SIZES or (kind(node) == "Pow" and _number(operand(node, 1, "exponent")) < 0)


GATES = (torch.ops.aten.sigmoid.default, torch.ops.aten.hardsigmoid.default)


def _above(edge: Edge, node: Node, active: Active) -> Edge:
    """The last edge on the way to a node whose tensor is what the product, or a move, reads."""
    last = edge
    while edge[0] is not node:
        last, edge = edge, edges(edge[0])[active(edge[0]).index(True)]
    return edge if last[0] is node else last


def _behind_moves(edge: Edge, active: Active) -> Node | None:
    node = edge[0]
    while node is not None and (kind(node) in MOVING or "Nearest" in kind(node)) and sum(active(node)) == 1:
        node = edges(node)[active(node).index(True)][0]
    return node


BOUNDED = {"Sigmoid": (0.0, 1.0), "Hardsigmoid": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Erf": (-1.0, 1.0)}
ANYTHING = (-math.inf, math.inf)


def _range(edge: Edge, active: Active) -> tuple[float, float]:
    """Between which numbers a factor lies, whatever the images: what its last steps tell."""
    node = _behind_moves(edge, active)
    if node is None or sum(active(node)) != 1:
        return ANYTHING
    what = kind(node)
    if what in BOUNDED:
        return BOUNDED[what]
    if what in ("Relu", "Exp"):
        return (0.0, math.inf)
    at = active(node).index(True)
    low, high = _range(edges(node)[at], active)
    if what in ("Hardtanh", "Clamp", "ClampMin", "ClampMax"):
        lower = getattr(node, "_saved_min_val" if what == "Hardtanh" else "_saved_min", None)
        upper = getattr(node, "_saved_max_val" if what == "Hardtanh" else "_saved_max", None)
        low = max(low, -math.inf if lower is None else _number(lower))
        return low, min(high, math.inf if upper is None else _number(upper))
    if what in BOUNDS:
        bound = _number(node._saved_other if at == 0 else node._saved_self)
        upper = what in ("Minimum", "Fmin")
        return (low, min(high, bound)) if upper else (max(low, bound), high)
    if what == "Reciprocal" and low >= 0:
        return 1 / high if high < math.inf else 0.0, 1 / low if low > 0 else math.inf
    if what == "Neg":
        return -high, -low
    scale, offset = _affine(node, what, at)
    ends = sorted((scale * low + offset, scale * high + offset)) if scale != 0 else [offset, offset]
    return (ends[0], ends[1]) if not any(math.isnan(e) for e in ends) else ANYTHING


def _affine(node: Node, what: str, at: int) -> tuple[float, float]:
    """The numbers a step multiplies by and adds, NaN where it is another step or they are not known."""
    unknown = (math.nan, math.nan)
    if what in ("Mul", "Div"):
        other = _number(node._saved_other if at == 0 else node._saved_self)
        return (other, 0.0) if what == "Mul" else (1 / other, 0.0) if at == 0 and other else unknown
    if what not in OFFSETS:
        return unknown
    found = note(node)
    if found is None or len(found.operands) < 2:
        return unknown
    alpha = float(getattr(node, "_saved_alpha", 1))
    other = _number(found.operands[1 if what == "Rsub" else 1 - at]) * alpha
    if what == "Rsub":
        return -alpha, _number(found.operands[1])
    if what == "Add":
        return (1.0, other)
    return (1.0, -other) if at == 0 else (-alpha, _number(found.operands[0]))


def _number(value: Any) -> float:
    """A constant as a number; NaN for a tensor of several that differ."""
    if isinstance(value, Tensor):
        one = value.numel() > 0 and not value.is_complex() and bool((value == value.reshape(-1)[0]).all())
        return float(value.reshape(-1)[0]) if one else math.nan
    return math.nan if value is None else float(value)
