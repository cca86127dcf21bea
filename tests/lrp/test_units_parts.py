"""Layers, norms and constants in parts: equal maps where a rule knows them, a warning where it does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.errors import RuleError
from lrp.helpers import RULES, Function, assert_close, explained, pictures, quietly, twins
from lrp.test_units_more import BOX, MEAN, SPREAD, WIDTH, alike, behind_layer, behind_relu, column, parts, read, warned

Step = Callable[[Any, Tensor], Tensor]

# --- steps that change nothing, or move the numbers ----------------------------------------------------------------


def folded(t: Tensor) -> Tensor:
    return F.fold(t.flatten(2), t.shape[-2:], kernel_size=1)


def largest(m: Any, t: Tensor) -> Tensor:
    return torch.stack([m.head(t), m.each(t)]).amax(0)


MOVED: dict[str, tuple[Step, Step]] = {
    "folded behind a layer": (lambda m, t: m.bn(m.mix(t)), lambda m, t: m.bn(folded(m.mix(t)))),
    "zeros added": (lambda m, t: m.mix(t), lambda m, t: m.mix(t) + torch.zeros(WIDTH, 1, 1, dtype=t.dtype)),
    "zeros added to a ReLU": (lambda m, t: t, lambda m, t: t + torch.zeros_like(t)),
    "minus two": (lambda m, t: t * column(torch.full((WIDTH,), -2.0).double()), lambda m, t: -2 * t),
    "over minus two": (lambda m, t: t * column(torch.full((WIDTH,), -0.5).double()), lambda m, t: t / -2),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MOVED)
def test_steps_that_change_nothing(name: str, rule: str) -> None:
    plain, other = map(behind_relu, MOVED[name])
    alike(plain, other, rule=rule, what=name)


LAST: dict[str, tuple[Function, Function]] = {
    "larger of two": (
        lambda m, x: torch.stack([m.fc(x.mean((2, 3)).repeat(1, 2)), m.fc(x.amax((2, 3)).repeat(1, 2))]).amax(0),
        lambda m, x: torch.maximum(m.fc(x.mean((2, 3)).repeat(1, 2)), m.fc(x.amax((2, 3)).repeat(1, 2))),
    ),
    "sum of one": (
        lambda m, x: m.fc(torch.relu(m.stem(x)).mean((2, 3))),
        lambda m, x: m.fc(torch.relu(m.stem(x)).mean((2, 3))).unsqueeze(2).sum(2),
    ),
    "mean of one": (
        lambda m, x: m.fc(torch.relu(m.stem(x)).mean((2, 3))),
        lambda m, x: m.fc(torch.relu(m.stem(x)).mean((2, 3))).unsqueeze(0).mean(0),
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", LAST)
def test_the_last_step_only_moves(name: str, rule: str) -> None:
    alike(*LAST[name], rule=rule, what=name)


# --- images normalised in one operation ----------------------------------------------------------------------------

NORMALISED: dict[str, Callable[[Tensor], Tensor]] = {
    "addcmul": lambda x: torch.addcmul(column(-MEAN / SPREAD), x, column(1 / SPREAD)),
    "addcdiv": lambda x: torch.addcdiv(column(-MEAN / SPREAD), x, column(SPREAD)),
    "lerp": lambda x: torch.lerp(column(-MEAN / SPREAD), column((1 - MEAN) / SPREAD), x),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NORMALISED)
def test_a_box_goes_through_normalisations_in_one_operation(name: str, rule: str) -> None:
    alike(read(lambda x: (x - column(MEAN)) / column(SPREAD)), read(NORMALISED[name]), rule=rule, what=name, **BOX)


def test_a_denominator_carries_no_box() -> None:
    (net,) = twins([read(lambda x: torch.addcdiv(column(MEAN), column(SPREAD), x))], **parts())
    with pytest.raises(RuleError, match="takes the network input"):
        fi.explain(net, pictures(2, 3, 6, 6), 1, **BOX)


# --- loud ----------------------------------------------------------------------------------------------------------


def by_columns(m: Any, t: Tensor) -> Tensor:
    """A layer of single pixels as a sum of one channel times one column of the matrix each."""
    w = m.mix.weight
    return sum(t[:, i : i + 1] * w[:, i] for i in range(WIDTH))  # type: ignore[return-value]


def padded_parts(m: Any, t: Tensor) -> Tensor:
    w = m.head.weight
    first, second = F.pad(t[:, :3], (1, 1, 1, 1)), F.pad(t[:, 3:], (1, 1, 1, 1))
    return F.conv2d(first, w[:, :3]) + F.conv2d(second, w[:, 3:])


@pytest.mark.parametrize("rule", ["zplus", "gamma"])
@pytest.mark.parametrize("step", [by_columns, padded_parts])
def test_a_layer_in_parts_is_loud(step: Step, rule: str) -> None:
    assert "parts" in warned(behind_relu(step), rule=rule)[0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("prepare", [lambda x: x, lambda x: (x - column(MEAN)) / column(SPREAD)])
def test_the_first_layer_in_parts_is_loud(prepare: Callable[[Tensor], Tensor], rule: str) -> None:
    def stem(m: Any, x: Tensor) -> Tensor:
        x, w = prepare(x), m.stem.weight
        return F.conv2d(x[:, :1], w[:, :1], padding=1) + F.conv2d(x[:, 1:], w[:, 1:], padding=1)

    def net(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.relu(m.head(torch.relu(stem(m, x)))).mean((2, 3)))

    assert "parts" in warned(net, rule=rule, **BOX)[0]


CENTRED: dict[str, Step] = {
    "its mean": lambda m, t: t - t.mean((2, 3), keepdim=True),
    "times a number": lambda m, t: t - 1.0 * t.mean((2, 3), keepdim=True),
    "a sum": lambda m, t: t - t.sum((2, 3), keepdim=True) / 36,
    "a pool": lambda m, t: t - F.adaptive_avg_pool2d(t, 1),
    "added": lambda m, t: t + -t.mean((2, 3), keepdim=True),
}


@pytest.mark.parametrize("name", CENTRED)
def test_a_mean_subtracted_in_parts_is_loud(name: str) -> None:
    assert "mean" in warned(behind_relu(CENTRED[name]), rule="zplus")[0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("step", [lambda m, t: t - t.mean(0), lambda m, t: t - t.mean(), lambda m, t: t - t.sum(0) / 2])
def test_a_mean_over_the_batch_is_loud(step: Step, rule: str) -> None:
    assert any("batch" in message for message in warned(behind_layer(step), rule=rule))


@pytest.mark.parametrize("rule", RULES)
def test_means_of_one_sample_are_quiet(rule: str) -> None:
    added = behind_relu(lambda m, t: t + m.mix(t).mean((2, 3), keepdim=True))
    assert not warned(added, rule=rule)


@pytest.mark.parametrize("rule", ["zplus", "gamma"])
def test_a_scale_behind_a_mask_is_loud(rule: str) -> None:
    mask = (torch.arange(36).view(6, 6) % 3 > 0).double()
    scaled = behind_relu(lambda m, t: m.mix(t) * mask * column(m.v))
    assert "mask" in warned(scaled, rule=rule)[0]


# --- relevance where it was asked for ------------------------------------------------------------------------------


@pytest.mark.parametrize("images_first", [True, False])
def test_relevance_inside_a_unit_is_refused_in_any_order(images_first: bool) -> None:
    (net,) = twins([lambda m, x: m.fc(torch.relu(x).mean((2, 3)))], **parts())
    images = pictures(2, 3, 6, 6).requires_grad_()
    with fi.recording():
        hidden = net.stem(images)
        score = net.fc(torch.relu(net.bn(hidden)).mean((2, 3)))[:, 1]
    with pytest.raises(RuleError, match="one unit"):
        fi.relevance(score, [images, hidden] if images_first else [hidden, images], rule="zplus")


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_for_nn_module_is_one_for_every_module(rule: str) -> None:
    def net(m: Any, x: Tensor) -> Tensor:
        t = m.stem(x)
        return m.fc((t + t.softmax(1) * t).mean((2, 3)))

    (model,) = twins([net], **parts())
    images = pictures(2, 3, 6, 6)
    plain = explained(model, images, rule=rule).heatmap
    assert_close(explained(model, images, rule={nn.Module: rule}).heatmap, plain, 1e-10)


# --- half precision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_norm_in_half_precision(rule: str) -> None:
    (model,) = twins([behind_relu(lambda m, t: m.bn(t))], **parts())
    images = pictures(2, 3, 6, 6).bfloat16()
    half, exact = copy.deepcopy(model).bfloat16(), copy.deepcopy(model).bfloat16().float()
    found, _ = quietly(lambda: fi.explain(half, images, 1, rule=rule))
    wanted, _ = quietly(lambda: fi.explain(exact, images.float(), 1, rule=rule))
    assert found.dtype == torch.bfloat16
    assert float((found.float() - wanted).norm() / wanted.norm()) < 0.1
