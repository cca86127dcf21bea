"""Steps whose relevance is not finite: skipped, counted, reported, and in the end refused with the layer's name."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import fasterisnet as fi
from fasterisnet.errors import InputError, NonFiniteError
from fasterisnet.methods import guided
from methods.tester import ALL, IDS, Tester, filled, labels_for, masks_for, pictures

FAMILY = [case for case in ALL if case[0] != "Standard"]
NAMES = [name for name in IDS if name != "Standard"]
MODULES = ["conv1", "bn1", "layer1.conv2", "layer2.bn1", "layer2.shortcut.0", "fc"]


def last_words(method: Any, model: nn.Module, *batch: Any, steps: int = 10) -> str:
    """What so many bad steps in a row end with."""
    for count in range(1, steps):
        assert method.loss(model, *batch).skipped and method.skipped == count
    with pytest.raises(NonFiniteError) as caught:
        method.loss(model, *batch)
    return str(caught.value)


@pytest.mark.parametrize("case", FAMILY, ids=NAMES)
def test_a_bad_step_changes_nothing(case: tuple[str, bool]) -> None:
    """Zero loss, zero gradient for every parameter."""
    model, images, labels, masks = Tester.batch()
    with torch.no_grad():
        model.layer1.conv1.weight[0, 0, 0, 0] = torch.inf
    method = Tester(*case).method()
    parts = method.loss(model, images, labels, masks)
    assert parts.skipped and method.skipped == 1
    assert float(parts.total.detach()) == 0
    parts.total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().max()) == 0, name


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("module", MODULES)
def test_the_layer_with_the_bad_weight_is_named(module: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guided, "PATIENCE", 2)
    model, *batch = Tester.batch()
    with torch.no_grad():
        model.get_submodule(module).weight.view(-1)[0] = value
    for make in (fi.Selective, fi.Dual, fi.GradInput):
        words = last_words(make(ranges=(0.3, 0.6)), model, *batch, steps=2)
        assert f"first bad layer: '{module}'" in words and "Lower the learning rate" in words


@pytest.mark.parametrize("box", [None, (0, 1)])
@pytest.mark.parametrize("make", [fi.Original, fi.Dual, fi.GradInput])
def test_relevance_that_overflows_on_its_way_back(make: Any, box: Any) -> None:
    """Activations are finite, 1e-200 * 1e200 * 1e200; G, coming from the head, is infinite once it has passed both."""
    layers = OrderedDict(
        conv=nn.Conv2d(2, 3, 3, padding=1), act=nn.ReLU(), small=nn.Conv2d(3, 3, 3, padding=1, bias=False),
        act2=nn.ReLU(), big=nn.Conv2d(3, 3, 3, padding=1, bias=False), big2=nn.Conv2d(3, 3, 1, bias=False),
        pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), fc=nn.Linear(3, 3),
    )  # fmt: skip
    model = filled(nn.Sequential(layers).double())
    with torch.no_grad():
        model.small.weight.mul_(1e-200)
        model.big.weight.mul_(1e200)
        model.big2.weight.mul_(1e200)
    images = pictures()
    assert bool(model(images).isfinite().all())
    words = last_words(make(ranges=(0.3, 0.6), box=box), model, images, labels_for(images), masks_for(images))
    assert "first bad layer: 'act2'" in words


def test_only_an_unbroken_row_ends_the_run() -> None:
    model, *batch = Tester.batch()
    method, weight = fi.Selective(ranges=(0.3, 0.6)), model.fc.weight.detach().clone()
    for row in range(1, 4):
        with torch.no_grad():
            model.fc.weight.fill_(torch.nan)
        assert all(method.loss(model, *batch).skipped for _ in range(9))
        assert method.skipped == 9 * row
        with torch.no_grad():
            model.fc.weight.copy_(weight)
        parts = method.loss(model, *batch)
        assert not parts.skipped and float(parts.total.detach()) > 0
    assert method.skipped == 27


@pytest.mark.parametrize("logit", [90.0, 200.0, 1e4])
@pytest.mark.parametrize("name", ["Selective", "SoftmaxGradInput"])
def test_extreme_confidence_has_finite_gradients(name: str, logit: float) -> None:
    """A finite loss whose gradient is not would go unnoticed: eta and the softmax must not overflow twice derived."""
    model, images, labels, masks = Tester.batch(torch.float32)
    with torch.no_grad():
        model.fc.bias.copy_(torch.tensor([0.0, logit, logit / 2]))
    parts = Tester(name).method().loss(model, images, labels, masks)
    parts.total.backward()
    assert not parts.skipped
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("name", ["Original", "Dual", "Selective"])
def test_no_stabiliser(name: str) -> None:
    """epsilon = 0 either works, or is refused before training; a run in which every step is skipped is neither."""
    model, *batch = Tester.batch()
    try:
        method = Tester(name).method(epsilon=0.0)
    except InputError:
        return
    parts = method.loss(model, *batch)
    assert not parts.skipped and bool(torch.isfinite(parts.total))
