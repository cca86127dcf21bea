"""The networks that nobody ships: what they compute, what sizes they take, and what they say to others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fasterisnet as fi
from fasterisnet.errors import UsageError
from fasterisnet.evaluation.export import export_model
from fasterisnet.models import build_model, model_names
from fasterisnet.models.ag_sononet import AGSononet, AttentionGate
from fasterisnet.models.unets import MultitaskUNet, SegmentedClassifier, unet
from methods.tester import filled


def images(size: int = 32, channels: int = 3) -> Tensor:
    return torch.rand(2, channels, size, size, generator=torch.Generator().manual_seed(0))


def test_an_attention_gate_is_its_formula() -> None:
    gate = filled(AttentionGate(4, 5).double())
    maps, gating = torch.randn(1, 4, 3, 3).double(), torch.randn(1, 5, 1, 1).double()
    scores = torch.zeros(3, 3).double()
    for row in range(3):
        for column in range(3):
            seen = gate.seen.weight[:, :, 0, 0] @ maps[0, :, row, column]
            gated = gate.gate.weight[:, :, 0, 0] @ gating[0, :, 0, 0] + gate.gate.bias
            scores[row, column] = gate.score.weight[0, :, 0, 0] @ (seen + gated).clamp(min=0) + gate.score.bias
    weights = scores - scores.min() + 1e-6
    weights = weights / weights.sum()
    torch.testing.assert_close(gate.attention(maps, gating)[0, 0], weights)
    torch.testing.assert_close(gate(maps, gating)[0], (maps[0] * weights).sum((1, 2)))


def test_ag_sononet_is_gated_by_its_last_map() -> None:
    model = AGSononet(3, 1, width=4).eval()
    kept: list[tuple[Tensor, Tensor]] = []
    for gate in model.gates:
        gate.register_forward_pre_hook(lambda _, args: kept.append((args[0], args[1])))
    inputs: list[Tensor] = []
    model.head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    assert model(images(64, 1)).shape == (2, 3)
    assert [tuple(maps.shape[1:]) for maps, _ in kept] == [(16, 16, 16), (32, 8, 8)]
    assert all(tuple(gating.shape[1:]) == (32, 4, 4) for _, gating in kept)
    assert inputs[0].shape == (2, 16 + 32 + 32)
    torch.testing.assert_close(inputs[0][:, 48:], kept[0][1].mean((2, 3)))


def test_the_papers_multitask_unet() -> None:
    """VGG-16's 13 convolutions with a norm before each ReLU, 7 x 7 pooling, two layers of 4096 and dropout."""
    with torch.device("meta"):
        model = MultitaskUNet(25)
    convolutions = [m.out_channels for m in model.encoder.modules() if isinstance(m, nn.Conv2d)]
    assert convolutions == [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.encoder.modules()) == 13
    assert [type(m) for m in model.head] == [
        nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear, nn.ReLU, nn.Dropout, nn.Linear, nn.ReLU, nn.Dropout, nn.Linear,
    ]  # fmt: skip
    linear = [(m.in_features, m.out_features) for m in model.head if isinstance(m, nn.Linear)]
    assert linear == [(512 * 49, 4096), (4096, 4096), (4096, 25)]
    assert [m.p for m in model.head if isinstance(m, nn.Dropout)] == [0.5, 0.5]


@pytest.mark.parametrize("size", [28, 33])
@pytest.mark.parametrize("name", ["ag_sononet_small", "multitask_unet_small", "resnet18_half", "segmented"])
def test_of_any_size_explained_and_exported(name: str, size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    if name == "segmented":
        model: nn.Module = SegmentedClassifier(unet("resnet18", 3, size), build_model("small", 3))
    else:
        model = build_model(name, 3)
    model.eval()
    found = fi.explain(model, images(size), box=(0.0, 1.0))
    assert found.shape == (2, 3, size, size) and bool(found.isfinite().all()) and float(found.abs().sum()) > 0
    if size == 28 and name != "segmented":  # that one is exported where it is trained
        export_model(model, tmp_path / "model.onnx", "onnx", example=images(size))  # proves itself that both are equal
        assert (tmp_path / "model.onnx").stat().st_size > 0


def test_a_shallow_unet_keeps_nothing_idle() -> None:
    for encoder in ("resnet18", "mobilenet_v2", "vgg11"):
        model = unet(encoder, 1, 32)
        model(images(32, 1)).sum().backward()
        assert all(p.grad is not None for p in model.parameters()), encoder


def test_half_a_resnet18_is_one_with_half_the_channels() -> None:
    half, whole = build_model("resnet18_half", 7, channels=3), build_model("resnet18", 7)
    sizes = {name: value.shape for name, value in whole.state_dict().items()}
    assert list(half.state_dict()) == list(sizes)
    for name, value in half.state_dict().items():
        if value.dim() and not name.startswith("fc"):
            assert value.shape[0] == sizes[name][0] // 2, name
    assert sum(p.numel() for p in half.parameters()) < 0.26 * sum(p.numel() for p in whole.parameters())


def test_names_are_listed() -> None:
    assert {"small", "ag_sononet", "multitask_unet"} <= set(model_names())


@pytest.mark.parametrize(("name", "size"), [("vit_b_16", 32), ("vit_tiny_patch16_224", 48), ("resnet18", 33)])
def test_transformers_take_any_multiple_of_their_patch(name: str, size: int) -> None:
    assert build_model(name, 2, size=size).eval()(images(size)).shape == (2, 2)


@pytest.mark.parametrize(("name", "size", "near"), [("vit_b_16", 40, "32 or 48"), ("vit_tiny_patch16_224", 10, "16")])
def test_a_size_that_does_not_fit_is_one_line(name: str, size: int, near: str) -> None:
    with pytest.raises(UsageError, match=f"patches of 16 pixels, and {size} is not a multiple; take --size {near}."):
        build_model(name, 2, size=size)
