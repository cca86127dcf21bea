"""Convolutions of maps smaller than their kernel, as matrix products.

ResNet18 at 28 pixels ends in 3x3 convolutions of 2x2 and 1x1 maps. Most of such a kernel meets padding only, and
convolution kernels are at their slowest there: they take more than half of a training step. Written as a matrix
from all pixels of a sample to all pixels of its result, nothing is multiplied by padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

NAMES = "input weight bias stride padding dilation groups"
CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
# With more than one pixel of result the matrix can be larger than the kernel: it is worth being put together from this
# many samples on, and if it is not much larger.
WORTHWHILE = 32
LARGEST = 2
_WATCHED = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]


class Geometry(NamedTuple):
    """The pixels of a map, of the kernel that goes over it, and of the result, in each dimension."""

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    out: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    def windows(self) -> Iterator[tuple[int, tuple[slice, ...], tuple[slice, ...]]]:
        """For every pixel of the result: its number, the pixels of the map it reads and the part of the kernel."""
        for number, place in enumerate(product(*map(range, self.out))):
            starts = [i * s - p for i, s, p in zip(place, self.stride, self.padding, strict=True)]
            ends = [min(start + k, n) for start, k, n in zip(starts, self.kernel, self.sizes, strict=True)]
            read = tuple(slice(max(0, start), end) for start, end in zip(starts, ends, strict=True))
            part = tuple(slice(r.start - start, r.stop - start) for r, start in zip(read, starts, strict=True))
            yield number, read, part


def small(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Geometry | None:
    """How the kernel lies on the map, if this is a convolution that is better written as a matrix product."""
    sizes, kernel = tuple(x.shape[2:]), tuple(weight.shape[2:])
    if groups != 1 or math.prod(sizes) > math.prod(kernel) or any(d != 1 for d in dilation):
        return None
    out = tuple((n + 2 * p - k) // s + 1 for n, k, s, p in zip(sizes, kernel, stride, padding, strict=True))
    if any(o < 1 for o in out) or any(p >= k for p, k in zip(padding, kernel, strict=True)):
        return None
    if math.prod(out) > 1 and (len(x) < WORTHWHILE or math.prod(out + sizes) > LARGEST * math.prod(kernel)):
        return None
    return Geometry(sizes, kernel, out, tuple(stride), tuple(padding))


class Unrolled(Function):
    """A kernel (to, from, ...) as a matrix (to, pixels of the result, from, pixels of the map)."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Geometry], output: Tensor) -> None:
        ctx.geometry = inputs[1]

    @staticmethod
    def forward(weight: Tensor, geometry: Geometry) -> Tensor:
        to, source = weight.shape[:2]
        matrix = weight.new_zeros(to, math.prod(geometry.out), source, *geometry.sizes)
        for number, read, part in geometry.windows():
            matrix[(slice(None), number, slice(None), *read)] = weight[(..., *part)]
        return matrix.flatten(3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        geometry: Geometry = ctx.geometry
        grad = grad.unflatten(3, geometry.sizes)
        out = grad.new_zeros(grad.shape[0], grad.shape[2], *geometry.kernel)
        for number, read, part in geometry.windows():
            out[(..., *part)] += grad[(slice(None), number, slice(None), *read)]
        return out, None


class SmallConvolution(Function):
    """The convolution of x with an unrolled kernel."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Geometry], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.geometry = inputs[3]

    @staticmethod
    def forward(x: Tensor, matrix: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        return convolve(x, matrix, bias, geometry)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix, bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        for_x = transposed(G, matrix, ctx.geometry) if wanted[0] else None
        for_matrix = (G.flatten(1).T @ x.flatten(1)).view_as(matrix) if wanted[1] else None
        for_bias = G.flatten(2).sum((0, 2)).to(bias.dtype) if wanted[2] else None
        return for_x, for_matrix, for_bias, None


def convolve(x: Tensor, matrix: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """The convolution, `matrix` being the unrolled kernel."""
    y = F.linear(x.flatten(1), matrix.flatten(0, 1).flatten(1)).view(len(x), len(matrix), *geometry.out)
    return y if bias is None else y + bias.to(y.dtype).view(-1, *[1] * len(geometry.out))


def transposed(G: Tensor, matrix: Tensor, geometry: Geometry) -> Tensor:
    """What the convolution's transpose makes of G."""
    flat = G.flatten(1) @ matrix.flatten(0, 1).flatten(1)
    return flat.view(len(G), matrix.shape[2], *geometry.sizes)


def numbers(value: Any, n: int) -> tuple[int, ...]:
    """A setting of a convolution as one number for each of n dimensions."""
    if isinstance(value, int):
        return (value,) * n
    return tuple(value) * (n if len(value) == 1 else 1)


class SmallMaps(TorchFunctionMode):
    """While entered, convolutions run as described above.

    Not where saved tensors are watched: gradient checkpointing runs the forward pass again outside, and compares.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in CONVOLUTIONS and _WATCHED(False) is None:
            values = dict(zip(NAMES.split(), args, strict=False)) | kwargs
            x, weight, padding = values["input"], values["weight"], values.get("padding", 0)
            if not isinstance(padding, str) and x.ndim == weight.ndim:
                n = weight.ndim - 2
                stride, dilation = (numbers(values.get(key, 1), n) for key in ("stride", "dilation"))
                geometry = small(x, weight, stride, numbers(padding, n), dilation, values.get("groups", 1))
                if geometry is not None:
                    x, weight, bias = _cast(x, weight, values.get("bias"))
                    return SmallConvolution.apply(x, Unrolled.apply(weight, geometry), bias, geometry)
        return func(*args, **kwargs)


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Autocast does not look into Functions: what it would do to a convolution is done here."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
