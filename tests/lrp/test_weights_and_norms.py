"""Batch norms, weights computed on the fly, modules used twice, and networks full of zeros."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from fasterisnet import explain
from fasterisnet.lrp.targets import AllLogits, Eta, Joint
from lrp.helpers import (
    Net,
    gradient_times_input,
    parameter_gradients,
    pictures,
    randomised,
    relu_rule,
)
from lrp.small_nets import (
    BOX,
    RULES,
    assert_derivative,
    residual,
)


def with_norm(norm: nn.Module) -> nn.Module:
    net = Net(
        lambda m, x: m.fc(F.relu(m.bn(m.conv(x)), inplace=True).flatten(1)),
        conv=nn.Conv2d(3, 5, 3, padding=1), fc=nn.Linear(80, 3),
    )  # fmt: skip
    net = randomised(net)
    net.add_module("bn", norm.double())
    return net


@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gradient"])
def test_batch_norm_without_affine_parameters(rule: str, training: bool, box: Any) -> None:
    """The same as one whose gamma is one and beta zero."""
    nets = []
    for affine in (False, True):
        net = with_norm(nn.BatchNorm2d(5, affine=affine))
        net.bn.running_mean.copy_(pictures(5))
        net.bn.running_var.copy_(pictures(5).abs() + 0.5)
        nets.append(net.train(training))
    images = pictures(3, 3, 4, 4)
    bare, affine = (explain(net, images, 1, rule=rule, box=box, create_graph=True) for net in nets)
    torch.testing.assert_close(bare, affine, rtol=1e-10, atol=1e-12)
    grads = [parameter_gradients(net, m.square().sum()) for net, m in zip(nets, (bare, affine), strict=True)]
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
def test_batch_norm_without_running_statistics(rule: str, affine: bool, box: Any) -> None:
    """Takes the batch's, in eval mode too; for a map that is the same as running ones of these values."""
    images = pictures(3, 3, 4, 4)
    trap = with_norm(nn.BatchNorm2d(5, affine=affine, track_running_stats=False)).eval()
    plain = with_norm(nn.BatchNorm2d(5, affine=affine)).eval()
    if affine:
        for net in (trap, plain):
            with torch.no_grad():
                net.bn.weight.copy_(pictures(5, seed=7))
                net.bn.bias.copy_(pictures(5, seed=8))
    hidden = plain.conv(images).detach()
    plain.bn.running_mean.copy_(hidden.mean((0, 2, 3)))
    plain.bn.running_var.copy_(hidden.var((0, 2, 3), correction=0))
    first, second = (explain(net, images, 1, rule=rule, box=box) for net in (trap, plain))
    torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-11)


def test_batch_norm_in_train_mode_has_constant_statistics() -> None:
    """Against autograd with detached biased statistics."""
    net = with_norm(nn.BatchNorm2d(5)).train()
    with torch.no_grad():
        net.bn.weight.copy_(pictures(5, seed=7))
        net.bn.bias.copy_(pictures(5, seed=8))
    images = pictures(3, 3, 4, 4)

    def surrogate(x: Tensor) -> Tensor:
        x = net.conv(x)
        mean, var = x.detach().mean((0, 2, 3), keepdim=True), x.detach().var((0, 2, 3), correction=0, keepdim=True)
        y = (x - mean) / (var + net.bn.eps).sqrt() * net.bn.weight.view(-1, 1, 1) + net.bn.bias.view(-1, 1, 1)
        return net.fc(relu_rule(y).flatten(1))

    torch.testing.assert_close(explain(net, images, 1), gradient_times_input(surrogate, images), rtol=1e-9, atol=1e-11)


def standardised(weight: Tensor) -> Tensor:
    dims = (1, 2, 3)
    return (weight - weight.mean(dims, keepdim=True)) / (weight.std(dims, keepdim=True) + 1e-5)


class StandardisedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, standardised(self.weight), self.bias, self.stride, self.padding)


@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("rule", RULES)
def test_weight_standardised_convolution(rule: str, box: Any) -> None:
    """Same map as with the weight computed beforehand; its gradient reaches the raw parameter by the chain rule."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.fc(F.relu(m.conv(x), inplace=True).flatten(1))

    nets = [
        randomised(Net(forward, conv=kind(3, 5, 3, padding=1), fc=nn.Linear(80, 3)))
        for kind in (StandardisedConv, nn.Conv2d)
    ]
    with torch.no_grad():
        nets[1].conv.weight.copy_(standardised(nets[0].conv.weight))
    images = pictures(2, 3, 4, 4)
    maps = [explain(net, images, 1, rule=rule, box=box, create_graph=True, strict=True) for net in nets]
    torch.testing.assert_close(*maps, rtol=1e-10, atol=1e-12)
    raw, direct = (parameter_gradients(net, m.square().sum()) for net, m in zip(nets, maps, strict=True))
    weight = nets[0].conv.weight
    chained = torch.autograd.grad(standardised(weight), weight, direct["conv.weight"])[0]
    assert chained.abs().max() > 0
    torch.testing.assert_close(raw["conv.weight"], chained, rtol=1e-9, atol=1e-9 * float(chained.abs().max()))
    torch.testing.assert_close(raw["fc.weight"], direct["fc.weight"], rtol=1e-9, atol=1e-9)


def parametrised(kind: Callable[..., nn.Module]) -> nn.Module:
    net = randomised(
        Net(
            lambda m, x: m.fc(F.relu(m.conv(x), inplace=True).flatten(1)),
            conv=nn.Conv2d(3, 5, 3, padding=1),
            fc=nn.Linear(80, 3),
        )
    )
    torch.manual_seed(2)
    kind(net.conv)
    kind(net.fc)
    return net.train()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "kind", [parametrizations.weight_norm, parametrizations.spectral_norm], ids=["weight", "spectral"]
)
def test_parametrised_weights_in_train_mode(kind: Callable[..., nn.Module], rule: str) -> None:
    trap, images = parametrised(kind), pictures(2, 3, 4, 4)
    before = copy.deepcopy(trap.state_dict())
    plain = Net(trap.function, conv=nn.Conv2d(3, 5, 3, padding=1), fc=nn.Linear(80, 3)).double()
    used = copy.deepcopy(trap)  # spectral norm moves on each time its weight is asked for
    with torch.no_grad():
        for name in ("conv", "fc"):
            source, copied = used.get_submodule(name), plain.get_submodule(name)
            copied.weight.copy_(source.weight)
            copied.bias.copy_(source.bias)
    heatmap = explain(trap, images, 1, rule=rule, strict=True)
    torch.testing.assert_close(heatmap, explain(plain, images, 1, rule=rule), rtol=1e-10, atol=1e-12)
    for name, value in trap.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    "kind", [parametrizations.weight_norm, parametrizations.spectral_norm], ids=["weight", "spectral"]
)
def test_gradients_reach_parametrised_weights(kind: Callable[..., nn.Module]) -> None:
    """By finite differences, in eval mode, where spectral norm stands still."""
    model, images = parametrised(kind).eval(), pictures(2, 3, 4, 4)

    def loss(create_graph: bool = False) -> Tensor:
        return explain(model, images, 1, create_graph=create_graph).square().sum()

    grads = parameter_gradients(model, loss(True))
    originals = [name for name in grads if "original" in name]
    assert len(originals) >= 2
    for name in originals:
        assert grads[name].abs().max() > 0
        assert_derivative(loss, model.get_parameter(name).data, grads[name])


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_reused_modules(rule: str, create_graph: bool) -> None:
    """One convolution, batch norm and ReLU used twice: the same as copies of them, whose gradients add up."""

    def shared(m: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            x = m.relu(m.bn(m.conv(x)))
        return m.fc(x.flatten(1))

    def apart(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.relu(m.bn2(m.conv2(torch.relu(m.bn(m.conv(x)))))).flatten(1))

    parts = {"conv": nn.Conv2d(3, 3, 3, padding=1), "bn": nn.BatchNorm2d(3), "fc": nn.Linear(48, 3)}
    one = randomised(Net(shared, **parts, relu=nn.ReLU(inplace=True))).eval()
    two = Net(apart, **copy.deepcopy(parts), conv2=copy.deepcopy(one.conv), bn2=copy.deepcopy(one.bn)).eval()
    images = pictures(2, 3, 4, 4)
    maps = [explain(net, images, 1, rule=rule, create_graph=create_graph) for net in (one, two)]
    torch.testing.assert_close(*maps, rtol=1e-10, atol=1e-12)
    if create_graph:
        once, twice = (parameter_gradients(net, m.square().sum()) for net, m in zip((one, two), maps, strict=True))
        for name in ("conv.weight", "bn.weight"):
            expected = twice[name] + twice[name.replace(".", "2.")]
            torch.testing.assert_close(once[name], expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "target", [None, 1, Joint(), Eta(0), AllLogits()], ids=["highest", "logit", "joint", "eta", "all"]
)
@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gradient"])
def test_zero_initialised_head(rule: str, box: Any, target: Any) -> None:
    """The map is zero, not NaN, and its loss has finite gradients."""
    model, images = residual(), pictures()
    nn.init.zeros_(model.fc.weight)
    nn.init.zeros_(model.fc.bias)
    heatmap = explain(model, images, target, rule=rule, box=box, create_graph=True)
    assert torch.equal(heatmap, torch.zeros_like(heatmap))
    grads = parameter_gradients(model, (heatmap + 1).square().sum())
    assert all(grad.isfinite().all() for grad in grads.values())
    if rule != "zplus":
        assert grads["fc.weight"].abs().max() > 0


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("rule", RULES)
def test_zero_initialised_residual_branch_and_black_image(rule: str, training: bool) -> None:
    """Batch norms whose gamma is zero, a black image, dead units: finite maps and gradients."""
    model, images = residual(training=training), pictures()
    nn.init.zeros_(model.bn2.weight)
    nn.init.zeros_(model.bn2.bias)
    with torch.no_grad():
        model.bn1.bias[0] = -100.0
    images[1] = 0
    torch.manual_seed(0)
    heatmap = explain(model, images, rule=rule, create_graph=True)
    assert heatmap.isfinite().all() and heatmap[0].abs().max() > 0
    assert torch.equal(heatmap[1], torch.zeros_like(heatmap[1]))
    grads = parameter_gradients(model, heatmap.square().sum())
    assert all(grad.isfinite().all() for grad in grads.values())
