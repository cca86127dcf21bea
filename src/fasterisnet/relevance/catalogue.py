"""The operations the engine knows by name, and how each is traced.

A handler is called instead of the operation, as `handler(trace, name, in_place, func, args, kwargs)`. Names are those of
torch's primitive functions without underscores: `add` stands for `+`, `+=`, `torch.add`, `Tensor.add_` and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fasterisnet.relevance.functions import ConvolutionSettings, Rectify
from fasterisnet.relevance.operations import (
    Activation,
    Convolution,
    Linear,
    Matmul,
    Norm,
    Operation,
    Pool,
    Product,
    Sum,
)

if TYPE_CHECKING:
    from fasterisnet.relevance.engine import Trace

Handler = Callable[["Trace", str, bool, Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[str, Handler] = {}

# Rearrangements: every number of the result is one of the operands' (or zero).
STRUCTURAL = frozenset(
    "view reshape flatten unflatten squeeze unsqueeze permute transpose swapaxes swapdims movedim moveaxis t adjoint "
    "contiguous clone expand expand_as view_as reshape_as repeat repeat_interleave tile getitem select narrow chunk split "
    "split_with_sizes tensor_split unbind unfold index_select gather take take_along_dim roll flip rot90 pad "
    "constant_pad_nd cat concat concatenate stack hstack vstack dstack where masked_fill dropout feature_dropout "
    "alpha_dropout feature_alpha_dropout pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle "
    "broadcast_to to type type_as float double half bfloat16 cpu cuda diagonal tril triu requires_grad detach_alias "
    "as_strided im2col col2im atleast_2d masked_select space_to_depth deepcopy setitem copy index_copy zero fill "
    "index_put masked_scatter scatter dropout1d dropout2d dropout3d identity __deepcopy__ retain_grad ravel positive "
    "broadcast_tensors meshgrid msort sort topk".split()
)

# Operations whose ordinary derivative is their rule.
ORDINARY = frozenset(
    "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool2d_with_indices amax amin max min "
    "maximum minimum softmax log_softmax neg negative einsum add sub mul div rsub grid_sample "
    "upsample_bicubic2d fft_rfft2".split()
) - {"fft_rfft2"}

# Results in (0, 1): constants when they multiply a signal.
GATES = frozenset({"softmax"})

# Known operations that may turn non-negative numbers into negative ones.
SIGNED = frozenset({"neg", "negative", "sub", "rsub", "log_softmax", "einsum", "upsample_bicubic2d", "mul", "add", "div"})

DIVISIONS = frozenset({"div", "divide", "true_divide", "truediv"})

# Activations whose native derivative reads their own result, which therefore must not be marked as changed.
_SAVE_RESULT = frozenset({"sigmoid", "tanh", "elu", "celu", "selu", "rrelu", "hardsigmoid", "leaky_relu"})

_ALIASES = {
    "iadd": "add", "radd": "add", "isub": "sub", "subtract": "sub", "imul": "mul", "rmul": "mul", "multiply": "mul",
    "itruediv": "div", "truediv": "div", "divide": "div", "true_divide": "div", "rtruediv": "rdiv", "rdiv": "rdiv",
    "rmatmul": "rmatmul", "clip": "clamp", "softmax_": "softmax", "special_softmax": "softmax", "__rsub__": "rsub",
    "expit": "sigmoid", "special_expit": "sigmoid", "concatenate": "cat", "silu": "silu", "swish": "silu",
}  # fmt: skip


def base_name(name: str) -> tuple[str, bool]:
    """`__iadd__` -> ("add", True), `relu_` -> ("relu", True), `__get__` -> ("get", False)."""
    plain = name.strip("_")
    in_place = (name.endswith("_") and not name.startswith("__")) or plain in ("iadd", "isub", "imul", "itruediv", "setitem")
    return _ALIASES.get(plain, plain), in_place


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Enters a handler under these names."""

    def enter(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return enter


def _bind(names: str, args: tuple[Any, ...], kwargs: dict[str, Any], **defaults: Any) -> list[Any]:
    values = dict(zip(names.split(), args, strict=False)) | kwargs
    return [values[n] if n in values else defaults.get(n) for n in names.split()]


# --- linear operations ---------------------------------------------------------------------------------------------


@handles("conv1d", "conv2d", "conv3d")
def convolution(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias, stride, padding, dilation, groups = _bind(
        "input weight bias stride padding dilation groups", args, kwargs, stride=1, padding=0, dilation=1, groups=1
    )
    n = weight.ndim - 2
    if trace.tag(x) is None or x.ndim != weight.ndim:
        return trace.ordinary(name, func, args, kwargs)
    dilation = _tuple(dilation, n)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(total % 2 for total in totals):
            sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
            with trace:
                x = F.pad(x, sides)
            padding = 0
        else:
            padding = [total // 2 for total in totals]
    settings = ConvolutionSettings(_tuple(stride, n), _tuple(padding, n), dilation, False, (0,) * n, groups)
    return _linear(trace, name, Convolution(trace.state, name, x, weight, bias, settings))


@handles("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias, stride, padding, output_padding, groups, dilation = _bind(
        "input weight bias stride padding output_padding groups dilation", args, kwargs,
        stride=1, padding=0, output_padding=0, groups=1, dilation=1,
    )  # fmt: skip
    n = weight.ndim - 2
    if trace.tag(x) is None or x.ndim != weight.ndim:
        return trace.ordinary(name, func, args, kwargs)
    settings = ConvolutionSettings(
        _tuple(stride, n), _tuple(padding, n), _tuple(dilation, n), True, _tuple(output_padding, n), groups
    )
    return _linear(trace, name, Convolution(trace.state, name, x, weight, bias, settings))


@handles("convolution")
def any_convolution(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias, *settings = _bind(
        "input weight bias stride padding dilation transposed output_padding groups", args, kwargs
    )
    if trace.tag(x) is None or x.ndim != weight.ndim:
        return trace.ordinary(name, func, args, kwargs)
    return _linear(trace, name, Convolution(trace.state, name, x, weight, bias, ConvolutionSettings(*settings)))


@handles("linear")
def linear(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias = _bind("input weight bias", args, kwargs)
    if trace.tag(x) is None or weight.ndim != 2:
        return trace.ordinary(name, func, args, kwargs)
    return _linear(trace, name, Linear(trace.state, name, x, weight, bias))


@handles("addmm")
def addmm(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    bias, x, weight = _bind("input mat1 mat2", args, kwargs)
    simple = len(args) + len(kwargs) == 3 and isinstance(bias, Tensor) and bias.ndim == 1
    if simple and trace.tag(x) is not None and trace.tag(weight) is None and trace.tag(bias) is None:
        return _linear(trace, name, Linear(trace.state, name, x, weight.t(), bias))
    return trace.ordinary(name, func, args, kwargs)


def _linear(trace: Trace, name: str, operation: Linear) -> Tensor:
    x = operation.x
    tag = trace.tag(x)
    assert tag is not None
    operation.non_negative, operation.path = tag.non_negative, tag.path
    # The ordinary derivative never needs the gradient of the images, so it is not computed.
    native_x = x.detach() if x is trace.entry and not trace.root_is_users else x
    y = operation.forward(native_x, operation.weight, operation.bias)
    trace.note(name, "linear")
    return trace.rewire(operation, y, operation=operation, origin=operation)


def _tuple(value: Any, n: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * n
    return tuple(value) * (n if len(value) == 1 else 1)


@handles("matmul", "mm", "bmm", "mv", "rmatmul")
def matmul(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    a, b = args[0], args[1] if len(args) > 1 else next(iter(kwargs.values()))
    if name == "rmatmul":
        a, b = b, a
    tag_a, tag_b = trace.tag(a), trace.tag(b)
    if tag_a is None and tag_b is None:
        return trace.ordinary(name, func, args, kwargs)
    if tag_a is None or tag_b is None:
        left = tag_a is None
        operation = Product(trace.state, name, b if left else a, a if left else b, left)
        return _linear(trace, name, operation)
    return _product_of_activations(trace, "matmul", torch.matmul, a, b, half_always=True)


def _product_of_activations(
    trace: Trace, name: str, func: Any, a: Tensor, b: Tensor, *, half_always: bool = False
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


@handles("scaled_dot_product_attention")
def attention(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    query, key, value, mask, dropout, causal, scale, grouped = _bind(
        "query key value attn_mask dropout_p is_causal scale enable_gqa", args, kwargs, dropout_p=0.0
    )
    if all(trace.tag(t) is None for t in (query, key, value)):
        return trace.ordinary(name, func, args, kwargs)
    trace.note(name, "softmax(q k^T) v, half to each factor")
    with trace:
        if grouped:
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        scores = (query @ key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        weights = torch.softmax(scores, -1)
        if dropout:
            weights = torch.dropout(weights, dropout, True)
        return weights @ value


# --- normalisation -------------------------------------------------------------------------------------------------


@handles("batch_norm")
def batch_norm(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias, mean, var, training, momentum, eps, cudnn = _bind(
        "input weight bias running_mean running_var training momentum eps cudnn_enabled", args, kwargs
    )
    tag = trace.tag(x)
    if tag is None:
        return trace.ordinary(name, func, args, kwargs)
    if training:
        y, mean, inverse, *_ = torch._batch_norm_impl_index(x, weight, bias, mean, var, True, momentum, eps, cudnn)
    else:
        y = func(x, weight, bias, mean, var, False, momentum, eps, cudnn)
        inverse = torch.rsqrt(var + eps)
    mean, inverse = mean.detach(), inverse.detach()

    def again() -> Tensor:
        if training:
            return torch.batch_norm(x, weight, bias, None, None, True, 0.0, eps, cudnn)
        return torch.batch_norm(x, weight, bias, mean, inverse**-2 - eps, False, 0.0, eps, cudnn)

    before = _fusable(trace, tag.operation, tag, "batch norm")
    before = before if isinstance(before, Linear) and _per_channel(before, y) else None
    operation = _norm(trace, name, x, weight, bias, mean, inverse, again, before)
    return trace.rewire(operation, y, operation=operation, origin=operation)


def _norm(
    trace: Trace, name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor,
    again: Callable[[], Tensor], before: Linear | None,
) -> Norm:  # fmt: skip
    scale = inverse.to(x.dtype) if weight is None else weight * inverse
    shift = (0 if bias is None else bias) - mean * scale
    trace.leave_root(name, x)
    trace.note(name, "norm, statistics constant")
    return Norm(trace.state, name, x, scale, shift.detach(), again, linear=before)


def _fusable(trace: Trace, before: Operation | None, tag: Any, behind: str) -> Operation | None:
    """The operation a batch norm or activation follows directly, told so."""
    if before is not None and tag.captured:
        before.fused_into = behind
    return before


def _per_channel(operation: Linear, y: Tensor) -> bool:
    return isinstance(operation, Convolution) or (type(operation) is Linear and y.ndim == 2)


@handles("layer_norm", "rms_norm", "group_norm", "instance_norm")
def layer_norm(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0] if args else kwargs["input"]
    if trace.tag(x) is None:
        return trace.ordinary(name, func, args, kwargs)
    y = func(*args, **kwargs)
    centred, groups = name != "rms_norm", 0
    if name == "instance_norm":
        _, weight, bias, mean, var, use_input_stats, _, eps, _ = _bind(
            "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled", args, kwargs
        )
        if not use_input_stats:
            again = lambda: func(*args, **kwargs)  # noqa: E731
            operation = _norm(trace, name, x, weight, bias, mean, torch.rsqrt(var + eps), again, None)
            return trace.rewire(operation, y, operation=operation, origin=operation)
        groups = x.shape[1]
    elif name == "group_norm":
        _, groups, weight, bias, eps = _bind("input num_groups weight bias eps", args, kwargs, eps=1e-5)
    elif name == "rms_norm":
        _, shape, weight, eps = _bind("input normalized_shape weight eps", args, kwargs)
        bias, eps = None, torch.finfo(x.dtype).eps if eps is None else eps
    else:
        _, shape, weight, bias, eps = _bind("input normalized_shape weight bias eps", args, kwargs, eps=1e-5)

    def grouped(t: Tensor) -> Tensor:
        return t.reshape(t.shape[0], groups, -1) if groups else t.flatten(-len(shape))

    def mean_of(t: Tensor) -> Tensor:
        return grouped(t).mean(-1, keepdim=True).expand_as(grouped(t)).reshape_as(t)

    # Constant for the relevance that passes, yet part of the graph: gradients of the maps stay exact.
    mean = mean_of(x) if centred else torch.zeros_like(x)
    inverse = torch.rsqrt(mean_of((x - mean) ** 2) + eps)
    gamma, beta = (
        t if t is None or not groups else t.view(-1, *[1] * (x.ndim - 2)) for t in (weight, bias)
    )
    scale = inverse if gamma is None else inverse * gamma
    shift = (0 if beta is None else beta.detach()) - mean * scale
    trace.leave_root(name, x)
    trace.note(name, "norm, normaliser constant")
    operation = Norm(
        trace.state, name, x, scale, shift, lambda: func(*args, **kwargs),
        centred=(lambda t: t - mean_of(t)) if centred else (lambda t: t),
    )  # fmt: skip
    return trace.rewire(operation, y, origin=operation)


# --- activations ---------------------------------------------------------------------------------------------------


@handles("relu")
def relu(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0] if args else kwargs["input"]
    tag = trace.tag(x)
    if tag is None:
        return trace.ordinary(name, func, args, kwargs)
    trace.leave_root(name, x)
    before = _fusable(trace, tag.operation, tag, "activation")
    operation = Activation(trace.state, name, x, before, None)
    operation.keep_norm_apart = bool(tag.captured)
    trace.operations.append(operation)
    trace.note(name, "ReLU rule")
    if in_place and tag.captured:
        trace.before_overwriting(x)
    y = cast(Tensor, Rectify.apply(operation, in_place, x, *operation.sources))
    trace.mark(y, non_negative=True)
    return y


@handles("clamp", "clamp_min", "threshold", "maximum")
def relu_in_disguise(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    """`clamp(min=0)`, `threshold(0, 0)` and `maximum(x, 0)` are ReLU; other bounds make another activation."""
    x = args[0] if args else kwargs["input"]
    bounds = [*args[1:], *[v for k, v in kwargs.items() if k not in ("input", "inplace", "max")]]
    upper = kwargs.get("max") if name == "clamp" and len(args) < 3 else (args[2] if name == "clamp" else None)
    if name == "clamp" and len(args) > 2:
        bounds = [args[1]]
    bounds = [b for b in bounds if not isinstance(b, bool)]
    if bounds and all(_is_zero(b) for b in bounds) and upper is None:
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
    "tanhshrink", "softsign", "_prelu_kernel", "prelu_kernel",
)  # fmt: skip
def activation(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0] if args else kwargs["input"]
    tag = trace.tag(x)
    if tag is None:
        return trace.ordinary(name, func, args, kwargs)
    trace.leave_root(name, x)
    if in_place:
        kept = trace.before_overwriting(x, keep=True)
        return trace.overwrite(x, _activated(trace, name, func, args, kwargs, kept, tag))
    return _activated(trace, name, func, args, kwargs, x, tag)


def _activated(
    trace: Trace, name: str, func: Any, args: Any, kwargs: Any, x: Tensor, tag: Any
) -> Tensor:
    settings = {k: v for k, v in kwargs.items() if k not in ("input", "inplace")}

    def function(t: Tensor) -> Tensor:
        return _out_of_place(func)(t, *args[1:], **settings)

    before = _fusable(trace, tag.operation, tag, "activation")
    operation = Activation(trace.state, name, x, before, function)
    y = function(x)
    if name in _SAVE_RESULT:
        y = y.clone()
    trace.note(name, "activation rule")
    gate = name in ("sigmoid", "hardsigmoid")
    y = trace.rewire(operation, y, gate=gate, non_negative=gate or name == "softplus" or _never_negative(name, args, kwargs))
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
    for home in (torch, torch._C._nn, Tensor, F):
        if hasattr(home, name[:-1]):
            return getattr(home, name[:-1])
    return func


@handles("glu")
def glu(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x, dim = _bind("input dim", args, kwargs, dim=-1)
    with trace:
        signal, gate = x.chunk(2, dim)
        return signal * gate.sigmoid()


# --- sums, products, quotients -------------------------------------------------------------------------------------


@handles("add", "sub")
def add(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    a, b = _bind("input other", args, {k: v for k, v in kwargs.items() if k in ("input", "other")})
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
    if "sum" not in trace.kinds or not tensors_only or in_place and tag_a is None:
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


def _sum(trace: Trace, name: str, a: Any, b: Any, alpha: float, facts: dict[str, Any]) -> Tensor:
    if name == "sub" or alpha != 1:
        tag = trace.tag(b)
        b = b * (-alpha if name == "sub" else alpha)
        if tag is not None:
            trace.mark(b)
    if trace.tag(a) is None:
        a, b = b, a
    b_is_source = trace.tag(b) is not None
    b_constant = b if b_is_source or not isinstance(b, Tensor) else b.detach()
    return trace.rewire(Sum(trace.state, name, a, b_constant, b_is_source), a + b, **facts)


@handles("mul", "square", "pow")
def mul(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    a, b = _bind("input other", args, {("other" if k == "exponent" else k): v for k, v in kwargs.items()})
    if name == "square" or (name == "pow" and isinstance(b, int | float) and b == 2):
        b = a
    elif name == "pow":
        return trace.ordinary(name, func, args, kwargs)
    tag_a, tag_b = trace.tag(a), trace.tag(b)
    if tag_a is not None and tag_b is not None:
        if in_place:
            kept = trace.before_overwriting(a, keep=True)
            return trace.overwrite(a, _product_of_activations(trace, "mul", torch.mul, kept, kept if b is a else b))
        return _product_of_activations(trace, "mul", torch.mul, a, b)
    return _scaled(trace, name, in_place, func, args, kwargs, tag_a or tag_b, b if tag_b is None else a)


def _scaled(
    trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any, tag: Any, factor: Any
) -> Any:
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


@handles("div")
def div(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    """A denominator computed from activations is a normaliser: constant."""
    a, b = _bind("input other", args, {k: v for k, v in kwargs.items() if k in ("input", "other")})
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


@handles("rsqrt", "reciprocal", "rdiv", "norm", "vector_norm", "linalg_vector_norm", "std", "var", "var_mean", "std_mean")
def normaliser(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
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
def pool(trace: Trace, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
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
    return trace.rewire(operation, y, gate=tag.gate, non_negative=tag.non_negative)
