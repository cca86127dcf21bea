"""Sums and pooling in every spelling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from lrp.helpers import RULES, SMALL, TWO_RULES, assert_alike, pictures, quietly, twins

WIDTH = 8

# --- sums ----------------------------------------------------------------------------------------------------------


def residual(add: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = torch.relu(m.conv(x))
        return m.fc(torch.relu(add(m.conv2(x), x)).flatten(1))

    return forward


def indexed(a: Tensor, b: Tensor) -> Tensor:
    return a.index_add(0, torch.arange(len(a)), b)


def by_slices(a: Tensor, b: Tensor) -> Tensor:
    a = a.clone()
    a[:, :2] += b[:, :2]
    a[:, 2:] = a[:, 2:] + b[:, 2:]
    return a


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch.add": torch.add,
    "add_": lambda a, b: a.add_(b),
    "b + a": lambda a, b: b + a,
    "alpha": lambda a, b: torch.add(a, b, alpha=1),
    "a - (-b)": lambda a, b: a - (-b),
    "keywords": lambda a, b: torch.add(input=a, other=b),
    "by channels": lambda a, b: torch.stack([a[:, i] + b[:, i] for i in range(WIDTH)], 1),
    "by slices": by_slices,
    "expanded": lambda a, b: a + b.expand_as(a),
    "aten": lambda a, b: torch.ops.aten.add(a, b),
    "flat": lambda a, b: (a.flatten(1) + b.flatten(1)).view_as(a),
}
STABILISED_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "stack.sum": lambda a, b: torch.stack([a, b]).sum(0),
    "python sum": lambda a, b: sum([a, b], torch.zeros_like(a)),
    "stack.mean": lambda a, b: torch.stack([a, b]).mean(0) * 2,
    "index_add": indexed,
    "alpha 2": lambda a, b: torch.add(a, b / 2, alpha=2),
    "scatter_add": lambda a, b: a.scatter_add(0, torch.arange(len(a)).view(-1, 1, 1, 1).expand_as(a), b),
    "cumsum": lambda a, b: torch.stack([a, b]).cumsum(0)[-1],
    "lerp": lambda a, b: 2 * torch.lerp(a, b, 0.5),
    "einsum": lambda a, b: torch.einsum("knchw->nchw", torch.stack([a, b])),
    "index_put": lambda a, b: a.index_put((torch.arange(len(a)),), b, accumulate=True),
    "matmul": lambda a, b: torch.einsum("k,knchw->nchw", torch.ones(2, dtype=a.dtype), torch.stack([a, b])),
    "addcmul": lambda a, b: torch.addcmul(a, b, torch.ones_like(b)),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, torch.ones_like(b)),
    "rsub": lambda a, b: torch.rsub(-a, b),
    "baddbmm": lambda a, b: torch.baddbmm(
        a.flatten(2), torch.eye(WIDTH, dtype=a.dtype).expand(len(a), -1, -1), b.flatten(2)
    ).view_as(a),
}


def sum_parts() -> dict[str, nn.Module]:
    return {
        "conv": nn.Conv2d(3, WIDTH, 3, padding=1),
        "conv2": nn.Conv2d(WIDTH, WIDTH, 1),
        "fc": nn.Linear(9 * WIDTH, 3),
    }


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [*SUMS, *STABILISED_SUMS])
def test_sums(name: str, rule: str) -> None:
    nets = twins([residual(torch.add), residual((SUMS | STABILISED_SUMS)[name])], **sum_parts())
    options: dict[str, Any] = (
        {"loud": rule == "zplus", **SMALL} if name in STABILISED_SUMS and rule != "epsilon" else {}
    )
    assert_alike(*nets, pictures(2, 3, 3, 3), rule=rule, what=name, **options)


# --- pooling -------------------------------------------------------------------------------------------------------

AVERAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "avg_pool2d": lambda t: F.avg_pool2d(t, 4).flatten(1),
    "adaptive": lambda t: F.adaptive_avg_pool2d(t, 1).flatten(1),
    "module": lambda t: nn.AdaptiveAvgPool2d((1, 1))(t).view(len(t), -1),
    "sum / n": lambda t: t.sum((2, 3)) / 16,
    "flat": lambda t: t.flatten(2).mean(-1),
    "keepdim": lambda t: t.mean([-1, -2], keepdim=True)[..., 0, 0],
    "einsum": lambda t: torch.einsum("nchw->nc", t) / 16,
    "avg_pool3d": lambda t: F.avg_pool3d(t[:, :, None], (1, 4, 4)).flatten(1),
    "avg_pool1d": lambda t: F.avg_pool1d(t.flatten(2), 16)[..., 0],
    "nanmean": lambda t: t.nanmean((2, 3)),
    "conv": lambda t: F.conv2d(t, torch.full((WIDTH, 1, 4, 4), 1 / 16, dtype=t.dtype), groups=WIDTH).flatten(1),
    "matmul": lambda t: t.flatten(2) @ torch.full((16,), 1 / 16, dtype=t.dtype),
    "area": lambda t: F.interpolate(t, size=1, mode="area").flatten(1),
    "lp_pool, p=1": lambda t: F.lp_pool2d(t, 1, 4).flatten(1) / 16,
}
MAXIMA: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool2d": lambda t: F.max_pool2d(t, 4).flatten(1),
    "adaptive": lambda t: F.adaptive_max_pool2d(t, 1).flatten(1),
    "with indices": lambda t: F.max_pool2d(t, 4, return_indices=True)[0].flatten(1),
    "max": lambda t: t.flatten(2).max(-1).values,
    "topk": lambda t: t.flatten(2).topk(1).values[..., 0],
    "sort": lambda t: t.flatten(2).sort(-1, descending=True)[0][..., 0],
    "max, max": lambda t: t.max(3)[0].max(2)[0],
    "gather": lambda t: t.flatten(2).gather(2, t.flatten(2).argmax(2, keepdim=True))[..., 0],
    "max_pool3d": lambda t: F.max_pool3d(t[:, :, None], (1, 4, 4)).flatten(1),
    "kthvalue": lambda t: t.flatten(2).kthvalue(16).values,
    "max_pool1d": lambda t: F.max_pool1d(t.flatten(2), 16)[..., 0],
    "minimum of the negative": lambda t: -(-t).amin((2, 3)),
    "cummax": lambda t: t.flatten(2).cummax(-1).values[..., -1],
    "windows": lambda t: t.unfold(2, 4, 1).unfold(3, 4, 1).amax((-1, -2)).flatten(1),
}


def pooled(pool: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: m.fc(torch.relu(m.hidden(pool(torch.relu(m.conv(x))))))


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("name", AVERAGES)
def test_average_pooling(name: str, rule: str) -> None:
    """z+ and gamma of a layer whose weights are constants: equal to the mean's but for the stabiliser, or loud."""
    nets = twins(
        [pooled(lambda t: t.mean((2, 3))), pooled(AVERAGES[name])],
        conv=nn.Conv2d(3, WIDTH, 3, padding=1),
        hidden=nn.Linear(WIDTH, 8),
        fc=nn.Linear(8, 3),
    )
    assert_alike(
        *nets,
        pictures(2, 3, 4, 4),
        rule=rule,
        what=name,
        loud=name in ("nanmean", "lp_pool, p=1"),
        **(SMALL if rule != "epsilon" else {}),
    )


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("name", MAXIMA)
def test_maximum_pooling(name: str, rule: str) -> None:
    nets = twins(
        [pooled(lambda t: t.amax((2, 3))), pooled(MAXIMA[name])],
        conv=nn.Conv2d(3, WIDTH, 3, padding=1),
        hidden=nn.Linear(WIDTH, 8),
        fc=nn.Linear(8, 3),
    )
    assert_alike(*nets, pictures(2, 3, 4, 4), rule=rule, what=name)


# --- nothing is summed, nothing is shifted -------------------------------------------------------------------------

ONE_NUMBER: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean((2, 3)),
    "sum": lambda x: x.sum((2, 3)),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
    "resized": lambda x: F.interpolate(x, size=(1, 1), mode="bilinear").flatten(1),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ONE_NUMBER)
def test_a_pool_of_one_number_is_none(name: str, rule: str) -> None:
    pools: list[Callable[[Tensor], Tensor]] = [lambda x: x.flatten(1), ONE_NUMBER[name]]
    functions = [lambda m, x, pool=pool: m.fc(pool(m.conv(x))) for pool in pools]
    plain, other = twins(functions, conv=nn.Conv2d(3, 5, 6), fc=nn.Linear(5, 3))
    assert_alike(plain, other, pictures(), rule=rule)


SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "minus the highest": lambda s: s - s.amax(-1, keepdim=True),
    "minus the highest, detached": lambda s: s - s.amax(-1, keepdim=True).detach(),
    "minus the mean": lambda s: s - s.mean(-1, keepdim=True),
    "plus a number": lambda s: s + 3,
}


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("rule", RULES)
def test_a_softmax_does_not_see_what_all_scores_have(name: str, rule: str) -> None:
    def attention(shift: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        def forward(m: Any, x: Tensor) -> Tensor:
            tokens = x.flatten(2)
            scores = shift(m.q(tokens) @ m.k(tokens).mT / 6)
            return m.fc((scores.softmax(-1) @ m.v(tokens)).flatten(1))

        return forward

    linear = {name: nn.Linear(36, 6) for name in "qkv"}
    plain, other = twins([attention(lambda s: s), attention(SHIFTS[name])], **linear, fc=nn.Linear(18, 3))
    assert_alike(plain, other, pictures(), rule=rule)


IN_PARTS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, Tensor], Tensor]]] = {
    "layer norm": (
        lambda m, x: F.layer_norm(x, (6,)),
        lambda m, x: (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True, unbiased=False) + 1e-5).rsqrt(),
    ),
    "leaky ReLU": (lambda m, x: F.leaky_relu(x, 0.1), lambda m, x: torch.relu(x) + 0.1 * x.clamp(max=0)),
    "layer": (
        lambda m, x: F.linear(x, m.own.weight, m.own.bias),
        lambda m, x: (x.unsqueeze(-2) * m.own.weight).sum(-1) + m.own.bias,
    ),
    "PReLU": (lambda m, x: F.leaky_relu(x, 0.1), lambda m, x: torch.relu(x) - 0.1 * torch.relu(-x)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", IN_PARTS)
def test_what_is_taken_apart_is_the_same_or_loud(name: str, rule: str) -> None:
    functions = [lambda m, x, step=step: m.fc(step(m, m.conv(x)).flatten(1)) for step in IN_PARTS[name]]
    parts = {"conv": nn.Conv2d(3, 4, 3, padding=1), "own": nn.Linear(6, 6), "fc": nn.Linear(144, 3)}
    plain, other = twins(functions, **parts)
    if rule == "epsilon":
        assert_alike(plain, other, pictures(), rule=rule)
    elif rule == "zplus" or name != "layer norm":
        assert quietly(lambda: fi.explain(other, pictures(), 1, rule=rule))[1]
    assert not quietly(lambda: fi.explain(plain, pictures(), 1, rule=rule))[1]
