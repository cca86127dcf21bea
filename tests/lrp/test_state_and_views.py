"""Values written over, tensors from before, buffers, hidden layers, boxes, and Functions that are not torch's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from lrp.helpers import (
    RULES,
    assert_close,
    attempt,
    pictures,
    quietly,
    randomised,
    twins,
)

# --- tensors with history from before are constants ----------------------------------------------------------------


class Cached(nn.Module):
    """A model that compares images with something it computed earlier."""

    def __init__(self, detached: bool, combine: str) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(5, 6), nn.Linear(4, 6)
        self.fc, self.combine = nn.Linear(6, 3), combine
        randomised(self)
        cache = self.text(pictures(3, 4, seed=4))
        self.cache = cache.detach() if detached else cache

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.image(x))
        if self.combine == "logits":
            return h @ self.cache.t()
        if self.combine == "linear":
            return F.linear(h, self.cache)
        if self.combine == "einsum":
            return torch.einsum("ni,oi->no", h, self.cache)
        if self.combine == "product":
            return self.fc(h * self.cache.mean(0))
        if self.combine == "sum":
            return self.fc(torch.relu(h + self.cache[0]))
        if self.combine == "cat":
            return self.fc(torch.cat([h, self.cache[:2]], 1)[:, :6])
        if self.combine == "attention":
            keys = self.cache.expand(len(h), -1, -1)
            return self.fc(F.scaled_dot_product_attention(h[:, None], keys, keys)[:, 0])
        raise AssertionError(self.combine)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("combine", ["logits", "linear", "einsum", "product", "sum", "cat", "attention"])
def test_tensors_with_history_from_before_are_constants(combine: str, rule: str) -> None:
    """`self.text = enc(tokens)` in the constructor: the same map as with the tensor detached."""
    images = pictures(2, 5)
    kept, messages = quietly(lambda: fi.explain(Cached(False, combine), images, 1, rule=rule))
    assert not messages
    assert_close(kept, fi.explain(Cached(True, combine), images, 1, rule=rule), 1e-10)


@pytest.mark.parametrize("rule", RULES)
def test_activations_kept_from_the_previous_call(rule: str) -> None:
    """A memory of the last batch, with its history: a constant of this one, though it came from images too."""

    class Remembering(nn.Module):
        def __init__(self, detach: bool) -> None:
            super().__init__()
            self.hidden, self.fc, self.detach = nn.Linear(5, 6), nn.Linear(6, 3), detach
            self.memory: Tensor | None = None
            randomised(self)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.hidden(x))
            out = h if self.memory is None else h + 0.5 * self.memory
            self.memory = h.detach() if self.detach else h
            return self.fc(torch.relu(out))

    maps = []
    for detach in (True, False):
        model = Remembering(detach)
        model(pictures(2, 5, seed=8).requires_grad_())
        maps.append(fi.explain(model, pictures(2, 5), 1, rule=rule))
    assert_close(maps[1], maps[0], 1e-10)


# --- values written over after an operation read them --------------------------------------------------------------


def overwritten_relu(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.hidden(x))
    y = m.fc(h)
    h.view(-1).zero_()
    return y


def overwritten_through_detach(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.hidden(x))
    y = m.fc(h)
    h.detach().mul_(3.0)
    return y


def overwritten_input(m: Any, x: Tensor) -> Tensor:
    h = m.hidden(x)
    s = F.silu(h)
    h.view(-1)[:3] = 5.0
    return m.fc(s)


def overwritten_summand(m: Any, x: Tensor) -> Tensor:
    a, b = torch.relu(m.hidden(x)), m.other(x)
    total = a + b
    b[:, 0] = 100.0
    return m.fc(torch.relu(total))


def overwritten_mean(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.hidden(x))
    average = h.mean(1, keepdim=True).expand(-1, 6).clone()
    h[:] = 0.0
    return m.fc(average)


def overwritten_base(m: Any, x: Tensor) -> Tensor:
    h = m.hidden(x)
    part = h[:, :3]
    y = torch.cat([torch.relu(part), part], 1)
    h.mul_(2.0)
    return m.fc(y)


def written_under_no_grad(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.hidden(x))
    y = m.fc(h)
    with torch.no_grad():
        h.mul_(2.0)
    return y


CLEAN: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, Tensor], Tensor]]] = {
    "relu, view": (overwritten_relu, lambda m, x: m.fc(torch.relu(m.hidden(x)))),
    "relu, no_grad": (written_under_no_grad, lambda m, x: m.fc(torch.relu(m.hidden(x)))),
    "silu": (overwritten_input, lambda m, x: m.fc(F.silu(m.hidden(x)))),
    "sum": (overwritten_summand, lambda m, x: m.fc(torch.relu(torch.relu(m.hidden(x)) + m.other(x)))),
    "mean": (overwritten_mean, lambda m, x: m.fc(torch.relu(m.hidden(x)).mean(1, keepdim=True).expand(-1, 6))),
    "base": (overwritten_base, lambda m, x: m.fc(torch.cat([torch.relu(m.hidden(x)[:, :3]), m.hidden(x)[:, :3]], 1))),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CLEAN)
def test_values_written_over(name: str, rule: str) -> None:
    """Right, or autograd's own error (in its words or ours); never the map of the new values."""
    nets = twins(CLEAN[name][::-1], hidden=nn.Linear(5, 6), other=nn.Linear(5, 6), fc=nn.Linear(6, 3))
    images = pictures(2, 5)
    expected = fi.explain(nets[0], images, 1, rule=rule)
    found, messages, refusal = attempt(lambda: fi.explain(nets[1], images, 1, rule=rule))
    if refusal:
        assert any(word in refusal for word in ("modified", "in place", "in-place", "inplace", "overwritten"))
    elif not messages:
        assert_close(found, expected, 1e-9, name)


def test_weights_changed_by_the_forward_pass() -> None:
    """Old spectral norm in train mode, clamped weights: what the layer used counts."""

    def clamping(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.hidden.weight.clamp_(-0.3, 0.3)
        return m.fc(torch.relu(m.hidden(x)))

    def plain(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.relu(m.hidden(x)))

    nets = twins([plain, clamping], hidden=nn.Linear(5, 6), fc=nn.Linear(6, 3))
    with torch.no_grad():
        nets[0].hidden.weight.clamp_(-0.3, 0.3)
    images = pictures(2, 5)
    for rule in RULES:
        assert_close(fi.explain(nets[1], images, 1, rule=rule), fi.explain(nets[0], images, 1, rule=rule), 1e-10)


# --- buffers and graphs --------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Buffers changed in place, re-assigned and resized, in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(1, 3))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        y = self.fc(x)
        self.last = y
        return y


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
def test_buffers_are_left_as_they_were(rule: str, training: bool) -> None:
    model = Counting().double().train(training)
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    for _ in range(2):
        fi.explain(model, pictures(2, 5), 1, rule=rule)
    for name, buffer in model.named_buffers():
        assert buffer is before[name][0], f"{name} is another tensor"
        assert torch.equal(buffer, before[name][1]) and not buffer.requires_grad, name


def test_buffers_are_updated_when_the_map_is_trained_through() -> None:
    model = Counting().double()
    fi.explain(model, pictures(2, 5), 1, create_graph=True)
    assert float(model.calls) == 1


@pytest.mark.parametrize("rule", RULES)
def test_nothing_keeps_the_graph_alive(rule: str) -> None:
    """A probe that hangs on a node of autograd's graph dies with it."""

    class Probe:
        pass

    seen: list[Any] = []

    def watching(m: Any, x: Tensor) -> Tensor:
        h = torch.relu(m.hidden(x))
        if h.grad_fn is not None:
            h.grad_fn.metadata["probe"] = probe = Probe()
            seen.append(weakref.ref(probe))
        return m.fc(h)

    (net,) = twins([watching], hidden=nn.Linear(5, 6), fc=nn.Linear(6, 3))
    heatmap = fi.explain(net, pictures(2, 5), 1, rule=rule)
    gc.collect()
    assert heatmap.grad_fn is None and not heatmap.requires_grad
    assert seen and all(reference() is None for reference in seen)
    seen.clear()
    heatmap = fi.explain(net, pictures(2, 5), 1, rule=rule, create_graph=True)
    heatmap.square().sum().backward()
    del heatmap
    gc.collect()
    assert seen and all(reference() is None for reference in seen)


@pytest.mark.parametrize("rule", RULES)
def test_explaining_leaves_no_gradients_behind(rule: str) -> None:
    (net,) = twins([lambda m, x: m.fc(torch.relu(m.hidden(x)))], hidden=nn.Linear(5, 6), fc=nn.Linear(6, 3))
    images = pictures(2, 5)
    fi.explain(net, images, 1, rule=rule)
    fi.explain(net, images, 1, rule=rule, create_graph=True)
    assert all(p.grad is None for p in net.parameters()) and images.grad is None and not images.requires_grad


# --- hidden layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_two_names_on_one_tensor(rule: str) -> None:
    """A module that hands its input on: both names get the same relevance, whatever the order."""
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Identity(), nn.Sequential(nn.Identity()), nn.Linear(6, 3))
    randomised(model).eval()
    images = pictures(2, 5)
    alone = fi.explain(model, images, 1, rule=rule, layers=["1"])
    for names in (["1", "2", "3", "3.0"], ["3.0", "2", "1"]):
        maps = fi.explain(model, images, 1, rule=rule, layers=names)
        assert set(maps) == {"input", *names}
        for name in names:
            assert_close(maps[name], alone["1"], 1e-10, name)
        assert_close(maps["input"], alone["input"], 1e-10)


@pytest.mark.parametrize("rule", RULES)
def test_layers_behind_a_box_and_under_hooks(rule: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(16, 3))
    randomised(model).eval()
    images = pictures(2, 3, 4, 4).sigmoid()
    plain = fi.explain(model, images, 1, rule=rule, layers=["1", "2", "3"], box=(0.0, 1.0))
    for name in ("2", "3"):
        assert_close(plain[name].flatten(), plain["1"].flatten(), 1e-10, name)
    model[2].register_full_backward_hook(lambda *_: None)
    hooked = fi.explain(model, images, 1, rule=rule, layers=["1", "2", "3"], box=(0.0, 1.0))
    for name, heatmap in plain.items():
        assert_close(hooked[name], heatmap, 1e-10, name)
