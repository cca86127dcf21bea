"""Extended GAIN and Grad-CAM: closed forms, finite differences, captum, and networks without maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from captum.attr import LayerGradCam
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.errors import InputError
from fasterisnet.methods.cam import grad_cam, last_map
from methods.tester import Residual, exact, filled, gradients, labels_for, masks_for, pictures, plain, slope


def spelled_out(
    model: nn.Sequential, images: Tensor, labels: Tensor, masks: Tensor, weights: Tensor | None = None
) -> Tensor:
    """The loss of a network that ends with a mean and a linear layer: there `d logit_c / d A_k` is `W_ck / pixels`.

    labels: (sample, class) of 0 and 1. weights: another W in the CAM alone.
    """
    maps, head = model[:7](images), model[-1]
    weights = head.weight if weights is None else weights
    one = weights.shape[0] == 1
    total = 0
    for i in range(len(images)):
        classes = [0] if one else labels[i].nonzero()[:, 0].tolist()
        for c in classes:
            sign = -1.0 if one and not bool(labels[i, 0]) else 1.0
            cam = torch.einsum("k,khw->hw", sign * weights[c], maps[i]).relu() / maps[i, 0].numel()
            cam = F.interpolate(cam[None, None], images.shape[2:], mode="bilinear", align_corners=False)[0, 0]
            cam = (cam - cam.min()) / (cam.max() - cam.min() + 1e-10)
            seen = images[i] - images[i] * torch.sigmoid(10 * (cam - 0.5))
            mining = sign * model(seen[None])[0, c]
            total = total + (mining + 100 * (cam - masks[i, 0].double()).square().mean()) / len(classes)
    return total / len(images)


def case(task: str) -> tuple[nn.Sequential, Tensor, Tensor, Tensor, Tensor]:
    images = pictures(3, 2, 8, 8)
    model = filled(plain(1 if task == "one logit" else 3).double(), 2).eval()
    if task == "several labels":
        several = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 1]])
        return model, images, several.double(), several, masks_for(images)
    labels = torch.tensor([0, 1, 1]) if task == "one logit" else labels_for(images)
    hot = labels.view(-1, 1) if task == "one logit" else F.one_hot(labels, 3)
    return model, images, labels, hot, masks_for(images)


@pytest.mark.parametrize("task", ["classes", "one logit", "several labels"])
def test_the_formula(task: str) -> None:
    model, images, labels, hot, masks = case(task)
    parts = fi.GAIN().loss(model, images, labels, masks)
    logits = model(images)
    plain_loss = F.cross_entropy(logits, labels) if task == "classes" else None
    if plain_loss is None:
        plain_loss = F.binary_cross_entropy_with_logits(logits, hot.double())
    torch.testing.assert_close(parts.total, plain_loss + spelled_out(model, images, hot, masks), rtol=1e-10, atol=0)
    assert parts.background.item() > 1e-3 and abs(parts.foreground.item()) > 1e-3


@pytest.mark.parametrize("second_order", [True, False])
def test_gradients_are_those_of_finite_differences(second_order: bool) -> None:
    """Of the closed form, in which the weights of the CAM move with the head, or stay where they were."""
    model, images, labels, hot, masks = case("classes")
    frozen = None if second_order else model[-1].weight.detach().clone()
    found = gradients(model, fi.GAIN(exact=second_order).loss(model, images, labels, masks).total)

    def loss() -> float:
        with torch.no_grad():
            value = F.cross_entropy(model(images), labels) + spelled_out(model, images, hot, masks, frozen)
        return float(value)

    for number, (name, parameter) in enumerate(model.named_parameters()):
        direction = pictures(*parameter.shape, seed=20 + number) - 0.5
        analytic = float((found[name] * direction).sum())
        size = max(abs(analytic), float(found[name].norm() * direction.norm()) / parameter.numel() ** 0.5)
        errors = [abs(slope(loss, parameter, direction, step) - analytic) for step in (1e-6, 1e-5)]
        assert min(errors) <= 1e-6 * size, (name, errors, analytic)


def test_constant_weights_change_the_gradient_and_not_the_loss() -> None:
    model, images, labels, _, masks = case("classes")
    one, two = (fi.GAIN(exact=choice).loss(model, images, labels, masks).total for choice in (True, False))
    assert torch.equal(one, two)
    first, second = (gradients(model, loss)["9.weight"] for loss in (one, two))
    assert float((first - second).norm() / first.norm()) > 1e-3


def test_a_probability_can_be_mined_instead_and_samples_without_mask_stay_out() -> None:
    model, images, labels, _, masks = case("classes")
    parts = fi.GAIN(mining_score="probability").loss(model, images, labels, masks)
    assert 0 < parts.foreground.item() < 1
    some = fi.GAIN().loss(model, images, labels, [masks[0], None, None])
    alone = fi.GAIN().loss(model, images[:1], labels[:1], masks[:1])
    torch.testing.assert_close(some.heatmap, alone.heatmap, rtol=1e-10, atol=0)
    none = fi.GAIN().loss(model, images, labels)
    assert none.heatmap.item() == 0 and none.without_mask == 3
    with pytest.raises(InputError, match="mining_score is 'score'"):
        fi.GAIN(mining_score="score")  # pyright: ignore[reportArgumentType]


def test_a_label_less_sample_is_in_the_classification_loss_only() -> None:
    model, images, _, _, masks = case("several labels")
    labels = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 0, 0]]).double()
    parts = fi.GAIN().loss(model, images, labels, masks)
    alone = fi.GAIN().loss(model, images[:1], labels[:1], masks[:1])
    torch.testing.assert_close(parts.heatmap, alone.heatmap / 3, rtol=1e-10, atol=0)
    assert fi.GAIN().loss(model, images, torch.zeros_like(labels), masks).heatmap.item() == 0


# --- Grad-CAM --------------------------------------------------------------------------------------------------------

BACKBONES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=5), "layer4"),
    "densenet121": (lambda: torchvision.models.densenet121(num_classes=5), "features"),
    "mobilenet_v3_small": (lambda: torchvision.models.mobilenet_v3_small(num_classes=5), "features"),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_grad_cam_is_captums(name: str) -> None:
    make, layer = BACKBONES[name]
    torch.manual_seed(0)
    model = make().double().eval()
    images = pictures(2, 3, 64, 64)
    target = torch.tensor([3, 1])
    assert last_map(model, images) == layer
    captum: Any = LayerGradCam(model, model.get_submodule(layer))
    wanted = captum.attribute(images, target, relu_attributions=True).detach()
    found = grad_cam(model, images, target)
    assert found.shape == (2, 1, 2, 2) and float(wanted.max()) > 0
    assert float((found - wanted).abs().max()) <= 1e-6 * float(wanted.max())


def test_the_last_map_is_on_the_way_to_the_logits_and_larger_than_a_pixel() -> None:
    class Aside(nn.Module):
        """Its auxiliary branch runs last and leads nowhere."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.aside = plain(), nn.Conv2d(2, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            logits = self.body(x)
            self.aside(x)
            return logits

    images = pictures(2, 2, 8, 8)
    assert last_map(Aside().double(), images) == "body.6"
    assert last_map(Residual().double(), images) == "layer2"
    assert last_map(torchvision.models.resnet18(num_classes=2).double(), pictures(2, 3, 28, 28)) == "layer3"


def test_networks_without_maps_are_refused_in_a_line() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(128, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    images = pictures(2, 2, 8, 8)
    batch = images, torch.tensor([0, 1]), masks_for(images)
    with pytest.raises(InputError, match=r"Grad-CAM needs maps .* here are none.*cam_layer"):
        fi.GAIN().loss(flat, *batch)
    transformer = torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 16, num_classes=3)
    with pytest.raises(InputError, match=r"after the last one, 'conv_proj', come \d+ of \d+ layers"):
        fi.GAIN().begin(transformer, torch.rand(2, 3, 32, 32))
    with pytest.raises(InputError, match="cam_layer names 'layer9', which is not a module"):
        fi.GAIN(cam_layer="layer9").loss(exact(plain()), *batch)
    with pytest.raises(InputError, match=r"The module '8' returns \(2, 6\), not maps"):
        fi.GAIN(cam_layer="8").loss(exact(plain()), *batch)
    assert fi.GAIN(cam_layer="3").begin(plain().double(), images) == ["Grad-CAM at '3': 5 maps of 4 x 4."]
