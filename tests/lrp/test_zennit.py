"""zennit as a second oracle, on plain sequential ReLU networks, where its rules can be made equal to ours.

* epsilon: zennit divides by `z + eps` at a layer, we multiply by `y/(y + eps)` at the ReLU behind it. Where the unit is
  on these are the same number; where it is off no relevance arrives. A max pool in between changes nothing. The last
  layer and average pooling are without a stabiliser in ours (here one of 1e-30, so that 0/0 is 0).
* z+: the same formula once zennit gets our stabiliser, also for average pooling; relevance starts from the last z.
* zB: zennit bounds a bias by itself, so it drops out of z; ours stays if it is positive. Equal for biases that are not.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from zennit.composites import NameLayerMapComposite
from zennit.rules import Epsilon, Norm, Pass, ZBox, ZPlus

from fasterisnet import explain
from lrp.reference import assert_same, images, one_hot, randomise

NOTHING = 1e-30
CLASSES = torch.tensor([1, 3])


def vgg(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=bias), nn.ReLU(), nn.Conv2d(4, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(5, 6, 3, stride=2, padding=1, groups=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 4),
    )  # fmt: skip


def alexnet(bias: bool = True) -> nn.Sequential:
    """Overlapping max pools, in front of the ReLU and behind it; in-place ReLUs; dropout that is off."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 5, stride=2, padding=2, bias=bias), nn.ReLU(inplace=True), nn.MaxPool2d(3, 1, 1),
        nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False), nn.MaxPool2d(3, 2), nn.ReLU(inplace=True),
        nn.Dropout(0.5), nn.Flatten(), nn.Linear(54, 10), nn.ReLU(inplace=True), nn.Linear(10, 4, bias=False),
    )  # fmt: skip


def normalised(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=bias), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(24, 4),
    )  # fmt: skip


NETS = {"vgg": vgg, "alexnet": alexnet, "normalised": normalised}
SIZE = 16


def plain(model: nn.Sequential) -> nn.Sequential:
    """For zennit: batch norms merged into the convolutions, no ReLU in place (it would overwrite zennit's store)."""
    layers: list[nn.Module] = []
    for layer in model:
        if isinstance(layer, nn.BatchNorm2d):
            layers[-1] = fuse_conv_bn_eval(layers[-1], layer)
        else:
            layers.append(nn.ReLU() if isinstance(layer, nn.ReLU) else layer)
    return nn.Sequential(*layers)


def zennit_map(model: nn.Sequential, x: Tensor, rule: str, first: object | None = None) -> Tensor:
    model = plain(model)
    last = str(len(model) - 1)
    if rule == "epsilon":
        hidden, pool, output = Epsilon(0.01), Norm(NOTHING), Epsilon(NOTHING)
        start = model(x)
    else:
        hidden, pool, output = ZPlus(0.01), Norm(0.01), ZPlus(0.01)
        bias = model[-1].bias
        bias = 0 if bias is None else bias.clamp(min=0)
        start = model[:-1](x) @ model[-1].weight.clamp(min=0).T + bias
    names = [([last], output)]
    if first is not None:
        names.append((["0"], first))
    layers = [(nn.ReLU, Pass()), ((nn.Conv2d, nn.Linear), hidden), ((nn.AvgPool2d, nn.AdaptiveAvgPool2d), pool)]
    composite = NameLayerMapComposite(names, layers)
    x = x.clone().requires_grad_()
    with composite.context(model) as modified:
        (relevance,) = torch.autograd.grad(modified(x), x, start.detach() * one_hot(CLASSES, 4))
    return relevance


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
@pytest.mark.parametrize("net", NETS)
def test_same_maps(net: str, rule: str, seed: int) -> None:
    model = randomise(NETS[net](), seed).eval()
    x = images(2, 3, SIZE, SIZE, seed=seed, low=-1.0 if seed else 0.0)
    maps = explain(model, x, CLASSES, rule=rule)
    assert_same(maps, zennit_map(model, x, rule))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
@pytest.mark.parametrize("net", NETS)
def test_same_first_layer(net: str, rule: str, bias: bool) -> None:
    """zB with bounds per channel; the bias (with the batch norm, if there is one) made negative."""
    model = randomise(NETS[net](bias), 3).eval()
    with torch.no_grad():
        if bias:
            model[0].bias.copy_(-model[0].bias.abs())
        if isinstance(model[1], nn.BatchNorm2d):
            norm = model[1]
            norm.weight.abs_()
            norm.bias.copy_(-norm.bias.abs())
            norm.running_mean.abs_()
    low, high = torch.tensor([-1.0, -0.5, -2.0]).double(), torch.tensor([1.0, 1.5, 0.5]).double()
    bounds = low.view(3, 1, 1), high.view(3, 1, 1)
    x = bounds[0] + (bounds[1] - bounds[0]) * images(2, 3, SIZE, SIZE, low=0.0)
    maps = explain(model, x, CLASSES, rule=rule, box=(low, high))
    box = ZBox(*(b.unsqueeze(0) for b in bounds), stabilizer=0.01)
    assert_same(maps, zennit_map(model, x, rule, box))
