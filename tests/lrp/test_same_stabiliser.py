"""Spellings that have the same maps with the stabiliser as it comes, not only with a small one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrp.helpers import assert_alike, pictures, twins

Forward = Callable[[Any, Tensor], Tensor]
Step = Callable[[Any, Tensor], Tensor]
WIDTH = 6


def between(step: Step) -> Forward:
    """A step between a convolution and the head."""
    return lambda m, x: m.fc(step(m, m.conv(x)).mean((2, 3)))


def attention(mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Forward:
    def forward(m: Any, x: Tensor) -> Tensor:
        t = torch.relu(m.conv(x)).flatten(2).mT
        return m.fc(mix(m.q(t), m.k(t), m.v(t)).mean(1))

    return forward


def by_channel(t: Tensor) -> Tensor:
    return t.view(-1, 1, 1)


def batch_norm_by_hand(m: Any, t: Tensor) -> Tensor:
    inverse = torch.rsqrt(m.bn.running_var + m.bn.eps)
    centred = t - by_channel(m.bn.running_mean)
    return torch.relu(centred * by_channel(inverse) * by_channel(m.bn.weight) + by_channel(m.bn.bias))


def batch_norm_by_division(m: Any, t: Tensor) -> Tensor:
    spread = torch.sqrt(m.bn.running_var + m.bn.eps)
    t = (t.permute(0, 2, 3, 1) - m.bn.running_mean) / spread
    return torch.relu(m.bn.weight * t + m.bn.bias).permute(0, 3, 1, 2)


def scale_and_shift(m: Any) -> tuple[Tensor, Tensor]:
    scale = m.bn.weight * torch.rsqrt(m.bn.running_var + m.bn.eps)
    return scale, m.bn.bias - m.bn.running_mean * scale


def batch_norm_folded(m: Any, x: Tensor) -> Tensor:
    scale, shift = scale_and_shift(m)
    return F.conv2d(x, m.conv.weight * scale.view(-1, 1, 1, 1), m.conv.bias * scale + shift, padding=1)


def batch_norm_by_addcmul(m: Any, t: Tensor) -> Tensor:
    scale, shift = map(by_channel, scale_and_shift(m))
    return torch.addcmul(shift, t, scale)


def layer_scaled(m: Any, x: Tensor) -> Tensor:
    return m.conv(x) * by_channel(m.bn.weight)


def layer_scale_folded(m: Any, x: Tensor) -> Tensor:
    return F.conv2d(x, m.conv.weight * m.bn.weight.view(-1, 1, 1, 1), m.conv.bias * m.bn.weight, padding=1)


def head(make: Forward) -> Forward:
    return lambda m, x: m.fc(torch.relu(make(m, x)).mean((2, 3)))


def residual(make: Forward) -> Forward:
    """Without an activation behind it: what is scaled is added to something else."""
    return lambda m, x: m.fc((make(m, x) + torch.relu(m.conv(x))).mean((2, 3)))


def channels_last(norm: Callable[[Any, Tensor], Tensor]) -> Step:
    return lambda m, t: torch.relu(norm(m, t.movedim(1, -1)).movedim(-1, 1))


ROOT = WIDTH**-0.5
SCORES = attention(lambda q, k, v: torch.softmax(q @ k.mT * ROOT, -1) @ v)
PAIRS: dict[str, tuple[Forward, Forward]] = {
    "silu": (between(lambda m, t: F.silu(t)), between(lambda m, t: t * torch.sigmoid(t))),
    "silu, gate first": (between(lambda m, t: F.silu(t)), between(lambda m, t: t.sigmoid().mul(t))),
    "silu, exp": (between(lambda m, t: F.silu(t)), between(lambda m, t: t / (1 + torch.exp(-t)))),
    "hardswish, relu6": (between(lambda m, t: F.hardswish(t)), between(lambda m, t: t * (F.relu6(t + 3) / 6))),
    "gelu": (between(lambda m, t: F.gelu(t)), between(lambda m, t: t * torch.special.ndtr(t))),
    "mish": (between(lambda m, t: F.mish(t)), between(lambda m, t: t * torch.tanh(F.softplus(t)))),
    "relu": (between(lambda m, t: torch.relu(t)), between(lambda m, t: t - t.clamp(max=0))),
    "relu, no leak": (between(lambda m, t: torch.relu(t)), between(lambda m, t: F.leaky_relu(t, 0.0))),
    "relu, no bound": (between(lambda m, t: torch.relu(t)), between(lambda m, t: F.hardtanh(t, 0.0, math.inf))),
    "batch norm": (between(lambda m, t: torch.relu(m.bn(t))), between(batch_norm_by_hand)),
    "batch norm, divided": (between(lambda m, t: torch.relu(m.bn(t))), between(batch_norm_by_division)),
    "batch norm, folded": (head(lambda m, x: m.bn(m.conv(x))), head(batch_norm_folded)),
    "batch norm, addcmul": (
        head(lambda m, x: m.bn(m.conv(x))),
        head(lambda m, x: batch_norm_by_addcmul(m, m.conv(x))),
    ),
    "layer scale, folded": (head(layer_scaled), head(layer_scale_folded)),
    "layer scale in a residual, folded": (residual(layer_scaled), residual(layer_scale_folded)),
    "batch norm behind relu": (
        between(lambda m, t: torch.relu(m.bn(torch.relu(t)))),
        between(lambda m, t: batch_norm_by_hand(m, torch.relu(t))),
    ),
    "two batch norms": (
        between(lambda m, t: torch.relu(m.bn(m.bn(torch.relu(t))))),
        between(lambda m, t: batch_norm_by_hand(m, m.bn(torch.relu(t)))),
    ),
    "two constants": (
        between(lambda m, t: torch.relu(torch.relu(t) + by_channel(m.bn.bias) + by_channel(m.bn.weight))),
        between(lambda m, t: torch.relu(torch.relu(t) + by_channel(m.bn.bias + m.bn.weight))),
    ),
    "group norm, constants apart": (
        between(lambda m, t: torch.relu(F.group_norm(t, 2, m.bn.weight, m.bn.bias))),
        between(lambda m, t: torch.relu(F.group_norm(t, 2) * by_channel(m.bn.weight) + by_channel(m.bn.bias))),
    ),
    "layer norm, constants apart": (
        between(channels_last(lambda m, t: F.layer_norm(t, (WIDTH,), m.bn.weight, m.bn.bias))),
        between(channels_last(lambda m, t: F.layer_norm(t, (WIDTH,)) * m.bn.weight + m.bn.bias)),
    ),
    "nothing less": (
        between(lambda m, t: torch.tanh(-t)),
        between(lambda m, t: torch.tanh(0 - t)),
    ),
    "fold": (
        head(lambda m, x: m.conv(x)),
        head(
            lambda m, x: F.fold(
                m.conv.weight.flatten(1) @ F.unfold(x, 3, padding=1) + m.conv.bias[:, None], x.shape[2:], 1
            )
        ),
    ),
    "nearest": (
        between(lambda m, t: F.interpolate(torch.relu(t), scale_factor=2)),
        between(lambda m, t: torch.relu(t).repeat_interleave(2, 2).repeat_interleave(2, 3)),
    ),
    "nearest, kron": (
        between(lambda m, t: F.interpolate(torch.relu(t), scale_factor=2, mode="nearest-exact")),
        between(lambda m, t: torch.kron(torch.relu(t), torch.ones(1, 1, 2, 2, dtype=t.dtype))),
    ),
    "sum / n": (
        lambda m, x: m.fc(torch.relu(m.conv(x)).mean((2, 3))),
        lambda m, x: m.fc(torch.relu(m.conv(x)).sum((2, 3)) / math.prod(x.shape[2:])),
    ),
    "sum * 1/n": (
        lambda m, x: m.fc(torch.relu(m.conv(x)).mean((2, 3))),
        lambda m, x: m.fc(torch.einsum("nchw->nc", torch.relu(m.conv(x))) * (1 / math.prod(x.shape[2:]))),
    ),
    "mean of means": (between(lambda m, t: t), lambda m, x: m.fc(m.conv(x).mean(-1).mean(-1))),
    "sum of sums / n": (between(lambda m, t: t), lambda m, x: m.fc(m.conv(x).sum(3).sum(2) / math.prod(x.shape[2:]))),
    "logits and nothing": (between(lambda m, t: t), lambda m, x: m.fc(m.conv(x).mean((2, 3))) + 0),
    "queries scaled": (SCORES, attention(lambda q, k, v: torch.softmax((q * ROOT) @ k.mT, -1) @ v)),
    "both scaled": (
        SCORES,
        attention(lambda q, k, v: torch.softmax((q * ROOT**0.5) @ (k / ROOT**-0.5).mT, -1) @ v),
    ),
    "baddbmm": (
        SCORES,
        attention(lambda q, k, v: torch.softmax(torch.baddbmm(q.new_zeros(()), q, k.mT, beta=0, alpha=ROOT), -1) @ v),
    ),
    "sdpa": (SCORES, attention(F.scaled_dot_product_attention)),
}


def parts() -> dict[str, nn.Module]:
    linear = {name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v")}
    norm = nn.BatchNorm2d(WIDTH)
    return {"conv": nn.Conv2d(3, WIDTH, 3, padding=1), "bn": norm, **linear, "fc": nn.Linear(WIDTH, 3)}


@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gamma"])
@pytest.mark.parametrize("name", PAIRS)
def test_spellings(name: str, rule: str) -> None:
    assert_alike(*twins(PAIRS[name], **parts()), pictures(2, 3, 4, 4), rule=rule, what=name)


@pytest.mark.parametrize(
    "name", ["silu", "mish", "relu", *[n for n in PAIRS if n.startswith(("batch norm", "layer scale"))]]
)
def test_spellings_behind_the_first_layer(name: str) -> None:
    assert_alike(*twins(PAIRS[name], **parts()), pictures(2, 3, 4, 4).sigmoid(), box=(0, 1), what=name)
