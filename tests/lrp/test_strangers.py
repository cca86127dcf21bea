"""Operations without a rule."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet import explain
from fasterisnet.errors import RuleError, RuleWarning
from fasterisnet.lrp.targets import AllLogits
from lrp.helpers import (
    Net,
    gradient_times_input,
    pictures,
    quietly,
    randomised,
    relu_rule,
)


class Doubler(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


STRANGERS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "custom Function": (Doubler.apply, "Doubler"),
    "sin": (torch.sin, "sin"),
    "sinh in place": (lambda t: t.sinh_(), "sinh"),
    "digamma": (lambda t: torch.digamma(t + 9), "digamma"),
}


def with_stranger(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """An operation without a rule in the middle, in the module `block.inner`."""
    block = Net(lambda m, x: m.inner(m.hidden(x)), hidden=nn.Linear(5, 8), inner=Net(lambda _m, x: function(x)))
    return randomised(Net(lambda m, x: m.fc(torch.relu(m.block(x))), block=block, fc=nn.Linear(8, 3)))


@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gamma"])
@pytest.mark.parametrize("stranger", STRANGERS)
def test_an_operation_without_a_rule_is_named_once(stranger: str, rule: str) -> None:
    function, name = STRANGERS[stranger]
    model, images = with_stranger(function), pictures(2, 5)
    _, messages = quietly(lambda: explain(model, images, AllLogits(), rule=rule))
    ours = [m for m in messages if name in m]
    assert len(ours) == 1
    where = "in module 'block.inner'"
    assert where in ours[0]
    assert len(messages) == 1
    with pytest.raises(RuleError, match=f"{name}.*{re.escape(where)}"):
        explain(model, images, rule=rule, strict=True)


def test_an_operation_without_a_rule_keeps_its_derivative() -> None:
    model, images = with_stranger(torch.sin), pictures(2, 5)
    with pytest.warns(RuleWarning, match="sin"):
        heatmap = explain(model, images, 1)

    def surrogate(x: Tensor) -> Tensor:
        return model.fc(relu_rule(model.block(x)))

    torch.testing.assert_close(heatmap, gradient_times_input(surrogate, images), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stranger", STRANGERS)
def test_the_plain_gradient_needs_no_rules(stranger: str) -> None:
    model, images = with_stranger(STRANGERS[stranger][0]), pictures(2, 5)
    assert quietly(lambda: explain(model, images, rule="gradient", strict=True))[1] == []
    expected = gradient_times_input(model, images)
    torch.testing.assert_close(explain(model, images, 1, rule="gradient"), expected, rtol=1e-10, atol=1e-12)


def test_the_same_stranger_in_two_modules_is_named_twice() -> None:
    parts = {"one": Net(lambda _m, x: x.sin()), "two": Net(lambda _m, x: x.sin().sin())}
    model = randomised(Net(lambda m, x: m.fc(m.two(m.one(x))), **parts, fc=nn.Linear(5, 3)))
    _, messages = quietly(lambda: explain(model, pictures(2, 5)))
    assert sorted(m.split("module ")[1].split(" ")[0] for m in messages) == ["'one'", "'two'"]


def test_a_traced_model_is_its_model() -> None:
    model, images = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double(), pictures(2, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, images)
    torch.testing.assert_close(explain(traced, images, strict=True), explain(model, images))


def unread(m: Any, x: Tensor) -> Tensor:
    m.inner(x)
    return m.fc(x)


OFF_PATH: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "detached normaliser": lambda m, x: m.fc(x / (2 + torch.sin(x.detach()))),
    "constant denominator": lambda m, x: m.fc(x / (2 + m.inner(x))),
    "no_grad factor": lambda m, x: m.fc(x * torch.no_grad()(m.inner)(x)),
    "detached result": lambda m, x: m.fc(x * m.inner(x).detach()),
    "result nobody reads": unread,
    "gate": lambda m, x: m.fc(x * torch.sigmoid(m.inner(x))),
    "of parameters only": lambda m, x: F.linear(x, torch.sin(m.fc.weight)),
    "integers": lambda m, x: m.fc(x) + torch.cumsum(torch.arange(3), 0),
}


@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
@pytest.mark.parametrize("case", OFF_PATH)
def test_a_stranger_off_the_path_is_no_matter(case: str, rule: str) -> None:
    """Relevance never passes it, so there is nothing to warn of."""
    model = randomised(Net(OFF_PATH[case], inner=Net(lambda _m, x: torch.sin(x)), fc=nn.Linear(5, 3)))
    images = pictures(8, 5)
    assert quietly(lambda: explain(model, images, rule=rule))[1] == []
    maps = [explain(model, images, c, rule=rule, strict=True) for c in range(3)]  # z+ of a class may be zero
    assert max(float(m.abs().max()) for m in maps) > 0
