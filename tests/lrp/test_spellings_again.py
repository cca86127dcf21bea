"""Steps that could compute but only move numbers, bounds that are never reached, masks and sums in rare words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fasterisnet as fi
from fasterisnet.errors import RuleError
from lrp.helpers import RULES, TWO_RULES, assert_alike, assert_close, pictures, quietly, twins
from lrp.test_spellings_more import WIDTH, Step, assert_same, behind, between, by_channel, parts

Function = Callable[[Tensor], Tensor]


# --- nothing is computed -------------------------------------------------------------------------------------------


def patches(t: Tensor) -> Tensor:
    """Cut into patches side by side and put together again."""
    return F.fold(F.unfold(t, 2, stride=2), t.shape[2:], 2, stride=2)


def swish(t: Tensor) -> Tensor:
    return t * torch.sigmoid(t)


NOTHING: dict[str, Function] = {
    "bilinear to the same size": lambda t: F.interpolate(t, size=t.shape[2:], mode="bilinear"),
    "bicubic to the same size": lambda t: F.interpolate(t, size=t.shape[2:], mode="bicubic"),
    "area": lambda t: F.interpolate(t, size=t.shape[2:], mode="area"),
    "average of one": lambda t: F.avg_pool2d(t, 1),
    "average of one, 3d": lambda t: F.avg_pool3d(t, 1),
    "maximum of one": lambda t: F.max_pool2d(t, 1),
    "adaptive maximum": lambda t: F.adaptive_max_pool2d(t, t.shape[2:]),
    "nearest": lambda t: F.interpolate(t, size=t.shape[2:]),
    "mean of one": lambda t: t.unsqueeze(1).mean(1),
    "sum of one": lambda t: t.unsqueeze(-1).sum(-1),
    "patches": patches,
    "nan_to_num": torch.nan_to_num,
    "times one": lambda t: t * 1,
    "divided by one": lambda t: t / torch.ones(1, dtype=t.dtype),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NOTHING)
def test_what_computes_nothing(name: str, rule: str) -> None:
    assert_same((between(lambda m, t: t), between(lambda m, t: NOTHING[name](t))), rule, what=name)


@pytest.mark.parametrize("name", NOTHING)
def test_what_computes_nothing_before_the_activation_of_a_first_layer(name: str) -> None:
    pair = between(lambda m, t: F.relu6(t)), between(lambda m, t: F.relu6(NOTHING[name](t)))
    images = pictures(2, 3, 8, 8).sigmoid()
    plain, other = (fi.explain(net, images, 1, box=(0, 1)) for net in twins(pair, **stem()))
    assert_close(other, plain, 1e-9, name)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NOTHING)
def test_nothing_between_a_layer_its_batch_norm_and_an_activation_by_hand(name: str, rule: str) -> None:
    def net(between: Function) -> Step:
        return lambda m, x: m.fc(swish(between(m.norm(between(m.conv(x))))).mean((2, 3)))

    plain, other = twins((net(lambda t: t), net(NOTHING[name])), **stem(), norm=nn.BatchNorm2d(WIDTH))
    assert_alike(plain, other, pictures(), rule=rule, what=name)


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("name", NOTHING)
def test_gates_of_which_nothing_is_computed(name: str, rule: str) -> None:
    def gated(around: Function) -> Step:
        return behind(lambda m, t: t * around(torch.sigmoid(m.other(t))))

    assert_same((gated(lambda g: g), gated(NOTHING[name])), rule, what=name)


@pytest.mark.parametrize(
    "step",
    [
        lambda t: F.avg_pool2d(t, 1, divisor_override=2),
        lambda t: F.interpolate(t, scale_factor=1.05, mode="bicubic"),  # six pixels stay six, but each is shifted
    ],
    ids=["half the average of one", "bicubic"],
)
def test_what_keeps_the_size_and_computes_all_the_same(step: Function) -> None:
    """Nothing here is negative but bicubic weights, so z+ neither loses relevance nor makes any negative."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, WIDTH, 1, bias=False), nn.Linear(WIDTH * 36, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(step(self.conv(x))).flatten(1))

    net, images = Net().double(), F.relu(pictures() - 1)  # few pixels, so that wrong shares show
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.abs_()
    maps = fi.explain(net, images, 0, rule="zplus", epsilon=1e-12)
    assert bool((maps >= 0).all())
    assert_close(maps.flatten(1).sum(1), net(images)[:, 0], 1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_every_second_pixel(rule: str) -> None:
    assert_same((between(lambda m, t: t[..., ::2, ::2]), between(lambda m, t: F.avg_pool2d(t, 1, 2))), rule)


@pytest.mark.parametrize("rule", TWO_RULES)
def test_patches_that_overlap_are_summed(rule: str) -> None:
    """As many numbers as before, and yet sums: 3x3 patches at every second of six places."""

    def folded(t: Tensor) -> Tensor:
        return F.fold(t.repeat(1, 1, 1, 1).flatten(2).view(len(t), WIDTH * 9, 4), (6, 6), 3, stride=2)

    def by_hand(t: Tensor) -> Tensor:
        columns = t.flatten(2).view(len(t), WIDTH, 3, 3, 2, 2)
        padded = [F.pad(columns[..., i, j], (2 * j, 3 - 2 * j, 2 * i, 3 - 2 * i)) for i in range(2) for j in range(2)]
        return torch.stack(padded).sum(0)

    pair = between(lambda m, t: by_hand(t[..., 1:7, 1:7])), between(lambda m, t: folded(t[..., 1:7, 1:7]))
    assert_same(pair, rule)


# --- bounds that are never reached, and masks ----------------------------------------------------------------------


BOUNDED: dict[str, tuple[Step, Step]] = {
    "a hard sigmoid of what is positive": (
        lambda m, t: t * F.hardsigmoid(F.relu(m.other(t))),
        lambda m, t: t * F.relu6(F.relu(m.other(t)) + 3) / 6,
    ),
    "the same, clamped": (
        lambda m, t: t * F.hardsigmoid(F.relu(m.other(t))),
        lambda m, t: t * (F.relu(m.other(t)) / 6 + 0.5).clamp(0, 1),
    ),
    "a gate of a SiLU": (
        lambda m, t: t * torch.sigmoid(F.silu(t)),
        lambda m, t: t * torch.sigmoid(t * torch.sigmoid(t)),
    ),
    "a hard sigmoid alone": (lambda m, t: F.hardsigmoid(t), lambda m, t: F.relu6(t + 3) / 6),
    "a hard sigmoid alone, clamped": (lambda m, t: F.hardsigmoid(t), lambda m, t: (t / 6 + 0.5).clamp(0, 1)),
    "a hard sigmoid alone, in steps": (lambda m, t: F.hardsigmoid(t), lambda m, t: (t + 3).clamp(0, 6) * (1 / 6)),
    "hard swish": (lambda m, t: F.hardswish(t), lambda m, t: t * F.relu6(t + 3) / 6),
    "hard swish, clamped": (lambda m, t: F.hardswish(t), lambda m, t: t * (t / 6 + 0.5).clamp(0, 1)),
    "from zero to one": (
        lambda m, t: t * F.hardtanh(F.relu(m.other(t))),
        lambda m, t: t * F.relu(m.other(t)).clamp(min=-1).clamp(max=1),
    ),
    "from zero to one, the other way round": (
        lambda m, t: t * F.hardtanh(F.relu(m.other(t))),
        lambda m, t: t * F.relu(m.other(t)).clamp(max=1).clamp(min=-1),
    ),
    "a hard sigmoid in two steps": (
        lambda m, t: t * F.hardsigmoid(F.relu(m.other(t))),
        lambda m, t: t * (F.relu(m.other(t)) + 3).clamp(min=0).clamp(max=6) / 6,
    ),
    "silu of a part": (lambda m, t: F.silu(t / 8), lambda m, t: swish(t / 8)),
    "softsign": (lambda m, t: F.softsign(t), lambda m, t: t * (1 / (1 + t.abs()))),
    "bounds around nothing": (lambda m, t: F.relu(t).clamp(max=1), lambda m, t: (F.relu(t) * 1).clamp(max=1)),
    "positive by its sign": (lambda m, t: F.relu(t), lambda m, t: torch.where(t.sign() == 1, t, 0.0)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_and_masks(name: str, rule: str) -> None:
    plain, other = BOUNDED[name]
    assert_same((between(plain), between(other)), rule, what=name, tolerance=1e-6)
    assert_same((behind(plain), behind(other)), rule, what=name, tolerance=1e-6)


# --- sums, means and softmax ---------------------------------------------------------------------------------------


def written_by_channel(m: Any, t: Tensor) -> Tensor:
    result = torch.zeros_like(t)
    for channel, one in enumerate(m.other(t).unbind(1)):
        result[:, channel] += one
    return result


def scattered(t: Tensor) -> Tensor:
    flat = t.flatten(2)
    whole = flat.new_zeros(len(t), WIDTH, 1)
    return whole.scatter_reduce(2, torch.zeros_like(flat).long(), flat, "mean", include_self=False)[..., None]


def attention(scores: Callable[[Tensor], Tensor]) -> Step:
    """Attention between channels, as in DANet."""

    def step(m: Any, t: Tensor) -> Tensor:
        flat = t.flatten(2)
        return t + (scores(flat @ m.other(t).flatten(2).mT).softmax(-1) @ flat).view_as(t)

    return step


def from_the_largest(scores: Tensor) -> Tensor:
    return scores.amax(-1, keepdim=True).expand_as(scores) - scores


def group_norm_by_batch_norm(m: Any, t: Tensor) -> Tensor:
    """Groups of all samples are channels of one, behind another norm and its scale."""
    grouped = F.batch_norm(twice(t).reshape(1, len(t) * 2, -1), None, None, training=True).view_as(t)
    return grouped * by_channel(m.slopes) + by_channel(m.slopes)


def twice(t: Tensor) -> Tensor:
    return F.layer_norm(t, t.shape[1:]) * 2 + 0.5


def mixed(negative: Function) -> Step:
    """Channels mixed by a matrix made of the images, behind a change of sign."""
    return lambda m, t: (t.flatten(2) @ m.other(t).flatten(2).mT @ negative(t.flatten(2))).view_as(t)


SUMS: dict[str, tuple[Step, Step]] = {
    "written by channel": (lambda m, t: m.other(t), written_by_channel),
    "noise that is off": (lambda m, t: t, lambda m, t: torch.add(t, torch.ones_like(t), alpha=0)),
    "a mean that is scattered": (lambda m, t: t * t.mean((2, 3), keepdim=True), lambda m, t: t * scattered(t)),
    "a product with what is negative": (mixed(lambda t: 0 - t), mixed(lambda t: -1 * t)),
    "the same, by its sign": (mixed(lambda t: 0 - t), mixed(torch.neg)),
    "a norm behind a norm": (lambda m, t: F.group_norm(twice(t), 2, m.slopes, m.slopes), group_norm_by_batch_norm),
    "scores from their largest": (attention(torch.neg), attention(from_the_largest)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str, rule: str) -> None:
    plain, other = SUMS[name]
    assert_same((behind(plain), behind(other)), rule, what=name)
    assert_same((between(plain), between(other)), rule, what=name)


def head(step: Step) -> Step:
    return lambda m, x: step(m, F.relu(m.conv(x)).mean((2, 3)))


@pytest.mark.parametrize("rule", ["zplus", "gamma"])
def test_products_and_sums_that_are_scaled_are_loud(rule: str) -> None:
    """The scale behind the sum does not hide that it is a layer by hand."""
    pair = (
        head(lambda m, t: 10 * F.linear(t, F.normalize(m.fc.weight))),
        head(lambda m, t: 10 * (t.unsqueeze(1) * F.normalize(m.fc.weight)).sum(-1)),
    )
    _, other = twins(pair, **stem())
    with pytest.raises(RuleError, match="products with weights"):
        fi.explain(other, pictures(), 1, rule=rule, strict=True)


@pytest.mark.parametrize("rule", RULES)
def test_the_largest_of_activations_and_constants_is_loud(rule: str) -> None:
    """Which would be a ReLU, written with `maximum`."""
    (other,) = twins([between(lambda m, t: torch.stack((t, torch.zeros_like(t))).amax(0))], **parts())
    with pytest.raises(RuleError, match="activations and constants"):
        fi.explain(other, pictures(), 1, rule=rule, strict=True)


# --- a forward pass that was not recorded --------------------------------------------------------------------------


def stem() -> dict[str, Any]:
    return {
        "conv": nn.Conv2d(3, WIDTH, 3, padding=1),
        "conv2": nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        "fc": nn.Linear(WIDTH, 3),
    }


def test_attention_in_steps_without_a_record() -> None:
    """torch's own steps of attention multiply by a plain number, which is no mask."""

    def attends(m: Any, x: Tensor) -> Tensor:
        tokens = m.conv(x).flatten(2).mT
        with sdpa_kernel(SDPBackend.MATH):
            return m.fc(F.scaled_dot_product_attention(tokens, tokens, tokens).mean(1))

    (net,) = twins([attends], **stem())
    images = pictures().requires_grad_()
    found, messages = quietly(lambda: fi.relevance(net(images)[:, 1], images))
    assert not messages
    assert_close(found, fi.explain(net, images, 1), 1e-9)


def test_fake_quantisation_only_rounds() -> None:
    """What quantisation-aware training puts behind every activation passes relevance on."""
    observer = torch.ao.quantization.default_fused_act_fake_quant()

    def rounded(m: Any, x: Tensor) -> Tensor:
        return m.fc(observer(F.relu(m.conv(x))).mean((2, 3)))

    (net,) = twins([rounded], **stem())
    net, images = net.float(), pictures().float()
    for _ in range(3):
        net(images)
    observer.eval()
    found, messages = quietly(lambda: fi.explain(net, images, 1))
    assert not messages
    (plain,) = twins([lambda m, x: m.fc(F.relu(m.conv(x)).mean((2, 3)))], **stem())
    assert_close(found, fi.explain(plain.float(), images, 1), 0.1)
