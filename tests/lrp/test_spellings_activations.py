"""Activations in every spelling: the rectifier above all, then the others as module, function, method and in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from lrp.helpers import (
    RULES,
    SMALL,
    TWO_RULES,
    activation_rule,
    assert_alike,
    assert_close,
    gradient_times_input,
    pictures,
    quietly,
    relu_rule,
    twins,
)

Activation = Callable[[Tensor], Tensor]
ZERO = torch.zeros((), dtype=torch.float64)


def convolutional(act: Activation) -> Callable[[Any, Tensor], Tensor]:
    """Behind a batch norm, behind a sum, and behind a linear layer."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = act(m.bn(m.conv(x)))
        x = act(m.conv2(x) + x)
        return m.fc(act(m.hidden(x.mean((2, 3)))))

    return forward


def parts() -> dict[str, nn.Module]:
    return {
        "conv": nn.Conv2d(3, 4, 3, padding=1),
        "bn": nn.BatchNorm2d(4),
        "conv2": nn.Conv2d(4, 4, 3, padding=1),
        "hidden": nn.Linear(4, 12),
        "fc": nn.Linear(12, 3),
    }


def assert_same_activation(
    plain: Activation, other: Activation, *, rule: str, training: bool = False, **options: Any
) -> None:
    nets = twins([convolutional(plain), convolutional(other)], **parts())
    for net in nets:
        net.train(training)
    assert_alike(*nets, pictures(2, 3, 4, 4), rule=rule, **options)


def masked_in_place(t: Tensor) -> Tensor:
    t[t < 0] = 0
    return t


def masked_copy(t: Tensor) -> Tensor:
    t = t.clone()
    t[t < 0] = 0.0
    return t


def written_through_a_view(t: Tensor) -> Tensor:
    t.flatten(1).relu_()
    return t


def filled_through_a_view(t: Tensor) -> Tensor:
    flat = t.view(-1)
    flat[flat < 0] = 0
    return t


RELUS: dict[str, Activation] = {
    "nn.ReLU": nn.ReLU(),
    "nn.ReLU(inplace)": nn.ReLU(inplace=True),
    "F.relu": F.relu,
    "F.relu(inplace)": lambda t: F.relu(t, inplace=True),
    "relu_": lambda t: t.relu_(),
    "aten.relu": lambda t: torch.ops.aten.relu(t),
    "clamp(min=0)": lambda t: t.clamp(min=0),
    "clamp(0)": lambda t: torch.clamp(t, 0),
    "clip": lambda t: t.clip(0, None),
    "clamp_": lambda t: t.clamp_(min=0),
    "clamp_min": lambda t: t.clamp_min(0),
    "clamp_min_": lambda t: t.clamp_min_(0),
    "clamp(min=tensor)": lambda t: t.clamp(min=ZERO),
    "clamp(min=zeros)": lambda t: t.clamp(min=torch.zeros_like(t)),
    "maximum(zeros)": lambda t: torch.maximum(t, torch.zeros_like(t)),
    "maximum(0, x)": lambda t: torch.maximum(ZERO, t),
    "torch.max": lambda t: torch.max(t, torch.zeros_like(t)),
    "torch.max(0, x)": lambda t: torch.max(ZERO, t),
    "fmax": lambda t: torch.fmax(t, torch.zeros_like(t)),
    "where(x > 0, x, 0)": lambda t: torch.where(t > 0, t, 0.0),
    "where(x >= 0)": lambda t: torch.where(t >= 0, t, torch.zeros_like(t)),
    "where(x < 0, 0, x)": lambda t: torch.where(t < 0, ZERO, t),
    "Tensor.where": lambda t: t.where(t > 0, ZERO),
    "x * (x > 0)": lambda t: t * (t > 0),
    "(x > 0) * x": lambda t: (t > 0) * t,
    "x * (x > 0).double()": lambda t: t * (t > 0).double(),
    "x.mul_(x > 0)": lambda t: t.mul_(t.detach() > 0),
    "x * heaviside": lambda t: t * torch.heaviside(t.detach(), ZERO),
    "masked_fill": lambda t: t.masked_fill(t < 0, 0),
    "masked_fill_": lambda t: t.masked_fill_(t < 0, 0.0),
    "masked_fill(tensor)": lambda t: t.masked_fill(t <= 0, ZERO),
    "x[x < 0] = 0": masked_in_place,
    "copy, x[x < 0] = 0": masked_copy,
    "index_put": lambda t: t.index_put((t < 0,), ZERO),
    "threshold": lambda t: F.threshold(t, 0.0, 0.0),
    "threshold_": lambda t: F.threshold_(t, 0.0, 0.0),
    "nn.Threshold": nn.Threshold(0.0, 0.0),
    "flat relu_": written_through_a_view,
    "flat mask": filled_through_a_view,
    "permuted": lambda t: t.transpose(0, 1).relu().transpose(0, 1),
    "in halves": lambda t: torch.cat([torch.relu(h) for h in t.chunk(2, 1)], 1),
    "sample by sample": lambda t: torch.stack([torch.relu(s) for s in t]),
    "-minimum(-x, 0)": lambda t: -torch.minimum(-t, ZERO),
    "-clamp(-x, max=0)": lambda t: -(-t).clamp(max=0),
}
# Not in the list: equal, or loud.
RARE_RELUS: dict[str, Activation] = {
    "leaky_relu(0)": lambda t: F.leaky_relu(t, 0.0),
    "hardtanh(0, inf)": lambda t: F.hardtanh(t, 0.0, float("inf")),
    "clamp(0, inf)": lambda t: t.clamp(0, float("inf")),
    "(x + |x|)/2": lambda t: (t + t.abs()) / 2,
    "maximum(0*x, x)": lambda t: torch.maximum(0 * t, t),
    "x - minimum(x, 0)": lambda t: t - t.clamp(max=0),
    "x * sign+": lambda t: t * t.sign().clamp(min=0),
    "prelu(0)": lambda t: F.prelu(t, torch.zeros(1, dtype=t.dtype)),
    "max of a stack": lambda t: torch.stack([t, torch.zeros_like(t)]).amax(0),
    "plus nothing": lambda t: torch.relu(t) + 0 * t,
    "sqrt of square": lambda t: (t + (t * t).sqrt()) / 2,
}


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("name", RELUS)
def test_relu(name: str, rule: str) -> None:
    assert_same_activation(torch.relu, RELUS[name], rule=rule, what=name)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "name",
    [
        "clamp(min=0)",
        "torch.max",
        "where(x > 0, x, 0)",
        "x * (x > 0)",
        "masked_fill",
        "x[x < 0] = 0",
        "threshold",
        "flat relu_",
    ],
)
def test_relu_in_train_mode_and_in_a_box(name: str, rule: str) -> None:
    """With zB on, the rectifier behind the first layer passes relevance on unchanged, however it is spelled."""
    assert_same_activation(torch.relu, RELUS[name], rule=rule, training=True, what=f"{name}, train")
    assert_same_activation(torch.relu, RELUS[name], rule=rule, box=(-6.0, 6.0), what=f"{name}, box")


@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
@pytest.mark.parametrize("name", RARE_RELUS)
def test_rare_spellings_of_relu_are_right_or_loud(name: str, rule: str) -> None:
    assert_same_activation(torch.relu, RARE_RELUS[name], rule=rule, loud=True, what=name, **SMALL)


def test_relu_follows_the_epsilon_rule() -> None:
    images = pictures(2, 3, 4, 4)
    for name, act in RELUS.items():
        (net,) = twins([convolutional(act)], **parts())
        expected = gradient_times_input(lambda x: convolutional(relu_rule)(net, x), images)
        assert_close(fi.explain(net, images, 1), expected, 1e-10, name)


def test_a_mask_that_is_no_rectifier_stays_one() -> None:
    """`where` and `masked_fill` with another condition are masks: their ordinary derivative."""
    images = pictures(2, 3, 4, 4)
    masks: dict[str, Activation] = {
        "where of others": lambda t: torch.where(t.roll(1, 1) > 0, t, ZERO),
        "x > 0.3": lambda t: t * (t > 0.3),
        "negative part": lambda t: torch.where(t < 0, t, ZERO),
        "constant mask": lambda t: t * (torch.arange(t.shape[1]) % 2).view(-1, *[1] * (t.ndim - 2)),
        "masked_fill(-1)": lambda t: t.masked_fill(t.detach().roll(1, 1) < 0, -1.0),
    }
    for name, act in masks.items():
        (net,) = twins([convolutional(act)], **parts())
        with_warnings = fi.explain(net, images, 1)
        expected = gradient_times_input(net, images)
        rectified = {"x > 0.3": 0.3, "negative part": 0.0}
        if name not in rectified:  # these two could as well be taken for activations, f(x)/(x + eps)
            assert_close(with_warnings, expected, 1e-10, name)
        else:
            ruled = gradient_times_input(lambda x: convolutional(lambda t: activation_rule(act, t))(net, x), images)
            close = [torch.allclose(with_warnings, e, rtol=1e-9, atol=1e-12) for e in (expected, ruled)]
            assert any(close), name


# --- bounded above ------------------------------------------------------------------------------------------------

RELU6: dict[str, Activation] = {
    "nn.ReLU6": nn.ReLU6(),
    "hardtanh": lambda t: F.hardtanh(t, 0.0, 6.0),
    "clamp": lambda t: t.clamp(0, 6),
    "clip": lambda t: torch.clip(t, 0.0, 6.0),
    "clamp tensors": lambda t: t.clamp(ZERO, ZERO + 6),
    "in place": lambda t: F.relu6(t, inplace=True),
}
RELU6_IN_TWO: dict[str, Activation] = {
    "relu, minimum": lambda t: torch.relu(t).minimum(ZERO + 6),
    "relu, clamp(max)": lambda t: torch.relu(t).clamp(max=6),
    "relu, torch.min": lambda t: torch.min(torch.relu(t), torch.full_like(t, 6.0)),
    "clamp(max), relu": lambda t: torch.relu(t.clamp(max=6)),
    "clamp_max": lambda t: t.clamp_min(0).clamp_max(6),
    "where": lambda t: torch.where(torch.relu(t) > 6, ZERO + 6, torch.relu(t)),
}


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("name", RELU6)
def test_relu6(name: str, rule: str) -> None:
    assert_same_activation(lambda t: F.relu6(12 * t) / 12, lambda t: RELU6[name](12 * t) / 12, rule=rule, what=name)


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("name", RELU6_IN_TWO)
def test_relu6_in_two_steps(name: str, rule: str) -> None:
    """Two activations behind each other: the same but for one more stabiliser."""
    assert_same_activation(
        lambda t: F.relu6(12 * t) / 12,
        lambda t: RELU6_IN_TWO[name](12 * t) / 12,
        rule=rule,
        what=name,
        loud=name == "where",
        **SMALL,
    )


# --- the others ----------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[Activation, ...]] = {
    "gelu": (F.gelu, nn.GELU(), lambda t: torch.ops.aten.gelu(t)),
    "gelu tanh": (lambda t: F.gelu(t, approximate="tanh"), nn.GELU("tanh")),
    "silu": (F.silu, nn.SiLU(), nn.SiLU(inplace=True), lambda t: torch.ops.aten.silu(t)),
    "hardswish": (F.hardswish, nn.Hardswish(), nn.Hardswish(inplace=True)),
    "mish": (F.mish, nn.Mish(), nn.Mish(inplace=True)),
    "elu": (F.elu, nn.ELU(), nn.ELU(inplace=True), F.elu_, F.celu, nn.CELU()),
    "selu": (F.selu, nn.SELU(), nn.SELU(inplace=True), torch.selu),
    "leaky_relu": (F.leaky_relu, nn.LeakyReLU(), nn.LeakyReLU(inplace=True), F.leaky_relu_),
    "leaky_relu by hand": (F.leaky_relu, lambda t: torch.maximum(t, 0.01 * t), lambda t: torch.max(t / 100, t)),
    "rrelu in eval": (lambda t: F.leaky_relu(t, (1 / 8 + 1 / 3) / 2), nn.RReLU().eval(), lambda t: F.rrelu(t)),
    "tanh": (torch.tanh, nn.Tanh(), lambda t: t.tanh_(), F.tanh),
    "sigmoid": (torch.sigmoid, nn.Sigmoid(), lambda t: t.sigmoid_(), torch.special.expit),
    "hardsigmoid": (F.hardsigmoid, nn.Hardsigmoid(), nn.Hardsigmoid(inplace=True)),
    "softplus": (F.softplus, nn.Softplus()),
    "hardtanh": (F.hardtanh, nn.Hardtanh(), lambda t: t.clamp(-1, 1), nn.Hardtanh(inplace=True)),
    "softsign": (F.softsign, nn.Softsign()),
    "hardshrink": (F.hardshrink, nn.Hardshrink(), lambda t: t.hardshrink()),
    "softshrink": (F.softshrink, nn.Softshrink()),
    "logsigmoid": (F.logsigmoid, nn.LogSigmoid()),
}


# Average pooling keeps positive values only under z+, and here these have none.
DEAD = ("logsigmoid", "softshrink")
OTHER_CASES = [(name, rule) for name in OTHERS for rule in TWO_RULES if rule != "zplus" or name not in DEAD]


@pytest.mark.parametrize(("name", "rule"), OTHER_CASES)
def test_other_activations(name: str, rule: str) -> None:
    plain, *others = OTHERS[name]
    for number, other in enumerate(others):
        assert_same_activation(plain, other, rule=rule, what=f"{name} {number}")


def plain_surrogate(function: Activation) -> Activation:
    return lambda t: activation_rule(function, t)


# In no list of the specification: the rule of activations, or a warning.
UNLISTED: dict[str, Activation] = {
    "atan": torch.atan,
    "erf": torch.erf,
    "erf_": lambda t: t.erf_(),
    "sin": torch.sin,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log1p of abs": lambda t: t.abs().log1p(),
    "sinh": torch.sinh,
    "square root": lambda t: (t.abs() + 1).sqrt(),
    "cube": lambda t: t**3,
    "softplus by hand": lambda t: (1 + t.exp()).log(),
    "sinc": torch.sinc,
    "asinh": torch.asinh,
}


@pytest.mark.parametrize("name", UNLISTED)
def test_activations_in_no_list_are_right_or_loud(name: str) -> None:
    images = pictures(2, 3, 4, 4)
    (net,) = twins([convolutional(UNLISTED[name])], **parts())
    found, messages = quietly(lambda: fi.explain(net, images, 1))
    if not messages:
        ruled = gradient_times_input(lambda x: convolutional(plain_surrogate(UNLISTED[name]))(net, x), images)
        assert_close(found, ruled, 1e-9)


@pytest.mark.parametrize("name", OTHERS)
def test_other_activations_follow_the_epsilon_rule(name: str) -> None:
    images = pictures(2, 3, 4, 4)
    (net,) = twins([convolutional(OTHERS[name][0])], **parts())
    expected = gradient_times_input(lambda x: convolutional(plain_surrogate(OTHERS[name][0]))(net, x), images)
    assert_close(fi.explain(net, images, 1), expected, 1e-9)


PRELUS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch.prelu": torch.prelu,
    "Tensor.prelu": lambda t, a: t.prelu(a),
    "max + a*min": lambda t, a: t.clamp(min=0) + a.view(-1, *[1] * (t.ndim - 2)) * t.clamp(max=0),
    "where": lambda t, a: torch.where(t > 0, t, a.view(-1, *[1] * (t.ndim - 2)) * t),
}


@pytest.mark.parametrize("name", PRELUS)
def test_prelu(name: str) -> None:
    """A slope that is a parameter: its gradient too. Written out it is right or loud."""

    def net(act: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        return lambda m, x: m.fc(act(m.hidden(x), m.slope))

    nets = twins(
        [net(F.prelu), net(PRELUS[name])],
        hidden=nn.Linear(5, 6),
        fc=nn.Linear(6, 3),
        slope=nn.Parameter(torch.zeros(6)),
    )
    options: dict[str, Any] = {"loud": True, **SMALL} if name == "max + a*min" else {}
    assert_alike(*nets, pictures(2, 5), what=name, **options)
