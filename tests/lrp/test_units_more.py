"""More of what z+, gamma and zB take for one layer or one step: equal maps in every spelling, or a warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.errors import RuleError
from lrp.helpers import RULES, Function, assert_alike, assert_close, explained, pictures, quietly, twins

Step = Callable[[Any, Tensor], Tensor]
WIDTH = 6
BOX: dict[str, Any] = {"box": (-5.0, 5.0)}


def parts() -> dict[str, Any]:
    return {
        "stem": nn.Conv2d(3, WIDTH, 3, padding=1),
        "bn": nn.BatchNorm2d(WIDTH),
        "mix": nn.Conv2d(WIDTH, WIDTH, 1),
        "each": nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False),
        "head": nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        "fc": nn.Linear(WIDTH, 3),
        "v": nn.Parameter(torch.zeros(WIDTH)),
    }


def column(t: Tensor) -> Tensor:
    return t.view(-1, 1, 1)


def behind_relu(step: Step) -> Function:
    """A step between a ReLU and another layer."""
    return lambda m, x: m.fc(torch.relu(m.head(step(m, torch.relu(m.stem(x))))).mean((2, 3)))


def behind_layer(step: Step) -> Function:
    """A step behind a convolution."""
    return lambda m, x: m.fc(torch.relu(m.head(step(m, m.stem(x)))).mean((2, 3)))


def alike(
    plain: Function, other: Function, images: Tensor | None = None, *, training: bool = False, **options: Any
) -> None:
    first, second = (net.train(training) for net in twins([plain, other], **parts()))
    assert_alike(first, second, pictures(2, 3, 6, 6) if images is None else images, **options)


def warned(function: Function, **options: Any) -> list[str]:
    (net,) = twins([function], **parts())
    return quietly(lambda: fi.explain(net, pictures(2, 3, 6, 6), 1, **options))[1]


# --- images normalised in place ------------------------------------------------------------------------------------

MEAN, SPREAD = torch.tensor([0.1, 0.2, 0.3]).double(), torch.tensor([0.5, 0.6, 0.7]).double()


def normalised(x: Tensor) -> Tensor:
    return (x - column(MEAN)) / column(SPREAD)


def normalised_in_place(x: Tensor) -> Tensor:
    x = x.clone()
    for i in range(3):
        x[:, i].sub_(MEAN[i]).div_(SPREAD[i])
    return x


def normalised_by_samples(x: Tensor) -> Tensor:
    x = x.clone()
    for i in range(len(x)):
        x[i].mul_(column(1 / SPREAD)).add_(column(-MEAN / SPREAD))
    return x


def read(prepare: Callable[[Tensor], Tensor]) -> Function:
    return lambda m, x: m.fc(torch.relu(m.head(torch.relu(m.stem(prepare(x))))).mean((2, 3)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("other", [normalised_in_place, normalised_by_samples])
def test_a_box_goes_through_steps_in_place(other: Callable[[Tensor], Tensor], rule: str) -> None:
    alike(read(normalised), read(other), rule=rule, **BOX)


def test_an_activation_in_place_is_no_step_in_front_of_the_first_layer() -> None:
    def rectified(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0].relu_()
        return x

    (net,) = twins([read(rectified)], **parts())
    with pytest.raises(RuleError, match="takes the network input"):
        fi.explain(net, pictures(2, 3, 6, 6), 1, **BOX)


# --- norms of a batch, of a sample, of a group ---------------------------------------------------------------------


def batch_norm(t: Tensor, *shape: int) -> Tensor:
    return F.batch_norm(t.reshape(*shape), None, None, training=True).view_as(t)


def side_by_side(m: Any, t: Tensor) -> Tensor:
    """The channels of all samples side by side."""
    channels = t.transpose(0, 1)
    return F.batch_norm(channels.reshape(1, WIDTH, -1), None, None, training=True).view_as(channels).transpose(0, 1)


ONE_SAMPLE: dict[str, tuple[Step, Step]] = {
    "group norm": (lambda m, t: F.group_norm(t, 2), lambda m, t: batch_norm(t, 1, 2 * len(t), -1)),
    "one group": (lambda m, t: F.group_norm(t, 1), lambda m, t: batch_norm(t, 1, len(t), -1)),
    "instance norm": (lambda m, t: F.instance_norm(t), lambda m, t: batch_norm(t, 1, WIDTH * len(t), 6, 6)),
    "instance norm, copied": (
        lambda m, t: F.instance_norm(t),
        lambda m, t: F.batch_norm(t.reshape(1, WIDTH * len(t), 6, 6).clone(), None, None, training=True).view_as(t),
    ),
    "batch norm, samples inside": (
        lambda m, t: F.batch_norm(t, None, None, training=True),
        side_by_side,
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ONE_SAMPLE)
def test_a_norm_is_what_it_takes_its_statistics_of(name: str, rule: str) -> None:
    plain, other = map(behind_layer, ONE_SAMPLE[name])
    alike(plain, other, rule=rule, what=name)


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_norm_of_one_sample_is_a_batch_norm(rule: str) -> None:
    def flat(m: Any, t: Tensor) -> Tensor:
        bn = m.bn
        return F.batch_norm(t.flatten(2), bn.running_mean, bn.running_var, bn.weight, bn.bias, bn.training).view_as(t)

    plain, other = behind_layer(lambda m, t: m.bn(t)), behind_layer(flat)
    alike(plain, other, pictures(1, 3, 6, 6), training=True, rule=rule)


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_norm_of_a_decomposed_graph(rule: str) -> None:
    def decomposed(m: Any, t: Tensor) -> Tensor:
        bn = m.bn
        norm = torch.ops.aten._native_batch_norm_legit_no_training
        return norm(t, bn.weight, bn.bias, bn.running_mean, bn.running_var, 0.1, bn.eps)[0]

    alike(behind_layer(lambda m, t: m.bn(t)), behind_layer(decomposed), rule=rule)


# --- a scale behind a layer ----------------------------------------------------------------------------------------


def windows(t: Tensor) -> Tensor:
    return F.pad(t, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)


def by_einsum(m: Any, t: Tensor) -> Tensor:
    return torch.einsum("bchwij,cij->bchw", windows(t), m.each.weight[:, 0])


def by_bmm(m: Any, t: Tensor) -> Tensor:
    """The channels in the batch dimension, weights on the left."""
    columns = F.unfold(t, 3, padding=1).view(len(t), WIDTH, 9, -1).permute(1, 2, 0, 3).flatten(2)
    return torch.bmm(m.each.weight.view(WIDTH, 1, 9), columns).view(WIDTH, len(t), *t.shape[2:]).transpose(0, 1)


def by_rows(m: Any, t: Tensor) -> Tensor:
    """Three output channels at a time, into a buffer."""
    filled = torch.empty_like(t)
    for rows in (slice(0, 3), slice(3, 6)):
        filled[:, rows] = F.conv2d(t, m.mix.weight[rows], m.mix.bias[rows])
    return filled


def by_products(m: Any, t: Tensor) -> Tensor:
    columns = F.unfold(t, 3, padding=1).view(len(t), WIDTH, 9, *t.shape[2:])
    return (columns * m.each.weight.view(1, WIDTH, 9, 1, 1)).sum(2)


@pytest.mark.parametrize("rule", ["zplus", "gamma"])
@pytest.mark.parametrize("spelled", [by_einsum, by_bmm])
@pytest.mark.parametrize(
    "scaled",
    [lambda m, y: m.bn(y), lambda m, y: y * column(m.v), lambda m, y: -y / column(m.v) + column(m.bn.bias)],
    ids=["batch norm", "scale", "division and shift"],
)
def test_a_scale_behind_a_layer_of_single_channels(scaled: Step, spelled: Step, rule: str) -> None:
    def net(each: Step) -> Function:
        return behind_relu(lambda m, t: torch.relu(scaled(m, each(m, t))))

    alike(net(lambda m, t: m.each(t)), net(spelled), rule=rule)


@pytest.mark.parametrize("spelled", [by_einsum, by_bmm])
def test_a_first_layer_of_single_channels_in_a_box(spelled: Step) -> None:
    def net(each: Step) -> Function:
        return lambda m, x: m.fc(torch.relu(m.head(torch.relu(m.bn(each(m, torch.cat([x, x], 1)))))).mean((2, 3)))

    alike(net(lambda m, t: m.each(t)), net(spelled), **BOX)


@pytest.mark.parametrize("rule", ["zplus", "gamma"])
@pytest.mark.parametrize(
    "step",
    [
        lambda m, t: column(m.v) * by_rows(m, t),
        lambda m, t: by_rows(m, t) * column(m.v) + column(m.bn.bias),
        lambda m, t: (by_rows(m, t) + column(m.bn.bias)).div(column(m.v)),
        lambda m, t: m.bn(by_products(m, t)),
        lambda m, t: by_products(m, t) * column(m.v),
        lambda m, t: torch.cat([m.mix(s) for s in t.split(1)]) * column(m.v),
        lambda m, t: m.mix(t)[:, :3].repeat(1, 2, 1, 1) * column(m.v),
    ],
)
def test_a_scale_behind_parts_of_a_layer_is_loud(step: Step, rule: str) -> None:
    assert "parts" in warned(behind_relu(step), rule=rule)[0]


@pytest.mark.parametrize("rule", RULES)
def test_a_scale_behind_parts_of_the_first_layer_is_loud(rule: str) -> None:
    def net(m: Any, x: Tensor) -> Tensor:
        y = torch.cat([m.stem(s) for s in x.split(1)]) * column(m.v)
        return m.fc(torch.relu(m.head(torch.relu(y))).mean((2, 3)))

    assert "parts of" in warned(net, rule=rule, **BOX)[0]


@pytest.mark.parametrize("rule", ["zplus", "gamma"])
@pytest.mark.parametrize(
    "step",
    [
        lambda m, t: (torch.cat([m.mix(t), t], 1) * column(torch.linspace(-1, 1, 12).double()))[:, 3:9],
        lambda m, t: m.mix(t) * torch.linspace(0.1, 1, 6).double(),
        lambda m, t: m.mix(t) * torch.tensor([0.0, 2.0]).double().view(2, 1, 1, 1),
        lambda m, t: (m.mix(t)[:, 1:] * 3)[:, :1] * t,
    ],
    ids=["layer beside others", "by position", "by sample", "number"],
)
def test_scales_that_belong_to_no_layer_are_silent(step: Step, rule: str) -> None:
    messages = warned(behind_relu(step), rule=rule)
    assert not messages


# --- steps of constants with rearrangements between them -----------------------------------------------------------


def layer_normed(weight: Tensor | None, bias: Tensor | None, t: Tensor) -> Tensor:
    return F.layer_norm(t.movedim(1, -1), [WIDTH], weight, bias).movedim(-1, 1)


def batch_normed(m: Any, t: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.batch_norm(t, m.bn.running_mean, m.bn.running_var, weight, bias, eps=m.bn.eps)


APART: dict[str, tuple[Step, Step]] = {
    "layer norm": (
        lambda m, t: layer_normed(m.v, m.bn.bias, t),
        lambda m, t: layer_normed(None, None, t) * column(m.v) + column(m.bn.bias),
    ),
    "layer norm, in two places": (
        lambda m, t: layer_normed(m.v, m.bn.bias, t),
        lambda m, t: ((layer_normed(None, None, t) * column(m.v)).flatten(2) + m.bn.bias[:, None]).view_as(t),
    ),
    "group norm": (
        lambda m, t: F.group_norm(t, 2, m.v, m.bn.bias),
        lambda m, t: F.layer_norm(t.reshape(len(t), 2, -1), [3 * 36]).view_as(t) * column(m.v) + column(m.bn.bias),
    ),
    "batch norm behind relu": (
        lambda m, t: batch_normed(m, t.relu(), m.v, m.bn.bias),
        lambda m, t: (
            (batch_normed(m, t.relu(), None, None).movedim(1, -1) * m.v + m.bn.bias).movedim(-1, 1).contiguous()
        ),
    ),
    "two shifts": (
        lambda m, t: t.relu() + column(m.v) + column(m.bn.bias),
        lambda m, t: ((t.relu() + column(m.v)).flatten(2) + m.bn.bias[:, None]).view_as(t),
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", APART)
def test_constants_with_rearrangements_between_them_are_one_step(name: str, rule: str) -> None:
    plain, other = map(behind_layer, APART[name])
    alike(plain, other, rule=rule, what=name)


def test_relevance_between_a_norm_and_its_constants() -> None:
    def net(m: Any, x: Tensor) -> Tensor:
        return m.fc((m.norm(m.stem(x).movedim(1, -1)).movedim(-1, 1) * column(m.v) + column(m.bn.bias)).mean((2, 3)))

    (model,) = twins([net], **parts(), norm=nn.LayerNorm(WIDTH))
    maps = fi.explain(model, pictures(2, 3, 6, 6), 1, rule="zplus", layers=["norm"])
    assert bool(maps["norm"].isfinite().all()) and float(maps["norm"].abs().max()) > 0


# --- a line written as lerp ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("at", [behind_relu, behind_layer])
def test_lerp_between_constants_is_a_line(at: Callable[[Step], Function], rule: str) -> None:
    ends = torch.tensor(-1.0).double(), torch.tensor(1.0).double()
    alike(at(lambda m, t: 2 * t - 1), at(lambda m, t: torch.lerp(*ends, t)), rule=rule)


# --- means ---------------------------------------------------------------------------------------------------------


def pooled(pool: Callable[[Tensor], Tensor]) -> Function:
    return lambda m, x: m.fc(pool(torch.relu(m.stem(x))))


MASK = torch.ones(2, 1, 6, 6).double()
MASK[1, :, 3:] = 0
MEANS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "views around": (
        lambda t: t.mean((2, 3)),
        lambda t: t.flatten(2).sum(2).view(len(t), WIDTH, 1, 1).div(36).flatten(1),
    ),
    "dimensions kept": (lambda t: t.mean((2, 3)), lambda t: t.sum((2, 3), keepdim=True)[..., 0, 0] / 36),
    "std_mean": (lambda t: t.mean((2, 3)), lambda t: torch.std_mean(t, (2, 3))[1]),
    "var_mean": (lambda t: t.mean((2, 3)), lambda t: torch.var_mean(t, (2, 3), keepdim=True)[1].flatten(1)),
    "masked": (
        lambda t: torch.stack([t[0].mean((1, 2)), t[1, :, :3].mean((1, 2))]),
        lambda t: (t * MASK).sum((2, 3)) / MASK.sum((2, 3)),
    ),
    "masked, multiplied": (
        lambda t: torch.stack([t[0].mean((1, 2)), t[1, :, :3].mean((1, 2))]),
        lambda t: (t * MASK).sum((2, 3)) * MASK.sum((2, 3)).reciprocal(),
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MEANS)
def test_means(name: str, rule: str) -> None:
    plain, other = map(pooled, MEANS[name])
    alike(plain, other, rule=rule, what=name)


def test_a_masked_mean_does_not_depend_on_the_batch() -> None:
    masks = iter([MASK, MASK[1:]])
    (net,) = twins([lambda m, x: pooled(lambda t: (t * m.mask).sum((2, 3)) / m.mask.sum((2, 3)))(m, x)], **parts())
    images, maps = pictures(2, 3, 6, 6), []
    for mask in masks:
        net.mask = mask
        maps.append(fi.explain(net, images[-len(mask) :], 1, rule="zplus"))
    assert_close(maps[0][1:], maps[1], 1e-10)


# --- layers in parts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["zplus", "gamma"])
def test_a_layer_by_shifting_and_adding_is_loud(rule: str) -> None:
    def shifted(m: Any, t: Tensor) -> Tensor:
        padded, size = F.pad(t, (1, 1, 1, 1)), t.shape[-1]
        weights = m.each.weight[:, 0]
        return sum(
            padded[:, :, i : i + size, j : j + size] * column(weights[:, i, j]) for i in range(3) for j in range(3)
        )  # type: ignore[return-value]

    assert "parts of one tensor" in warned(behind_relu(shifted), rule=rule)[0]


@pytest.mark.parametrize("rule", ["zplus", "gamma"])
def test_a_layer_added_with_its_scale_at_once_is_loud(rule: str) -> None:
    added = behind_relu(lambda m, t: torch.addcmul(t, m.head(t), column(m.v)))
    assert "adds" in warned(added, rule=rule)[0] or "sum" in warned(added, rule=rule)[0]
    assert not warned(behind_relu(lambda m, t: torch.addcmul(t, torch.relu(m.head(t)), column(m.v))), rule="gamma")


# --- rules for modules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_one_rule_for_every_module_is_that_rule(rule: str) -> None:
    def attending(m: Any, x: Tensor) -> Tensor:
        t = m.stem(x).flatten(2).mT
        return m.fc((t + (t @ t.mT).softmax(-1) @ t).mean(1))

    (net,) = twins([attending], **parts())
    images = pictures(2, 3, 6, 6)
    for rules in ({"default": rule}, {"default": rule, nn.Conv2d: rule, "fc": rule}):
        assert_close(explained(net, images, rule=rules).heatmap, explained(net, images, rule=rule).heatmap, 1e-10)


# --- a softmax in steps --------------------------------------------------------------------------------------------

SOFTMAX: dict[str, Callable[[Tensor], Tensor]] = {
    "logsumexp": lambda s: (s - s.logsumexp(-1, keepdim=True)).exp(),
    "logsumexp, a dimension put back": lambda s: torch.exp(s - torch.logsumexp(s, 2)[..., None]),
    "log softmax": lambda s: s.log_softmax(-1).exp(),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SOFTMAX)
def test_a_softmax_in_steps(name: str, rule: str) -> None:
    def attending(softmax: Callable[[Tensor], Tensor]) -> Function:
        def forward(m: Any, x: Tensor) -> Tensor:
            t = m.stem(x).flatten(2).mT
            return m.fc((t + softmax(t @ t.mT / 3) @ t).mean(1))

        return forward

    alike(attending(lambda s: s.softmax(-1)), attending(SOFTMAX[name]), rule=rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "step",
    [
        lambda t: t.logsumexp((2, 3)),
        lambda t: (t - t.mean(2, keepdim=True).logsumexp(2, keepdim=True)).exp().sum((2, 3)),
        lambda t: (t - t.mT.logsumexp(2, keepdim=True)).exp().sum((2, 3)),
    ],
)
def test_what_is_no_softmax_is_loud(step: Callable[[Tensor], Tensor], rule: str) -> None:
    assert "no relevance rule" in warned(pooled(step), rule=rule)[0]
