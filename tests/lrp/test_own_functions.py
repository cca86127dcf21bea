"""Functions whose derivative is not torch's own are never taken for a known operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.errors import RuleError, RuleWarning
from lrp.helpers import (
    TWO_RULES,
    assert_alike,
    assert_close,
    explained,
    gradient_times_input,
    pictures,
    quietly,
    relu_rule,
    twins,
)

# --- Functions that are not torch's --------------------------------------------------------------------------------


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class OwnReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (ctx.saved_tensors[0] > 0)


class OwnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class AddmmBackward0(torch.autograd.Function):
    """A Function with the name of one of torch's nodes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


ReluBackward0 = type("ReluBackward0", (StraightThrough,), {})
Relu = type("Relu", (StraightThrough,), {})
View = type("View", (Reversal,), {})
FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "straight through": lambda m, x: m.fc(StraightThrough.apply(m.hidden(x))),
    "reversal": lambda m, x: m.fc(Reversal.apply(torch.relu(m.hidden(x)))),
    "own relu": lambda m, x: m.fc(OwnReLU.apply(m.hidden(x))),
    "own linear": lambda m, x: m.fc(torch.relu(OwnLinear.apply(x, m.hidden.weight))),
    "named like torch's": lambda m, x: m.fc(AddmmBackward0.apply(m.hidden(x))),
    "named ReluBackward0": lambda m, x: m.fc(ReluBackward0.apply(m.hidden(x))),
    "named Relu": lambda m, x: m.fc(Relu.apply(m.hidden(x))),
    "named View": lambda m, x: m.fc(View.apply(m.hidden(x))),
    "on the logits": lambda m, x: Reversal.apply(m.fc(torch.relu(m.hidden(x)))),
    "on the images": lambda m, x: m.fc(torch.relu(m.hidden(StraightThrough.apply(x)))),
}


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_own_functions_are_loud(name: str, rule: str) -> None:
    (net,) = twins([FUNCTIONS[name]], hidden=nn.Linear(5, 6), fc=nn.Linear(6, 3))
    images = pictures(2, 5)
    with pytest.warns(RuleWarning):
        fi.explain(net, images, 1, rule=rule)
    with pytest.raises(RuleError):
        fi.explain(net, images, 1, rule=rule, strict=True)


def test_own_functions_under_gradient_are_what_autograd_does() -> None:
    for name, function in FUNCTIONS.items():
        (net,) = twins([function], hidden=nn.Linear(5, 6), fc=nn.Linear(6, 3))
        images = pictures(2, 5)
        found, _ = quietly(lambda: fi.explain(net, images, 1, rule="gradient"))
        assert_close(found, gradient_times_input(net, images), 1e-10, name)


def test_a_function_off_the_way_to_the_images_is_nobody_s_business() -> None:
    """Quantised weights: a custom Function on parameters alone needs no rule."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.relu(F.linear(x, StraightThrough.apply(10 * m.hidden.weight) / 10, m.hidden.bias)))

    (net,) = twins([forward], hidden=nn.Linear(5, 6), fc=nn.Linear(6, 3))
    images = pictures(2, 5)
    found = explained(net, images)
    assert not found.messages
    weight = (10 * net.hidden.weight).round() / 10
    expected = gradient_times_input(lambda x: net.fc(relu_rule(F.linear(x, weight, net.hidden.bias))), images)
    assert_close(found.heatmap, expected, 1e-10)
    assert float(found.gradients["hidden.weight"].abs().max()) > 0


def test_gradient_rule_everywhere() -> None:
    """`rule="gradient"` is the gradient, whatever the network is made of."""

    def odd(m: Any, x: Tensor) -> Tensor:
        h = m.hidden(x)
        h = F.layer_norm(h, [6]) * torch.sigmoid(m.other(x)) + h.square() / (1 + h.abs()) + h.softmax(1) * h
        return m.fc(torch.where(h > 0, h, h.exp() - 1).cumsum(1))

    nets = twins([odd], hidden=nn.Linear(5, 6), other=nn.Linear(5, 6), fc=nn.Linear(6, 3))
    found, messages = quietly(lambda: fi.explain(nets[0], pictures(2, 5), 1, rule="gradient"))
    assert not messages
    assert_close(found, gradient_times_input(nets[0], pictures(2, 5)), 1e-10)
    assert_alike(nets[0], nets[0], pictures(2, 5), rule="gradient")
