"""Sums, products, constants and pools in every spelling and in place: each against the plain network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet import explain
from lrp.helpers import (
    Net,
    pictures,
    quietly,
    randomised,
)
from lrp.small_nets import (
    RULES,
    assert_explained_alike,
    behind,
    in_place_sum,
)

SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch.add": torch.add,
    "Tensor.add": lambda a, b: a.add(b),
    "Tensor.add_": lambda a, b: a.add_(b),
    "alpha": lambda a, b: a.add(0.5 * b, alpha=2.0),
    "reversed": lambda a, b: b + a,
    "minus minus": lambda a, b: a - (-b),
    "sub_": lambda a, b: a.sub_(-b),
}


def residual_with(add: Callable[[Tensor, Tensor], Tensor], body: str, training: bool) -> nn.Module:
    """One residual block whose branch ends in a convolution, a batch norm, a pooling or a SiLU."""

    def forward(m: Any, x: Tensor) -> Tensor:
        identity = torch.relu(m.stem(x))
        out = m.conv(identity)
        if body == "bn":
            out = m.bn(out)
        elif body == "pool":
            out = F.avg_pool2d(out, 3, 1, 1)
        elif body == "silu":
            out = F.silu(out)
        return m.fc(F.relu(add(out, identity), inplace=True).flatten(1))

    parts = {"stem": nn.Conv2d(3, 5, 3, padding=1), "conv": nn.Conv2d(5, 5, 3, padding=1), "fc": nn.Linear(80, 3)}
    return randomised(Net(forward, **parts, bn=nn.BatchNorm2d(5))).train(training)


@pytest.mark.parametrize("body", ["conv", "bn", "pool", "silu"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spelling", ["+=", *SUMS])
def test_every_spelling_of_a_sum(spelling: str, rule: str, body: str) -> None:
    add = in_place_sum if spelling == "+=" else SUMS[spelling]
    trap, plain = (residual_with(f, body, training=body == "bn") for f in (add, lambda a, b: a + b))
    assert_explained_alike(trap, plain, pictures(2, 3, 4, 4), rule=rule)


MORE_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "stack, sum": lambda a, b: torch.stack([a, b]).sum(0),
    "twice the mean": lambda a, b: 2 * torch.stack([a, b]).mean(0),
    "reversed difference": lambda a, b: torch.rsub(-a, b),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spelling", MORE_SUMS)
def test_sums_that_do_not_look_like_one(spelling: str, rule: str) -> None:
    """The stabiliser aside, which is added to another multiple of the sum."""
    nets = [residual_with(f, "bn", training=False) for f in (MORE_SUMS[spelling], torch.add)]
    assert_explained_alike(*nets, pictures(2, 3, 4, 4), rule=rule, epsilon=1e-9, tolerance=1e-6)


CONSTANTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "1 - x": (lambda x: 1 - x, lambda x: (-x) + 1),
    "rsub": (lambda x: torch.rsub(x, 1), lambda x: (-x) + 1),
    "radd": (lambda x: 0.5 + x, lambda x: x + 0.5),
    "tensor + x": (lambda x: torch.full((4, 1), 0.5).double() + x, lambda x: x + torch.full((4, 1), 0.5).double()),
    "rmul": (lambda x: 3 * x, lambda x: x * 3),
    "x / c": (lambda x: x / 4, lambda x: x * 0.25),
    "tensor * x": (lambda x: torch.full((4, 1), -0.5).double() * x, lambda x: x * -0.5),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spelling", CONSTANTS)
def test_constants_on_either_side(spelling: str, rule: str) -> None:
    for place in ("conv", "bn"):
        (trap, images), (plain, _) = (behind(place, lambda t, f=f: torch.relu(f(t))) for f in CONSTANTS[spelling])
        assert_explained_alike(trap, plain, images, rule=rule)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch.mul": torch.mul,
    "Tensor.mul_": lambda a, b: a.mul_(b),
    "reversed": lambda a, b: b * a,
    "einsum": lambda a, b: torch.einsum("bchw,bchw->bchw", a, b),
    "addcmul": lambda a, b: torch.addcmul(torch.zeros((), dtype=a.dtype), a, b),
    "matmul": lambda a, b: (a.unsqueeze(-1).unsqueeze(-1) @ b.unsqueeze(-1).unsqueeze(-1))[..., 0, 0],
}


def product_net(product: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    parts = {"conv": nn.Conv2d(3, 5, 3, padding=1), "other": nn.Conv2d(3, 5, 1), "fc": nn.Linear(80, 3)}
    return randomised(Net(lambda m, x: m.fc(product(m.conv(x), m.other(x)).flatten(1)), **parts))


@pytest.mark.parametrize("rule", ["epsilon", "gradient"])
@pytest.mark.parametrize("spelling", PRODUCTS)
def test_every_spelling_of_a_product(spelling: str, rule: str) -> None:
    """Half of the relevance to each factor, or a warning that there is no rule; never twice as much in silence."""
    images = pictures(2, 3, 4, 4)
    trap, plain = product_net(PRODUCTS[spelling]), product_net(lambda a, b: a * b)
    heatmaps: list[Tensor] = []
    _, messages = quietly(lambda: heatmaps.append(explain(trap, images, 1, rule=rule)))
    if messages:
        assert spelling == "addcmul" and "'addcmul'" in messages[0]
    else:
        torch.testing.assert_close(heatmaps[0], explain(plain, images, 1, rule=rule), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spelling", [torch.square, lambda t: t**2, lambda t: t.pow(2), lambda t: t.square_()])
def test_a_square_is_a_product(spelling: Callable[[Tensor], Tensor]) -> None:
    """Its relevance is that of the product: all of it, once."""
    (trap, images), (plain, _) = behind("bn", spelling), behind("bn", lambda t: t * t)
    for rule in RULES:
        assert_explained_alike(trap, plain, images, rule=rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("weights", ["bi,oi->bo", "oi,bi->bo"])
def test_einsum_with_a_weight_is_linear(weights: str, rule: str) -> None:
    def by_einsum(m: Any, x: Tensor) -> Tensor:
        pair = (x, m.hidden.weight) if weights.startswith("b") else (m.hidden.weight, x)
        return m.fc(torch.relu(torch.einsum(weights, *pair)))

    def by_linear(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.relu(m.hidden(x)))

    nets = [randomised(Net(f, hidden=nn.Linear(5, 6, bias=False), fc=nn.Linear(6, 3))) for f in (by_einsum, by_linear)]
    assert_explained_alike(*nets, pictures(2, 5), rule=rule)


MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda t: t.mean((2, 3)),
    "mean twice": lambda t: t.mean(3).mean(2),
    "adaptive": lambda t: F.adaptive_avg_pool2d(t, 1).flatten(1),
    "sum": lambda t: t.sum((2, 3)) / 16,
    "flat": lambda t: t.flatten(2).mean(-1),
}


# In two steps it is another network to z+, which cuts off negative values in between.
POOLINGS = [
    (s, rule, signed)
    for s in MEANS
    for rule in ("epsilon", "zplus")
    for signed in (False, True)
    if not (s == "mean twice" and rule == "zplus" and signed)
]


@pytest.mark.parametrize(("spelling", "rule", "signed"), POOLINGS)
def test_every_spelling_of_global_pooling(spelling: str, rule: str, signed: bool) -> None:
    """The stabiliser aside, as above."""

    def net(pool: Callable[[Tensor], Tensor]) -> nn.Module:
        def forward(m: Any, x: Tensor) -> Tensor:
            x = m.conv(x)
            return m.fc(pool(x if signed else torch.relu(x)))

        return randomised(Net(forward, conv=nn.Conv2d(3, 5, 3, padding=1), fc=nn.Linear(5, 3)))

    trap, plain = net(MEANS[spelling]), net(lambda t: F.avg_pool2d(t, 4).flatten(1))
    assert_explained_alike(trap, plain, pictures(2, 3, 4, 4), rule=rule, epsilon=1e-9, tolerance=1e-6)
