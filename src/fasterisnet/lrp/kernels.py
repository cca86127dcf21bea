"""Steps of a relevance pass whose derivatives are written out: autograd's generic double backward costs far more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# Elements handled at a time by the element-wise kernels, so that their temporaries stay in the processor's cache.
CHUNK = 1 << 20


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
            torch.mul(o_y, a, out=o_G)
            o_y.mul_(inverse).mul_(g)
            if scale is None or for_scale is None:
                o_y.mul_(ctx.epsilon)
            else:
                each = along_channels(scale[channels], o_y)
                for_scale[channels] += torch.mul(o_G, g, out=inverse).sum(others, dtype=scale.dtype)
                o_G.mul_(each)
                o_y.mul_(each * ctx.epsilon)
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
            inverse = stabilised(c, ctx.epsilon, ctx.signed).reciprocal()
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
    """`z + eps`, eps with the sign of z where `signed`, that of a zero being positive."""
    if not signed:
        return z + epsilon if epsilon else z
    return z + torch.copysign(z.new_tensor(epsilon), z + 0.0)  # -0 + 0 is 0; `where` takes ten times as long


class SumShares(Function):
    """z+ through `y = a + b`: `s = R/(a+ + b+ + eps)`, `a+ s` to a and, if b is no constant, `b+ s` to b.

    R is what came as relevance and `y+ G`, either of which may be missing.
    """

    @staticmethod
    def forward(
        ctx: Any, R: Tensor | None, G: Tensor | None, a: Tensor, b: Tensor, epsilon: float, both: bool = True
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(R, G, a, b)
        ctx.epsilon = epsilon
        arrived = [t for t in (R, G) if t is not None]
        out = [torch.empty_like(arrived[0]) for _ in range(1 + both)]
        for _, (first, second, o_a, *rest) in parts(a, b, *out, *arrived):
            o_b, *came = rest if both else (None, *rest)
            torch.clamp(first, min=0, out=o_a)
            plus_b = torch.clamp(second, min=0, out=o_b)
            s = torch.add(o_a, plus_b).add_(epsilon).reciprocal_()
            s.mul_(_relevance(came, R is not None, first, second))
            for share in (o_a,) if o_b is None else (o_a, o_b):
                share.mul_(s)
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *shares: Tensor) -> tuple[Tensor | None, ...]:
        R, G, a, b = ctx.saved_tensors
        arrived = [t for t in (R, G) if t is not None]
        out = [torch.empty_like(a) for _ in (*arrived, a, b)]
        for _, cut in parts(a, b, *arrived, *out, *shares):
            (first, second), came = cut[:2], cut[2 : 2 + len(arrived)]
            *o_came, o_a, o_b = cut[2 + len(arrived) : 4 + 2 * len(arrived)]
            w_a, *w_b = cut[4 + 2 * len(arrived) :]
            plus_a, plus_b = first.clamp(min=0), second.clamp(min=0)
            inverse = torch.add(plus_a, plus_b).add_(ctx.epsilon).reciprocal_()
            o_R = torch.mul(w_a, plus_a, out=o_came[0])
            if w_b:
                o_R.addcmul_(w_b[0], plus_b)
            o_R.mul_(inverse)
            s = inverse.mul_(_relevance(came, R is not None, first, second))  # what z loses is o_R * s
            torch.sub(w_a, o_R, out=o_a)
            torch.sub(w_b[0], o_R, out=o_b) if w_b else torch.neg(o_R, out=o_b)
            for o, t in ((o_a, first), (o_b, second)):
                torch.ops.aten.threshold_backward(o.mul_(s), t, 0, grad_input=o)
            if G is not None:
                y, for_y = torch.add(first, second), torch.mul(o_R, came[-1], out=plus_a)
                torch.ops.aten.threshold_backward(for_y, y, 0, grad_input=for_y)
                torch.mul(o_R, y.clamp_(min=0), out=o_came[-1])
                o_a.add_(for_y)
                o_b.add_(for_y)
        found = iter(out)
        return *(None if t is None else next(found) for t in (R, G)), *found, None, None


def _relevance(came: Sequence[Tensor], first_is_R: bool, a: Tensor, b: Tensor) -> Tensor:
    """`R + (a + b)+ G` of those that came."""
    if first_is_R and len(came) == 1:
        return came[0]
    y = torch.add(a, b).clamp_(min=0).mul_(came[-1])
    return y.add_(came[0]) if first_is_R else y


class Result(Function):
    """What a node computed of some operands, as it was kept: without a history, but with the node's derivative."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, derivative: Callable[[Tensor], Sequence[Tensor | None]], *xs: Tensor) -> Tensor:
        ctx.derivative, ctx.sizes = derivative, [x.shape for x in xs]
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        found = [*ctx.derivative(u), *[None] * len(ctx.sizes)]
        fits = (t if t is not None and t.shape == size else None for t, size in zip(found, ctx.sizes, strict=False))
        return None, None, *fits


class ChannelShares(Function):
    """z+ through `a + shift` with a ReLU y behind: `R_y = y G`, `R_x = a+/(a+ + shift+ + eps) R_y`, a being `scale x`.

    scale and shift are one number a channel, the shift is a constant.
    """

    @staticmethod
    def forward(ctx: Any, G: Tensor, y: Tensor, x: Tensor, scale: Tensor, shift: Tensor, epsilon: float) -> Tensor:
        rest = shift.clamp(min=0) + epsilon
        ctx.save_for_backward(G, y, x, scale, rest)
        out = torch.empty_like(y)
        for channels, (b, g, c, o) in parts(y, G, x, out):
            torch.mul(c, along_channels(scale[channels], c), out=o)
            z = o.clamp_(min=0) + along_channels(rest[channels], c)
            o.div_(z).mul_(g).mul_(b)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        G, y, x, scale, rest = ctx.saved_tensors
        out = [torch.empty_like(y) for _ in range(3)]
        for_scale, others = torch.zeros_like(scale), [0, *range(2, y.ndim)]
        for channels, (b, g, c, w, o_G, o_y, o_x) in parts(y, G, x, u, *out):
            factor, constant = (along_channels(t[channels], c) for t in (scale, rest))
            plus_a = torch.mul(c, factor, out=o_x).clamp_(min=0)
            inverse = torch.add(plus_a, constant).reciprocal_()
            torch.mul(w, inverse, out=o_y)
            for_a = inverse.mul_(o_y).mul_(g).mul_(b)  # but for `rest`
            torch.ops.aten.threshold_backward(for_a, plus_a, 0, grad_input=for_a)
            o_y.mul_(plus_a)
            torch.mul(o_y, b, out=o_G)
            o_y.mul_(g)
            torch.mul(for_a, factor * constant, out=o_x)
            for_scale[channels] += for_a.mul_(c).sum(others, dtype=scale.dtype) * rest[channels]
        return *out, for_scale, None, None
