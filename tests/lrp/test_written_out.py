"""Norms, activations and gates written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet import explain
from lrp.helpers import (
    EPSILON,
    Net,
    gradient_times_input,
    pictures,
    randomised,
)
from lrp.small_nets import (
    assert_explained_alike,
    gate_by_operator,
    squeeze_excite,
)


def layer_norm_by_hand(x: Tensor) -> Tensor:
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5)


def layer_norm_by_rsqrt(x: Tensor) -> Tensor:
    return (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(1, correction=0, keepdim=True) + 1e-5)


def rms_norm_by_hand(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)


WRITTEN_OUT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "layer norm": (layer_norm_by_hand, lambda t: F.layer_norm(t, [80])),
    "layer norm, rsqrt": (layer_norm_by_rsqrt, lambda t: F.layer_norm(t, [80])),
    "RMS norm": (rms_norm_by_hand, lambda t: F.rms_norm(t, [80], eps=1e-5)),
    "normalize": (lambda t: t / t.norm(dim=1, keepdim=True), lambda t: F.normalize(t, dim=1)),
    "swish": (lambda t: t * t.sigmoid(), F.silu),
    "GLU": (lambda t: (t[:, :40] * t[:, 40:].sigmoid()).repeat(1, 2), lambda t: F.glu(t, 1).repeat(1, 2)),
    "softmax": (lambda t: t * F.softmax(t, 1), lambda t: t * nn.Softmax(1)(t)),
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_written_out(name: str) -> None:
    """Epsilon treats what people write out by hand like the function torch has for it.

    The stabiliser is smaller than the square of any activation: its derivative is `eps/x^2`.
    """
    nets = [
        randomised(Net(lambda m, x, f=f: m.fc(f(m.hidden(x))), hidden=nn.Linear(5, 80), fc=nn.Linear(80, 3)))
        for f in WRITTEN_OUT[name]
    ]
    assert_explained_alike(*nets, pictures(2, 5), rule="epsilon", epsilon=1e-12, tolerance=1e-6)


def test_in_place_sum_under_zplus_by_hand() -> None:
    """`R_1 = a1+/(a1+ + a2+ + eps) R_y` where `out += identity` overwrites a1, on a network of plain numbers."""

    def forward(m: Any, x: Tensor) -> Tensor:
        out = m.branch(x)
        out += x
        return m.fc(torch.relu(out))

    model = Net(forward, branch=nn.Linear(2, 2, bias=False), fc=nn.Linear(2, 1, bias=False)).double()
    with torch.no_grad():
        model.branch.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 0.5]]))
        model.fc.weight.copy_(torch.tensor([[1.0, 3.0]]))
    heatmap = explain(model, torch.tensor([[1.0, 4.0]], dtype=torch.float64), 0, rule="zplus")
    branch, identity = (2.0, 2.0), (1.0, 4.0)
    z = sum(w * (a + b) for w, a, b in zip((1, 3), branch, identity, strict=True))
    expected = []
    for w, weight, a, b in zip((1, 3), (2.0, 0.5), branch, identity, strict=True):
        R = w * (a + b) * z / (z + EPSILON)
        R_branch, R_identity = (part / (a + b + EPSILON) * R for part in (a, b))
        expected.append(R_identity + weight * b * R_branch / (a + EPSILON))
    torch.testing.assert_close(heatmap, torch.tensor([expected], dtype=torch.float64), rtol=1e-12, atol=0)


GATINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "*=": gate_by_operator,
    "mul_": lambda x, g: x.mul_(g),
    "g * x": lambda x, g: g * x,
    "torch.mul": torch.mul,
}


@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gradient"])
@pytest.mark.parametrize("spelling", GATINGS)
def test_gate_with_in_place_product(spelling: str, rule: str) -> None:
    trap, plain = squeeze_excite(GATINGS[spelling]), squeeze_excite(lambda x, g: x * g)
    assert_explained_alike(trap, plain, pictures(2, 3, 4, 4), rule=rule)


def test_a_gate_is_a_constant() -> None:
    images = pictures(2, 3, 4, 4)
    expected = gradient_times_input(squeeze_excite(lambda x, g: x * g, surrogate=True), images)
    torch.testing.assert_close(explain(squeeze_excite(gate_by_operator), images, 1), expected, rtol=1e-10, atol=1e-12)


def test_glu_is_a_signal_and_a_gate() -> None:
    model = randomised(Net(lambda m, x: m.fc(F.glu(m.hidden(x), 1)), hidden=nn.Linear(5, 8), fc=nn.Linear(4, 3)))
    images = pictures(2, 5)

    def surrogate(x: Tensor) -> Tensor:
        signal, gate = model.hidden(x).chunk(2, 1)
        return model.fc(signal * gate.sigmoid().detach())

    expected = gradient_times_input(surrogate, images)
    torch.testing.assert_close(explain(model, images, 1, strict=True), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        explain(model, images, 1, rule="gradient"), gradient_times_input(model, images), rtol=1e-10, atol=1e-12
    )


def test_normalize_divides_by_a_constant() -> None:
    model = randomised(
        Net(lambda m, x: m.fc(F.normalize(m.hidden(x), dim=1)), hidden=nn.Linear(5, 8), fc=nn.Linear(8, 3))
    )
    images = pictures(2, 5)

    def surrogate(x: Tensor) -> Tensor:
        hidden = model.hidden(x)
        return model.fc(hidden / hidden.detach().norm(dim=1, keepdim=True))

    expected = gradient_times_input(surrogate, images)
    torch.testing.assert_close(explain(model, images, 1, strict=True), expected, rtol=1e-10, atol=1e-12)
