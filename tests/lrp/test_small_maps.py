"""Convolutions of maps smaller than their kernel: the same results, maps and gradients as convolutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fasterisnet.lrp import small_maps
from fasterisnet.lrp.small_maps import WORTHWHILE, SmallMaps, small
from fasterisnet.methods import Dual, Original, Standard
from fasterisnet.models import build_model

DIMENSIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@st.composite
def geometries(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Sizes, kernel, stride and padding of a convolution that has a result."""
    n = draw(st.integers(1, 3))
    sizes, kernel, stride, padding = [], [], [], []
    for _ in range(n):
        k = draw(st.integers(1, 5))
        p = draw(st.integers(0, k - 1))
        sizes.append(draw(st.integers(max(1, k - 2 * p), 5)))
        kernel.append(k)
        stride.append(draw(st.integers(1, 3)))
        padding.append(p)
    return tuple(sizes), tuple(kernel), tuple(stride), tuple(padding)


def results(y: Tensor, *leaves: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(y.shape, generator=generator, dtype=y.dtype)
    return [y, *torch.autograd.grad((y * weights).sum(), leaves)]


@given(geometries(), st.booleans())
def test_any_geometry(geometry: tuple[tuple[int, ...], ...], with_bias: bool) -> None:
    sizes, kernel, stride, padding = geometry
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((WORTHWHILE, 2, *sizes), (3, 2, *kernel), (3,))
    )
    leaves = (x, weight, bias) if with_bias else (x, weight)
    convolve = DIMENSIONS[len(sizes)]
    expected = results(convolve(*leaves, stride=stride, padding=padding), *leaves)
    with SmallMaps():
        found = convolve(*leaves, stride=stride, padding=padding)
    for got, wanted in zip(results(found, *leaves), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("size", "samples", "settings", "is_small"),
    [
        (1, 1, {}, True),
        (2, WORTHWHILE, {}, True),
        (2, WORTHWHILE - 1, {}, False),
        (2, 1, {"stride": (2, 2)}, True),
        (3, WORTHWHILE, {}, False),
        (3, 1, {"padding": (0, 0)}, True),
        (4, WORTHWHILE, {}, False),
        (1, 1, {"dilation": (2, 2)}, False),
        (1, 1, {"groups": 2}, False),
    ],
)
def test_which_are_small(size: int, samples: int, settings: dict[str, object], is_small: bool) -> None:
    values: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, **settings}
    found = small(torch.zeros(samples, 4, size, size), torch.zeros(8, 4 // values["groups"], 3, 3), **values)
    assert (found is not None) == is_small


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("method", [Standard(), Original(0.7, box=None), Dual(0.7)], ids=lambda m: type(m).__name__)
def test_a_training_step_is_the_same(method: Standard, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = build_model("resnet18_half", 3).double()
    images, labels = torch.rand(WORTHWHILE, 3, 28, 28, dtype=torch.float64), torch.arange(WORTHWHILE) % 3
    masks = torch.zeros(WORTHWHILE, 1, 28, 28)
    masks[:, :, 8:20, 8:20] = 1
    if last:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    if not isinstance(method, Standard):
        method.ranges = (1e-3, 10.0)
    found = step(method, model, images, labels, masks)
    met: list[int] = []
    monkeypatch.setattr(small_maps, "small", lambda *_, **__: met.append(1))
    expected = step(method, model, images, labels, masks)
    assert met
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-9)


def test_second_derivatives() -> None:
    weight = torch.randn(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(WORTHWHILE, 2, 2, 2, dtype=torch.float64, requires_grad=True)

    def curved(weight: Tensor) -> Tensor:
        y = F.conv2d(x, weight, padding=1)
        (slope,) = torch.autograd.grad(y.tanh().sum(), weight, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), weight)[0]

    expected = curved(weight)
    with SmallMaps():
        found = curved(weight)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_per_sample_gradients() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).double()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    labels = torch.arange(3) % 2
    images = torch.randn(3, WORTHWHILE, 2, 2, 2, dtype=torch.float64)

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, values, (x,))
        return F.cross_entropy(logits, y.expand(len(x)))

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
    expected = gradients(parameters, images, labels)
    with SmallMaps():
        found = gradients(parameters, images, labels)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_gradient_checkpointing_is_left_alone() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    images = torch.rand(WORTHWHILE, 3, 2, 2)
    with SmallMaps():
        y = checkpoint(layers, images, use_reentrant=False)
    y.square().sum().backward()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    found = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    layers.zero_grad()
    layers(images).square().sum().backward()
    for got, p in zip(found, layers.parameters(), strict=True):
        torch.testing.assert_close(got, p.grad)


def test_autocast_and_empty_batches() -> None:
    layer, images = nn.Conv2d(3, 4, 1), torch.rand(2, 3, 1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(images)
        with SmallMaps():
            found = layer(images)
    assert found.dtype == expected.dtype == torch.bfloat16
    with SmallMaps():
        assert layer(images[:0]).shape == (0, 4, 1, 1)


def step(method: Standard, model: nn.Module, images: Tensor, labels: Tensor, masks: Tensor) -> list[Tensor]:
    model.zero_grad()
    parts = method.loss(model, images, labels, masks)
    parts.total.backward()
    return [parts.total.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
