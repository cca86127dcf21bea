"""What the paper relies on, seen through whole methods. Maps against `explain` and ResNet depths: test_family.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn

import fasterisnet as fi
from fasterisnet.errors import FasterISNetError
from methods.tester import METHODS, Residual, Tester, filled, labels_for, masks_for, pictures

FAMILY = [name for name in METHODS if name != "Standard"]


@pytest.mark.parametrize("name", FAMILY)
def test_no_background_loss_when_all_relevance_is_in_the_foreground(name: str) -> None:
    """A black background has no relevance without zB; with light in it, it has."""
    model, images, labels, masks = Tester.batch()
    method = Tester(name).independent(box=None)
    dark, light = (method.loss(model, x, labels, masks) for x in (images * masks, images))
    assert float(dark.background.detach()) == 0
    assert float(light.background.detach()) > 0.1


@pytest.mark.parametrize("name", ["Original", "Stochastic", "GradInput"])
def test_background_loss_ignores_the_scale_of_relevance(name: str) -> None:
    """Logits times ten: relevance times ten, the same L1, another L2. (1e-9: m is stabilised by 1e-10.)"""
    model, images, labels, masks = Tester.batch()
    method = Tester(name).independent()
    before, total = method.loss(model, images, labels, masks), method.measure(model, images)["input"]
    with torch.no_grad():
        for parameter in model.fc.parameters():
            parameter.mul_(10)
    after = method.loss(model, images, labels, masks)
    torch.testing.assert_close(method.measure(model, images)["input"], 10 * total, rtol=1e-9, atol=0)
    torch.testing.assert_close(after.background, before.background, rtol=1e-7, atol=0)
    assert abs(float((after.foreground - before.foreground).detach())) > 0.1


@pytest.mark.parametrize("name", FAMILY)
def test_no_foreground_loss_inside_the_range(name: str) -> None:
    model, images, labels, masks = Tester.batch()
    assert float(Tester(name).method(ranges=(1e-9, 1e9)).loss(model, images, labels, masks).foreground.detach()) == 0


@pytest.mark.parametrize("name", FAMILY)
def test_a_map_depends_on_its_own_sample_only(name: str) -> None:
    """Whatever its neighbours show (eval mode)."""
    model, images, _, _ = Tester.batch()
    method, others = Tester(name).independent(), images.clone()
    others[1:] = pictures(3, 2, 9, 8, seed=9)
    one, two = (method.measure(model, x)["input"][0] for x in (images, others))
    torch.testing.assert_close(one, two, rtol=1e-12, atol=0)


def test_maps_at_once_and_deep_supervision_exclude_each_other() -> None:
    model, *batch = Tester.batch()
    with pytest.raises(FasterISNetError, match="maps_at_once does not go with deep supervision"):
        fi.Original(maps_at_once=1, deep_supervision=True, ranges=(0.3, 0.6)).loss(model, *batch)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: torchvision.models.resnet18(num_classes=4),
    "efficientnet_b0": lambda: torchvision.models.efficientnet_b0(num_classes=4),
    "mobilenet_v3_small": lambda: torchvision.models.mobilenet_v3_small(num_classes=4),
    "timm resnet18": lambda: timm.create_model("resnet18", num_classes=4),
    "timm efficientnet_b0": lambda: timm.create_model("efficientnet_b0", num_classes=4),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_default_depths_are_sensible(name: str) -> None:
    """Four to eight of them, resolution falling down to that of the head, and the loss has gradients everywhere."""
    torch.manual_seed(0)
    model = BUILDERS[name]().train()
    images = torch.rand(2, 3, 64, 64)
    method: Any = fi.Selective(deep_supervision=True, ranges=(0.3, 0.6))
    depths = method.depths(model, images)
    assert 4 <= len(depths) <= 8
    maps = fi.explain(model, images, layers=depths)
    sizes = [m.shape[-1] for m in maps.values()]
    assert list(maps) == ["input", *depths]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 64 and sizes[-1] == 2
    assert {32, 16, 8, 4} - set(sizes) <= {32}
    parts = method.loss(model, images, labels_for(images, 4), masks_for(images))
    assert bool(torch.isfinite(parts.total))
    parts.total.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_masks_of_deep_maps_keep_every_foreground_pixel() -> None:
    """One foreground pixel: at every depth the cell above it, and no other, is foreground."""
    model = filled(Residual().double()).eval()
    images, mask = pictures(1, 2, 8, 8), torch.zeros(1, 1, 8, 8)
    mask[0, 0, 5, 6] = 1
    settings: dict[str, Any] = {"heatmap_weight": 1.0, "ranges": (1.0, 1.0), "foreground": "square", "box": (0, 1)}
    foreground = []
    for depth, size in (("layer1", 4), ("layer2", 2)):
        maps = fi.explain(model, images, torch.tensor([1]), box=(0, 1), layers=[depth])
        assert isinstance(maps, dict) and maps[depth].shape[-1] == size
        for m, scale in ((maps["input"], 1), (maps[depth], 8 // size)):
            s = m[0, :, 5 // scale, 6 // scale].abs().sum()
            foreground.append(float((1 - s) ** 2))
    for number, depth in enumerate(("layer1", "layer2")):

        class Second(fi.Stochastic):
            def draw(self, logits: torch.Tensor) -> torch.Tensor:
                return torch.tensor([1])

        method = Second(deep_supervision=[depth], background_weight=0.0, **settings)
        parts = method.loss(model, images, torch.tensor([0]), mask)
        two = sorted(foreground[2 * number : 2 * number + 2], reverse=True)
        assert float(parts.foreground.detach()) == pytest.approx((two[0] + 0.7 * two[1]) / 1.7, rel=1e-9)
