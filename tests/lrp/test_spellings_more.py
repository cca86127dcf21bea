"""Spellings of activations, gates and constants that have to be told by what they compute, and learned numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.errors import InputError, RuleError
from lrp.helpers import RULES, Net, assert_alike, pictures, quietly, randomised, twins

Step = Callable[[Any, Tensor], Tensor]
WIDTH = 6


def between(step: Step) -> Step:
    """A step between two convolutions, behind no activation."""
    return lambda m, x: m.fc(F.relu(m.conv2(step(m, m.conv(x)))).mean((2, 3)))


def behind(step: Step) -> Step:
    """The same behind a ReLU."""
    return between(lambda m, t: step(m, F.relu(t)))


def by_channel(t: Tensor) -> Tensor:
    return t.view(-1, 1, 1)


def parts() -> dict[str, Any]:
    convolutions = {name: nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for name in ("conv2", "other")}
    learned = {"scale": nn.Parameter(torch.zeros(())), "slopes": nn.Parameter(torch.zeros(WIDTH))}
    return {"conv": nn.Conv2d(3, WIDTH, 3, padding=1), **convolutions, "fc": nn.Linear(WIDTH, 3), **learned}


def assert_same(pair: tuple[Step, Step], rule: str, **options: Any) -> None:
    plain, other = twins(pair, **parts())
    assert_alike(plain, other, pictures(2, 3, 8, 8), rule=rule, **options)


# --- constants -----------------------------------------------------------------------------------------------------


def update(one: Callable[[Tensor], Any]) -> Step:
    """A hand-written recurrent cell's update, gated by z and by 1 - z."""

    def step(m: Any, t: Tensor) -> Tensor:
        z = torch.sigmoid(m.other(t))
        return (one(z) - z) * torch.tanh(m.conv2(t)) + z * t

    return behind(step)


ONES: dict[str, Callable[[Tensor], Any]] = {
    "ones_like": torch.ones_like,
    "one tensor": lambda z: z.new_ones(()),
    "one for each channel": lambda z: z.new_ones(WIDTH, 1, 1),
    "one for each sample": lambda z: z.new_ones(len(z), 1, 1, 1),
    "expanded": lambda z: z.new_ones(1).expand_as(z),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ONES)
def test_what_a_gate_leaves_is_a_gate(name: str, rule: str) -> None:
    assert_same((update(lambda z: 1), update(ONES[name])), rule, what=name)


# --- gates times constants, and times each other -------------------------------------------------------------------


def gate(m: Any, t: Tensor) -> Tensor:
    return m.other(t.mean((2, 3), keepdim=True))


def first(m: Any, t: Tensor) -> Tensor:
    return torch.sigmoid(gate(m, t))


def second(m: Any, t: Tensor) -> Tensor:
    return torch.sigmoid(m.other(t))


GATED: dict[str, tuple[Step, Step]] = {
    "hard sigmoid": (lambda m, t: t * (F.relu6(gate(m, t) + 3) / 6), lambda m, t: t * F.relu6(gate(m, t) + 3) / 6),
    "bounded by 6": (lambda m, t: 6 * (t * (F.relu6(gate(m, t)) / 6)), lambda m, t: t * F.relu6(gate(m, t))),
    "bounded below": (lambda m, t: -(t * F.relu6(-gate(m, t))), lambda m, t: t * gate(m, t).clamp(-6, 0)),
    "a number": (lambda m, t: 2 * (t * first(m, t)), lambda m, t: t * (2 * first(m, t))),
    "a quotient": (lambda m, t: (t * first(m, t)) / 3, lambda m, t: t * (first(m, t) / 3)),
    "a learned number": (lambda m, t: m.scale * (t * first(m, t)), lambda m, t: t * (m.scale * first(m, t))),
    "minus": (lambda m, t: -(t * first(m, t)), lambda m, t: t * (-first(m, t))),
    "minus one": (lambda m, t: -(t * (1 - first(m, t))), lambda m, t: t * (first(m, t) - 1)),
    "channels": (
        lambda m, t: by_channel(m.slopes) * (t * first(m, t)),
        lambda m, t: t * (by_channel(m.slopes) * first(m, t)),
    ),
    "two gates": (lambda m, t: t * first(m, t) * second(m, t), lambda m, t: t * (first(m, t) * second(m, t))),
    "squared": (lambda m, t: t * first(m, t) * first(m, t), lambda m, t: t * first(m, t) ** 2),
    "root": (lambda m, t: t * first(m, t).sqrt(), lambda m, t: t * first(m, t) ** 0.5),
    "scaled parts": (
        lambda m, t: 2 * (t * torch.cat([first(m, t)[:, :2], first(m, t)[:, 2:]], 1)),
        lambda m, t: t * torch.cat([2 * first(m, t)[:, :2], 2 * first(m, t)[:, 2:]], 1),
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", GATED)
def test_a_gate_times_a_constant_is_a_gate(name: str, rule: str) -> None:
    plain, other = GATED[name]
    assert_same((behind(plain), behind(other)), rule, what=name)


@pytest.mark.parametrize("rule", ["epsilon", "gamma"])
def test_sigmoid_attention_and_dropout_behind_a_gate(rule: str) -> None:
    def attend(mix: Callable[[Tensor, Tensor], Tensor]) -> Step:
        def step(m: Any, t: Tensor) -> Tensor:
            u = t.flatten(2)
            return mix(torch.sigmoid(u.mT @ u), u.mT).mT.view_as(t)

        return behind(step)

    assert_same((attend(lambda a, v: (a @ v) / 64), attend(lambda a, v: (a / 64) @ v)), rule)
    nets = twins([behind(lambda m, t: F.dropout(t * second(m, t))), behind(lambda m, t: t * F.dropout(second(m, t)))],
                 **parts())  # fmt: skip
    maps = []
    for net in nets:
        torch.manual_seed(0)
        maps.append(fi.explain(net, pictures(2, 3, 6, 6), 0, rule=rule))
    torch.testing.assert_close(*maps)


@pytest.mark.parametrize("rule", RULES)
def test_two_signals_times_a_constant_still_share(rule: str) -> None:
    signals: tuple[Step, Step] = (lambda m, t: 2 * (t * gate(m, t)), lambda m, t: t * (2 * gate(m, t)))
    assert_same((behind(signals[0]), behind(signals[1])), rule)
    (shared, alone) = twins([behind(signals[0]), behind(lambda m, t: 2 * (t * gate(m, t).detach()))], **parts())
    maps = [fi.explain(net, pictures(2, 3, 6, 6), 0, rule=rule) for net in (shared, alone)]
    assert float((maps[0] - maps[1]).abs().max()) > 1e-3 * float(maps[1].abs().max())


# --- sigmoid and tanh by each other --------------------------------------------------------------------------------

SHIFTED: dict[str, tuple[Step, Step]] = {
    "sigmoid": (lambda m, t: torch.sigmoid(t), lambda m, t: 0.5 * torch.tanh(t / 2) + 0.5),
    "sigmoid, one added": (lambda m, t: torch.sigmoid(t), lambda m, t: (1 + torch.tanh(0.5 * t)) / 2),
    "sigmoid, in place": (lambda m, t: torch.sigmoid(t), lambda m, t: t.div(2).tanh_().add(1).mul_(0.5)),
    "tanh": (lambda m, t: torch.tanh(t), lambda m, t: 2 * torch.sigmoid(2 * t) - 1),
    "tanh, mirrored": (lambda m, t: torch.tanh(t), lambda m, t: -(1 - torch.sigmoid(t * 2) * 2)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SHIFTED)
def test_sigmoid_and_tanh_by_each_other(name: str, rule: str) -> None:
    plain, other = SHIFTED[name]
    assert_same((between(plain), between(other)), rule, what=name)


@pytest.mark.parametrize("rule", RULES)
def test_other_lines_around_a_tanh_are_steps(rule: str) -> None:
    assert_same(
        (
            between(lambda m, t: torch.tanh(t / 3) * 0.5 + 0.5),
            between(lambda m, t: torch.tanh(t / 3).div(2).add(0.5)),
        ),
        rule,
    )


# --- activations ---------------------------------------------------------------------------------------------------


def scattered(t: Tensor) -> Tensor:
    out = torch.zeros_like(t)
    out[t > 0] = t[t > 0]
    return out


def finite(t: Tensor) -> Tensor:
    return t * ((t > 0) & torch.isfinite(t))


RELUS: dict[str, Step] = {
    "signbit": lambda m, t: t * (1 - torch.signbit(t).double()),
    "not signbit": lambda m, t: t * ~torch.signbit(t),
    "and finite": lambda m, t: finite(t),
    "and not NaN": lambda m, t: torch.where((t >= 0).logical_and(t == t), t, 0.0),
    "mask of a view": lambda m, t: t * (t.flatten(1) > 0).view_as(t),
    "mask rearranged": lambda m, t: t * (t.movedim(1, -1) > 0).movedim(-1, 1),
    "view of t, mask of t": lambda m, t: (t.flatten(1) * (t > 0).flatten(1)).view_as(t),
    "in halves": lambda m, t: torch.cat([t[:, :2] * (t[:, :2] > 0), t[:, 2:] * (t > 0)[:, 2:]], 1),
    "mask in place": lambda m, t: t.masked_fill((t > 0).logical_not_(), 0.0),
    "int mask": lambda m, t: t * (t > 0).int(),
    "of -t": lambda m, t: t * (-t < 0),
    "-t": lambda m, t: -((-t) * (t > 0)),
    "masked_scatter": lambda m, t: torch.zeros_like(t).masked_scatter(t > 0, t[t > 0]),
    "z[m] = t[m]": lambda m, t: scattered(t),
    "clamp(0, inf)": lambda m, t: t.clamp(0, math.inf),
    "elu": lambda m, t: F.elu(t, 0.0),
    "prelu": lambda m, t: F.prelu(t, torch.zeros(WIDTH, dtype=t.dtype)),
    "clamp(0, tensor)": lambda m, t: t.clamp(torch.zeros_like(t), torch.full_like(t, math.inf)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", RELUS)
def test_more_rectifiers(name: str, rule: str) -> None:
    assert_same((between(lambda m, t: F.relu(t)), between(RELUS[name])), rule, what=name)
    if name not in ("in halves", "-t"):  # of which a first layer is another one
        assert_same((between(lambda m, t: F.relu(t)), between(RELUS[name])), rule, what=name, box=(-5.0, 5.0))


Pair = tuple[Step, Step]
MASKED: dict[str, Pair] = {
    "leaky, slope": (lambda m, t: F.leaky_relu(t, 0.1), lambda m, t: t * (0.1 + 0.9 * (t > 0).double())),
    "leaky, where of slopes": (
        lambda m, t: F.leaky_relu(t, 0.1),
        lambda m, t: t * torch.where(t > 0, t.new_ones(()), t.new_full((), 0.1)),
    ),
    "threshold": (lambda m, t: F.threshold(t, 0.1, 0.0), lambda m, t: t * (t > 0.1)),
    "threshold, fill": (lambda m, t: F.threshold(t, 0.1, 0.0), lambda m, t: t.masked_fill(t <= 0.1, 0)),
    "threshold, filled": (lambda m, t: F.threshold(t, 0.1, 0.3), lambda m, t: t.masked_fill(t <= 0.1, 0.3)),
    "threshold, where": (lambda m, t: F.threshold(t, 0.1, 0.0), lambda m, t: torch.where(t > 0.1, t, 0.0)),
    "threshold behind relu": (
        lambda m, t: F.threshold(F.relu(t), 0.1, 0.0),
        lambda m, t: (lambda u: u * (u > 0.1))(F.relu(t)),
    ),
    "hardshrink": (lambda m, t: F.hardshrink(t, 0.3), lambda m, t: t * (t.abs() > 0.3)),
    "hardshrink, two": (lambda m, t: F.hardshrink(t, 0.3), lambda m, t: t * ((t > 0.3) | (t < -0.3))),
    "negative part": (lambda m, t: t.clamp(max=0), lambda m, t: t * (t < 0)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MASKED)
def test_masks_of_a_tensor_itself_are_activations(name: str, rule: str) -> None:
    plain, other = MASKED[name]
    assert_same((between(plain), between(other)), rule, what=name)


@pytest.mark.parametrize("rule", RULES)
def test_a_thresholded_sample_has_one_map_in_every_batch(rule: str) -> None:
    """Whether a mask is that of a ReLU is never decided by the values of a batch."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.up(F.relu(m.down(F.relu(m.conv(x)).mean((2, 3)))))
        return m.fc(h * (h > 0.1))

    modules = {"down": nn.Linear(WIDTH, 4), "up": nn.Linear(4, WIDTH), "fc": nn.Linear(WIDTH, 3)}
    for seed in range(6):
        (net,) = twins([forward], seed, conv=nn.Conv2d(3, WIDTH, 3), **modules)
        images = pictures(4, 3, 4, 4, seed=seed + 5)
        together = fi.explain(net, images, 0, rule=rule)
        for i in range(4):
            torch.testing.assert_close(fi.explain(net, images[i : i + 1], 0, rule=rule)[0], together[i])


@pytest.mark.parametrize("rule", RULES)
def test_masks_of_others_stay_masks(rule: str) -> None:
    """A mask made of other numbers, or of a mean, is a constant."""
    masks: dict[str, tuple[Step, Step]] = {
        "rolled": (lambda m, t: t.roll(1, 1) > 0, lambda m, t: (t.roll(1, 1) > 0).clone()),
        "other half": (lambda m, t: t.flip(1) > 0, lambda m, t: (t > 0).flip(1)),
        "mean": (lambda m, t: t > t.mean(), lambda m, t: (t - t.mean()) > 0),
        "share kept": (lambda m, t: (t > 0).double().mean(), lambda m, t: (t > 0).double().sum() / t.numel()),
    }
    for name, (first, second) in masks.items():
        constant: Step = lambda m, t, f=first: t * torch.from_numpy(f(m, t).detach().double().numpy())  # noqa: E731
        for mask in (first, second):
            masked: Step = lambda m, t, f=mask: t * f(m, t)  # noqa: E731
            assert_same((between(constant), between(masked)), rule, what=name)


HALVES: dict[str, Pair] = {
    "prelu": (lambda m, t: F.prelu(t, m.slopes), lambda m, t: F.relu(t) - by_channel(m.slopes) * F.relu(-t)),
    "prelu, clamp": (
        lambda m, t: F.prelu(t, m.slopes),
        lambda m, t: t.clamp(max=0) * by_channel(m.slopes) + t.clamp(min=0),
    ),
    "prelu, minus first": (
        lambda m, t: F.prelu(t, m.slopes),
        lambda m, t: -by_channel(m.slopes) * F.relu(-t) + F.relu(t),
    ),
    "leaky": (lambda m, t: F.leaky_relu(t, 0.1), lambda m, t: F.relu(t) - 0.1 * F.relu(-t)),
    "leaky, alpha": (lambda m, t: F.leaky_relu(t, 0.1), lambda m, t: F.relu(t).sub(F.relu(-t), alpha=0.1)),
    "leaky, masks": (lambda m, t: F.leaky_relu(t, 0.1), lambda m, t: t * (t > 0) + 0.1 * t * (t <= 0)),
    "leaky, scaled": (lambda m, t: F.leaky_relu(t, 0.1), lambda m, t: F.relu(2 * t) / 2 - F.relu(-0.1 * t)),
    "leaky, min": (
        lambda m, t: F.leaky_relu(t, 0.1),
        lambda m, t: torch.maximum(t, torch.zeros_like(t)) + 0.1 * torch.minimum(t, torch.zeros_like(t)),
    ),
}


@pytest.mark.parametrize("rule", [*RULES, "gradient"])
@pytest.mark.parametrize("name", HALVES)
def test_activations_in_two_halves(name: str, rule: str) -> None:
    """z+ and gamma, which look at sums, may say instead that there are two."""
    plain, other = HALVES[name]
    assert_same((between(plain), between(other)), rule, what=name, loud=rule in ("zplus", "gamma"))
    assert_same((between(plain), between(other)), rule, what=name, box=(-5.0, 5.0))


BOUNDED: dict[str, Pair] = {
    "min, max": (lambda m, t: F.hardtanh(t), lambda m, t: t.clamp(min=-1).clamp(max=1)),
    "max, min": (lambda m, t: F.hardtanh(t), lambda m, t: t.clamp(max=1).clamp(min=-1)),
    "maximum, minimum": (
        lambda m, t: F.hardtanh(t),
        lambda m, t: torch.minimum(torch.maximum(t, -torch.ones_like(t)), torch.ones_like(t)),
    ),
    "a view between": (lambda m, t: F.hardtanh(t), lambda m, t: t.clamp(min=-1).contiguous().clone().clamp(max=1)),
    "relu6, upper first": (lambda m, t: F.relu6(9 * t), lambda m, t: (9 * t).clamp(max=6).clamp(min=0)),
    "relu6, upper, relu": (lambda m, t: F.relu6(9 * t), lambda m, t: F.relu((9 * t).clamp(max=6))),
    "relu6, relu first": (lambda m, t: F.relu6(9 * t), lambda m, t: F.relu(9 * t).clamp(max=6)),
    "relu6, where": (
        lambda m, t: F.relu6(9 * t),
        lambda m, t: (lambda u: torch.where(u > 6, u.new_full((), 6.0), u))(F.relu(9 * t)),
    ),
    "relu6, mask": (
        lambda m, t: F.relu6(9 * t),
        lambda m, t: (lambda u: u.masked_fill(u > 6, 6.0))((9 * t).clamp(min=0)),
    ),
    "in place": (lambda m, t: F.hardtanh(t), lambda m, t: t.clone().clamp_(min=-1).clamp_(max=1)),
}


@pytest.mark.parametrize("rule", [*RULES, "gradient"])
@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_behind_each_other(name: str, rule: str) -> None:
    plain, other = BOUNDED[name]
    if rule != "gradient":
        assert_same((between(plain), between(other)), rule, what=name)
    if "9" not in name and not name.startswith("relu6"):  # a number in front of the bounds is no first layer's
        assert_same((between(plain), between(other)), rule, what=name, box=(-5.0, 5.0))


def test_relevance_between_bounds() -> None:
    """Where it is asked for, what lies in front of a bound is no part of the same step."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu, self.fc = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.relu(self.conv(x)).clamp(max=0.5).mean((2, 3)))

    for rule in RULES:
        maps = fi.explain(randomised(Two()).eval(), pictures(2, 3, 5, 5), 0, rule=rule, layers=["relu"])
        assert float(maps["relu"].abs().sum()) > 0


VIEWED: dict[str, Pair] = {
    "two views": (lambda m, t: F.silu(t), lambda m, t: (t.flatten(1) * torch.sigmoid(t.flatten(1))).view_as(t)),
    "slices": (
        lambda m, t: F.silu(t),
        lambda m, t: torch.cat([t[:, :2] * torch.sigmoid(t[:, :2]), t[:, 2:] * torch.sigmoid(t[:, 2:])], 1),
    ),
    "chunks": (
        lambda m, t: F.silu(t),
        lambda m, t: torch.cat([t.chunk(2, 1)[i] * torch.sigmoid(t.chunk(2, 1)[i]) for i in range(2)], 1),
    ),
    "there and back": (lambda m, t: F.silu(t), lambda m, t: t * torch.sigmoid(t.movedim(1, -1).movedim(-1, 1))),
    "permuted": (
        lambda m, t: F.hardswish(t),
        lambda m, t: (lambda u, v: u * F.hardsigmoid(v))(t.mT, t.transpose(2, 3)).mT,
    ),
    "computed twice": (
        lambda m, t: F.silu(2 * t + 1),
        lambda m, t: (2 * t + 1) * torch.sigmoid(2 * t + 1),
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", VIEWED)
def test_activations_of_a_tensor_that_was_rearranged_twice(name: str, rule: str) -> None:
    plain, other = VIEWED[name]
    tolerance = 1e-6 if name == "permuted" else 1e-9  # torch takes 1/6 in single precision
    assert_same((between(plain), between(other)), rule, what=name, tolerance=tolerance)


@pytest.mark.parametrize("rule", ["epsilon", "gamma"])
def test_what_is_not_the_same_tensor(rule: str) -> None:
    """Halves, and sums with other constants, gate each other: the gate is a constant."""
    gates: dict[str, tuple[Step, Step]] = {
        "halves": (lambda m, t: t[:, :3].repeat(1, 2, 1, 1), lambda m, t: t[:, 3:].repeat(1, 2, 1, 1)),
        "rolled": (lambda m, t: t, lambda m, t: t.roll(1, 1)),
        "other constant": (lambda m, t: t + 1, lambda m, t: t + 2),
    }
    for name, (signal, gate) in gates.items():
        spelled: Step = lambda m, t, a=signal, b=gate: a(m, t) * torch.sigmoid(b(m, t))  # noqa: E731
        constant: Step = lambda m, t, a=signal, b=gate: a(m, t) * torch.sigmoid(b(m, t).detach())  # noqa: E731
        maps = [fi.explain(net, pictures(2, 3, 6, 6), 0, rule=rule) for net in twins(
            [between(spelled), between(constant)], **parts())]  # fmt: skip
        torch.testing.assert_close(maps[0], maps[1], msg=name)


# --- learned numbers: the gradients of a loss on the maps, against finite differences -----------------------------


def attention(m: Any, x: Tensor) -> Tensor:
    t = m.conv(x).flatten(2).mT
    return m.fc((torch.softmax((m.scale * t) @ t.mT, -1) @ t).mean(1))


LEARNED: dict[str, tuple[Step, dict[str, Any]]] = {
    "scale of x in x * sigmoid(x)": (between(lambda m, t: (m.scale * t) * torch.sigmoid(t)), {}),
    "divisor of x": (between(lambda m, t: torch.sigmoid(t) * (t / (2 + m.scale))), {}),
    "scales of x": (between(lambda m, t: (by_channel(m.slopes) * t) * torch.sigmoid(t)), {}),
    "temperature of a gate": (between(lambda m, t: t * torch.sigmoid(m.scale * m.other(t))), {}),
    "queries": (attention, {"rule": "zplus"}),
    "scale of the images in a box": (lambda m, x: between(lambda _, t: F.relu(t))(m, m.scale * x), {"box": (-5, 5)}),
    "the same, z+": (
        lambda m, x: between(lambda _, t: F.relu(t))(m, m.scale * x - m.slopes[3:].view(-1, 1, 1)),
        {"box": (-5, 5), "rule": "zplus"},
    ),
}


@pytest.mark.parametrize("value", [None, 1.0])
@pytest.mark.parametrize("name", LEARNED)
def test_learned_numbers_have_exact_gradients(name: str, value: float | None) -> None:
    """value: what all of them are at the moment, in which they look like a constant."""
    forward, options = LEARNED[name]
    images = pictures(2, 3, 6, 6)
    net: Any = randomised(Net(forward, **parts())).eval()
    learned: list[Any] = [net.scale, net.slopes]
    if value is not None:
        for p in learned:
            p.data.fill_(value)

    def loss(create_graph: bool = False) -> Tensor:
        maps, messages = quietly(lambda: fi.explain(net, images, 0, create_graph=create_graph, **options))
        assert not messages
        return maps.square().sum()

    gradients = torch.autograd.grad(loss(create_graph=True), learned, allow_unused=True)
    directions = [torch.linspace(0.5, 1, p.numel(), dtype=p.dtype).view(p.shape) for p in learned]
    found = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None)
    values = []
    for sign in (1, -2):
        with torch.no_grad():
            for p, d in zip(learned, directions, strict=True):
                p.add_(sign * 1e-6 * d)
        values.append(float(loss()))
    expected = (values[0] - values[1]) / 2e-6
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-9 * abs(values[0]))


# --- a forward pass of one's own -----------------------------------------------------------------------------------

BY_MASK: dict[str, Step] = {
    "x * (x > 0)": lambda m, t: t * (t > 0),
    "where": lambda m, t: torch.where(t > 0, t, 0.0),
    "masked_fill": lambda m, t: t.masked_fill(t < 0, 0.0),
    "index_put": lambda m, t: t.index_put((t < 0,), t.new_zeros(())),
    "masked_scatter": lambda m, t: torch.zeros_like(t).masked_scatter(t > 0, t[t > 0]),
}


@pytest.mark.parametrize("name", BY_MASK)
def test_masks_nobody_looked_at_are_loud(name: str) -> None:
    """Without `recording` a ReLU by a mask cannot be told: that is said. With it, the map is that of a ReLU."""
    net, plain = twins([between(BY_MASK[name]), between(lambda m, t: F.relu(t))], **parts())
    images = pictures(2, 3, 6, 6).requires_grad_()
    score = net(images)[:, 0]
    _, messages = quietly(lambda: fi.relevance(score, images))
    assert len(messages) == 1 and "recording()" in messages[0]
    assert not quietly(lambda: fi.relevance(score, images, rule="gradient"))[1]
    with pytest.raises(RuleError):
        fi.relevance(score, images, strict=True)
    with fi.recording():
        score = net(images)[:, 0]
    found, messages = quietly(lambda: fi.relevance(score, images))
    assert not messages
    torch.testing.assert_close(found.detach(), fi.explain(plain, images.detach(), 0))


def test_a_part_changed_in_place_has_its_derivative_without_a_warning() -> None:
    """The gradient needs no notes."""

    def changed(m: Any, t: Tensor) -> Tensor:
        t = t.clone()
        t[:, :2] *= 2
        t[:, 2:].tanh_()
        return t

    net = twins([between(changed)], **parts())[0]
    images = pictures(2, 3, 6, 6).requires_grad_()
    score = net(images)[:, 0]
    found, messages = quietly(lambda: fi.relevance(score, images, rule="gradient"))
    assert not messages
    (gradient,) = torch.autograd.grad(score.sum(), images)
    torch.testing.assert_close(found, (gradient * images).detach())


def test_masks_of_padding_and_scores_are_quiet() -> None:
    net = twins([between(lambda m, t: t * (torch.arange(6) < 4) * 0.5)], **parts())[0]
    images = pictures(2, 3, 6, 6).requires_grad_()
    logits = net(images)
    score = (logits * F.one_hot(torch.tensor([1, 2]), 3)).sum(1)
    assert not quietly(lambda: fi.relevance(score, images))[1]


def test_heads_that_meet_behind_their_last_dimension_are_loud() -> None:
    """What is one number a sample is the score; two layers that meet there may be the network's own."""

    def heads(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(m.conv(x))
        return m.fc(h.mean((2, 3)))[:, :1], m.fc(F.relu(m.conv2(h)).mean((2, 3)))[:, 1:2]

    met: dict[str, tuple[Step, tuple[str, ...]]] = {
        "sum": (lambda m, x: sum(h.squeeze(1) for h in heads(m, x)), ("zplus", "gamma")),  # type: ignore[return-value]
        "gate": (lambda m, x: heads(m, x)[0].squeeze(1).sigmoid() * heads(m, x)[1].squeeze(1), tuple(RULES)),
    }
    quiet: dict[str, Step] = {
        "difference of logits": lambda m, x: (lambda y: y[:, 0] - y[:, 1])(m.fc(heads(m, x)[0].expand(-1, 6))),
        "log odds": lambda m, x: fi.targets.Eta(1)(m.fc(F.relu(m.conv(x)).mean((2, 3)))),
        "softmax and logit": lambda m, x: (lambda y: y.softmax(1)[:, 0] - y[:, 1])(m.fc(m.conv(x).mean((2, 3)))),
        "a sum over all": lambda m, x: heads(m, x)[0].sum() + heads(m, x)[1].sum(),
        "heads that meet before": lambda m, x: sum(heads(m, x))[:, 0],  # type: ignore[index]
    }
    for name, forward in [*[(n, f) for n, (f, _) in met.items()], *quiet.items()]:
        for rule in (*RULES, "gradient"):
            net = randomised(Net(forward, **parts())).eval()
            images = pictures(2, 3, 6, 6).requires_grad_()
            with fi.recording():
                score = net(images)
            _, messages = quietly(lambda s=score, x=images, r=rule: fi.relevance(s, x, rule=r))
            loud = name in met and rule in met[name][1]
            assert bool(messages) == loud, (name, rule, messages)


def test_modules_that_never_ran() -> None:
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)).eval()
    images = torch.rand(2, 3, 5, 5)
    for call in (lambda: fi.explain(net, images, 0), lambda: fi.check(net, images)):
        with pytest.raises(InputError, match="forward pass"):
            call()
    net(images)
    assert fi.explain(net, images, 0).shape == images.shape


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dims", [(2, 3), (1, 2, 3)])
def test_a_normaliser_among_others_takes_no_relevance(dims: tuple[int, ...], rule: str) -> None:
    """ConvNeXt V2's global response normalisation."""

    def normalised(m: Any, t: Tensor, constant: bool) -> Tensor:
        size = torch.linalg.vector_norm(t, dim=dims, keepdim=True)
        factor = size / (size.mean(1, keepdim=True) + 1e-6)
        return t * (factor.detach() if constant else factor)

    first, second = twins([behind(lambda m, t, c=c: normalised(m, t, c)) for c in (False, True)], **parts())
    (found, messages), (wanted, _) = (
        quietly(lambda net=net: fi.explain(net, pictures(2, 3, 8, 8), 1, rule=rule)) for net in (first, second)
    )
    assert not messages
    torch.testing.assert_close(found, wanted)
