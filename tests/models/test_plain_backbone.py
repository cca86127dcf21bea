"""A model trained as an ISNet is the library's model and nothing else: that is why its inference costs nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fasterisnet as fi
from fasterisnet.models import build_model

METHODS = {
    "Original": lambda: fi.Original(0.5, ranges=(0.1, 10.0)),
    "Dual": lambda: fi.Dual(0.5, ranges=(0.1, 10.0)),
    "Selective": lambda: fi.Selective(0.5, ranges=(0.1, 10.0), deep_supervision=True),
    "Stochastic": lambda: fi.Stochastic(0.5, ranges=(0.1, 10.0)),
}
NETS = {"small": 16, "resnet18": 32}


def anatomy(model: nn.Module) -> list[tuple[Any, ...]]:
    """Of every module: its name, class, own attributes, hooks and what calling it would run."""
    found = []
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if "hooks" in key and value is not None}
        callables = (type(module).forward, type(module).__call__, "forward" in vars(module), module._compiled_call_impl)
        found.append((name, type(module), sorted(vars(module)), hooks, callables))
    return found


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", METHODS)
def test_trained_model_is_the_bare_backbone(name: str, net: str) -> None:
    torch.manual_seed(0)
    model, fresh = build_model(net, 3), build_model(net, 3)
    images, labels = torch.rand(4, 3, NETS[net], NETS[net]), torch.tensor([0, 1, 2, 0])
    masks = torch.zeros(4, 1, NETS[net], NETS[net])
    masks[..., 4:12, 4:12] = 1
    before = next(model.parameters()).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    method = METHODS[name]()
    for _ in range(2):
        optimizer.zero_grad()
        method.loss(model.train(), images, labels, masks).total.backward()
        optimizer.step()
    assert not torch.equal(next(model.parameters()), before)

    assert type(model) is type(fresh) and anatomy(model.eval()) == anatomy(fresh.eval())
    assert list(model.state_dict()) == list(fresh.state_dict())
    assert all(type(p) is nn.Parameter and not p._backward_hooks for p in model.parameters())
    assert not torch.overrides._get_current_function_mode_stack()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model(images), fresh(images))


def test_inference_runs_the_operations_of_the_bare_backbone() -> None:
    """The same operations, in the same order, as a model that no method ever saw."""
    torch.manual_seed(0)
    model, fresh = build_model("small", 3), build_model("small", 3)
    images, masks = torch.rand(2, 3, 16, 16), torch.ones(2, 1, 16, 16)
    METHODS["Dual"]().loss(model, images, torch.tensor([0, 1]), masks).total.backward()
    recorded = []
    for net in (model.eval(), fresh.eval()):
        with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            net(images)
        recorded.append([event.name for event in profile.events() if event.name.startswith("aten::")])
    assert recorded[0] == recorded[1] and "aten::conv2d" in recorded[0]
