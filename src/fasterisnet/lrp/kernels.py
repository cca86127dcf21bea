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
        y = _dense(y)
        ctx.save_for_backward(G, y, scale)
        ctx.epsilon = epsilon
        out = torch.empty_like(y)
        for part in _parts(y, scale, G, out):
            a, g, o = part.tensors
            torch.add(a, epsilon, out=o)
            torch.div(a, o, out=o)
            o.mul_(g)
            if part.scale is not None:
                o.mul_(part.scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        G, y, scale = ctx.saved_tensors
        for_G, for_y = torch.empty_like(y), torch.empty_like(y)
        sums = None if scale is None else ChannelSums(y, scale)
        for part in _parts(y, scale, G, u, for_G, for_y):
            a, g, w, o_G, o_y = part.tensors
            inverse = torch.add(a, ctx.epsilon).reciprocal_()
            torch.mul(w, inverse, out=o_y)
            if part.scale is not None and sums is not None:
                sums.add(part.rows, torch.mul(o_y, a).mul_(g))
                o_y.mul_(part.scale)
            torch.mul(o_y, a, out=o_G)
            o_y.mul_(inverse).mul_(g).mul_(ctx.epsilon)
        return for_G, for_y, None if sums is None else sums.total(), None


class ChannelScale(Function):
    """`G * scale`, one number a channel: batch norm with its statistics held constant."""

    @staticmethod
    def forward(ctx: Any, G: Tensor, scale: Tensor) -> Tensor:
        G = _dense(G)
        ctx.save_for_backward(G, scale)
        return G * _along_channels(scale, G)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        G, scale = ctx.saved_tensors
        for_G, sums = torch.empty_like(G), ChannelSums(G, scale)
        for part in _parts(G, scale, u, for_G):
            g, w, o_G = part.tensors
            if ctx.needs_input_grad[1]:
                sums.add(part.rows, torch.mul(w, g))
            assert part.scale is not None
            torch.mul(w, part.scale, out=o_G)
        return for_G, sums.total() if ctx.needs_input_grad[1] else None


class Quotient(Function):
    """`G * y / (z + eps)`, or `G / (z + eps)` without y; eps takes the sign of z where `signed`; sign(0) = 1."""

    @staticmethod
    def forward(ctx: Any, G: Tensor, y: Tensor | None, z: Tensor, epsilon: float, signed: bool) -> Tensor:
        z = _dense(z)
        ctx.save_for_backward(G, y, z)
        ctx.epsilon, ctx.signed = epsilon, signed
        out = torch.empty_like(z)
        for part in _parts(z, None, G, out, *_given(y)):
            c, g, o, *a = part.tensors
            torch.div(g, _stabilised(c, epsilon, signed), out=o)
            if a:
                o.mul_(a[0])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        G, y, z = ctx.saved_tensors
        for_G, for_z = torch.empty_like(z), torch.empty_like(z)
        for_y = None if y is None else torch.empty_like(z)
        for part in _parts(z, None, G, u, for_G, for_z, *_given(y), *_given(for_y)):
            c, g, w, o_G, o_z, *rest = part.tensors
            inverse = _stabilised(c, ctx.epsilon, ctx.signed).reciprocal_()
            torch.mul(w, inverse, out=o_G)
            torch.mul(o_G, g, out=o_z)
            if rest:
                rest[1].copy_(o_z)
                o_G.mul_(rest[0])
                o_z.mul_(rest[0])
            o_z.mul_(inverse).neg_()
        return for_G, for_y, for_z, None, None


def _given(t: Tensor | None) -> tuple[Tensor, ...]:
    return () if t is None else (t,)


class SumShares(Function):
    """z+ through `y = a + b`: `s = R/(a+ + b+ + eps)`, `a+ s` to a and `b+ s` to b."""

    @staticmethod
    def forward(ctx: Any, R: Tensor, a: Tensor, b: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        R = _dense(R)
        ctx.save_for_backward(R, a, b)
        ctx.epsilon = epsilon
        for_a, for_b = torch.empty_like(R), torch.empty_like(R)
        for part in _parts(R, None, a, b, for_a, for_b):
            r, first, second, o_a, o_b = part.tensors
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
        for part in _parts(R, None, a, b, u_a, u_b, for_R, for_a, for_b):
            r, first, second, w_a, w_b, o_R, o_a, o_b = part.tensors
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


def _stabilised(z: Tensor, epsilon: float, signed: bool) -> Tensor:
    return torch.where(z < 0, z - epsilon, z + epsilon) if signed else z + epsilon


def _along_channels(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view(-1, *[1] * (like.ndim - 2))


class _Part(NamedTuple):
    """A slice of every tensor, as a matrix whose rows or columns are channels, and the channels' numbers for it."""

    tensors: list[Tensor]
    scale: Tensor | None
    rows: slice


class ChannelSums:
    """Sums over everything but the channels, collected part by part."""

    def __init__(self, like: Tensor, scale: Tensor) -> None:
        self.by_columns = _by_columns(like)
        self.samples = like.shape[0]
        rows = scale.numel() if self.by_columns else self.samples * scale.numel()
        self.sums = torch.zeros(rows, dtype=scale.dtype, device=scale.device)

    def add(self, rows: slice, values: Tensor) -> None:
        if self.by_columns:
            self.sums += values.sum(0, dtype=self.sums.dtype)
        else:
            torch.sum(values, 1, dtype=self.sums.dtype, out=self.sums[rows])

    def total(self) -> Tensor:
        return self.sums if self.by_columns else self.sums.view(self.samples, -1).sum(0)


def _by_columns(like: Tensor) -> bool:
    """Whether channels are the columns of the matrix a tensor is cut up as."""
    return like.ndim == 2 or (like.ndim >= 4 and not like.is_contiguous())


def _parts(like: Tensor, scale: Tensor | None, *others: Tensor) -> Iterator[_Part]:
    """Cuts `like` (dense) and the others, laid out alike, into parts that fit the cache (on CUDA: one part)."""
    channels_last = like.ndim >= 4 and not like.is_contiguous()
    by_columns = _by_columns(like)
    if by_columns:
        shape = (-1, like.shape[1])
    else:
        shape = (like.shape[0] * like.shape[1], -1) if like.ndim > 2 else (1, -1)
    matrices = [_matrix(t, like, shape, channels_last) for t in (like, *others)]
    rows, columns = matrices[0].shape
    if scale is not None:
        scale = scale.view(1, -1) if by_columns else scale.repeat(like.shape[0]).view(-1, 1)
    step = rows if like.is_cuda else max(1, CHUNK // max(1, columns))
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        part_scale = scale if scale is None or by_columns else scale[part]
        yield _Part([m[part] for m in matrices], part_scale, part)


def _dense(t: Tensor) -> Tensor:
    """The tensor itself if it is contiguous, channels first or last, else a copy that is."""
    if t.is_contiguous() or (t.ndim in (4, 5) and t.is_contiguous(memory_format=_format(t.ndim))):
        return t
    return t.contiguous()


def _format(ndim: int) -> torch.memory_format:
    return torch.channels_last if ndim == 4 else torch.channels_last_3d


def _matrix(t: Tensor, like: Tensor, shape: tuple[int, int], channels_last: bool) -> Tensor:
    if channels_last:
        t = t.contiguous(memory_format=_format(like.ndim)).movedim(1, -1)
    else:
        t = t.contiguous()
    return t.reshape(shape)
