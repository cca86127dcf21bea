"""Training steps of the authors' code with frozen batch norm (tests/golden/train_step.npz), through our methods.

`flex.frozen.*` is their LRP-Flex. Its maps, losses and the gradients of all parameters are ours to 1e-12, with one
exception on purpose: under zB the gradient of the first norm's scale (`1.weight`). There biases are constants, and our
specification counts the whole fused bias `(b - mean)*gamma/sd + beta` among them; the authors leave gamma alive in it.

`block_dual.frozen.*` is their LRP Block, which the Dual ISNet was trained with. Ours differs from it on purpose:
- the Block divides by `y + eps` at max pooling, its epsilon map also at average pooling and at the last layer; our maps
  send relevance to the winner, and to the inputs of linear operations, unchanged;
- the Block's epsilon map divides by a `z` with constant biases, ours by the activation itself, biases alive;
- gamma alive in the fused bias, as above, here in both layers and both rules.
That these are all the differences is shown with the maps written out in plain torch: with the Block's habits they have
the stored losses and gradients (to 5e-8: something in the Block runs in single precision), with ours those of `Dual`.

`*.train.*` are not comparable: see tests/relevance/test_golden.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.losses import heatmap_loss
from fasterisnet.lrp.targets import AllLogits, Eta, Joint, Logit, Target
from fasterisnet.methods import ISNet

STEP = dict(np.load(Path(__file__).parents[1] / "golden" / "train_step.npz"))
IMAGES, MASKS, LABELS, EXPLAINED = (torch.tensor(STEP[name]) for name in ("x", "mask", "target", "explained"))
C1, C2, P, D, W1, W2 = (float(value) for value in STEP["C1_C2_P_d_w1_w2"])
SETTINGS: dict[str, Any] = {
    "heatmap_weight": P, "decay": D, "background_weight": W1, "foreground_weight": W2, "ranges": (C1, C2),
}  # fmt: skip
BOXES = {"eps": None, "zB": (0.0, 1.0)}
TARGETS: dict[str, Target] = {"label": Logit(EXPLAINED), "eta_label": Eta(EXPLAINED), "all": AllLogits()}
EPSILON = 0.01
FIRST = pytest.mark.parametrize("first", BOXES)


class Explaining(ISNet):
    """An ISNet that explains what it is told to."""

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(**settings)
        self.target = target

    def targets(self, logits: Tensor) -> list[tuple[str, Target]]:
        return [("epsilon", self.target)]


def network() -> nn.Sequential:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.AvgPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(108, 5)).double()
    state = {name[2:]: torch.tensor(value) for name, value in STEP.items() if name.startswith("p.")}
    assert len(state) == 14
    assert all("num_batches" in key for key in model.load_state_dict(state, strict=False).missing_keys)
    return model.eval()


def stored_gradients(prefix: str) -> dict[str, Tensor]:
    start = f"{prefix}grad."
    return {name.removeprefix(start): torch.tensor(g) for name, g in STEP.items() if name.startswith(start)}


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def errors(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    assert actual.keys() == wanted.keys() and len(wanted) == 10
    return {name: float((actual[name] - w).abs().max() / w.abs().max()) for name, w in wanted.items()}


# --- LRP-Flex: the same numbers -------------------------------------------------------------------------------------


@FIRST
@pytest.mark.parametrize("target", TARGETS)
def test_flex(first: str, target: str) -> None:
    model, prefix = network(), f"flex.frozen.{first}.{target}."
    method = Explaining(TARGETS[target], box=BOXES[first], **SETTINGS)
    parts = method.loss(model, IMAGES, LABELS, MASKS)
    for ours, theirs in ((parts.classification, "LC"), (parts.heatmap, "LLRP"), (parts.total, "total")):
        assert float(ours.detach()) == pytest.approx(float(STEP[prefix + theirs]), rel=1e-12)
    sums = torch.tensor(STEP[prefix + "heatmap_abs_sum"])
    torch.testing.assert_close(method.measure(model, IMAGES)["input"], sums, rtol=1e-12, atol=0)
    found = errors(gradients(model, parts.total), stored_gradients(prefix))
    special = found.pop("1.weight")
    assert max(found.values()) < 1e-12
    if first == "eps":
        assert special < 1e-12
    else:
        assert 1e-4 < special < 1e-2  # on purpose; the next test shows why


@FIRST
@pytest.mark.parametrize("target", ["label", "eta_label"])
def test_flex_maps(first: str, target: str) -> None:
    """Stored in single precision: equal to half a unit in the last place."""
    maps = fi.explain(network(), IMAGES, TARGETS[target], box=BOXES[first])
    assert isinstance(maps, Tensor)
    stored = STEP[f"flex.frozen.{first}.{target}.heatmap"]
    assert stored.dtype == np.float32
    wanted = torch.tensor(stored).double()
    assert bool(((maps.unsqueeze(1) - wanted).abs() <= 2.0**-24 * wanted.abs() + 1e-12).all())


@FIRST
def test_original_is_flex_of_all_logits(first: str) -> None:
    """Whether its maps are computed together or in groups."""
    prefix = f"flex.frozen.{first}.all."
    for maps_at_once in (None, 1, 2, 3):
        model = network()
        method = fi.Original(box=BOXES[first], maps_at_once=maps_at_once, **SETTINGS)
        parts = method.loss(model, IMAGES, LABELS, MASKS)
        assert float(parts.total.detach()) == pytest.approx(float(STEP[f"{prefix}total"]), rel=1e-12)
        found = errors(gradients(model, parts.total), stored_gradients(prefix))
        assert max(e for name, e in found.items() if (first, name) != ("zB", "1.weight")) < 1e-12


# --- the maps in plain torch ----------------------------------------------------------------------------------------


def away_from_zero(z: Tensor) -> Tensor:
    return z + torch.where(z >= 0, EPSILON, -EPSILON)


def written_out(
    model: nn.Sequential,
    rule: str,
    *,
    boxed: bool,
    block: bool = False,
    live: bool = False,
    start: Tensor | None = None,
) -> Tensor:
    """One map of the golden network, layer by layer, as relevance (z+, the Block) or as a gradient (our epsilon).

    start: G at the logits. block: with the Block's stabilisers and constant biases. live: gamma acts in fused biases.
    """
    conv, norm, _, _, conv2, norm2, _, _, _, head = model
    x, up, back = IMAGES, lambda t: F.interpolate(t, scale_factor=2) / 4, F.conv_transpose2d
    y = norm(conv(x)).relu()
    pooled, winners = F.max_pool2d(y, 2, return_indices=True)
    y2 = norm2(conv2(pooled)).relu()
    means = F.avg_pool2d(y2, 2)
    flat, last_bias = means.flatten(1), head.bias.detach()

    def fused(conv: nn.Module, norm: nn.Module) -> tuple[Tensor, Tensor]:
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        inside = scale if live else scale.detach()
        bias = (conv.bias.detach() - norm.running_mean) * inside + norm.bias.detach()
        return conv.weight * scale.view(-1, 1, 1, 1), bias

    (w, b), (w2, b2) = fused(conv, norm), fused(conv2, norm2)

    def first_layer(R: Tensor) -> Tensor:
        minus = w.clamp(max=0)
        z = F.conv2d(x, w, b, padding=1) - F.conv2d(torch.ones_like(x), minus, b.clamp(max=0), padding=1)
        s = R / (z + EPSILON)
        return x * back(s, w, padding=1) - back(s, minus, padding=1)

    if rule == "zplus":
        plus = head.weight.clamp(min=0)
        z = flat @ plus.T + last_bias.clamp(min=0)
        R = (flat * ((z / (z + EPSILON)) @ plus)).view_as(means)
        R = y2 * up(R / (means + EPSILON))
        plus = w2.clamp(min=0)
        z = F.conv2d(pooled, plus, b2.clamp(min=0), padding=1)
        R = pooled * back(R / (z + EPSILON), plus, padding=1)
        R = F.max_unpool2d(pooled * R / (pooled + EPSILON) if block else R, winners, 2)
        if boxed:
            return first_layer(R)
        plus = w.clamp(min=0)
        return x * back(R / (F.conv2d(x, plus, b.clamp(min=0), padding=1) + EPSILON), plus, padding=1)
    if block:
        z = flat @ head.weight.T + last_bias
        R = (flat * ((z / away_from_zero(z)) @ head.weight)).view_as(means)
        R = y2 * up(R / (means + EPSILON))
        R = pooled * back(R / away_from_zero(F.conv2d(pooled, w2, b2, padding=1)), w2, padding=1)
        R = F.max_unpool2d(pooled * R / (pooled + EPSILON), winners, 2)
        return first_layer(R) if boxed else x * back(R / away_from_zero(F.conv2d(x, w, b, padding=1)), w, padding=1)
    start = torch.ones(4, 5, dtype=x.dtype) if start is None else start
    G = up((start @ head.weight).view_as(means)) * y2 / (y2 + EPSILON)
    G = F.max_unpool2d(back(G, w2, padding=1), winners, 2)
    return first_layer(y * G) if boxed else x * back(G * y / (y + EPSILON), w, padding=1)


def step_of(model: nn.Sequential, maps: Tensor) -> tuple[Tensor, Tensor]:
    """The heatmap loss and the total, of maps (sample, map, channel, ...)."""
    heatmaps = heatmap_loss(maps, MASKS, C1, C2, decay=D, w1=W1, w2=W2).total
    return heatmaps, (1 - P) * F.cross_entropy(model(IMAGES), LABELS) + P * heatmaps


def starts(model: nn.Sequential, target: str) -> list[Tensor]:
    """G at the logits for every map of a target."""
    logits = model(IMAGES)
    if target == "all":
        return [F.one_hot(torch.full((4,), c), 5).double() for c in range(5)]
    return [torch.autograd.grad(TARGETS[target](logits).sum(), logits, create_graph=True)[0]]


@pytest.mark.parametrize("target", TARGETS)
def test_the_one_difference_to_flex_is_the_scale_in_the_fused_bias(target: str) -> None:
    found = {}
    for live in (True, False):
        model = network()
        maps = [written_out(model, "epsilon", boxed=True, live=live, start=s) for s in starts(model, target)]
        found[live] = gradients(model, step_of(model, torch.stack(maps, 1))[1])
    assert max(errors(found[True], stored_gradients(f"flex.frozen.zB.{target}.")).values()) < 1e-12
    model = network()
    parts = Explaining(TARGETS[target], box=(0.0, 1.0), **SETTINGS).loss(model, IMAGES, LABELS, MASKS)
    assert max(errors(gradients(model, parts.total), found[False]).values()) < 1e-12


# --- Dual against the Block -----------------------------------------------------------------------------------------


def dual_maps(model: nn.Sequential, boxed: bool, **habits: bool) -> Tensor:
    return torch.stack([written_out(model, rule, boxed=boxed, **habits) for rule in ("zplus", "epsilon")], 1)


@FIRST
def test_the_block_is_understood(first: str) -> None:
    """Maps, loss and every gradient of the authors' Block from the maps written out with its habits."""
    model, prefix = network(), f"block_dual.frozen.{first}."
    maps = dual_maps(model, first == "zB", block=True, live=True)
    wanted = torch.tensor(STEP[f"{prefix}heatmap_zplus_eps"]).double()
    torch.testing.assert_close(maps.detach(), wanted, rtol=2e-7, atol=1e-9)
    heatmaps, total = step_of(model, maps)
    assert float(heatmaps.detach()) == pytest.approx(float(STEP[f"{prefix}LLRP"]), rel=5e-8)
    assert float(total.detach()) == pytest.approx(float(STEP[f"{prefix}total"]), rel=5e-8)
    assert max(errors(gradients(model, total), stored_gradients(prefix)).values()) < 5e-8


@FIRST
@pytest.mark.parametrize("habit", ["block", "live"])
def test_each_habit_of_the_block_matters(first: str, habit: str) -> None:
    """Without it the stored gradients are missed by far: so the differences named above are real ones."""
    model = network()
    maps = dual_maps(model, first == "zB", **{"block": True, "live": True, habit: False})
    found = errors(gradients(model, step_of(model, maps)[1]), stored_gradients(f"block_dual.frozen.{first}."))
    assert max(found.values()) > 1e-2


@FIRST
def test_dual(first: str) -> None:
    """Ours: the same maps by our specification, written out, loss and gradients."""
    model = network()
    parts = fi.Dual(box=BOXES[first], **SETTINGS).loss(model, IMAGES, LABELS, MASKS)
    reference = network()
    heatmaps, total = step_of(reference, dual_maps(reference, first == "zB"))
    assert float(parts.heatmap.detach()) == pytest.approx(float(heatmaps.detach()), rel=1e-12)
    assert float(parts.total.detach()) == pytest.approx(float(total.detach()), rel=1e-12)
    assert max(errors(gradients(model, parts.total), gradients(reference, total)).values()) < 1e-12


@FIRST
@pytest.mark.parametrize("variant", ["Dual", "label", "eta_label"])
def test_by_finite_differences(first: str, variant: str) -> None:
    """The same step with all biases and shifts below zero: constants or not, their positive part is zero."""
    model = network()
    with torch.no_grad():
        for conv, norm in ((model[0], model[1]), (model[4], model[5])):
            scale = norm.weight / (norm.running_var + norm.eps).sqrt()
            norm.bias.copy_(-0.05 - norm.bias.abs() - (scale * (conv.bias - norm.running_mean)).clamp(min=0))
        model[9].bias.copy_(-model[9].bias.abs())
    make: Callable[..., ISNet] = fi.Dual if variant == "Dual" else lambda **kw: Explaining(TARGETS[variant], **kw)
    method = make(box=BOXES[first], **SETTINGS)

    def loss() -> Tensor:
        return method.loss(model, IMAGES, LABELS, MASKS).total

    for number, (parameter, gradient) in enumerate(
        zip(model.parameters(), gradients(model, loss()).values(), strict=True)
    ):
        noise = torch.Generator().manual_seed(number)
        direction = torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
        analytic, start = float((gradient * direction).sum()), parameter.detach().clone()
        size = max(abs(analytic), float(gradient.norm() * direction.norm()) / parameter.numel() ** 0.5)
        for step in (1e-5, 1e-6, 1e-7):
            values = []
            for k in (-2, -1, 1, 2):
                with torch.no_grad():
                    parameter.copy_(start + k * step * direction)
                values.append(float(loss().detach()))
            with torch.no_grad():
                parameter.copy_(start)
            numeric = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step)
            if abs(numeric - analytic) <= 1e-6 * size:
                break
        assert abs(numeric - analytic) <= 1e-6 * size, (number, numeric, analytic)


def test_joint_maps_are_those_of_explain() -> None:
    """The written-out maps are also `explain`'s: what the Dual ISNet is trained on is what one sees."""
    for rule in ("zplus", "epsilon"):
        for box in BOXES.values():
            maps = fi.explain(network(), IMAGES, Joint(), rule=rule, box=box)
            assert isinstance(maps, Tensor)
            wanted = written_out(network(), rule, boxed=box is not None).detach()
            torch.testing.assert_close(maps, wanted, rtol=1e-10, atol=1e-13)
