"""Steps whose derivatives are written out, against differences: in one piece, and in parts that fit a small cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fasterisnet.lrp import kernels
from fasterisnet.lrp.kernels import Attenuate, ChannelShares, Quotient, SumShares

SHAPE = (2, 3, 4, 2)
EPS = 0.01


def numbers(*shape: int, seed: int, positive: bool = False) -> Tensor:
    """None of them near zero, where a clamp has no derivative."""
    t = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    t = t.sign() * (t.abs() + 0.1)
    return (t.abs() if positive else t).requires_grad_()


A, B, G, R = (numbers(*SHAPE, seed=seed) for seed in range(4))
Y, SCALE, SHIFT = numbers(*SHAPE, seed=4, positive=True), numbers(3, seed=5), numbers(3, seed=6).detach()

KERNELS: dict[str, tuple[Callable[..., Tensor | tuple[Tensor, ...]], tuple[Tensor, ...]]] = {
    "a ReLU": (lambda G, y: Attenuate.apply(G, y, None, EPS), (G, Y)),
    "a ReLU and its batch norm": (lambda G, y, scale: Attenuate.apply(G, y, scale, EPS), (G, Y, SCALE)),
    "a quotient": (lambda G, z: Quotient.apply(G, None, z, EPS, True), (G, A)),
    "a quotient of a product": (lambda G, y, z: Quotient.apply(G, y, z, EPS, False), (G, B, Y)),
    "without a stabiliser": (lambda G, y, z: Quotient.apply(G, y, z, 0.0, False), (G, B, Y)),
    "a sum": (lambda R, a, b: SumShares.apply(R, None, a, b, EPS), (R, A, B)),
    "a sum with a constant": (lambda R, a, b: SumShares.apply(R, None, a, b, EPS, False), (R, A, B)),
    "a sum with a ReLU behind": (lambda G, a, b: SumShares.apply(None, G, a, b, EPS), (G, A, B)),
    "a sum with a ReLU behind, and relevance": (lambda R, G, a, b: SumShares.apply(R, G, a, b, EPS), (R, G, A, B)),
    "a batch norm with a ReLU behind": (
        lambda G, y, x, scale: ChannelShares.apply(G, y, x, scale, SHIFT, EPS),
        (G, Y, A, SCALE),
    ),
}


@pytest.mark.parametrize("chunk", [1 << 20, 10])
@pytest.mark.parametrize("name", KERNELS)
def test_derivatives(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CHUNK", chunk)
    function, inputs = KERNELS[name]
    assert torch.autograd.gradcheck(function, inputs)


def test_a_sum_is_shared_out_as_written() -> None:
    plus_a, plus_b = A.clamp(min=0), B.clamp(min=0)
    s = (R + (A + B).clamp(min=0) * G) / (plus_a + plus_b + EPS)
    for share, expected in zip(SumShares.apply(R, G, A, B, EPS), (plus_a * s, plus_b * s), strict=True):
        torch.testing.assert_close(share, expected)


def test_a_batch_norm_is_shared_out_as_written() -> None:
    scale, shift = (t.view(-1, 1, 1) for t in (SCALE, SHIFT))
    plus = (scale * A).clamp(min=0)
    expected = plus / (plus + shift.clamp(min=0) + EPS) * Y * G
    torch.testing.assert_close(ChannelShares.apply(G, Y, A, SCALE, SHIFT, EPS), expected)
