"""Idioms of published code: what differs between the ways in which repositories write one block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from lrp.helpers import RULES, assert_alike, parameter_gradients, pictures, quietly, twins

Step = Callable[[Any, Tensor], Tensor]
Pair = tuple[Step, Step]
WIDTH = 6


def assert_same(pair: Pair, rule: str, behind: Callable[[Tensor], Tensor] = lambda t: t, **options: Any) -> None:
    """The same maps of two networks whose blocks stand between two convolutions."""

    def between(step: Step) -> Step:
        return lambda m, x: m.fc(F.relu(m.conv2(step(m, behind(m.conv(x))))).mean((2, 3)))

    parts = {name: nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for name in ("conv2", "other")}
    heads = {"fc": nn.Linear(WIDTH, 3), "experts": nn.Linear(WIDTH, WIDTH * WIDTH)}
    more = {
        "norm": nn.BatchNorm2d(WIDTH),
        "pairs": nn.Bilinear(WIDTH, WIDTH, WIDTH),
        "slopes": nn.Parameter(torch.ones(WIDTH)),
    }
    plain, other = twins(
        [between(step) for step in pair], conv=nn.Conv2d(3, WIDTH, 3, padding=1), **parts, **heads, **more
    )
    assert_alike(plain, other, pictures(2, 3, 8, 8), rule=rule, **options)


def channels(m: Any) -> Tensor:
    return m.slopes.view(-1, 1, 1)


def pooled(t: Tensor) -> Tensor:
    return t.mean((2, 3), keepdim=True)


# --- one tensor that is joined -------------------------------------------------------------------------------------

JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "cat": lambda t: torch.cat([t], 1),
    "stack, sum": lambda t: torch.stack([t]).sum(0),
    "stack, select": lambda t: torch.stack([t], 1)[:, 0],
    "cat with nothing": lambda t: torch.cat([t, t[:, :0]], 1),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", JOINED)
def test_one_tensor_that_is_joined_is_itself(name: str, rule: str) -> None:
    """A DenseNet's first layer joins one map, between a layer and its batch norm."""
    pair = (lambda m, t: F.relu(m.norm(t)), lambda m, t: F.relu(m.norm(JOINED[name](t))))
    assert_same(pair, rule, what=name)
    assert_same(pair, rule, what=name, box=(-5.0, 5.0))


# --- numbers that are only repeated --------------------------------------------------------------------------------


def nearest(t: Tensor) -> Tensor:
    grid = F.affine_grid(
        torch.eye(2, 3, dtype=t.dtype).expand(len(t), 2, 3), [*t.shape[:2], 16, 16], align_corners=False
    )
    return F.grid_sample(t, grid, mode="nearest", align_corners=False)


REPEATED: dict[str, Pair] = {
    "bilinear": (
        lambda m, t: pooled(t).expand_as(t),
        lambda m, t: F.interpolate(pooled(t), size=(8, 8), mode="bilinear"),
    ),
    "bicubic": (
        lambda m, t: pooled(t).expand_as(t),
        lambda m, t: F.interpolate(pooled(t), size=(8, 8), mode="bicubic"),
    ),
    "adaptive": (lambda m, t: pooled(t).expand_as(t), lambda m, t: F.adaptive_avg_pool2d(pooled(t), 8)),
    "grid": (lambda m, t: F.interpolate(t, scale_factor=2), lambda m, t: nearest(t)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", REPEATED)
def test_resizing_that_only_repeats_numbers(name: str, rule: str) -> None:
    """The global pool of a pyramid (PSPNet, ASPP) is resized from one pixel."""
    assert_same(REPEATED[name], rule, what=name)


# --- products ------------------------------------------------------------------------------------------------------


def bilinear(m: Any, t: Tensor) -> Tensor:
    return m.pairs(t.movedim(1, -1), m.other(t).movedim(1, -1)).movedim(-1, 1)


def by_einsum(m: Any, t: Tensor) -> Tensor:
    half = torch.einsum("bihw,oij->bhwoj", t, m.pairs.weight)
    return (half * m.other(t).movedim(1, -1).unsqueeze(3)).sum(-1).movedim(-1, 1) + m.pairs.bias.view(-1, 1, 1)


def test_a_bilinear_layer_is_a_product_of_two_in_a_box_too() -> None:
    assert_same((by_einsum, bilinear), "epsilon")
    assert_same((by_einsum, bilinear), "epsilon", box=(-5.0, 5.0))
    for rule in ("zplus", "gamma"):
        assert_same((by_einsum, bilinear), rule, loud=True, tolerance=1e-4)


def experts(m: Any, t: Tensor) -> Tensor:
    return m.experts(t.mean((2, 3))).view(len(t), WIDTH, WIDTH)


DYNAMIC: Pair = (
    lambda m, t: (experts(m, t) @ t.flatten(2)).view_as(t),
    lambda m, t: F.conv2d(
        t.reshape(1, -1, 8, 8), experts(m, t).reshape(-1, WIDTH, 1, 1), groups=len(t)
    ).view_as(t),
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_a_dynamic_convolution_in_groups_is_a_matrix_product(rule: str) -> None:
    """CondConv: the kernels of a batch are computed from it and run as one convolution in groups."""
    assert_same(DYNAMIC, rule)


SIZES: dict[str, Pair] = {
    "response": (
        lambda m, t: t * (t.norm(dim=(2, 3), keepdim=True) / (1 + t.norm(dim=(2, 3), keepdim=True).mean(1, True))),
        lambda m, t: (lambda n: t * (n / (1 + n.mean(1, True))))((t * t).sum((2, 3), keepdim=True).sqrt()),
    ),
    "capsule": (
        lambda m, t: (lambda n: n**2 / (1 + n**2) * t / (n + 1e-8))(t.norm(dim=1, keepdim=True)),
        lambda m, t: (lambda s: s / (1 + s) * t / (s.sqrt() + 1e-8))(t.pow(2).sum(1, keepdim=True)),
    ),
    "mean": (
        lambda m, t: t * (t.norm(dim=1, keepdim=True) ** 2 / WIDTH), lambda m, t: t * t.square().mean(1, keepdim=True)
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SIZES)
def test_a_sum_of_squares_is_a_size(name: str, rule: str) -> None:
    assert_same(SIZES[name], rule, what=name)


# --- sums ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_a_learned_shift_of_zero_is_a_shift(rule: str) -> None:
    """DyT before it is trained: only a mask of zeros is nothing, what training changes is not."""
    pair = (
        lambda m, t: torch.addcmul(0 * channels(m), torch.tanh(t), channels(m)),
        lambda m, t: torch.tanh(t) * channels(m) + 0 * channels(m),
    )
    assert_same(pair, rule)


@pytest.mark.parametrize("rule", RULES)
def test_a_mean_that_is_added_is_no_norm_in_parts(rule: str) -> None:
    assert_same((lambda m, t: t + pooled(t), lambda m, t: t - -F.adaptive_avg_pool2d(t, 1)), rule)
    (net,) = twins([lambda m, x: m.fc(x + x.mean(0, keepdim=True))], fc=nn.Linear(5, 3))
    assert quietly(lambda: fi.explain(net, pictures(2, 5), 0, rule=rule))[1]


@pytest.mark.parametrize("rule", RULES)
def test_what_an_activation_leaves_is_an_activation(rule: str) -> None:
    assert_same((lambda m, t: F.softshrink(t, 0.2), lambda m, t: t - t.clamp(-0.2, 0.2)), rule)


@pytest.mark.parametrize("rule", ["zplus", "gamma"])
def test_an_activation_in_parts_by_masks_is_loud(rule: str) -> None:
    pair = (lambda m, t: F.prelu(t, m.slopes), lambda m, t: t * (t > 0) + channels(m) * t * (t <= 0))
    assert_same(pair, rule, loud=True)


@pytest.mark.parametrize("rule", RULES)
def test_a_mean_of_layers_side_by_side_is_none_of_a_layer_in_parts(rule: str) -> None:
    """A convolution in groups, or a layer for each sample, is joined along another dimension than the mean's."""

    def grouped(m: Any, t: Tensor) -> Tensor:
        return F.conv2d(t, m.other.weight[:, :3], m.other.bias, padding=1, groups=2)

    def apart(m: Any, t: Tensor) -> Tensor:
        half = m.other.weight[:, :3].chunk(2), m.other.bias.chunk(2), t.chunk(2, 1)
        return torch.cat([F.conv2d(x, w, b, padding=1) for w, b, x in zip(*half, strict=True)], 1)

    def each(m: Any, t: Tensor) -> Tensor:
        return torch.stack([grouped(m, x[None])[0] for x in t])

    for step in (apart, each):
        assert_same((lambda m, t: t + pooled(grouped(m, t)), lambda m, t: t + pooled(step(m, t))), rule)


# --- gradients -----------------------------------------------------------------------------------------------------

STRANGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "sign": lambda t: t * torch.sign(t),
    "logaddexp": lambda t: torch.logaddexp(t, t.flip(1)),
    "std": lambda t: t + t.std((2, 3), keepdim=True),
    "in place": lambda t: (t * 1.0).exp_(),
}


@pytest.mark.filterwarnings("ignore::fasterisnet.errors.RuleWarning")
@pytest.mark.parametrize("name", STRANGERS)
def test_gradients_are_exact_past_what_has_no_rule(name: str) -> None:
    """Under z+ a stranger divides relevance by its own result, which is differentiated."""
    parts = {"conv": nn.Conv2d(3, 4, 3), "conv2": nn.Conv2d(4, 4, 1), "fc": nn.Linear(4, 2)}
    (net,) = twins([lambda m, x: m.fc(F.relu(m.conv2(STRANGERS[name](m.conv(x)))).mean((2, 3)))], **parts)
    images, weight = pictures(2, 3, 6, 6), net.conv.weight

    def loss(create_graph: bool) -> Tensor:
        return (fi.explain(net, images, 1, rule="zplus", create_graph=create_graph) * images.cos()).sum()

    direction = pictures(*weight.shape, seed=5)
    expected = (parameter_gradients(net, loss(True))["conv.weight"] * direction).sum()
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(sign * 1e-6 * direction)
            values.append(loss(False))
            weight.sub_(sign * 1e-6 * direction)
    torch.testing.assert_close((values[0] - values[1]) / 2e-6, expected, rtol=1e-6, atol=1e-8)


def test_what_is_not_shut_out_passes_a_mask() -> None:
    """Scores of attention with a mask added, whose zeros add nothing, are scores with some replaced (z+)."""
    shut = torch.tensor([[False, True, False, False, True]])
    pair = (
        lambda m, x: m.fc((m.query(x).masked_fill(shut, -1e4)).softmax(1)),
        lambda m, x: m.fc((m.query(x) + shut * -1e4).softmax(1)),
    )
    first, second = twins(pair, query=nn.Linear(5, 5), fc=nn.Linear(5, 3))
    maps = [fi.explain(net, pictures(2, 5), 0, rule="zplus") for net in (first, second)]
    assert maps[0].abs().max() > 0
    torch.testing.assert_close(maps[1], maps[0], rtol=1e-3, atol=1e-6)
