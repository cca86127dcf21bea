"""Operations that are linear in the images: the Jacobian times x, without a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.errors import RuleWarning
from lrp.helpers import assert_close, parameter_gradients, pictures, twins

W = pictures(4, 4, seed=9)


def sliced(t: Tensor) -> Tensor:
    buffer = torch.zeros(len(t), 2, 6, 6, dtype=t.dtype)
    buffer[:, :, 1:5, 1:5] = t
    buffer[:, 0, 0, :4] = t[:, 1, 2]
    return buffer


def added_to_a_slice(t: Tensor) -> Tensor:
    buffer = torch.ones(len(t), 2, 6, 6, dtype=t.dtype)
    buffer[..., 1:5, 1:5] += 2 * t
    return buffer


def scaled_slice(t: Tensor) -> Tensor:
    t = t.clone()
    t[:, 0] *= 3.0
    t[:, 1, ::2] /= 2.0
    return t


def filled(t: Tensor) -> Tensor:
    t = t.clone()
    t[:, 0, 1].fill_(2.0)
    t[..., -1].zero_()
    return t


LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "slice assignment": sliced,
    "slice +=": added_to_a_slice,
    "slice *=": scaled_slice,
    "fill_": filled,
    "cumsum": lambda t: t.cumsum(2),
    "cumsum_": lambda t: t.clone().cumsum_(1),
    "cumsum backwards": lambda t: t.flip(1).cumsum(-1),
    "index_add": lambda t: t.index_add(2, torch.tensor([0, 0, 3]), t[:, :, :3], alpha=0.5),
    "index_copy": lambda t: t.index_copy(2, torch.tensor([2, 0]), t[:, :, :2]),
    "index_fill": lambda t: t.index_fill(3, torch.tensor([1]), 0.5),
    "index_put": lambda t: t.index_put((torch.tensor([0, 1]),), t.flip(0), accumulate=True),
    "scatter": lambda t: t.scatter(2, torch.zeros(2, 2, 1, 4, dtype=torch.long), t[:, :, :1]),
    "scatter_add": lambda t: torch.zeros_like(t).scatter_add(3, torch.arange(4).flip(0).expand_as(t) // 2, t),
    "scatter_reduce": lambda t: torch.zeros_like(t).scatter_reduce(3, torch.arange(4).expand_as(t) // 2, t, "sum"),
    "put": lambda t: t.put(torch.tensor([0, 5]), t.flatten()[:2]),
    "take": lambda t: t.take(torch.arange(64).flip(0).view(2, 2, 4, 4)),
    "masked_scatter": lambda t: t.masked_scatter(torch.arange(4) % 2 == 0, t.flip(0)),
    "masked_select": lambda t: t.masked_select(torch.arange(4) % 2 == 0).view(2, -1),
    "lerp": lambda t: torch.lerp(t, t.flip(2), 0.3),
    "lerp, weights": lambda t: torch.lerp(t, t.flip(2), W),
    "tensordot": lambda t: torch.tensordot(t, W, 1),
    "inner": lambda t: torch.inner(t, W),
    "matmul": lambda t: W @ t,
    "einsum": lambda t: torch.einsum("nchw,hk->nckw", t, W),
    "multi_dot": lambda t: torch.linalg.multi_dot([t[0, 0], W, W])[None, None] + t * 0.5,
    "kron": lambda t: torch.kron(t, torch.ones(1, 1, 2, 2, dtype=t.dtype)),
    "outer": lambda t: torch.outer(t.flatten(), W[0]).view(2, -1),
    "addmm": lambda t: torch.addmm(t[0, 0], W, t[0, 1], beta=0.5, alpha=2.0)[None] + 0 * t[:, 0],
    "addr": lambda t: torch.addr(W, t[0, 0, 0], W[1])[None, None] + t,
    "dot": lambda t: t + torch.dot(t[0, 0, 0], W[0]),
    "addcmul": lambda t: torch.addcmul(t, t.flip(1), W, value=0.5),
    "addcdiv": lambda t: torch.addcdiv(t, t.flip(1), W, value=0.5),
    "unbatched conv": lambda t: torch.stack([F.conv2d(s, W.view(2, 2, 2, 2)) for s in t]),
    "unbatched pool": lambda t: torch.stack([F.avg_pool2d(s, 2) for s in t]),
    "conv_transpose": lambda t: F.conv_transpose2d(t, W.view(2, 2, 2, 2), stride=2),
    "fold": lambda t: F.fold(F.unfold(t, 2), (4, 4), 2),
    "antialias": lambda t: F.interpolate(t, size=(3, 3), mode="bilinear", antialias=True),
    "antialias, bicubic": lambda t: F.interpolate(t, size=(3, 3), mode="bicubic", antialias=True),
    "nearest-exact": lambda t: F.interpolate(t, scale_factor=1.5, mode="nearest-exact"),
    "bilinear": lambda t: F.interpolate(t, size=6, mode="bilinear"),
    "bicubic": lambda t: F.interpolate(t, size=6, mode="bicubic"),
    "area": lambda t: F.interpolate(t, size=3, mode="area"),
    "grid_sample": lambda t: F.grid_sample(t, W.view(1, 4, 2, 2).expand(2, -1, -1, -1) / 2, align_corners=False),
    "affine_grid": lambda t: F.grid_sample(
        t,
        F.affine_grid(torch.eye(2, 3).double().expand(2, -1, -1), [2, 2, 4, 4], align_corners=True),
        align_corners=True,
    ),
    "nan_to_num": lambda t: torch.nan_to_num(t),
    "column_stack": lambda t: torch.column_stack([t[:, 0, 0], t[:, 1, 1]]),
    "row_stack": lambda t: torch.vstack([t, t]).view(2, -1),
    "hstack": lambda t: torch.hstack([t, t[:, :1]]),
    "dstack": lambda t: torch.dstack([t, t]),
    "block_diag": lambda t: torch.block_diag(*t[:, 0])[None, None].expand(2, -1, -1, -1) + 0 * t.sum(),
    "diff": lambda t: t.diff(dim=2),
    "diff, twice": lambda t: t.diff(n=2),
    "gradient": lambda t: torch.gradient(t, dim=2)[0],
    "trapezoid": lambda t: torch.trapezoid(t, dim=3),
    "cumulative_trapezoid": lambda t: torch.cumulative_trapezoid(t, dim=3),
    "trace": lambda t: torch.stack([s[0].trace() for s in t])[:, None].expand(-1, 4) + t[:, 0, 0],
    "diagonal": lambda t: t.diagonal(dim1=2, dim2=3),
    "diag_embed": lambda t: torch.diag_embed(t),
    "tril": lambda t: t.tril(),
    "triu": lambda t: t.triu(1),
    "diagonal_scatter": lambda t: torch.diagonal_scatter(t, t[..., 0], dim1=2, dim2=3),
    "select_scatter": lambda t: t.select_scatter(t[:, 0], 1, 1),
    "slice_scatter": lambda t: t.slice_scatter(t[:, :, :2], 2, 1, 3),
    "as_strided": lambda t: t.as_strided((2, 4, 4), (32, 4, 1), 0),
    "unfold": lambda t: t.unfold(2, 2, 1),
    "roll": lambda t: t.roll((1, 2), (2, 3)),
    "rot90": lambda t: t.rot90(1, (2, 3)),
    "flip": lambda t: t.flip(2, 3),
    "pixel_shuffle": lambda t: F.pixel_shuffle(t.reshape(2, 8, 2, 2), 2),
    "pixel_unshuffle": lambda t: F.pixel_unshuffle(t, 2),
    "channel_shuffle": lambda t: F.channel_shuffle(t.reshape(2, 4, 2, 4), 2),
    "repeat_interleave": lambda t: t.repeat_interleave(2, 1),
    "tile": lambda t: t.tile(1, 2, 1, 1),
    "reflect": lambda t: F.pad(t, (1, 1, 1, 1), mode="reflect"),
    "replicate": lambda t: F.pad(t, (2, 1, 0, 1), mode="replicate"),
    "circular": lambda t: F.pad(t, (1, 1, 1, 1), mode="circular"),
    "pad(-1)": lambda t: F.pad(t, (1, 0, 0, 1), value=-1.0),
    "crop by pad": lambda t: F.pad(t, (-1, -1)),
    "fft": lambda t: torch.view_as_real(torch.fft.rfft2(t)),
    "ifft": lambda t: torch.fft.irfft2(torch.fft.rfft2(t) * 2),
    "real part of fft": lambda t: torch.fft.fft(t).real,
    "sum": lambda t: t.sum(2),
    "nansum": lambda t: t.nansum(2),
    "mean": lambda t: t.mean((2, 3)),
    "sum_to_size": lambda t: t.sum_to_size(2, 1, 4, 4),
    "sub": lambda t: t - 0.5 * t.flip(1),
    "rsub": lambda t: torch.rsub(t, 1.0),
    "neg": lambda t: t.neg(),
    "div": lambda t: t / W,
    "div by a number": lambda t: t.div(3.0),
    "mul": lambda t: W * t,
    "ldexp": lambda t: torch.ldexp(t, torch.tensor(2)),
    "deg2rad": lambda t: torch.deg2rad(t),
    "complex": lambda t: torch.complex(t, 2 * t).imag,
    "bilinear with a constant": lambda t: F.bilinear(t, W[:1].expand(2, 2, 4, 4).contiguous(), W.view(1, 4, 4)),
    "cross": lambda t: torch.linalg.cross(t[:, :, :3], W[:3].expand(2, 2, 3, 4), dim=2),
    "embedding mask": lambda t: t * (torch.arange(4) != 2),
    "where": lambda t: torch.where(torch.arange(4) % 2 == 0, t, -t),
    "dropout": lambda t: F.dropout(t, 0.0),
    "chunks": lambda t: torch.cat([c.flip(1) for c in t.chunk(2, 1)], 2),
    "unbind": lambda t: torch.stack(t.unbind(2)[::-1], 2),
    "movedim": lambda t: t.movedim(1, 3),
    "swapaxes": lambda t: t.swapaxes(1, 2),
    "atleast_3d": lambda t: torch.atleast_3d(t),
    "broadcast_to": lambda t: torch.broadcast_to(t[:, :, :1], (2, 2, 4, 4)),
    "times a number": lambda t: t * torch.vdot(W[0], W[1]),
    "avg_pool, not counting": lambda t: F.avg_pool2d(t, 3, 2, 1, count_include_pad=False),
    "avg_pool, divisor": lambda t: F.avg_pool2d(t, 2, divisor_override=3),
    "to": lambda t: t.to(torch.float64),
    "window": lambda t: t * torch.hamming_window(4, dtype=t.dtype),
    "vmap": lambda t: torch.vmap(lambda s: s @ W)(t),
    "solve": lambda t: torch.linalg.solve(W, t),
    "triangular solve": lambda t: torch.linalg.solve_triangular(W.triu(), t, upper=True),
}


# Seldom met in a classifier: the map has to be right, a warning is allowed.
RARE = {
    "solve",
    "triangular solve",
    "complex",
    "fft",
    "ifft",
    "real part of fft",
    "kron",
    "multi_dot",
    "cross",
    "ldexp",
    "deg2rad",
    "bilinear with a constant",
    "quantile",
    "mode",
    "addr",
    "put",
}


def assert_linear(operation: Callable[[Tensor], Tensor], rare: bool) -> None:
    """Behind a linear layer and in front of one: no rectifier is near, so the whole network is affine."""
    images = pictures(2, 2, 4, 4)
    width = operation(images).reshape(2, -1).shape[1]

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.fc(operation(m.conv(x)).reshape(2, -1))

    (net,) = twins([forward], conv=nn.Conv2d(2, 2, 1), fc=nn.Linear(width, 3))
    jacobian = torch.func.jacrev(lambda x: net(x)[:, 1].sum())(images)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if rare else "error", RuleWarning)
        found = fi.explain(net, images, 1)
        trained = fi.explain(net, images, 1, create_graph=True, strict=not rare)
    assert_close(found, images * jacobian.detach(), 1e-10, "map")
    assert_close(trained.detach(), found, 1e-12, "trained through")
    x = images.clone().requires_grad_()
    reference = x * torch.autograd.grad(net(x)[:, 1].sum(), x, create_graph=True)[0]
    expected = parameter_gradients(net, reference.square().sum())
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in parameter_gradients(net, trained.square().sum()).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-9 * scale)


@pytest.mark.parametrize("name", LINEAR)
def test_linear_operations_do_not_warn(name: str) -> None:
    assert_linear(LINEAR[name], name in RARE)


SELECTING: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda t: t.sort(3).values,
    "msort": torch.msort,
    "topk": lambda t: t.topk(2).values,
    "kthvalue": lambda t: t.kthvalue(2).values,
    "median": lambda t: t.median(3).values,
    "mode": lambda t: t.mode(3).values,
    "max": lambda t: t.max(3).values,
    "amin": lambda t: t.amin((2, 3)),
    "maximum": lambda t: torch.maximum(t, t.flip(1)),
    "minimum": lambda t: torch.minimum(t, t.flip(2)),
    "fmax": lambda t: torch.fmax(t, t.flip(1)),
    "cummax": lambda t: t.cummax(3).values,
    "max_pool": lambda t: F.max_pool2d(t, 2, 1),
    "adaptive max": lambda t: F.adaptive_max_pool2d(t, 3),
    "max_unpool": lambda t: F.max_unpool2d(*F.max_pool2d(t, 2, return_indices=True), 2),
    "aminmax": lambda t: torch.stack(torch.aminmax(t, dim=3)),
    "quantile": lambda t: t.quantile(0.3, dim=3),
    "take_along_dim": lambda t: t.take_along_dim(t.argsort(3), 3),
    "by argmax": lambda t: t.flatten(2).gather(2, t.flatten(2).argmax(2, True)),
}


@pytest.mark.parametrize("name", SELECTING)
def test_selections_do_not_warn(name: str) -> None:
    """Winners take all: the ordinary derivative at these images."""
    assert_linear(SELECTING[name], name in RARE)
