"""Steps of a relevance pass whose derivatives are written out: autograd's generic double backward costs far more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# Elements handled at a time by the element-wise kernels, so that their temporaries stay in the processor's cache.
CHUNK = 1 << 18


def wide(t: Tensor) -> Tensor:
    """Half precision is too narrow for quotients."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def along_channels(vector: Tensor, like: Tensor) -> Tensor:
    """One number a channel, shaped to be multiplied with `like`."""
    return vector.view(-1, *[1] * (like.ndim - 2))


def parts(like: Tensor, *others: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
    """Tensors of one shape cut into parts that fit the cache (on CUDA: one), and the channels of each part.

    A part is some samples; of a larger sample some channels, or, where channels lie side by side, some rows.
    """
    everything = (like, *others)
    if like.is_cuda or like.ndim < 2 or like.numel() <= CHUNK:
        yield slice(None), list(everything)
        return
    numbers = like[0].numel()
    axis = 2 if like.ndim > 2 and like.stride(1) == 1 else 1
    samples = max(1, CHUNK // numbers)
    width = max(1, CHUNK * like.shape[axis] // max(CHUNK, numbers))
    for first in range(0, len(like), samples):
        for start in range(0, like.shape[axis], width):
            where = [slice(first, first + samples), slice(None), slice(None)][: axis + 1]
            where[axis] = slice(start, start + width)
            yield where[1], [t[tuple(where)] for t in everything]


class ConvolutionSettings(NamedTuple):
    """The arguments of `aten::convolution` behind input, weight and bias."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


class ConvolutionInputGradient(Function):
    """G at a convolution's input, `W^T G`. Backward: one convolution for G, one weight gradient for W, nothing else."""

    @staticmethod
    def forward(ctx: Any, G: Tensor, weight: Tensor, x: Tensor, settings: ConvolutionSettings) -> Tensor:
        ctx.save_for_backward(G, weight)
        ctx.settings = settings
        return torch.ops.aten.convolution_backward(G, x, weight, None, *settings, (True, False, False))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        G, weight = ctx.saved_tensors
        for_G = for_weight = None
        if ctx.needs_input_grad[0]:
            for_G = torch.ops.aten.convolution(u, weight, None, *ctx.settings)
        if ctx.needs_input_grad[1]:
            for_weight = torch.ops.aten.convolution_backward(G, u, weight, None, *ctx.settings, (False, True, False))[1]
        return for_G, for_weight, None, None


class Attenuate(Function):
    """`G * y/(y + eps) * scale`: a ReLU's rule and, with `scale` (one number a channel), its batch norm's in one."""

    @staticmethod
    def forward(ctx: Any, G: Tensor, y: Tensor, scale: Tensor | None, epsilon: float) -> Tensor:
        ctx.save_for_backward(G, y, scale)
        ctx.epsilon = epsilon
        out = torch.empty_like(y)
        for channels, (a, g, o) in parts(y, G, out):
            torch.add(a, epsilon, out=o)
            torch.div(a, o, out=o)
            o.mul_(g)
            if scale is not None:
                o.mul_(along_channels(scale[channels], o))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        G, y, scale = ctx.saved_tensors
        for_G, for_y = torch.empty_like(y), torch.empty_like(y)
        for_scale = None if scale is None else torch.zeros_like(scale)
        others = [0, *range(2, y.ndim)]
        for channels, (a, g, w, o_G, o_y) in parts(y, G, u, for_G, for_y):
            inverse = torch.add(a, ctx.epsilon).reciprocal_()
            torch.mul(w, inverse, out=o_y)
            if scale is not None and for_scale is not None:
                for_scale[channels] += torch.mul(o_y, a).mul_(g).sum(others, dtype=scale.dtype)
                o_y.mul_(along_channels(scale[channels], o_y))
            torch.mul(o_y, a, out=o_G)
            o_y.mul_(inverse).mul_(g).mul_(ctx.epsilon)
        return for_G, for_y, for_scale, None


class Quotient(Function):
    """`G * y / (z + eps)`, or `G / (z + eps)` without y; eps takes the sign of z where `signed`; sign(0) = 1."""

    @staticmethod
    def forward(ctx: Any, G: Tensor, y: Tensor | None, z: Tensor, epsilon: float, signed: bool) -> Tensor:
        ctx.save_for_backward(G, y, z)
        ctx.epsilon, ctx.signed = epsilon, signed
        out = torch.empty_like(z)
        for _, (c, g, o, *a) in parts(z, G, out, *([] if y is None else [y])):
            torch.div(g, stabilised(c, epsilon, signed), out=o)
            if a:
                o.mul_(a[0])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        G, y, z = ctx.saved_tensors
        for_G, for_z = torch.empty_like(z), torch.empty_like(z)
        for_y = None if y is None else torch.empty_like(z)
        for _, (c, g, w, o_G, o_z, *rest) in parts(z, G, u, for_G, for_z, *([] if y is None else [y, for_y])):
            inverse = stabilised(c, ctx.epsilon, ctx.signed).reciprocal_()
            torch.mul(w, inverse, out=o_G)
            torch.mul(o_G, g, out=o_z)
            if rest:
                a, o_y = rest
                o_y.copy_(o_z)
                o_G.mul_(a)
                o_z.mul_(a)
            o_z.mul_(inverse).neg_()
        return for_G, for_y, for_z, None, None


def stabilised(z: Tensor, epsilon: float, signed: bool = True) -> Tensor:
    """`z + eps`, eps with the sign of z where `signed`."""
    return torch.where(z < 0, z - epsilon, z + epsilon) if signed else z + epsilon


class SumShares(Function):
    """z+ through `y = a + b`: `s = R/(a+ + b+ + eps)`, `a+ s` to a and `b+ s` to b."""

    @staticmethod
    def forward(ctx: Any, R: Tensor, a: Tensor, b: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(R, a, b)
        ctx.epsilon = epsilon
        for_a, for_b = torch.empty_like(R), torch.empty_like(R)
        for _, (r, first, second, o_a, o_b) in parts(R, a, b, for_a, for_b):
            torch.clamp(first, min=0, out=o_a)
            torch.clamp(second, min=0, out=o_b)
            s = torch.add(o_a, o_b).add_(epsilon).reciprocal_().mul_(r)
            o_a.mul_(s)
            o_b.mul_(s)
        return for_a, for_b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u_a: Tensor, u_b: Tensor) -> tuple[Tensor | None, ...]:
        R, a, b = ctx.saved_tensors
        for_R, for_a, for_b = (torch.empty_like(R) for _ in range(3))
        for _, (r, first, second, w_a, w_b, o_R, o_a, o_b) in parts(R, a, b, u_a, u_b, for_R, for_a, for_b):
            plus_a, plus_b = first.clamp(min=0), second.clamp(min=0)
            inverse = torch.add(plus_a, plus_b).add_(ctx.epsilon).reciprocal_()
            torch.mul(w_a, plus_a, out=o_R)
            o_R.addcmul_(w_b, plus_b).mul_(inverse)
            s = inverse.mul_(r)  # R/(z + eps); what z loses is o_R * s
            torch.sub(w_a, o_R, out=o_a)
            o_a.mul_(s).mul_(first > 0)
            torch.sub(w_b, o_R, out=o_b)
            o_b.mul_(s).mul_(second > 0)
        return for_R, for_a, for_b, None
