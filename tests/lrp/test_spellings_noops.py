"""What changes no value changes no relevance, wherever it stands: behind a layer, before its norm, on the logits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fasterisnet as fi
from fasterisnet.errors import FasterISNetError
from lrp.helpers import (
    RULES,
    TWO_RULES,
    assert_alike,
    assert_close,
    explained,
    gradient_times_input,
    pictures,
    quietly,
    randomised,
    relu_rule,
    twins,
)

PLACES = ["input", "conv", "bn", "relu", "branch", "sum", "pool", "hidden", "logits"]


def staged(places: Sequence[str], noop: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A residual network with something in some of its places."""

    def at(here: str, x: Tensor) -> Tensor:
        return noop(x) if here in places else x

    def forward(m: Any, x: Tensor) -> Tensor:
        x = at("conv", m.conv(at("input", x)))
        x = at("relu", torch.relu(at("bn", m.bn(x))))
        x = at("sum", at("branch", m.conv2(x)) + x)
        x = at("pool", F.max_pool2d(torch.relu(x), 2))
        return at("logits", m.fc(torch.relu(at("hidden", m.hidden(x.flatten(1))))))

    return forward


def parts() -> dict[str, nn.Module]:
    return {
        "conv": nn.Conv2d(3, 4, 3, padding=1),
        "bn": nn.BatchNorm2d(4),
        "conv2": nn.Conv2d(4, 4, 3, padding=1),
        "hidden": nn.Linear(16, 6),
        "fc": nn.Linear(6, 3),
    }


def hooked(t: Tensor) -> Tensor:
    t = t.view_as(t)
    if t.requires_grad:
        t.register_hook(lambda g: g)
    return t


def module_with(hook: str) -> Callable[[Tensor], Tensor]:
    def noop(t: Tensor) -> Tensor:
        module = nn.Identity()
        getattr(module, f"register_{hook}")(lambda *_: None)
        return module(t)

    return noop


def assigned(t: Tensor) -> Tensor:
    buffer = torch.zeros_like(t)
    buffer[:] = t
    return buffer


def by_parts(t: Tensor) -> Tensor:
    buffer = torch.empty_like(t)
    buffer[:, :1], buffer[:, 1:] = t[:, :1], t[:, 1:]
    return buffer


def reversed_twice(t: Tensor) -> Tensor:
    return t.flip(1).flip(1)


def copied(t: Tensor) -> Tensor:
    return torch.empty_like(t).copy_(t)


NOOPS: dict[str, Callable[[Tensor], Tensor]] = {
    "double": lambda t: t.double(),
    "to(dtype)": lambda t: t.to(torch.float64),
    "to(device, copy)": lambda t: t.to("cpu", copy=True),
    "type_as": lambda t: t.type_as(t),
    "contiguous": lambda t: t.contiguous(),
    "channels last": lambda t: t.to(memory_format=torch.channels_last) if t.ndim == 4 else t.t().contiguous().t(),
    "clone": lambda t: t.clone(),
    "copy_": copied,
    "view_as": lambda t: t.view_as(t),
    "reshape": lambda t: t.reshape(-1).reshape(t.shape),
    "flatten": lambda t: t.flatten(1).unflatten(1, t.shape[1:]),
    "slice": lambda t: t[:],
    "ellipsis": lambda t: t[...],
    "None index": lambda t: t[:, None].squeeze(1),
    "transposed twice": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "permuted": lambda t: t.movedim(1, -1).movedim(-1, 1),
    "expand": lambda t: t.expand_as(t),
    "repeat": lambda t: t.repeat(*[1] * t.ndim),
    "cat of one": lambda t: torch.cat([t], 1),
    "cat of chunks": lambda t: torch.cat(t.chunk(2, 1), 1),
    "cat of splits": lambda t: torch.cat(t.split([1, t.shape[1] - 1], 1), 1),
    "stack of unbound": lambda t: torch.stack(t.unbind(1), 1),
    "stack of items": lambda t: torch.stack([t[i] for i in range(len(t))]),
    "index": lambda t: t[torch.arange(len(t))],
    "index_select": lambda t: t.index_select(1, torch.arange(t.shape[1])),
    "gather": lambda t: t.gather(1, torch.arange(t.shape[1]).view(-1, *[1] * (t.ndim - 2)).expand(t.shape)),
    "flipped twice": reversed_twice,
    "rolled and back": lambda t: t.roll(1, 1).roll(-1, 1),
    "padded and cut": lambda t: F.pad(t, (0, 1))[..., :-1],
    "sliced buffer": by_parts,
    "buffer": assigned,
    "as_strided": lambda t: t.as_strided(t.shape, t.stride()),
    "dropout in eval": lambda t: F.dropout(t, 0.5, training=False),
    "dropout2d in eval": lambda t: nn.Dropout2d(0.5).eval()(t) if t.ndim == 4 else nn.Dropout(0.5).eval()(t),
    "dropout of nothing": lambda t: F.dropout(t, 0.0, training=True),
    "alpha dropout": lambda t: nn.AlphaDropout(0.5).eval()(t),
    "Identity": nn.Identity(),
    "tensor hook": hooked,
    "full backward hook": module_with("full_backward_hook"),
    "full backward pre-hook": module_with("full_backward_pre_hook"),
    "forward hook": module_with("forward_hook"),
    "where True": lambda t: torch.where(torch.ones_like(t, dtype=torch.bool), t, 0.0),
    "masked_fill nothing": lambda t: t.masked_fill(torch.zeros_like(t, dtype=torch.bool), 7.0),
    "checkpoint of nothing": lambda t: checkpoint(lambda s: s.view_as(s), t, use_reentrant=False),
    "requires_grad_": lambda t: t.requires_grad_() if t.is_leaf else t,
    "real": lambda t: torch.real(t),
    "positive": lambda t: +t,
    "einsum identity": lambda t: torch.einsum("ab...->ab...", t),
}


# Behind these a batch norm is behind a concat or the like: on its own under z+, not one with its layer.
ASSEMBLING = {
    "copy_", "repeat", "cat of one", "cat of chunks", "cat of splits", "stack of unbound", "stack of items", "index",
    "index_select", "gather", "flipped twice", "rolled and back", "padded and cut", "sliced buffer", "buffer",
    "as_strided", "where True", "masked_fill nothing", "einsum identity",
}  # fmt: skip


def assert_a_noop(name: str, noop: Callable[[Tensor], Tensor], rule: str) -> None:
    """In all places at once; if that fails, the first place that fails alone is named."""
    images = pictures(2, 3, 4, 4)
    places = [p for p in PLACES if not (rule == "zplus" and name in ASSEMBLING and p == "conv")]
    plain, everywhere = twins([staged((), noop), staged(places, noop)], **parts())
    try:
        assert_alike(plain, everywhere, images, rule=rule, what=f"{name} everywhere")
    except (AssertionError, FasterISNetError):
        for place in places:
            _, alone = twins([staged((), noop), staged([place], noop)], **parts())
            assert_alike(plain, alone, images, rule=rule, what=f"{name} at {place}")
        raise


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("noop", NOOPS)
def test_in_every_place(noop: str, rule: str) -> None:
    assert_a_noop(noop, NOOPS[noop], rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("noop", ["contiguous", "clone", "view_as", "full backward hook", "dropout of nothing"])
def test_in_train_mode_and_in_a_box(noop: str, rule: str) -> None:
    images = pictures(3, 3, 4, 4)
    for places in (PLACES[:1], PLACES[1:4]):
        plain, other = twins([staged((), nn.Identity()), staged(places, NOOPS[noop])], **parts())
        assert_alike(plain, other, images, rule=rule, box=(-6.0, 6.0), what=f"{noop} at {places}, box")
        assert_alike(plain.train(), other.train(), images, rule=rule, what=f"{noop} at {places}, train")


CONSTANT_FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "times one": lambda t: t * 1.0,
    "over one": lambda t: t / torch.ones_like(t),
    "minus minus": lambda t: t.neg().neg(),
    "twice half": lambda t: (t * 2.0) / 2,
    "plus zero": lambda t: t + 0.0,
    "minus zero": lambda t: t - torch.zeros_like(t),
    "nan_to_num": torch.nan_to_num,
    "sum of one": lambda t: t.unsqueeze(0).sum(0),
    "mean of one": lambda t: t.unsqueeze(0).mean(0),
    "cumsum of one": lambda t: t.unsqueeze(0).cumsum(0).squeeze(0),
    "max of one": lambda t: t.unsqueeze(0).amax(0),
    "identity product": lambda t: torch.einsum("nc...,cd->nd...", t, torch.eye(t.shape[1], dtype=t.dtype)),
}


@pytest.mark.parametrize("noop", CONSTANT_FACTORS)
def test_arithmetic_that_changes_nothing(noop: str) -> None:
    """Epsilon only: to z+ these are sums and layers of their own."""
    assert_a_noop(noop, CONSTANT_FACTORS[noop], "epsilon")


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
@pytest.mark.parametrize("place", ["conv", "bn", "conv2", "hidden", "fc", ""])
def test_backward_hooks_on_the_modules_themselves(place: str, kind: str, rule: str) -> None:
    plain, other = twins([staged((), nn.Identity())] * 2, **parts())
    getattr(other.get_submodule(place), f"register_{kind}")(lambda *_: None)
    assert_alike(plain, other, pictures(2, 3, 4, 4), rule=rule, what=f"{kind} on {place or 'the model'}")


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("place", PLACES)
def test_tensor_hooks_do_not_touch_relevance(place: str, rule: str) -> None:
    def clip(t: Tensor) -> Tensor:
        if t.requires_grad:
            t.register_hook(lambda g: g * 0.0 + 7.0)
        return t

    plain, other = twins([staged((), nn.Identity()), staged([place], clip)], **parts())
    images = pictures(2, 3, 4, 4)
    expected = fi.explain(plain, images, 1, rule=rule)
    found, messages = quietly(lambda: fi.explain(other, images, 1, rule=rule))
    assert_close(found, expected, 1e-9, f"hook at {place}")
    assert not messages


@pytest.mark.parametrize("rule", RULES)
def test_backward_hooks_that_change_gradients_do_not_touch_relevance(rule: str) -> None:
    plain, other = twins([staged((), nn.Identity())] * 2, **parts())
    for module in (other.conv, other.hidden, other.fc, other):
        module.register_full_backward_hook(
            lambda _m, gradients, _g: tuple(None if g is None else g * 3 for g in gradients)
        )
    images = pictures(2, 3, 4, 4)
    found, _ = quietly(lambda: fi.explain(other, images, 1, rule=rule))
    assert_close(found, fi.explain(plain, images, 1, rule=rule), 1e-9)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("via", [torch.float32, torch.bfloat16])
def test_through_another_precision(via: torch.dtype, rule: str) -> None:
    """Casting down and up again in every place: equal as far as that precision goes."""
    tolerance = 50 * torch.finfo(via).eps
    images = pictures(2, 3, 4, 4)
    places = [[], *([place] for place in PLACES)]
    nets = twins([staged(place, lambda t: t.to(via).double()) for place in places], **parts())
    expected = explained(nets[0], images, rule=rule)
    for place, net in zip(PLACES, nets[1:], strict=True):
        found = explained(net, images, rule=rule)
        assert not found.messages
        difference = (found.heatmap - expected.heatmap).norm() / expected.heatmap.norm()
        assert difference < tolerance, f"{via} at {place}: {difference:.1e}"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 3])
def test_logits_from_several_heads(count: int, rule: str) -> None:
    """`torch.cat([h(f) for h in heads], 1)` is the head whose rows those are."""

    def joined(m: Any, x: Tensor) -> Tensor:
        features = torch.relu(m.hidden(x))
        rows = zip(m.fc.weight.split(3 // count), m.fc.bias.split(3 // count), strict=True)
        return torch.cat([F.linear(features, w, b) for w, b in rows], 1)

    def stacked(m: Any, x: Tensor) -> Tensor:
        features = torch.relu(m.hidden(x))
        return torch.stack([features @ w + b for w, b in zip(m.fc.weight, m.fc.bias, strict=True)], 1)

    def assigned_heads(m: Any, x: Tensor) -> Tensor:
        features = torch.relu(m.hidden(x))
        logits = features.new_zeros(len(x), 3)
        for c in range(3):
            logits[:, c] = F.linear(features, m.fc.weight[c : c + 1], m.fc.bias[c : c + 1])[:, 0]
        return logits

    functions = [lambda m, x: m.fc(torch.relu(m.hidden(x))), joined, stacked, assigned_heads]
    nets = twins(functions, hidden=nn.Linear(5, 6), fc=nn.Linear(6, 3))
    for name, net in zip(("cat", "stack", "assigned"), nets[1:], strict=True):
        assert_alike(nets[0], net, pictures(2, 5), rule=rule, what=name)
        assert_alike(nets[0], net, pictures(2, 5), rule=rule, target=fi.targets.Joint(), what=f"{name}, joint")


@pytest.mark.parametrize("rule", RULES)
def test_modules_used_twice_and_nested(rule: str) -> None:
    shared = randomised(nn.Linear(5, 5))
    twice = nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), randomised(nn.Linear(5, 3), 3)).eval()
    first, second = copy.deepcopy(shared), copy.deepcopy(shared)
    apart = nn.Sequential(nn.Sequential(first, nn.ReLU()), second, nn.ReLU(), copy.deepcopy(twice[4])).eval()
    images = pictures(2, 5)
    one, two = explained(twice, images, rule=rule), explained(apart, images, rule=rule)
    assert not one.messages and not two.messages
    assert_close(one.heatmap, two.heatmap, 1e-9)
    assert_close(one.gradients["0.weight"], two.gradients["0.0.weight"] + two.gradients["1.weight"], 1e-9)


def test_the_network_of_these_tests_follows_the_rules() -> None:
    """Its epsilon map against the rules written into ordinary functions."""
    (net,) = twins([staged((), nn.Identity())], **parts())

    def ruled(x: Tensor) -> Tensor:
        x = relu_rule(net.bn(net.conv(x)))
        x = F.max_pool2d(relu_rule(net.conv2(x) + x), 2)
        return net.fc(relu_rule(net.hidden(x.flatten(1))))

    images = pictures(2, 3, 4, 4)
    assert_close(fi.explain(net, images, 1), gradient_times_input(ruled, images), 1e-10)
