"""Operations in place on a view: autograd keeps them inside another node, the rules are theirs all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrp.helpers import RULES, assert_alike, pictures, twins

Step = Callable[[Tensor, Tensor], Tensor]
Pair = tuple[Step, Step]


def through(view: Callable[[Tensor], Tensor], write: Callable[[Tensor, Tensor], Any]) -> Step:
    """Writes through a view of the signal, and hands on the signal."""

    def step(signal: Tensor, other: Tensor) -> Tensor:
        write(view(signal), view(other))
        return signal

    return step


def first_half(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The function on the first three columns, the rest untouched."""
    return lambda s, o: torch.cat([function(s[:, :3], o[:, :3]), s[:, 3:]], 1)


def flat(t: Tensor) -> Tensor:
    return t.view(-1)


def half(t: Tensor) -> Tensor:
    return t[:, :3]


def masked_leaky(s: Tensor, _o: Tensor) -> Tensor:
    s = s.clone()
    s[s < 0] = s[s < 0] * 0.1
    return s


PAIRS: dict[str, Pair] = {
    "relu_": (lambda s, _: torch.relu(s), through(flat, lambda s, _: s.relu_())),
    "half relu_": (first_half(lambda s, _: torch.relu(s)), through(half, lambda s, _: s.relu_())),
    "clamp_": (lambda s, _: torch.relu(s), through(flat, lambda s, _: s.clamp_(min=0))),
    "masked_fill_": (lambda s, _: torch.relu(s), through(flat, lambda s, _: s.masked_fill_(s < 0, 0.0))),
    "index": (lambda s, _: torch.relu(s), through(flat, lambda s, _: s.__setitem__(s < 0, 0.0))),
    "silu_": (lambda s, _: F.silu(s), through(flat, lambda s, _: F.silu(s, inplace=True))),
    "half hardswish_": (first_half(lambda s, _: F.hardswish(s)), through(half, lambda s, _: F.hardswish(s, True))),
    "tanh_": (lambda s, _: torch.tanh(s), through(flat, lambda s, _: s.tanh_())),
    "add_": (lambda s, o: s + o, through(flat, lambda s, o: s.add_(o))),
    "half add_": (first_half(lambda s, o: s + o), through(half, lambda s, o: s.add_(o))),
    "mul_ by a signal": (lambda s, o: s * o, through(flat, lambda s, o: s.mul_(o))),
    "mul_ by a gate": (lambda s, o: s * o.sigmoid(), through(flat, lambda s, o: s.mul_(o.sigmoid()))),
    "half mul_ by a gate": (first_half(lambda s, o: s * o.sigmoid()), through(half, lambda s, o: s.mul_(o.sigmoid()))),
    "a gate written in place": (lambda s, o: s * o.sigmoid(), lambda s, o: s * o.view(-1).sigmoid_().view_as(s)),
    "a gate on a part": (
        first_half(lambda s, o: s * o.sigmoid()), lambda s, o: torch.cat([s[:, :3] * o[:, :3].sigmoid_(), s[:, 3:]], 1),
    ),
    "a gate in a buffer": (lambda s, o: s * o.sigmoid(), lambda s, o: s * torch.empty_like(s).copy_(o.sigmoid())),
    "mul_ by two": (lambda s, _: s * 2, through(flat, lambda s, _: s.mul_(2.0))),
    "copy_": (lambda s, o: torch.cat([o[:, :3], s[:, 3:]], 1), through(half, lambda s, o: s.copy_(o))),
    "zero_": (lambda s, _: s * (torch.arange(6) >= 3), through(half, lambda s, _: s.zero_())),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", PAIRS)
def test_in_place_on_a_view(name: str, rule: str) -> None:
    def net(step: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        return lambda m, x: m.fc(torch.relu(m.middle(step(m.hidden(x), m.other(x)))))

    parts = {"hidden": nn.Linear(5, 6), "other": nn.Linear(5, 6), "middle": nn.Linear(6, 8), "fc": nn.Linear(8, 3)}
    assert_alike(*twins([net(f) for f in PAIRS[name]], **parts), pictures(2, 5), rule=rule, what=name)


def test_a_leaky_rectifier_by_mask_is_no_rectifier() -> None:
    """`x[x < 0] = 0.1*x[x < 0]`: leaky, or loud; not a ReLU."""

    def net(step: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        return lambda m, x: m.fc(step(m.hidden(x), x))

    plain = net(lambda s, _: F.leaky_relu(s, 0.1))
    nets = twins([plain, net(masked_leaky)], hidden=nn.Linear(5, 6), fc=nn.Linear(6, 3))
    assert_alike(*nets, pictures(2, 5), loud=True, epsilon=1e-9, tolerance=1e-4)
