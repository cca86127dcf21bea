"""Relevance at the outputs of modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet import explain
from fasterisnet.lrp.targets import AllLogits, Joint
from lrp.helpers import (
    EPSILON,
    Net,
    parameter_gradients,
    pictures,
    randomised,
)
from lrp.small_nets import (
    BOX,
    RULES,
    assert_derivative,
    in_place_sum,
    residual,
    zeroed,
)


def bias_free(*, in_place: bool = True) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.ReLU(in_place), nn.AvgPool2d(2),
        nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.ReLU(in_place), nn.MaxPool2d(3, 1, 1),
        nn.Flatten(), nn.Linear(54, 8, bias=False), nn.ReLU(in_place), nn.Linear(8, 3, bias=False),
    ).double()  # fmt: skip


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rule", ["epsilon", "gradient"])
def test_relevance_is_conserved_from_layer_to_layer(rule: str, in_place: bool) -> None:
    """No biases, no stabiliser: at every layer it sums up to the explained logit."""
    model, images = bias_free(in_place=in_place), pictures()
    names = [name for name, _ in model.named_children()]
    classes = torch.tensor([0, 2, 1])
    maps = explain(model, images, classes, rule=rule, epsilon=1e-12, layers=names)
    logits = model(images).gather(1, classes[:, None])[:, 0].detach()
    assert list(maps) == ["input", *names]
    for name, heatmap in maps.items():
        torch.testing.assert_close(
            heatmap.flatten(1).sum(1), logits, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_relevance_is_conserved_under_zplus() -> None:
    """Started from its own z, the positive part of the logit: the same sum everywhere behind."""
    model, images = bias_free(), pictures()
    names = ["1", "2", "4", "5", "6", "8"]
    maps = explain(model, images, 0, rule="zplus", epsilon=1e-12, layers=names)
    hidden = model[:-1](images).detach()
    start = hidden @ model[-1].weight[0].detach().clamp(min=0)
    assert start.min() > 0
    for name in ("input", *names):
        torch.testing.assert_close(maps[name].flatten(1).sum(1), start, rtol=1e-6, atol=1e-9)
        assert maps[name].min() >= 0


def test_shapes_of_relevance_at_layers() -> None:
    model, images = bias_free(), pictures()
    one = explain(model, images, layers=["0", "2", "9"])
    every = explain(model, images, AllLogits(), layers=["0", "2", "9"])
    for name, shape in {"input": (3, 6, 6), "0": (6, 6, 6), "2": (6, 3, 3), "9": (3,)}.items():
        assert one[name].shape == (3, *shape)
        assert every[name].shape == (3, 3, *shape)
    for c in range(3):
        torch.testing.assert_close(every["2"][:, c], explain(model, images, c, layers=["2"])["2"])


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("rule", ["epsilon", "gamma", "gradient"])
@pytest.mark.parametrize("layer", ["conv", "bn"])
def test_relevance_in_front_of_an_in_place_relu(layer: str, rule: str, training: bool, create_graph: bool) -> None:
    """That of the layer's own output, not of what the ReLU made of it."""
    results = []
    for in_place in (True, False):
        net = randomised(
            Net(
                lambda m, x: m.fc(m.relu(m.bn(m.conv(x)) if layer == "bn" else m.conv(x)).flatten(1)),
                conv=nn.Conv2d(3, 5, 3, padding=1),
                bn=nn.BatchNorm2d(5),
                relu=nn.ReLU(in_place),
                fc=nn.Linear(80, 3),
            )
        ).train(training)
        maps = explain(net, pictures(3, 3, 4, 4), 1, rule=rule, layers=[layer, "relu"], create_graph=create_graph)
        grads = parameter_gradients(net, maps[layer].square().sum()) if create_graph else {}
        results.append(({n: m.detach() for n, m in maps.items()}, grads))
        if rule == "epsilon" and not in_place and not training:
            value = net.conv(pictures(3, 3, 4, 4))
            value = (net.bn(value) if layer == "bn" else value).detach()
            y = value.clamp(min=0)
            by_hand = value * y / (y + EPSILON) * net.fc.weight[1].detach().view(5, 4, 4)
            torch.testing.assert_close(maps[layer].detach(), by_hand, rtol=1e-10, atol=1e-12)
    for first, second in zip(*results, strict=True):
        for name in first:
            torch.testing.assert_close(first[name], second[name], rtol=1e-10, atol=1e-12)


def test_two_names_for_one_tensor() -> None:
    """A module that returns its input, in front of an in-place ReLU: both layers keep the value they had."""
    results = []
    for in_place in (True, False):
        parts = {"conv": nn.Conv2d(3, 5, 3, padding=1), "same": nn.Identity(), "relu": nn.ReLU(in_place)}
        net = Net(lambda m, x: m.fc(m.relu(m.same(m.conv(x))).flatten(1)), **parts, fc=nn.Linear(80, 3))
        results.append(explain(randomised(net), pictures(2, 3, 4, 4), 1, layers=["conv", "same", "relu"]))
    for name in ("input", "conv", "same", "relu"):
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-12, atol=1e-14)
    assert torch.equal(results[0]["conv"], results[0]["same"])


OVERWRITTEN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": (in_place_sum, torch.add),
    "product": (lambda a, b: a.mul_(b), torch.mul),
    "scale": (lambda a, b: a.mul_(2.0) + b, lambda a, b: a * 2.0 + b),
    "channel": (lambda a, b: zeroed(a) + b, lambda a, b: torch.cat([torch.zeros_like(a[:, :1]), a[:, 1:]], 1) + b),
    "activation": (lambda a, b: F.silu(a, inplace=True) + b, lambda a, b: F.silu(a) + b),
    "view": (lambda a, b: a.view(2, -1).relu_().view_as(a) + b, lambda a, b: a.view(2, -1).relu().view_as(a) + b),
}


@pytest.mark.parametrize("rule", ["epsilon", "gradient"])
@pytest.mark.parametrize("step", OVERWRITTEN)
def test_relevance_at_a_layer_that_is_overwritten(step: str, rule: str) -> None:
    results = []
    for change in OVERWRITTEN[step]:
        net = Net(
            lambda m, x, f=change: m.fc(f(m.bn(m.conv(x)), m.other(x)).flatten(1)),
            conv=nn.Conv2d(3, 5, 3, padding=1), bn=nn.BatchNorm2d(5), other=nn.Conv2d(3, 5, 1), fc=nn.Linear(80, 3),
        )  # fmt: skip
        results.append(explain(randomised(net).eval(), pictures(2, 3, 4, 4), 1, rule=rule, layers=["bn", "other"]))
    for name in results[0]:
        assert results[1][name].abs().max() > 0
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-11, atol=1e-13)


def test_the_model_itself_as_a_layer() -> None:
    model, images = residual(), pictures()
    maps = explain(model, images, Joint(), layers=["", "fc"])
    torch.testing.assert_close(maps[""], model(images).detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(maps["fc"], maps[""])


@pytest.mark.parametrize("rule", RULES)
def test_asking_for_layers_changes_no_map(rule: str) -> None:
    model, images = residual(), pictures()
    for box in (None, BOX):
        bare = explain(model, images, 1, rule=rule, box=box)
        names = ["pool", "dropout", "fc"] if rule == "zplus" else ["bn2", "pool", "fc"]
        maps = explain(model, images, 1, rule=rule, box=box, layers=names)
        torch.testing.assert_close(maps["input"], bare, rtol=1e-12, atol=1e-14)
        again = explain(model, images, 1, rule=rule, box=box, layers=names[::-1])
        for name in names:
            torch.testing.assert_close(maps[name], again[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_relevance_at_the_last_layer(rule: str) -> None:
    """The explained logit itself, nothing at the others (z+ starts from its z, asked for below the layer)."""
    model, images = residual(), pictures()
    logits = model(images).detach()
    maps = explain(model, images, 2, rule=rule, layers=["fc"])
    torch.testing.assert_close(maps["fc"], logits * torch.tensor([0.0, 0.0, 1.0, 0.0]), rtol=1e-12, atol=1e-14)
    joint = explain(model, images, Joint(), rule=rule, layers=["fc"])
    torch.testing.assert_close(joint["fc"], logits, rtol=1e-12, atol=1e-14)


def test_no_layers_and_an_empty_list_of_layers() -> None:
    model, images = residual(), pictures()
    heatmap = explain(model, images, 1)
    maps = explain(model, images, 1, layers=[])
    assert isinstance(heatmap, Tensor)
    assert list(maps) == ["input"] and torch.equal(maps["input"], heatmap)


def test_layers_train() -> None:
    """A loss on the relevance of a hidden layer: exact gradients, in front of and behind it."""
    model, images = residual(), pictures()

    def loss(create_graph: bool = False) -> Tensor:
        maps = explain(model, images, 1, layers=["bn1", "pool"], create_graph=create_graph)
        return maps["bn1"].square().sum() + maps["pool"].square().sum()

    grads = parameter_gradients(model, loss(True))
    for name in ("conv1.weight", "bn1.weight", "conv2.weight", "fc.weight"):
        assert grads[name].abs().max() > 0
        assert_derivative(loss, model.get_parameter(name).data, grads[name])
