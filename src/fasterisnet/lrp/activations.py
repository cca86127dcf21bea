"""Telling activations by what they compute, not by how they were written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fasterisnet.lrp.gates import BOUNDS, unscaled, value_range
from fasterisnet.lrp.kinds import ACTIVATIONS, Edge, Node, edges, kind, shape, source, spoken
from fasterisnet.lrp.layers import Active, operand
from fasterisnet.lrp.record import Note, note


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
    return _less_itself(node) if what == "Sub" else None


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
    if what == "Hardtanh":
        return node._saved_min_val == 0 and node._saved_max_val == math.inf
    if what == "LeakyRelu":
        return node._saved_negative_slope == 0
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
    """`x / g(x)` (softsign), and `x * g(x)` with a squashing function g: SiLU, hard-swish, GELU, Mish by hand."""
    if len(active(node)) < 2 or not all(active(node)):
        return None
    for at in (0, 1) if what == "Mul" else (0,):
        a, other = (node._saved_self, node._saved_other) if at == 0 else (node._saved_other, node._saved_self)
        x, edge = unscaled(a, edges(node)[at], active)
        steps = _steps(edges(node)[1 - at], edge, active)
        if steps is None or (steps & SQUASHING and len(steps & ACTIVATIONS) > 1 and "Softplus" not in steps):
            continue  # a gate of another activation of x is a gate
        if what == "Div" or _squashes(edges(node)[1 - at], active):
            return Activation(x, a * other if what == "Mul" else a / other, edge)
    return None


def _squashes(edge: Edge, active: Active) -> bool:
    """Whether something lies between 0 and a finite number, whatever the images."""
    low, high = value_range(edge, active)
    node = source(edge)[0]
    if node is not None and kind(node) == "Tanh":
        low = max(low, min(value_range(edges(node)[0], active)[0], 0.0))
    return math.isclose(low, 0, abs_tol=1e-6) and high < math.inf


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


def _less_itself(node: Node) -> Activation | None:
    """`x - tanh(x)`, and `x - min(x, 0)`, a ReLU."""
    first, (below, _) = edges(node)[0], edges(node)[-1]
    if below is None or edges(below)[:1] != (first,) or getattr(node, "_saved_alpha", 1) != 1:
        return None
    if kind(below) == "Tanh":
        x = operand(below, 0)
        return Activation(x, x - x.tanh(), first)
    if kind(below) in OF_ONE and _mirrors(below, kind(below)):
        x = operand(below, 0, "self")
        return Activation(x, x.clamp(min=0), first, True)
    return None
