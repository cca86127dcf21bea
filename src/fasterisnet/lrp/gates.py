"""Factors of products: which carries the signal, and which is a gate or a normaliser, by the values it can have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fasterisnet.lrp.kinds import MOVING, SAME, SUMS, Edge, Node, edges, kind, only_moves, shape, signs, source
from fasterisnet.lrp.layers import Active, operand
from fasterisnet.lrp.masks import one_number
from fasterisnet.lrp.record import note

if TYPE_CHECKING:
    from fasterisnet.lrp.step import Step

BOUNDS = {"Maximum": torch.maximum, "Minimum": torch.minimum, "Fmax": torch.fmax, "Fmin": torch.fmin}
CLAMPS = frozenset({"Clamp", "Hardtanh", "ClampMax", "ClampMin", *BOUNDS})
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
    """Whether a factor takes no relevance: a gate, or a normaliser, times any constants."""
    node = _unscaled(edge, active)
    if node is None:
        return False
    found = note(node)
    on = [e for e, is_on in zip(edges(node), active(node), strict=True) if is_on]
    joined = kind(node) in ("Cat", "Stack") or (kind(node) == "CopySlices" and found is not None and not found.replay)
    if joined or (kind(node) == "Mul" and len(on) == 2) or kind(node) == "Sqrt":
        return all(is_constant(e, active) for e in on)
    if kind(node) == "Div" and len(on) == 2:  # a normaliser among others
        return is_constant(on[0], active)
    if kind(node) == "Pow" and len(on) == 1 and _number(operand(node, 1, "exponent")) > 0:
        return is_constant(on[0], active)
    if kind(node) == "CopySlices":
        if found is None or found.replay not in GATES:
            return False
        size, _, _, whole, _ = found.view
        return math.prod(size) == math.prod(whole) or shape(_above(edge, node, active)) == tuple(size)
    low, high = value_range((node, 0), active)
    reached = value_range((node, 0), active, reached=True)
    if squeezes((low, high)) or squeezes(reached) or (kind(node) in CLAMPS and low >= 0 and high <= 1):
        return True
    while kind(node) in ("Mul", "Div", "Add", "Clamp", "ClampMin") and sum(active(node)) == 1:
        node = _behind_moves(edges(node)[active(node).index(True)], active)
        if node is None:
            return False
    negative = kind(node) == "Pow" and _number(operand(node, 1, "exponent")) < 0
    return kind(node) in SIZES or negative or (kind(node) in ("Sum", "Mean") and _is_square(edges(node)[0][0]))


def _is_square(node: Node) -> bool:
    """Whether something is `x * x`, or `x ** 2`: its sum is a size, as a norm."""
    alone = kind(node) == "Pow" and edges(node)[1:] in ((), ((None, 0),))
    return _number(operand(node, 1, "exponent")) == 2 if alone else kind(node) == "Mul" and len(set(edges(node))) == 1


def squeezes(between: tuple[float, float]) -> bool:
    """Whether a range is that of a gate, times a number: from zero to somewhere."""
    near, far = sorted(between, key=abs)
    return abs(near) <= 1e-6 and 0 < abs(far) < math.inf


GATES = (torch.ops.aten.sigmoid.default, torch.ops.aten.hardsigmoid.default)


def _above(edge: Edge, node: Node, active: Active) -> Edge:
    """The last edge on the way to a node whose tensor is what the product, or a move, reads."""
    last = edge
    while edge[0] is not node:
        last, edge = edge, edges(edge[0])[active(edge[0]).index(True)]
    return edge if last[0] is node else last


def _behind_moves(edge: Edge, active: Active) -> Node | None:
    node = edge[0]
    while node is not None and (kind(node) in MOVING or only_moves(node)) and sum(active(node)) == 1:
        node = edges(node)[active(node).index(True)][0]
    return node


def _unscaled(edge: Edge, active: Active) -> Node | None:
    """What a factor is made of, apart from what it was multiplied with, be it learned, and how it was rearranged."""
    node = _behind_moves(edge, active)
    while node is not None and sum(active(node)) == 1:
        at = active(node).index(True)
        if kind(node) not in ("Mul", "Neg", "NativeDropout") and not (kind(node) == "Div" and at == 0):
            break
        node = _behind_moves(edges(node)[at], active)
    return node


def squashes(edge: Edge, active: Active) -> bool:
    """Whether something lies between zero and a finite number, whatever the images, times any constants."""
    node = _unscaled(edge, active)
    if node is None:
        return False
    low, high = value_range((node, 0), active)
    if kind(node) == "Tanh":
        low = max(low, min(value_range(edges(node)[0], active)[0], 0.0))
    return squeezes((low, high)) or squeezes(value_range((node, 0), active, reached=True))


BOUNDED = {"Sigmoid": (0.0, 1.0), "Hardsigmoid": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Erf": (-1.0, 1.0)}
ANYTHING = (-math.inf, math.inf)


def value_range(edge: Edge, active: Active, reached: bool = False) -> tuple[float, float]:
    """Between which numbers a factor lies, whatever the images: what its last steps tell, as if bounds were reached."""
    node = _behind_moves(edge, active)
    if node is None or sum(active(node)) != 1:
        return ANYTHING
    what = kind(node)
    if what in BOUNDED:
        return BOUNDED[what]
    if what in ("Relu", "Exp", "Softplus", "Abs"):
        return (0.0, math.inf)
    at = active(node).index(True)
    low, high = value_range(edges(node)[at], active, reached)
    if what in CLAMPS:
        lower, upper = (None if bound is None else _number(bound) for bound in clamped_to(node, at))
        if reached:
            return low if lower is None else lower, high if upper is None else upper
        return max(low, -math.inf if lower is None else lower), min(high, math.inf if upper is None else upper)
    if what == "Reciprocal" and low >= 0:
        return 1 / high if high < math.inf else 0.0, 1 / low if low > 0 else math.inf
    if what == "Neg":
        return -high, -low
    scale, offset = as_affine(node, what, at) if not is_learned(constant_of(node, what, at)) else (math.nan, math.nan)
    ends = sorted((scale * low + offset, scale * high + offset)) if scale != 0 else [offset, offset]
    return (ends[0], ends[1]) if not any(math.isnan(e) for e in ends) else ANYTHING


def clamped_to(node: Node, at: int) -> tuple[Any, Any]:
    """The bounds that a step clamps operand `at` to, None where there is none."""
    what = kind(node)
    if what in BOUNDS:
        bound = node._saved_other if at == 0 else node._saved_self
        return (bound, None) if what in ("Maximum", "Fmax") else (None, bound)
    low, high = ("_saved_min_val", "_saved_max_val") if what == "Hardtanh" else ("_saved_min", "_saved_max")
    return getattr(node, low, None), getattr(node, high, None)


def as_affine(node: Node, what: str, at: int) -> tuple[float, float]:
    """The numbers a step multiplies by and adds, NaN where it is another step or they are not known."""
    unknown = (math.nan, math.nan)
    if what == "Neg":
        return -1.0, 0.0
    if what in ("Mul", "Div"):
        other = _number(constant_of(node, what, at))
        return (other, 0.0) if what == "Mul" else (1 / other, 0.0) if at == 0 and other else unknown
    if what not in SUMS:
        return unknown
    found = note(node)
    if found is None or len(found.operands) < 2:
        return unknown
    return signs(node)[at], signs(node)[1 - at] * _number(found.operands[1 - at])


def constant_of(node: Node, what: str, at: int) -> Any:
    """What a product or a sum of two, of which operand `at` depends on the images, takes besides it."""
    if what in ("Mul", "Div"):
        return node._saved_other if at == 0 else node._saved_self
    found = note(node) if what in SUMS else None
    return None if found is None or len(found.operands) < 2 else found.operands[1 - at]


def is_learned(value: Any) -> bool:
    """Whether training changes it, so that nothing may be decided by the value it has now."""
    return isinstance(value, Tensor) and value.requires_grad


def _number(value: Any) -> float:
    """A constant as a number; NaN for a tensor of several that differ."""
    number = one_number(value.detach() if isinstance(value, Tensor) else value)
    return math.nan if number is None else float(number)


def unscaled(
    edge: Edge, active: Active, through: frozenset[str] = SAME, learned: bool = True
) -> tuple[float | Tensor, Edge]:
    """The number (`learned` or not) that steps multiplied with, and the edge before, `through` nodes of these kinds."""
    number: float | Tensor = 1.0
    while (node := source(edge, through)[0]) is not None and sum(active(node)) == 1:
        what, at = kind(node), active(node).index(True)
        scale, value = constant_of(node, what, at), as_affine(node, what, at)[0] if what not in SUMS else math.nan
        if math.isnan(value) or value == 0 or (is_learned(scale) and not (learned and scale.numel() == 1)):
            break
        factor = value if not is_learned(scale) else scale if what == "Mul" else 1 / scale
        number, edge = number * factor, edges(node)[at]
    return number, source(edge)
