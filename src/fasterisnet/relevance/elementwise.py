"""How activations, sums, products, quotients and pools are traced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fasterisnet.relevance.catalogue import GATES, bind, handles
from fasterisnet.relevance.functions import Rectify
from fasterisnet.relevance.operations import Activation, Matmul, Operation, Pool, Sum

if TYPE_CHECKING:
    from fasterisnet.relevance.catching import Catcher

# Activations whose native derivative reads their own result, which therefore must not be marked as changed.
_SAVE_RESULT = frozenset({"sigmoid", "tanh", "elu", "celu", "selu", "rrelu", "leaky_relu"})


# --- activations ---------------------------------------------------------------------------------------------------


@handles("relu")
def relu(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0] if args else kwargs["input"]
    tag = trace.tag(x)
    if tag is None:
        return trace.ordinary(name, func, args, kwargs)
    trace.leave_root(name, x)
    before = units_with(trace, tag.operation, tag, "activation")
    operation = Activation(trace.state, name, x, before, None)
    operation.keep_norm_apart = bool(tag.captured)
    trace.operations.append(operation)
    trace.note(name, "ReLU rule")
    if in_place:
        trace.before_overwriting(x, keep_output=False)
    y = cast(Tensor, Rectify.apply(operation, in_place, x, *operation.sources))
    trace.mark(y, non_negative=True)
    return y


@handles("clamp", "clamp_min", "threshold", "maximum")
def relu_in_disguise(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    """`clamp(min=0)`, `threshold(0, 0)` and `maximum(x, 0)` are ReLU; other bounds make another activation."""
    names = {
        "clamp": "input min max", "clamp_min": "input min", "maximum": "input other",
        "threshold": "input threshold value",
    }  # fmt: skip
    x, *bounds = bind(names[name], args, kwargs)
    upper = bounds.pop() if name == "clamp" else None
    if upper is None and all(_is_zero(bound) for bound in bounds):
        return relu(trace, "relu", in_place, func, (x,), {})
    if name == "maximum":
        return trace.ordinary(name, func, args, kwargs)
    return activation(trace, name, in_place, func, args, kwargs)


def _is_zero(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.requires_grad and value.numel() == 1 and bool(value == 0)
    return value == 0


@handles(
    "gelu", "silu", "mish", "hardswish", "leaky_relu", "elu", "celu", "selu", "prelu", "rrelu", "tanh", "sigmoid",
    "hardsigmoid", "hardtanh", "relu6", "softplus", "log_sigmoid", "logsigmoid", "hardshrink", "softshrink",
    "tanhshrink", "softsign", "prelu_kernel",
)  # fmt: skip
def activation(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0] if args else kwargs["input"]
    tag = trace.tag(x)
    if tag is None:
        return trace.ordinary(name, func, args, kwargs)
    trace.leave_root(name, x)
    if in_place:
        kept = trace.before_overwriting(x, keep=True)
        return trace.overwrite(x, _activated(trace, name, func, args, kwargs, kept, tag))
    return _activated(trace, name, func, args, kwargs, x, tag)


def _activated(trace: Catcher, name: str, func: Any, args: Any, kwargs: Any, x: Tensor, tag: Any) -> Tensor:
    settings = {k: v for k, v in kwargs.items() if k not in ("input", "inplace")}

    def function(t: Tensor) -> Tensor:
        if name == "hardsigmoid":  # the same numbers from operations that torch can differentiate twice
            return F.hardtanh(t + 3, 0.0, 6.0) / 6
        return _out_of_place(func)(t, *args[1:], **settings)

    before = units_with(trace, tag.operation, tag, "activation")
    operation = Activation(trace.state, name, x, before, function)
    y = function(x)
    if name in _SAVE_RESULT:
        y = y.clone()
    trace.note(name, "activation rule")
    gate = name in GATES
    y = trace.rewire(
        operation, y, gate=gate, non_negative=gate or name == "softplus" or _never_negative(name, args, kwargs)
    )
    operation.keep(y)
    return y


def _never_negative(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    low = {"relu6": lambda: 0, "hardtanh": lambda: args[1] if len(args) > 1 else kwargs.get("min_val", -1)}
    return name in low and not isinstance(low[name](), Tensor) and low[name]() >= 0


def _out_of_place(func: Any) -> Any:
    """`silu_` -> `silu`, wherever torch keeps it."""
    name = func.__name__
    if not name.endswith("_") or name.startswith("__"):
        return func
    for home in (torch, torch._C._nn, Tensor, F):  # pyright: ignore[reportAttributeAccessIssue]
        if hasattr(home, name[:-1]):
            return getattr(home, name[:-1])
    return func


@handles("glu")
def glu(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x, dim = bind("input dim", args, kwargs, dim=-1)
    with trace:
        signal, gate = x.chunk(2, dim)
        return signal * gate.sigmoid()


def units_with(trace: Catcher, before: Operation | None, tag: Any, behind: str) -> Operation | None:
    """The operation a batch norm or activation follows directly, told so."""
    if before is not None and tag.captured:
        before.fused_into = behind
    return before


# --- sums, products, quotients -------------------------------------------------------------------------------------


@handles("add", "sub")
def add(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    a, b = bind("input other", args, {k: v for k, v in kwargs.items() if k in ("input", "other")})
    alpha = kwargs.get("alpha", 1)
    tag_a, tag_b = trace.tag(a), trace.tag(b)
    tensors_only = all(isinstance(t, Tensor | int | float) for t in (a, b))
    if tag_a is None and tag_b is None:
        return trace.ordinary(name, func, args, kwargs)
    active = [t for t in (tag_a, tag_b) if t is not None]
    facts = {
        "gate": all(t.gate for t in active),
        "non_negative": name == "add" and len(active) == 2 and all(t.non_negative for t in active) and alpha >= 0,
    }
    trace.leave_root(name, a, b)
    adds_nothing = any(isinstance(t, int | float) and t == 0 for t in (a, b))
    if "sum" not in trace.kinds or not tensors_only or adds_nothing or (in_place and tag_a is None):
        if in_place:
            trace.before_overwriting(a)
        result = func(*args, **kwargs)
        trace.note(name, "ordinary derivative")
        trace.mark(result, **facts)
        return result
    trace.note(name, "sum")
    if in_place:
        return trace.overwrite(a, _sum(trace, name, trace.before_overwriting(a, keep=True), b, alpha, facts))
    return _sum(trace, name, a, b, alpha, facts)


def _sum(trace: Catcher, name: str, a: Any, b: Any, alpha: float, facts: dict[str, Any]) -> Tensor:
    if name == "sub" or alpha != 1:
        tag = trace.tag(b)
        b = b * (-alpha if name == "sub" else alpha)
        if tag is not None:
            trace.mark(b)
    if trace.tag(a) is None:
        a, b = b, a
    operation = Sum(trace.state, name, a, b, b_is_source=trace.tag(b) is not None)
    return trace.rewire(operation, a + b, origin=operation, **facts)


@handles("addcmul", "addcdiv")
def add_product(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    base, a, b = bind("input tensor1 tensor2", args, {k: v for k, v in kwargs.items() if k != "value"})
    value = kwargs.get("value", 1)
    if in_place:
        return trace.ordinary(name, func, args, kwargs)
    with trace:
        product = a * b if name == "addcmul" else a / b
        return base + (product if value == 1 else product * value)


@handles("rsub")
def reversed_difference(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    a, b = bind("input other", args, {k: v for k, v in kwargs.items() if k in ("input", "other")})
    with trace:
        return a * -kwargs.get("alpha", 1) + b


@handles("mul", "square", "pow")
def mul(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    a, b = bind("input other", args, {("other" if k == "exponent" else k): v for k, v in kwargs.items()})
    if name == "square" or (name == "pow" and isinstance(b, int | float) and b == 2):
        b = a
    elif name == "pow":
        return trace.ordinary(name, func, args, kwargs)
    tag_a, tag_b = trace.tag(a), trace.tag(b)
    if isinstance(b, Tensor) and tag_a is not None and tag_b is not None:
        if in_place:
            kept = trace.before_overwriting(a, keep=True)
            return trace.overwrite(a, product_of_activations(trace, "mul", torch.mul, kept, kept if b is a else b))
        return product_of_activations(trace, "mul", torch.mul, a, b)
    return _scaled(trace, name, in_place, func, args, kwargs, tag_a or tag_b, b if tag_b is None else a)


def _scaled(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any, tag: Any, factor: Any) -> Any:
    """Multiplied or divided by something that does not depend on the network input."""
    if tag is None:
        return trace.ordinary(name, func, args, kwargs)
    if in_place:
        trace.before_overwriting(args[0])
    result = func(*args, **kwargs)
    if result.requires_grad:
        trace.leave_root(name, *args)
        trace.note(name, "ordinary derivative")
        positive = isinstance(factor, int | float) and factor >= 0
        trace.mark(result, gate=tag.gate, non_negative=tag.non_negative and positive)
    return result


def product_of_activations(
    trace: Catcher, name: str, func: Any, a: Tensor, b: Tensor, *, half_always: bool = False
) -> Tensor:
    """Half of the relevance to each factor; a gate is a constant, the signal takes all."""
    tag_a, tag_b = trace.tag(a), trace.tag(b)
    assert tag_a is not None and tag_b is not None
    trace.leave_root(name, a, b)
    constant = tag_a if tag_a.gate and not tag_b.gate else tag_b if tag_b.gate and not tag_a.gate else None
    kinds = ["half", "half"]
    if constant is not None and not half_always:
        kinds = ["constant", "keep"] if constant is tag_a else ["keep", "constant"]
    trace.note(name, "product, half to each" if kinds[0] == "half" else "product with a gate: the signal takes all")
    with torch.enable_grad():
        first, second = (
            t if kind == "keep" else trace.operand(name, kind, t) for kind, t in zip(kinds, (a, b), strict=True)
        )
        y = func(first, second)
    facts = {"gate": tag_a.gate and tag_b.gate, "non_negative": tag_a.non_negative and tag_b.non_negative}
    if name == "matmul" and "matmul" in trace.kinds and a.ndim > 1 and b.ndim > 1:
        weights = None if constant is None else a if constant is tag_a else b
        return trace.rewire(Matmul(trace.state, name, a, b, weights), y, **facts)
    trace.mark(y, **facts)
    return y


@handles("div")
def div(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    """A denominator computed from activations is a normaliser: constant."""
    a, b = bind("input other", args, {k: v for k, v in kwargs.items() if k in ("input", "other")})
    tag_a, tag_b = trace.tag(a), trace.tag(b)
    if tag_b is None:
        return _scaled(trace, name, in_place, func, args, kwargs, tag_a, b)
    if tag_a is None or "rounding_mode" in kwargs:
        return trace.ordinary("reciprocal", func, args, kwargs)
    trace.leave_root(name, a, b)
    trace.note(name, "quotient, denominator constant")
    kept = trace.before_overwriting(a, keep=True) if in_place else a
    y = torch.div(kept, trace.operand(name, "constant", b))
    trace.mark(y, gate=tag_a.gate, non_negative=tag_a.non_negative and tag_b.non_negative)
    return trace.overwrite(a, y) if in_place else y


@handles(
    "rsqrt", "reciprocal", "rdiv", "norm", "vector_norm", "linalg_vector_norm", "std", "var", "var_mean", "std_mean"
)
def normaliser(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    """Measures of size: constants in products, as in every normalisation; no rule if a signal."""
    result = trace.ordinary(name, func, args, kwargs)
    parts = result if isinstance(result, tuple) else (result,)
    if any(trace.tag(t) is not None for t in args):
        for t in parts[:1]:
            if t.requires_grad:
                trace.mark(t, gate=True, non_negative=True)
    return result


# --- pooling and other non-negative linear maps --------------------------------------------------------------------


@handles(
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
    "mean", "sum", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_trilinear3d", "upsample_nearest_exact1d", "upsample_nearest_exact2d",
    "upsample_nearest_exact3d", "nanmean", "sum_to_size",
)  # fmt: skip
def pool(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0] if args else kwargs["input"]
    tag = trace.tag(x)
    if tag is None:
        return trace.ordinary(name, func, args, kwargs)
    settings = {k: v for k, v in kwargs.items() if k != "input"}

    def function(t: Tensor) -> Tensor:
        return func(t, *args[1:], **settings)

    trace.leave_root(name, x)
    if "pool" not in trace.kinds:
        trace.note(name, "ordinary derivative")
        y = function(x)
        trace.mark(y, gate=tag.gate, non_negative=tag.non_negative)
        return y
    trace.note(name, "linear without parameters")
    operation = Pool(trace.state, name, x, function, signed=not tag.non_negative)
    y = function(trace.operand(name, "positive", x) if operation.signed else x)
    return trace.rewire(operation, y, origin=operation, gate=tag.gate, non_negative=tag.non_negative)
