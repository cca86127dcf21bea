"""Telling activations, gates and normalisers by what they compute, not by how they were written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fasterisnet.lrp.kinds import ACTIVATIONS, MOVING, Edge, Node, edges, kind, source
from fasterisnet.lrp.layers import Active, operand
from fasterisnet.lrp.record import note

if TYPE_CHECKING:
    from fasterisnet.lrp.walk import Step


class Activation(NamedTuple):
    """`y = f(x)`, x coming from `edge`."""

    x: Tensor
    y: Tensor
    edge: Edge
    rectifies: bool = False


# --- activations ---------------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[Node, Tensor], Tensor]] = {
    "Gelu": lambda n, x: F.gelu(x, approximate=n._saved_approximate),
    "Silu": lambda n, x: F.silu(x),
    "Mish": lambda n, x: F.mish(x),
    "Hardswish": lambda n, x: F.hardswish(x),
    "LeakyRelu": lambda n, x: F.leaky_relu(x, n._saved_negative_slope),
    "Elu": lambda n, x: torch.ops.aten.elu(x, n._saved_alpha, n._saved_scale, n._saved_input_scale),
    "Celu": lambda n, x: F.celu(x, n._saved_alpha),
    "PreluKernel": lambda n, x: torch.where(x > 0, x, n._saved_weight * x),
    "RreluWithNoise": lambda n, x: x * torch.where(x > 0, torch.ones_like(x), n._saved_noise)
    if n._saved_training
    else F.leaky_relu(x, (n._saved_lower + n._saved_upper) / 2),
    "Tanh": lambda n, x: x.tanh(),
    "Sigmoid": lambda n, x: x.sigmoid(),
    "Hardsigmoid": lambda n, x: F.hardtanh(x + 3, 0.0, 6.0) / 6,  # torch cannot differentiate its own twice
    "Hardtanh": lambda n, x: F.hardtanh(x, n._saved_min_val, n._saved_max_val),
    "Softplus": lambda n, x: F.softplus(x, n._saved_beta, n._saved_threshold),
    "LogSigmoid": lambda n, x: F.logsigmoid(x),
    "Hardshrink": lambda n, x: F.hardshrink(x, n._saved_lambd),
    "Softshrink": lambda n, x: F.softshrink(x, n._saved_lambd),
    "Threshold": lambda n, x: F.threshold(x, n._saved_threshold, operand(n, 2)),
    "Clamp": lambda n, x: torch.clamp(x, n._saved_min, n._saved_max),
    "ClampMin": lambda n, x: torch.clamp(x, min=n._saved_min),
    "ClampMax": lambda n, x: torch.clamp(x, max=n._saved_max),
}
# Element-wise steps of functions of one activation, such as `x * tanh(softplus(x))`.
UNARY = ACTIVATIONS | {"Mul", "Div", "Add", "Sub", "Rsub", "Neg", "Exp", "Erf", "Reciprocal", "Log1P", "Expm1", "Abs",
                       "Clone", "ToCopy", "Sqrt", "Rsqrt", "Pow", "Log"}  # fmt: skip


def activation(node: Node, active: Active) -> Activation | None:
    """The activation a node is: by its kind, as a mask made of its own signs, or as a product `x * g(x)`."""
    what, found = kind(node), note(node)
    if found is not None and found.selected is not None:
        return _masked(node, found.selected, active(node))
    if what in FUNCTIONS:
        x = operand(node, 0, "self")
        edge = edges(node)[0]
        rectifies = _rectifies(node, what)
        y = x.clamp(min=0) if rectifies else FUNCTIONS[what](node, x)
        return Activation(x, y, edge if rectifies else _without_rectifier(node, edge), rectifies)
    if what == "Relu":
        y = node._saved_result
        return Activation(y, y, edges(node)[0], True)
    if what in ("Maximum", "Minimum"):
        return _bounded(node, what, active(node))
    if what in ("Mul", "Div"):
        return _of_itself(node, what, active(node))
    return _tanhshrink(node) if what == "Sub" else None


def _rectifies(node: Node, what: str) -> bool:
    if what == "Threshold":
        return node._saved_threshold == 0 and operand(node, 2) == 0
    upper = getattr(node, "_saved_max", None) if what == "Clamp" else None
    return what in ("Clamp", "ClampMin") and upper is None and _all_zero(node._saved_min)


def _all_zero(bound: Any) -> bool:
    return bound is not None and bool((torch.as_tensor(bound) == 0).all())


def _without_rectifier(node: Node, edge: Edge) -> Edge:
    """`min(relu(x), 6)` is one activation: the bound behind a ReLU takes the ReLU's place."""
    upper_only = kind(node) in ("ClampMax", "Minimum") or (kind(node) == "Clamp" and node._saved_min is None)
    below = source(edge)[0]
    if not upper_only or below is None:
        return edge
    is_relu = kind(below) == "Relu" or (kind(below) in FUNCTIONS and _rectifies(below, kind(below)))
    return edges(below)[0] if is_relu else edge


def _bounded(node: Node, what: str, active: list[bool]) -> Activation | None:
    """`max(x, 0)` is a ReLU, another constant bound another activation. Of two activations the winner takes all."""
    a, b = node._saved_self, node._saved_other
    for at, (x, bound) in enumerate(((a, b), (b, a))):
        if active[at] and what == "Maximum" and _all_zero(bound):
            return Activation(x, x.clamp(min=0), edges(node)[at], True)
        if active[at] and not active[1 - at]:
            y = torch.maximum(x, bound) if what == "Maximum" else torch.minimum(x, bound)
            return Activation(x, y, _without_rectifier(node, edges(node)[at]))
    return None


def _masked(node: Node, x: Tensor, active: list[bool]) -> Activation | None:
    """`x * (x > 0)`, `where(x > 0, x, 0)`, `x[x < 0] = 0`: ReLUs, if the values say so too."""
    with torch.no_grad():
        kept = node(torch.ones(tuple(node._input_metadata[0].shape), dtype=x.dtype, device=x.device))
        kept = kept[active.index(True)] if isinstance(kept, tuple) else kept
        is_relu = kept.shape == x.shape and torch.equal(x * kept, x.clamp(min=0))
    return Activation(x, x.clamp(min=0), edges(node)[active.index(True)], True) if is_relu else None


def _of_itself(node: Node, what: str, active: list[bool]) -> Activation | None:
    """`x * g(x)` and `x / g(x)`, g element by element: SiLU, hard-swish, Mish, softsign by hand."""
    if len(active) < 2 or not all(active):
        return None
    for at in (0, 1) if what == "Mul" else (0,):
        if _is_function_of(edges(node)[1 - at], source(edges(node)[at])):
            x, other = (node._saved_self, node._saved_other) if at == 0 else (node._saved_other, node._saved_self)
            return Activation(x, x * other if what == "Mul" else x / other, edges(node)[at])
    return None


def _is_function_of(edge: Edge, x: Edge, steps: int = 0) -> bool:
    """Whether an edge is computed from x alone, element by element, in at least one step that is not linear."""
    node = edge[0]
    if node is None or steps > 8 or edge == x:
        return edge == x and steps > 0
    if kind(node) not in UNARY:
        return False
    below = [e for e in edges(node) if e[0] is not None and not hasattr(e[0], "variable")]
    return len(below) > 0 and all(_is_function_of(e, x, steps + 1) for e in below)


def _tanhshrink(node: Node) -> Activation | None:
    """`x - tanh(x)`."""
    first, second = edges(node)[0], edges(node)[-1]
    if second[0] is None or kind(second[0]) != "Tanh" or edges(second[0])[0] != first or getattr(node, "_saved_alpha", 1) != 1:
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
    factors = [i for i in on if i >= offset]
    if len(factors) < 2:
        return [(i, 1.0) for i in on]
    constant = {i: at.kind == "Mul" and is_constant(at.edge(i), at.walk.active) for i in factors}
    one_sided = any(constant.values()) and not all(constant.values())
    return [(i, 1.0 if i < offset or one_sided else 0.5) for i in on if not (one_sided and constant.get(i))]


def is_constant(edge: Edge, active: Active) -> bool:
    """Whether a factor takes no relevance: a gate, or a normaliser."""
    node = _behind_moves(edge, active)
    if node is None:
        return False
    low, high = _range(edge, active)
    clamped = kind(node) in ("Clamp", "Hardtanh") and 0 <= low and high <= 1
    if clamped or (math.isclose(low, 0, abs_tol=1e-6) and math.isclose(high, 1, abs_tol=1e-6)):
        return True
    while kind(node) in ("Mul", "Div", "Add", "Clamp", "ClampMin") and sum(active(node)) == 1:
        node = _behind_moves(edges(node)[active(node).index(True)], active)
        if node is None:
            return False
    return kind(node) in SIZES or (kind(node) == "Pow" and _number(operand(node, 1, "exponent")) < 0)


def _behind_moves(edge: Edge, active: Active) -> Node | None:
    node = edge[0]
    while node is not None and kind(node) in MOVING and sum(active(node)) == 1:
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
    if what in ("Minimum", "Maximum") or what not in ("Add", "Sub", "Rsub"):
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
    """A constant as a number; NaN for a tensor of several."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else math.nan
    return math.nan if value is None else float(value)
