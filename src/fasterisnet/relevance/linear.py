"""How linear operations, attention and normalisations are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fasterisnet.relevance.catalogue import HANDLERS, bind, handles
from fasterisnet.relevance.elementwise import product_of_activations, units_with
from fasterisnet.relevance.functions import ConvolutionSettings
from fasterisnet.relevance.linear_operations import Contraction, Convolution, Linear, Product, SmallConvolution
from fasterisnet.relevance.operations import Norm
from fasterisnet.small_maps import numbers, small

if TYPE_CHECKING:
    from fasterisnet.relevance.catching import Catcher

__all__ = ["HANDLERS"]


# --- linear operations ---------------------------------------------------------------------------------------------


@handles("conv1d", "conv2d", "conv3d")
def convolution(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias, stride, padding, dilation, groups = bind(
        "input weight bias stride padding dilation groups", args, kwargs, stride=1, padding=0, dilation=1, groups=1
    )
    n = weight.ndim - 2
    if trace.tag(x) is None or x.ndim != weight.ndim:
        return trace.ordinary(name, func, args, kwargs)
    dilation = numbers(dilation, n)
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
    settings = ConvolutionSettings(numbers(stride, n), numbers(padding, n), dilation, False, (0,) * n, groups)
    geometry = small(x, weight, settings.stride, settings.padding, dilation, groups)
    if geometry is not None:
        return _linear(trace, name, SmallConvolution(trace.state, name, x, weight, bias, geometry))
    return _linear(trace, name, Convolution(trace.state, name, x, weight, bias, settings))


@handles("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias, stride, padding, output_padding, groups, dilation = bind(
        "input weight bias stride padding output_padding groups dilation", args, kwargs,
        stride=1, padding=0, output_padding=0, groups=1, dilation=1,
    )  # fmt: skip
    n = weight.ndim - 2
    if trace.tag(x) is None or x.ndim != weight.ndim:
        return trace.ordinary(name, func, args, kwargs)
    settings = ConvolutionSettings(
        numbers(stride, n), numbers(padding, n), numbers(dilation, n), True, numbers(output_padding, n), groups
    )
    return _linear(trace, name, Convolution(trace.state, name, x, weight, bias, settings))


@handles("convolution")
def any_convolution(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias, *settings = bind(
        "input weight bias stride padding dilation transposed output_padding groups", args, kwargs
    )
    if trace.tag(x) is None or x.ndim != weight.ndim:
        return trace.ordinary(name, func, args, kwargs)
    return _linear(trace, name, Convolution(trace.state, name, x, weight, bias, ConvolutionSettings(*settings)))


@handles("linear")
def linear(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias = bind("input weight bias", args, kwargs)
    if trace.tag(x) is None or weight.ndim != 2:
        return trace.ordinary(name, func, args, kwargs)
    return _linear(trace, name, Linear(trace.state, name, x, weight, bias))


@handles("addmm", "baddbmm")
def addmm(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    bias, a, b, beta, alpha = bind("input mat1 mat2 beta alpha", args, _renamed(kwargs), beta=1, alpha=1)
    if all(trace.tag(t) is None for t in (bias, a, b)) or in_place:
        return trace.ordinary(name, func, args, kwargs)
    is_layer = trace.tag(bias) is None and trace.tag(b) is None and bias.ndim == 1 and beta == alpha == 1
    if is_layer and name == "addmm":
        return _linear(trace, name, Linear(trace.state, name, a, b.t(), bias))
    with trace:
        product = a @ b
        return (bias if beta == 1 else bias * beta) + (product if alpha == 1 else product * alpha)


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    names = {"batch1": "mat1", "batch2": "mat2"}
    return {names.get(key, key): value for key, value in kwargs.items()}


def _linear(trace: Catcher, name: str, operation: Linear) -> Tensor:
    x = operation.x
    tag = trace.tag(x)
    assert tag is not None
    operation.non_negative, operation.path = tag.non_negative, tag.path
    # The ordinary derivative never needs the gradient of the images, so it is not computed.
    operation.ends_here = x is trace.entry and not trace.root_is_users
    y = operation.forward(operation.x_value, operation.weight, operation.bias)
    trace.note(name, "linear")
    return trace.rewire(operation, y, operation=operation, origin=operation)


@handles("matmul", "mm", "bmm", "mv", "rmatmul")
def matmul(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
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
    return product_of_activations(trace, "matmul", torch.matmul, a, b, half_always=True)


@handles("einsum")
def einsum(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    equation, *operands = args
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    active = [t for t in operands if trace.tag(t) is not None]
    if not active or len(operands) != 2 or not isinstance(equation, str) or "->" not in equation:
        return trace.ordinary(name, func, args, kwargs)
    if len(active) == 2:
        return product_of_activations(trace, name, lambda a, b: torch.einsum(equation, a, b), *operands)
    left = active[0] is operands[1]
    x, weight = operands[::-1] if left else operands
    return _linear(trace, name, Contraction(trace.state, name, x, weight, equation.replace(" ", ""), left))


@handles("scaled_dot_product_attention")
def attention(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    query, key, value, mask, dropout, causal, scale, grouped = bind(
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
def batch_norm(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias, mean, var, training, momentum, eps, cudnn = bind(
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

    before = units_with(trace, tag.operation, tag, "batch norm")
    before = before if isinstance(before, Linear) and _per_channel(before, y) else None
    operation = _norm(trace, name, x, weight, bias, mean, inverse, again, before)
    return trace.rewire(operation, y, operation=operation, origin=operation)


def _norm(
    trace: Catcher, name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor,
    again: Callable[[], Tensor], before: Linear | None,
) -> Norm:  # fmt: skip
    scale = inverse.to(x.dtype) if weight is None else weight * inverse
    shift = (0 if bias is None else bias) - mean * scale
    trace.leave_root(name, x)
    trace.note(name, "norm, statistics constant")
    return Norm(trace.state, name, x, scale, shift.detach(), again, linear=before)


def _per_channel(operation: Linear, y: Tensor) -> bool:
    return isinstance(operation, Convolution | SmallConvolution) or (type(operation) is Linear and y.ndim == 2)


@handles("layer_norm", "rms_norm", "group_norm", "instance_norm")
def layer_norm(trace: Catcher, name: str, in_place: bool, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0] if args else kwargs["input"]
    if trace.tag(x) is None:
        return trace.ordinary(name, func, args, kwargs)
    y = func(*args, **kwargs)
    centred, groups, shape = name != "rms_norm", 0, ()
    if name == "instance_norm":
        _, weight, bias, mean, var, use_input_stats, _, eps, _ = bind(
            "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled", args, kwargs
        )
        if not use_input_stats:
            again = lambda: func(*args, **kwargs)  # noqa: E731
            operation = _norm(trace, name, x, weight, bias, mean, torch.rsqrt(var + eps), again, None)
            return trace.rewire(operation, y, operation=operation, origin=operation)
        groups = x.shape[1]
    elif name == "group_norm":
        _, groups, weight, bias, eps = bind("input num_groups weight bias eps", args, kwargs, eps=1e-5)
    elif name == "rms_norm":
        _, shape, weight, eps = bind("input normalized_shape weight eps", args, kwargs)
        bias, eps = None, torch.finfo(x.dtype).eps if eps is None else eps
    else:
        _, shape, weight, bias, eps = bind("input normalized_shape weight bias eps", args, kwargs, eps=1e-5)

    def grouped(t: Tensor) -> Tensor:
        return t.reshape(t.shape[0], groups, -1) if groups else t.flatten(-len(shape))

    def mean_of(t: Tensor) -> Tensor:
        return grouped(t).mean(-1, keepdim=True).expand_as(grouped(t)).reshape_as(t)

    # Constant for the relevance that passes, yet part of the graph: gradients of the maps stay exact.
    mean = mean_of(x) if centred else torch.zeros_like(x)
    inverse = torch.rsqrt(mean_of((x - mean) ** 2) + eps)
    gamma, beta = (t if t is None or not groups else t.view(-1, *[1] * (x.ndim - 2)) for t in (weight, bias))
    scale = inverse if gamma is None else inverse * gamma
    shift = (0 if beta is None else beta.detach()) - mean * scale
    trace.leave_root(name, x)
    trace.note(name, "norm, normaliser constant")
    operation = Norm(
        trace.state, name, x, scale, shift, lambda: func(*args, **kwargs),
        centred=(lambda t: t - mean_of(t)) if centred else (lambda t: t),
    )  # fmt: skip
    return trace.rewire(operation, y, origin=operation)
