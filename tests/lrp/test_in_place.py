"""Activations in place: each trap against the same network without it."""

from __future__ import annotations

import copy
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
    relu_rule,
)
from lrp.small_nets import (
    BOX,
    RULES,
    assert_explained_alike,
    behind,
    zeroed,
)

RELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "module": nn.ReLU(inplace=True),
    "F.relu(inplace)": lambda t: F.relu(t, inplace=True),
    "F.relu_": F.relu_,
    "torch.relu_": torch.relu_,
    "Tensor.relu_": lambda t: t.relu_(),
    "clamp_(min=0)": lambda t: t.clamp_(min=0),
    "clamp_min_": lambda t: t.clamp_min_(0),
    "F.threshold": lambda t: F.threshold(t, 0, 0, inplace=True),
    "torch.relu": torch.relu,
    "clamp": lambda t: t.clamp(0),
    "maximum": lambda t: torch.maximum(t, torch.zeros((), dtype=t.dtype)),
}


PLACES = [
    "conv", "bn", "first bn", "linear", "linear 3-D", "linear 4-D", "matmul", "add", "iadd", "view", "transpose", "cat",
    "pool", "layer norm", "product",
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("place", PLACES)
def test_in_place_relu(place: str, rule: str) -> None:
    trap, images = behind(place, lambda t: t.relu_())
    plain, _ = behind(place, lambda t: t.relu())
    assert_explained_alike(trap, plain, images, rule=rule)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("place", ["conv", "bn", "linear", "linear 3-D", "view"])
@pytest.mark.parametrize("rule", RULES)
def test_in_place_relu_behind_the_first_layer_in_a_box(rule: str, place: str, training: bool) -> None:
    trap, images = behind(place, lambda t: t.relu_())
    plain, _ = behind(place, lambda t: t.relu())
    assert_explained_alike(trap.train(training), plain.train(training), images, rule=rule, box=BOX)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spelling", RELUS)
def test_every_spelling_of_relu(spelling: str, rule: str) -> None:
    for place in ("bn", "add", "linear 3-D"):
        trap, images = behind(place, RELUS[spelling])
        plain, _ = behind(place, nn.ReLU().eval())
        assert_explained_alike(trap, plain, images, rule=rule)


@pytest.mark.parametrize("place", ["conv", "linear", "linear 3-D", "add", "view", "transpose", "cat"])
def test_in_place_relu_follows_the_epsilon_rule(place: str) -> None:
    """Against autograd with the rule written into the activation."""
    trap, images = behind(place, lambda t: t.relu_())
    surrogate, _ = behind(place, relu_rule)
    torch.testing.assert_close(
        explain(trap, images, 1), gradient_times_input(surrogate, images), rtol=1e-10, atol=1e-12
    )


ACTIVATIONS: dict[str, Callable[[bool], Callable[[Tensor], Tensor]]] = {
    "silu": lambda p: lambda t: F.silu(t, inplace=p),
    "mish": lambda p: lambda t: F.mish(t, inplace=p),
    "hardswish": lambda p: lambda t: F.hardswish(t, inplace=p),
    "hardsigmoid": lambda p: lambda t: F.hardsigmoid(t, inplace=p),
    "relu6": lambda p: lambda t: F.relu6(t, inplace=p),
    "hardtanh": lambda p: nn.Hardtanh(inplace=p),
    "leaky_relu": lambda p: lambda t: F.leaky_relu(t, 0.1, inplace=p),
    "elu": lambda p: lambda t: F.elu(t, inplace=p),
    "celu": lambda p: lambda t: F.celu(t, inplace=p),
    "selu": lambda p: lambda t: F.selu(t, inplace=p),
    "tanh": lambda p: lambda t: t.tanh_() if p else t.tanh(),
    "sigmoid": lambda p: lambda t: t.sigmoid_() if p else t.sigmoid(),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_in_place_activations(name: str, rule: str) -> None:
    for place in ("conv", "bn", "add", "view", "linear 3-D"):
        trap, images = behind(place, ACTIVATIONS[name](True))
        plain, _ = behind(place, ACTIVATIONS[name](False))
        assert_explained_alike(trap, plain, images, rule=rule)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_in_place_activations_follow_the_epsilon_rule(name: str) -> None:
    def ruled(t: Tensor) -> Tensor:
        x = t.detach()
        y = ACTIVATIONS[name](False)(x)
        return y + y / (x + EPSILON * torch.where(x < 0, -1.0, 1.0).double()) * (t - x)

    trap, images = behind("bn", ACTIVATIONS[name](True))
    surrogate, _ = behind("bn", ruled)
    torch.testing.assert_close(
        explain(trap, images, 1), gradient_times_input(surrogate, images), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("rule", RULES)
def test_in_place_relu_on_a_view_changes_its_base(rule: str) -> None:
    """`y.view(...).relu_()` for its effect on y alone."""

    def trapped(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        y.view(2, -1).relu_()
        return m.fc(y.flatten(1))

    def plain(m: Any, x: Tensor) -> Tensor:
        return m.fc(m.conv(x).relu().flatten(1))

    trap, images = behind("conv", nn.Identity())
    other = copy.deepcopy(trap)
    trap.function, other.function = trapped, plain
    assert torch.equal(trap(images), other(images))
    assert_explained_alike(trap, other, images, rule=rule)


@pytest.mark.parametrize("rule", RULES)
def test_in_place_on_an_activation_another_branch_reads(rule: str) -> None:
    """The pre-activation ResNet: the ReLU overwrites what the shortcut adds afterwards."""

    def trapped(m: Any, x: Tensor) -> Tensor:
        x = m.conv(x)
        out = m.conv2(F.relu(x, inplace=True))
        out += x
        return m.fc(F.relu(out, inplace=True).flatten(1))

    def plain(m: Any, x: Tensor) -> Tensor:
        x = torch.relu(m.conv(x))
        return m.fc(torch.relu(m.conv2(x) + x).flatten(1))

    nets = [
        randomised(Net(f, conv=nn.Conv2d(3, 5, 3, padding=1), conv2=nn.Conv2d(5, 5, 1), fc=nn.Linear(80, 3)))
        for f in (trapped, plain)
    ]
    assert_explained_alike(*nets, pictures(2, 3, 4, 4), rule=rule)


def doubled_slice(t: Tensor) -> Tensor:
    t[:, 1:] *= 2
    return t


OVERWRITES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "scale": (lambda t: t.mul_(2.0), lambda t: t * 2.0),
    "shift": (lambda t: t.add_(0.3), lambda t: t + 0.3),
    "divide": (lambda t: t.div_(3.0), lambda t: t / 3.0),
    "subtract": (lambda t: t.sub_(0.1), lambda t: t - 0.1),
    "negate": (lambda t: t.neg_(), lambda t: -t),
    "mask": (lambda t: t.masked_fill_(t.detach() > 1, 0), lambda t: t.masked_fill(t.detach() > 1, 0)),
    "zero a channel": (zeroed, lambda t: torch.cat([torch.zeros_like(t[:, :1]), t[:, 1:]], 1)),
    "double a slice": (doubled_slice, lambda t: torch.cat([t[:, :1], t[:, 1:] * 2], 1)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("step", OVERWRITES)
def test_values_overwritten_between_layer_and_relu(step: str, rule: str) -> None:
    """What stands between a layer and its ReLU, in place or not, keeps the two apart."""
    in_place, plain = OVERWRITES[step]
    for place in ("conv", "bn", "add", "linear 3-D"):
        trap, images = behind(place, lambda t: in_place(t).relu_())
        other, _ = behind(place, lambda t: plain(t).relu())
        assert torch.equal(trap(images), other(images))
        assert_explained_alike(trap, other, images, rule=rule)


def shared_outputs(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    z = m.bn(y)
    return m.fc((torch.relu(z) + torch.relu(y) + z.tanh()).flatten(1))


def own_outputs(m: Any, x: Tensor) -> Tensor:
    return m.fc((torch.relu(m.bn(m.conv(x))) + torch.relu(m.conv(x)) + m.bn(m.conv(x)).tanh()).flatten(1))


@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("rule", RULES)
def test_outputs_that_several_operations_read(rule: str, box: Any) -> None:
    """A layer fused with one of its readers still serves the others, as if each had a layer of its own."""
    nets = [
        randomised(Net(f, conv=nn.Conv2d(3, 5, 3, padding=1), bn=nn.BatchNorm2d(5), fc=nn.Linear(80, 3))).eval()
        for f in (shared_outputs, own_outputs)
    ]
    assert_explained_alike(*nets, pictures(2, 3, 4, 4), rule=rule, box=box)
