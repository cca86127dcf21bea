"""Autograd Functions of the relevance pass: where rules take the place of derivatives, and fast analytic kernels.

Two kinds live here. `Rewire`, `Rectify` and `Alias` sit in the *forward* graph and ask the operation they carry what to
do with the incoming G; outside a relevance pass they behave like the ordinary derivative. The others are steps *of* the
relevance pass whose own derivatives are written out, because autograd's generic double backward costs far more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from fasterisnet.relevance.operations import Operation

# Elements handled at a time by the element-wise kernels, so that their temporaries stay in the processor's cache.
CHUNK = 1 << 18


class Rewire(Function):
    """Marks `y` as the output of an operation; in a relevance pass its rule sends G straight to the sources."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, y: Tensor, *sources: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(y)
        ctx.operation = operation
        ctx.count = len(sources)
        return y

    @staticmethod
    def backward(ctx: Any, G: Tensor | None) -> tuple[Tensor | None, ...]:
        if G is None or not ctx.operation.state.active:
            return (None, G, *[None] * ctx.count)
        native, grads = ctx.operation.propagate(G)
        return (None, native, *grads)


class Rectify(Function):
    """ReLU, in place or not, with the ordinary derivative outside a relevance pass."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, in_place: bool, x: Tensor, *sources: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.operation = operation
        ctx.count = len(sources)
        if in_place:
            ctx.mark_dirty(x)
            y = x.relu_()
        else:
            y = x.relu()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, G: Tensor | None) -> tuple[Tensor | None, ...]:
        if G is None:
            return (None,) * (3 + ctx.count)
        (y,) = ctx.saved_tensors
        if not ctx.operation.state.active:
            return (None, None, torch.ops.aten.threshold_backward(G, y, 0), *[None] * ctx.count)
        native, grads = ctx.operation.propagate(G, y)
        return (None, None, native, *grads)


class Alias(Function):
    """An operand as it is, through which a rule may change, or stop, the relevance that flows back."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.operation = operation
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, G: Tensor | None) -> tuple[Tensor | None, ...]:
        if G is None or not ctx.operation.state.active:
            return None, G
        return None, ctx.operation.propagate(G)[0]


class Assign(Function):
    """`x[...] = y` with y's history: how an in-place operation ends whose rule still needs the old x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(x)
        ctx.is_view = x._is_view()
        return x.copy_(y)

    @staticmethod
    def backward(ctx: Any, G: Tensor | None) -> tuple[Tensor | None, ...]:
        # The history of a view's base takes "no gradient" for "the same gradient", so it has to be told zero.
        return torch.zeros_like(G) if ctx.is_view and G is not None else None, G


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
    """`G * y / (z + eps)`, with eps taking the sign of z where `signed`; sign(0) = 1."""

    @staticmethod
    def forward(ctx: Any, G: Tensor, y: Tensor, z: Tensor, epsilon: float, signed: bool) -> Tensor:
        z = _dense(z)
        ctx.save_for_backward(G, y, z)
        ctx.epsilon, ctx.signed = epsilon, signed
        out = torch.empty_like(z)
        for part in _parts(z, None, G, y, out):
            c, g, a, o = part.tensors
            torch.mul(g, a, out=o)
            o.div_(_stabilised(c, epsilon, signed))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        G, y, z = ctx.saved_tensors
        for_G, for_y, for_z = torch.empty_like(z), torch.empty_like(z), torch.empty_like(z)
        for part in _parts(z, None, G, y, u, for_G, for_y, for_z):
            c, g, a, w, o_G, o_y, o_z = part.tensors
            inverse = _stabilised(c, ctx.epsilon, ctx.signed).reciprocal_()
            torch.mul(w, inverse, out=o_z)
            torch.mul(o_z, a, out=o_G)
            torch.mul(o_z, g, out=o_y)
            torch.mul(o_y, a, out=o_z)
            o_z.mul_(inverse).neg_()
        return for_G, for_y, for_z, None, None


class SumShares(Function):
    """z+ through `y = a + b`: `s = G*y/(a+ + b+ + eps)`, to a where it is positive, to b where it is."""

    @staticmethod
    def forward(ctx: Any, G: Tensor, y: Tensor, a: Tensor, b: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        y = _dense(y)
        ctx.save_for_backward(G, y, a, b)
        ctx.epsilon = epsilon
        for_a, for_b = torch.empty_like(y), torch.empty_like(y)
        for part in _parts(y, None, G, a, b, for_a, for_b):
            c, g, first, second, o_a, o_b = part.tensors
            s = first.clamp(min=0).add_(second.clamp(min=0)).add_(epsilon).reciprocal_().mul_(c).mul_(g)
            torch.mul(s, first > 0, out=o_a)
            torch.mul(s, second > 0, out=o_b)
        return for_a, for_b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u_a: Tensor, u_b: Tensor) -> tuple[Tensor | None, ...]:
        G, y, a, b = ctx.saved_tensors
        for_G, for_y, for_a, for_b = (torch.empty_like(y) for _ in range(4))
        for part in _parts(y, None, G, a, b, u_a, u_b, for_G, for_y, for_a, for_b):
            c, g, first, second, w_a, w_b, o_G, o_y, o_a, o_b = part.tensors
            inverse = first.clamp(min=0).add_(second.clamp(min=0)).add_(ctx.epsilon).reciprocal_()
            first_on, second_on = first > 0, second > 0
            w = torch.mul(w_a, first_on).add_(w_b * second_on).mul_(inverse)
            torch.mul(w, c, out=o_G)
            torch.mul(w, g, out=o_y)
            w.mul_(c).mul_(g).mul_(inverse).neg_()
            torch.mul(w, first_on, out=o_a)
            torch.mul(w, second_on, out=o_b)
        return for_G, for_y, for_a, for_b, None


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
