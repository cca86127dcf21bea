"""Random networks, each spelled at random: the same maps and the same gradients as in the plain spelling."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from lrp.helpers import TWO_RULES, assert_alike, pictures, twins
from lrp.test_spellings_activations import RELUS
from lrp.test_spellings_gates import GATES
from lrp.test_spellings_linear import LINEAR
from lrp.test_spellings_noops import NOOPS

WIDTH = 8
Step = Callable[[Any, Tensor], Tensor]
Spelled = tuple[str, Step, Step]  # what it is, plain and in other words


def affine_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, [WIDTH])


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "steps": lambda x: (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt(),
    "rsqrt": lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5),
    "group norm": lambda x: F.group_norm(x, 1),
    "module": nn.LayerNorm(WIDTH, elementwise_affine=False),
}
SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch.add": torch.add,
    "b + a": lambda a, b: b + a,
    "add_": lambda a, b: a.clone().add_(b),
    "a - (-b)": lambda a, b: a - (-b),
}
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "b * a": lambda a, b: b * a,
    "mul_": lambda a, b: a.clone().mul_(b),
    "einsum": lambda a, b: torch.einsum("ni,ni->ni", a, b),
    "keywords": lambda a, b: torch.mul(input=a, other=b),
}
SIGMOIDS = [
    name
    for name in GATES
    if GATES[name][0] is torch.sigmoid and name not in ("expanded", "repeated", "nearest", "reshaped")
]
HARD = [name for name in GATES if GATES[name][0] is not torch.sigmoid]
LINEARS = [name for name in LINEAR if name != "bias as a column"]


def apply_linear(layer: int, name: str) -> Step:
    return lambda m, x: LINEAR[name](x, m.layers[layer].weight, m.layers[layer].bias)


def plain_linear(layer: int) -> Step:
    return lambda m, x: F.linear(x, m.layers[layer].weight, m.layers[layer].bias)


def drawn_step(draw: random.Random, layer: int, kinds: list[str]) -> Spelled:
    kind = draw.choice(kinds)
    one, name = plain_linear(layer), draw.choice(LINEARS)
    other = apply_linear(layer, name)
    if kind == "linear":
        return name, one, other
    if kind == "relu":
        name = draw.choice(list(RELUS))
        return name, lambda _m, x: torch.relu(x), lambda _m, x: RELUS[name](x.clone())
    if kind == "noop":
        name = draw.choice(list(NOOPS))
        return name, lambda _m, x: x, lambda _m, x: NOOPS[name](x)
    if kind == "sum":
        spelled = draw.choice(list(SUMS))
        return f"{name} {spelled}", lambda m, x: x + one(m, x), lambda m, x: SUMS[spelled](x, other(m, x))
    if kind == "product":
        spelled = draw.choice(list(PRODUCTS))
        return f"{name} {spelled}", lambda m, x: x * one(m, x), lambda m, x: PRODUCTS[spelled](x, other(m, x))
    if kind == "norm":
        spelled = draw.choice(list(NORMS))
        return spelled, lambda _m, x: affine_norm(x), lambda _m, x: NORMS[spelled](x)
    gate = draw.choice(SIGMOIDS if kind == "gate" else HARD)
    plain, written = GATES[gate]
    return f"{name} {gate}", lambda m, x: x * plain(one(m, x)), lambda m, x: written(other(m, x)) * x


def drawn_network(seed: int, kinds: list[str]) -> tuple[list[str], list[Step]]:
    """The names of its spellings; plain and in other words, with a rectifier and a head at the end."""
    draw = random.Random(seed)
    steps = [drawn_step(draw, layer, kinds) for layer in range(draw.randint(3, 6))]
    head = draw.choice(LINEARS)

    def network(which: int) -> Step:
        def forward(m: Any, x: Tensor) -> Tensor:
            x = m.stem(x)
            for step in steps:
                x = step[which](m, x)
            x = torch.relu(x)
            linear: Any = F.linear if which == 1 else LINEAR[head]
            return linear(x, m.fc.weight, m.fc.bias)

        return forward

    return [name for name, _, _ in steps] + [head], [network(1), network(2)]


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("seed", range(30))
def test_random_networks(seed: int, rule: str) -> None:
    """(z+ has no rule for a layer norm that would hold for its steps as well.)"""
    kinds = ["linear", "relu", "relu", "noop", "sum", "gate", "hard gate", "product"]
    names, functions = drawn_network(seed, kinds if rule == "zplus" else [*kinds, "norm"])
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
    nets = twins(functions, seed=seed, stem=nn.Linear(5, WIDTH), layers=layers, fc=nn.Linear(WIDTH, 3))
    images, joint = pictures(2, 5, seed=seed), fi.targets.Joint()
    assert_alike(*nets, images, rule=rule, what=", ".join(names), tolerance=1e-5, target=joint)
