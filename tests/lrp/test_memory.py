"""Explanations give back what they took: nothing grows, and nothing waits for the garbage collector."""

from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet import explain
from fasterisnet.errors import FasterISNetError
from fasterisnet.lrp.targets import AllLogits
from lrp.helpers import Net
from lrp.small_nets import BOX, RULES

STEPS = 100
SLACK = 10 * 2**20  # one activation of `network` a step, left behind, would be 23 MB


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip


def pictures() -> Tensor:
    return torch.randn(4, 1, 64, 60, generator=torch.Generator().manual_seed(1))


def resident() -> int:
    """Bytes of memory this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def live() -> tuple[int, int]:
    """How many tensors, and how many tracked objects of any kind, are alive."""
    gc.collect()
    objects = gc.get_objects()
    return sum(issubclass(type(o), Tensor) for o in objects), len(objects)


def assert_no_growth(step: Callable[[], None]) -> None:
    for _ in range(10):
        step()
    (tensors, objects), before = live(), resident()
    for _ in range(STEPS):
        step()
    assert resident() - before < SLACK
    tensors_after, objects_after = live()
    assert tensors_after == tensors
    assert objects_after - objects < STEPS // 2


@pytest.mark.parametrize("options", [{}, {"rule": "zplus", "box": BOX, "layers": ["2"]}], ids=["epsilon", "zplus"])
def test_explanations_do_not_grow(options: dict[str, Any]) -> None:
    model, images = network(), pictures()

    def step() -> None:
        explain(model, images, 1, **options)

    assert_no_growth(step)


@pytest.mark.parametrize("options", [{}, {"rule": "zplus", "box": BOX, "layers": ["2"]}], ids=["epsilon", "zplus"])
def test_training_steps_do_not_grow(options: dict[str, Any]) -> None:
    model, images = network(), pictures()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        maps = explain(model, images, create_graph=True, **options)
        heatmap = maps["input"] if isinstance(maps, dict) else maps
        loss = heatmap.square().mean() + F.cross_entropy(model(images), torch.zeros(4, dtype=torch.long))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    assert_no_growth(step)


def test_failing_explanations_do_not_grow() -> None:
    model, images = network(), pictures()

    def step() -> None:
        with pytest.raises(FasterISNetError):
            explain(model, images, 7)
        with pytest.raises(FasterISNetError):
            explain(model, images, layers=["3", "9"])

    assert_no_growth(step)


# --- without the garbage collector ---------------------------------------------------------------------------------


class Watched(nn.Module):
    """Keeps weak references to activations of its last forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.act = nn.SiLU()
        self.fc = nn.Linear(4 * 36, 3)
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.bn1(self.conv1(x)), inplace=True)
        b = self.conv2(a)
        b += a
        c = self.act(b)
        gate = c.mean((2, 3), keepdim=True).sigmoid()
        d = c * gate
        e = F.avg_pool2d(d, 3, stride=1, padding=1)
        self.seen = [weakref.ref(t) for t in (a, b, c, gate, d, e)]
        return self.fc(e.flatten(1))

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.seen)


@contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def watched() -> tuple[Watched, Tensor]:
    torch.manual_seed(0)
    return Watched(), torch.rand(2, 1, 6, 6)


OPTIONS = [{}, {"layers": ["act"]}, {"box": (0.0, 1.0)}, {"target": AllLogits()}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "layers", "box", "all logits"])
@pytest.mark.parametrize("rule", RULES)
def test_an_explanation_frees_its_activations(rule: str, options: dict[str, Any]) -> None:
    model, images = watched()
    with without_collector():
        maps = explain(model, images, rule=rule, **options)
        assert len(model.seen) == 6 and model.alive() == 0
    assert maps is not None


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "layers", "box", "all logits"])
@pytest.mark.parametrize("rule", RULES)
def test_dropping_the_maps_frees_the_graph(rule: str, options: dict[str, Any]) -> None:
    """With `create_graph=True` the maps hold the graph, and nothing else does."""
    model, images = watched()
    with without_collector():
        maps = explain(model, images, rule=rule, create_graph=True, **options)
        assert model.alive() > 0
        del maps
        assert model.alive() == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_training_step_frees_the_graph(rule: str) -> None:
    model, images = watched()
    with without_collector():
        loss = explain(model, images, rule=rule, create_graph=True, box=(0.0, 1.0)).square().sum()
        loss.backward()
        del loss
        assert model.alive() == 0
    assert model.conv1.weight.grad is not None


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_images_hold_nothing(requires_grad: bool) -> None:
    model, images = watched()
    images.requires_grad_(requires_grad)
    with without_collector():
        explain(model, images, create_graph=True)
        assert model.alive() == 0


@pytest.mark.parametrize("options", [{"target": 9}, {"layers": ["act"], "target": lambda z: z}], ids=["class", "shape"])
def test_a_failure_frees_its_activations(options: dict[str, Any]) -> None:
    model, images = watched()
    with without_collector():
        try:
            explain(model, images, **options)
        except FasterISNetError as error:
            message = str(error)
        assert message and model.alive() == 0


def test_a_failing_model_frees_its_activations() -> None:
    inner, images = watched()

    def forward(m: Any, x: Tensor) -> Tensor:
        m.inner(x)
        raise ArithmeticError("stop")

    model = Net(forward, inner=inner)
    with without_collector():
        try:
            explain(model, images)
        except ArithmeticError as error:
            message = str(error)
        assert message == "stop" and len(inner.seen) == 6 and inner.alive() == 0
