"""Convolutions of maps smaller than their kernel, as matrix products.

ResNet18 at 28 pixels ends in 3x3 convolutions of 2x2 and 1x1 maps. Most of such a kernel meets padding only, and
convolution kernels are at their slowest there: they take more than half of a training step. Written as a matrix
from all pixels of a sample to all pixels of its result, nothing is multiplied by padding.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

NAMES = "input weight bias stride padding dilation groups".split()
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


def small(
    x: Tensor, weight: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Geometry | None:
    """How the kernel lies on the map, if this is a convolution that is better written as a matrix product."""
    sizes, kernel = tuple(x.shape[2:]), tuple(weight.shape[2:])
    if isinstance(padding, str) or x.ndim != weight.ndim or groups != 1 or math.prod(sizes) > math.prod(kernel):
        return None
    stride, padding, dilation = (_numbers(value, len(kernel)) for value in (stride, padding, dilation))
    out = tuple((n + 2 * p - k) // s + 1 for n, k, s, p in zip(sizes, kernel, stride, padding, strict=True))
    if any(d != 1 for d in dilation) or any(o < 1 for o in out):
        return None
    if any(p >= k for p, k in zip(padding, kernel, strict=True)):
        return None
    if math.prod(out) > 1 and (len(x) < WORTHWHILE or math.prod(out + sizes) > LARGEST * math.prod(kernel)):
        return None
    return Geometry(sizes, kernel, out, stride, padding)


def _numbers(value: Any, n: int) -> tuple[int, ...]:
    """A setting of a convolution as one number for each of n dimensions."""
    return (value,) * n if isinstance(value, int) else tuple(value) * (n if len(value) == 1 else 1)


@lru_cache(maxsize=64)
def selection(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Which number of the kernel (rows) lies between which pixels of the result and of the map (columns): 0 or 1."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        places, numbers = math.prod(geometry.sizes), math.prod(geometry.kernel)
        maps = torch.eye(places, dtype=dtype, device=device).view(places, 1, *geometry.sizes)
        kernels = torch.eye(numbers, dtype=dtype, device=device).view(numbers, 1, *geometry.kernel)
        convolve = CONVOLUTIONS[len(geometry.sizes) - 1]
        found = convolve(maps, kernels, stride=geometry.stride, padding=geometry.padding)
        return found.flatten(2).permute(1, 2, 0).reshape(numbers, -1).contiguous()


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """The convolution as a linear layer from all of a sample's numbers to all of its results."""
    pixels = math.prod(geometry.out)
    # (to, from, pixels of the result, pixels of the map), every number the kernel's that lies there
    laid = (weight.flatten(2) @ selection(geometry, weight.dtype, weight.device)).unflatten(2, (pixels, -1))
    matrix = laid.transpose(1, 2).flatten(2).flatten(0, 1)
    bias = None if bias is None else bias.unsqueeze(1).expand(-1, pixels).flatten()
    return F.linear(x.flatten(1), matrix, bias).unflatten(1, (-1, *geometry.out))


class SmallMaps(TorchFunctionMode):
    """While entered, convolutions run as described above.

    Not where saved tensors are watched: gradient checkpointing runs the forward pass again outside, and compares.
    Not with a weight that is computed: if the images have a part in it, it would pass a product that is no layer.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in CONVOLUTIONS and _WATCHED(False) is None:
            settings = dict(zip(NAMES, args, strict=False)) | kwargs
            x, weight, bias = settings.pop("input"), settings.pop("weight"), settings.pop("bias", None)
            geometry = small(x, weight, **settings) if weight.is_leaf else None
            if geometry is not None:
                return convolution(x, weight, bias, geometry)
        return func(*args, **kwargs)
