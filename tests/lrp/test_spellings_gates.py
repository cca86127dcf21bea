"""Products: two signals share, a gate is a constant, however either is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from lrp.helpers import (
    SMALL,
    TWO_RULES,
    assert_alike,
    assert_close,
    gradient_times_input,
    pictures,
    product_rule,
    quietly,
    relu_rule,
    twins,
)

Gate = Callable[[Tensor], Tensor]
ONE = torch.ones((), dtype=torch.float64)


def squeeze_excite(
    gate: Gate, multiply: Callable[[Tensor, Tensor], Tensor] = torch.mul
) -> Callable[[Any, Tensor], Tensor]:
    """A gate (batch, channels, 1, 1) on the channels of a convolution."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.conv(x)
        t = 3 * m.up(torch.relu(m.down(x.mean((2, 3), keepdim=True))))
        return m.fc(torch.relu(m.conv2(multiply(x, gate(t)))).mean((2, 3)))

    return forward


def parts() -> dict[str, nn.Module]:
    return {
        "conv": nn.Conv2d(3, 4, 3, padding=1),
        "down": nn.Conv2d(4, 6, 1),
        "up": nn.Conv2d(6, 4, 1),
        "conv2": nn.Conv2d(4, 6, 3, padding=1),
        "fc": nn.Linear(6, 3),
    }


def nearest(g: Tensor) -> Tensor:
    return F.interpolate(g, size=(4, 4), mode="nearest")


def assert_same_gate(plain: Gate, other: Gate, rule: str, **options: Any) -> None:
    assert_alike(
        *twins([squeeze_excite(plain), squeeze_excite(other)], **parts()), pictures(2, 3, 4, 4), rule=rule, **options
    )


GATES: dict[str, tuple[Gate, Gate]] = {
    "nn.Sigmoid": (torch.sigmoid, nn.Sigmoid()),
    "sigmoid_": (torch.sigmoid, lambda t: t.sigmoid_()),
    "expit": (torch.sigmoid, torch.special.expit),
    "tanh + 1": (torch.sigmoid, lambda t: 0.5 * (torch.tanh(t / 2) + 1)),
    "1 + tanh": (torch.sigmoid, lambda t: (1 + torch.tanh(0.5 * t)) / 2),
    "tanh * 0.5 + 0.5": (torch.sigmoid, lambda t: torch.tanh(t * 0.5) * 0.5 + 0.5),
    "clamped sigmoid": (torch.sigmoid, lambda t: torch.sigmoid(t).clamp(0, 1)),
    "clamped away from 0": (torch.sigmoid, lambda t: torch.sigmoid(t).clamp(1e-30, 1.0)),
    "expanded": (torch.sigmoid, lambda t: torch.sigmoid(t).expand(-1, -1, 4, 4)),
    "repeated": (torch.sigmoid, lambda t: torch.sigmoid(t).repeat(1, 1, 4, 4)),
    "nearest": (torch.sigmoid, lambda t: nearest(torch.sigmoid(t))),
    "reshaped": (torch.sigmoid, lambda t: torch.sigmoid(t.flatten(1)).view(-1, 4, 1, 1)),
    "cloned": (torch.sigmoid, lambda t: torch.sigmoid(t).clone().contiguous().double()),
    "in halves": (torch.sigmoid, lambda t: torch.cat([h.sigmoid() for h in t.chunk(2, 1)], 1)),
    "dropout": (torch.sigmoid, lambda t: F.dropout(t.sigmoid(), 0.5, training=False)),
    "times one": (torch.sigmoid, lambda t: t.sigmoid() * 1.0),
    "nn.Hardsigmoid": (F.hardsigmoid, nn.Hardsigmoid()),
    "hardsigmoid in place": (F.hardsigmoid, lambda t: F.hardsigmoid(t, inplace=True)),
    "relu6(t + 3)/6": (F.hardsigmoid, lambda t: F.relu6(t + 3) / 6),
    "relu6 in place": (F.hardsigmoid, lambda t: F.relu6(t.add(3), inplace=True).div_(6.0)),
    "(t + 3).clamp(0, 6)/6": (F.hardsigmoid, lambda t: (t + 3).clamp(0, 6) / 6),
    "* (1/6)": (F.hardsigmoid, lambda t: (t + 3).clamp(0, 6) * (1 / 6)),
    "hardtanh/6": (F.hardsigmoid, lambda t: F.hardtanh(t + 3, 0, 6) / 6),
    "clamp(t/6 + 0.5)": (F.hardsigmoid, lambda t: (t / 6 + 0.5).clamp(0, 1)),
    "relu, minimum": (F.hardsigmoid, lambda t: torch.relu(t + 3).minimum(6 * ONE) / 6),
    "hardtanh(0, 1)": (lambda t: t.clamp(0, 1), lambda t: F.hardtanh(t, 0.0, 1.0)),
    "clip": (lambda t: t.clamp(0, 1), lambda t: torch.clip(t, 0, 1)),
    "clamp tensors": (lambda t: t.clamp(0, 1), lambda t: t.clamp(0 * ONE, ONE)),
    "relu6(6t)/6": (lambda t: t.clamp(0, 1), lambda t: F.relu6(6 * t) / 6),
    "relu, clamp(max)": (lambda t: t.clamp(0, 1), lambda t: torch.relu(t).clamp(max=1)),
    "maximum, minimum": (lambda t: t.clamp(0, 1), lambda t: torch.minimum(torch.maximum(t, 0 * ONE), ONE)),
}
# However written, but not by anything in the list: equal, or loud.
RARE_GATES: dict[str, tuple[Gate, Gate]] = {
    "1/(1 + exp(-t))": (torch.sigmoid, lambda t: 1 / (1 + torch.exp(-t))),
    "reciprocal": (torch.sigmoid, lambda t: (1 + torch.exp(-t)).reciprocal()),
    "exp/(1 + exp)": (torch.sigmoid, lambda t: t.exp() / (1 + t.exp())),
    "exp(logsigmoid)": (torch.sigmoid, lambda t: F.logsigmoid(t).exp()),
    "1 - sigmoid(-t)": (torch.sigmoid, lambda t: 1 - torch.sigmoid(-t)),
    "erf": (lambda t: 0.5 * (1 + torch.erf(t)), lambda t: (torch.erf(t) + 1) / 2),
    "where": (lambda t: t.clamp(0, 1), lambda t: torch.where(t > 1, ONE, torch.where(t < 0, 0 * ONE, t))),
}


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("name", GATES)
def test_gates(name: str, rule: str) -> None:
    plain, other = GATES[name]
    tolerance = 1e-6 if plain is F.hardsigmoid else 1e-9  # torch's derivative of it takes 1/6 in single precision
    assert_same_gate(plain, other, rule, what=name, tolerance=tolerance)


@pytest.mark.parametrize("name", RARE_GATES)
def test_rare_gates_are_right_or_loud(name: str) -> None:
    plain, other = RARE_GATES[name]
    if name == "erf":  # no plain spelling exists: half each, a gate, or loud, but the same for both
        maps = [
            quietly(lambda f=f: fi.explain(*twins([squeeze_excite(f)], **parts()), pictures(2, 3, 4, 4), 1))
            for f in (plain, other)
        ]
        assert maps[0][1] or torch.allclose(maps[0][0], maps[1][0], rtol=1e-9, atol=1e-12)
        return
    assert_same_gate(plain, other, "epsilon", loud=True, what=name)


@pytest.mark.parametrize("name", GATES)
def test_a_gate_is_a_constant(name: str) -> None:
    """The signal takes all: against autograd with the gate detached."""
    images = pictures(2, 3, 4, 4)
    (net,) = twins([squeeze_excite(GATES[name][1])], **parts())

    def ruled(x: Tensor) -> Tensor:
        x = net.conv(x)
        t = 3 * net.up(torch.relu(net.down(x.mean((2, 3), keepdim=True))))
        return net.fc(relu_rule(net.conv2(x * GATES[name][0](t).detach())).mean((2, 3)))

    assert_close(fi.explain(net, images, 1), gradient_times_input(ruled, images), 1e-9, name)


def multiplied_in_place(x: Tensor, g: Tensor) -> Tensor:
    x *= g
    return x


MULTIPLIED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x * g": lambda x, g: x * g,
    "g * x": lambda x, g: g * x,
    "mul_": lambda x, g: x.mul_(g),
    "*=": multiplied_in_place,
    "multiply": torch.multiply,
    "expand_as": lambda x, g: x * g.expand_as(x),
    "einsum": lambda x, g: torch.einsum("bchw,bc->bchw", x, g[..., 0, 0]),
    "einsum, reversed": lambda x, g: torch.einsum("bc,bchw->bchw", g[..., 0, 0], x),
    "channel by channel": lambda x, g: torch.stack([x[:, c] * g[:, c] for c in range(4)], 1),
    "slices of a buffer": lambda x, g: torch.cat([x[:, :2] * g[:, :2], x[:, 2:] * g[:, 2:]], 1),
    "kwargs": lambda x, g: torch.mul(input=x, other=g),
    "transposed": lambda x, g: (x.transpose(0, 1) * g.transpose(0, 1)).transpose(0, 1),
    "diagonal matrices": lambda x, g: (torch.diag_embed(g[..., 0, 0]) @ x.flatten(2)).view_as(x),
    "addcmul": lambda x, g: torch.addcmul(torch.zeros_like(x), x, g),
    "lerp": lambda x, g: torch.lerp(torch.zeros_like(x), x, g.expand_as(x)),
    "grouped conv": lambda x, g: F.conv2d(x.reshape(1, -1, 4, 4), g.reshape(-1, 1, 1, 1), groups=g.numel()).view_as(x),
    "x / (1/g)": lambda x, g: x / (1 / g),
}


# z+ of a layer leaves out what is negative; of a product with a gate, nothing.
GATED = [
    (name, rule)
    for name in MULTIPLIED
    for rule in TWO_RULES
    if rule == "epsilon" or name not in ("diagonal matrices", "grouped conv")
]


@pytest.mark.parametrize(("name", "rule"), GATED)
def test_multiplying_by_a_gate(name: str, rule: str) -> None:
    rare = name in ("diagonal matrices", "addcmul", "lerp", "grouped conv", "x / (1/g)")
    nets = twins([squeeze_excite(torch.sigmoid), squeeze_excite(torch.sigmoid, MULTIPLIED[name])], **parts())
    assert_alike(*nets, pictures(2, 3, 4, 4), rule=rule, loud=rare, what=name)


# z+ of a matrix product leaves out negative terms, of which an elementwise one has nothing else.
TWO_SIGNALS = [
    (name, rule)
    for name in MULTIPLIED
    for rule in TWO_RULES
    if not (name in ("diagonal matrices", "grouped conv") and rule == "zplus") and name != "x / (1/g)"
]


@pytest.mark.parametrize(("name", "rule"), TWO_SIGNALS)
def test_multiplying_two_signals(name: str, rule: str) -> None:
    """Half to each factor in every spelling; for epsilon also by value."""
    rare = name in ("addcmul", "lerp")
    identity: Gate = lambda t: t  # noqa: E731
    nets = twins([squeeze_excite(identity), squeeze_excite(identity, MULTIPLIED[name])], **parts())
    images = pictures(2, 3, 4, 4)
    options: dict[str, Any] = SMALL if rule == "zplus" else {}
    assert_alike(*nets, images, rule=rule, loud=rare, what=name, **options)

    def ruled(x: Tensor) -> Tensor:
        m = nets[0]
        x = m.conv(x)
        t = 3 * m.up(relu_rule(m.down(x.mean((2, 3), keepdim=True))))
        return m.fc(relu_rule(m.conv2(product_rule(torch.mul, x, t))).mean((2, 3)))

    assert_close(fi.explain(nets[0], images, 1), gradient_times_input(ruled, images), 1e-9, "half each")


# --- activations that are a product with a gate --------------------------------------------------------------------

BY_HAND: dict[str, tuple[Gate, Gate]] = {
    "silu": (F.silu, lambda t: t * torch.sigmoid(t)),
    "sigmoid first": (F.silu, lambda t: torch.sigmoid(t) * t),
    "silu, mul_": (F.silu, lambda t: t.mul(t.sigmoid())),
    "silu by tanh": (F.silu, lambda t: t * (0.5 * (torch.tanh(t / 2) + 1))),
    "hardswish": (F.hardswish, lambda t: t * F.hardsigmoid(t)),
    "hardswish, relu6": (F.hardswish, lambda t: t * (F.relu6(t + 3) / 6)),
    "hardswish, clamp": (F.hardswish, lambda t: t * ((t + 3).clamp(0, 6) / 6)),
    "hardswish, hardtanh": (F.hardswish, lambda t: t * (F.hardtanh(t + 3, 0.0, 6.0) / 6)),
    "hardswish, /6 first": (F.hardswish, lambda t: (F.relu6(t + 3) / 6) * t),
    "glu": (lambda t: F.glu(t, 1).repeat(1, 2), lambda t: (t[:, :6] * t[:, 6:].sigmoid()).repeat(1, 2)),
    "glu by chunks": (
        lambda t: F.glu(t, 1).repeat(1, 2),
        lambda t: (t.chunk(2, 1)[0] * t.chunk(2, 1)[1].sigmoid()).repeat(1, 2),
    ),
}
RARE_BY_HAND: dict[str, tuple[Gate, Gate]] = {
    "hardswish, /6 last": (F.hardswish, lambda t: t * F.relu6(t + 3) / 6),
    "hardswish, /6 of x": (F.hardswish, lambda t: (t / 6) * F.relu6(t + 3)),
    "gelu": (F.gelu, lambda t: 0.5 * t * (1 + torch.erf(t / math.sqrt(2)))),
    "gelu, gate": (F.gelu, lambda t: t * (0.5 * (1 + torch.erf(t / math.sqrt(2))))),
    "gelu tanh": (
        lambda t: F.gelu(t, approximate="tanh"),
        lambda t: 0.5 * t * (1 + torch.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3))),
    ),
    "mish": (F.mish, lambda t: t * torch.tanh(F.softplus(t))),
    "silu by exp": (F.silu, lambda t: t / (1 + torch.exp(-t))),
    "softsign": (F.softsign, lambda t: t / (1 + t.abs())),
    "leaky": (F.leaky_relu, lambda t: torch.where(t > 0, t, 0.01 * t)),
    "leaky, max": (F.leaky_relu, lambda t: torch.maximum(t, 0.01 * t)),
    "hardshrink": (F.hardshrink, lambda t: t * (t.abs() > 0.5)),
}


def dense(act: Gate) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: m.fc(act(3 * m.hidden(x)))


@pytest.mark.parametrize("rule", ["epsilon", "gamma"])
@pytest.mark.parametrize("name", [*BY_HAND, *RARE_BY_HAND])
def test_activations_by_hand(name: str, rule: str) -> None:
    """`x*g(x)`: the gate is a constant, so G*g(x), which is f(x)/x but for the stabiliser."""
    plain, other = (BY_HAND | RARE_BY_HAND)[name]
    nets = twins([dense(plain), dense(other)], hidden=nn.Linear(5, 12), fc=nn.Linear(12, 3))
    assert_alike(*nets, pictures(2, 5), rule=rule, loud=name in RARE_BY_HAND, what=name, **SMALL)


SQUARES: dict[str, Gate] = {
    "square": torch.square,
    "**": lambda t: t**2,
    "pow": lambda t: t.pow(2.0),
    "square_": lambda t: t.square_(),
    "mul clone": lambda t: t * t.clone(),
    "einsum": lambda t: torch.einsum("ni,ni->ni", t, t),
    "float_power": lambda t: t.float_power(2),
    "mul views": lambda t: t.view_as(t) * t,
}


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("name", SQUARES)
def test_a_square_is_a_product(name: str, rule: str) -> None:
    nets = twins([dense(lambda t: t * t), dense(SQUARES[name])], hidden=nn.Linear(5, 12), fc=nn.Linear(12, 3))
    assert_alike(
        *nets, pictures(2, 5), rule=rule, loud=name == "float_power", what=name, **(SMALL if rule == "zplus" else {})
    )


QUOTIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reciprocal": lambda a, b: a * b.reciprocal(),
    "1/b": lambda a, b: a * (1 / b),
    "pow(-1)": lambda a, b: a * b.pow(-1),
    "div_": lambda a, b: a.div_(b),
    "torch.div": lambda a, b: torch.div(a, b),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_quotients_of_two_signals_agree_or_are_loud(name: str) -> None:
    def net(divide: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        return lambda m, x: m.fc(divide(m.hidden(x), 2 + m.other(x).square()))

    nets = twins(
        [net(f) for f in (torch.true_divide, QUOTIENTS[name])],
        hidden=nn.Linear(5, 6),
        other=nn.Linear(5, 6),
        fc=nn.Linear(6, 3),
    )
    (plain, warned), (other, also) = (quietly(lambda n=n: fi.explain(n, pictures(2, 5), 1)) for n in nets)
    if not (warned or also):
        assert_close(other, plain, 1e-9)
