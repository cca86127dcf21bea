"""Attention rollout: against a few lines that take a timm ViT apart, and in words where there is none."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from fasterisnet.errors import InputError
from fasterisnet.evaluation.explainers import heatmaps
from fasterisnet.evaluation.rollout import rollout
from fasterisnet.models import build_model


def images(size: int = 64, count: int = 2) -> Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def by_hand(model: nn.Module, batch: Tensor) -> Tensor:
    """Weights of timm's attention from its own layers, one head after the other, tokens as rows."""
    seen: list[Tensor] = []
    for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
        block.attn.register_forward_hook(lambda module, args, _: seen.append(weights(module, args[0])))
    with torch.no_grad():
        model(batch)
    total = torch.eye(seen[0].shape[-1]).double()
    for attention in seen:
        total = 0.5 * (attention + torch.eye(attention.shape[-1])) @ total
    return total


def weights(module: nn.Module, x: Tensor) -> Tensor:
    q, k, _ = module.qkv(x).chunk(3, -1)  # pyright: ignore[reportCallIssue]
    q, k = (t.unflatten(-1, (module.num_heads, -1)).double() for t in (q, k))
    heads = [(q[:, :, h] @ k[:, :, h].mT / q.shape[-1] ** 0.5).softmax(-1) for h in range(q.shape[2])]
    return sum(heads, torch.zeros(())) / len(heads)


@pytest.mark.parametrize("fused", [True, False])
def test_rollout_is_what_a_few_lines_say(fused: bool) -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=3, depth=3).eval()
    for block in model.blocks:
        block.attn.fused_attn = fused
    found = rollout(model, images())
    wanted = by_hand(model, images())[:, 0, 1:].view(-1, 1, 4, 4)
    assert found.shape == (2, 3, 64, 64)
    patches = found.unflatten(3, (4, 16)).unflatten(2, (4, 16)).sum((3, 5)).sum(1, keepdim=True)
    torch.testing.assert_close(patches.double(), wanted, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(wanted, wanted.mean()), "a flat map would prove nothing"


@pytest.mark.parametrize("training", [True, False])
def test_torchvision_is_seen_and_left_as_it_was(training: bool) -> None:
    """Also where PyTorch would take its fast path, which shows no weights; the last of its layers alone is checked."""
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=3, dropout=0.1).train(training)
    kept: list[Tensor] = []
    attend = model.encoder.layers[1].self_attention  # pyright: ignore[reportAttributeAccessIssue]
    handle = attend.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    found = rollout(model, images(32))
    handle.remove()
    assert model.training is training
    _, expected = attend.eval()(kept[0], kept[0], kept[0], need_weights=True)
    first = found.unflatten(3, (4, 8)).unflatten(2, (4, 8)).sum((1, 3, 5)).flatten(1)
    shallow = torchvision.models.VisionTransformer(32, 8, 1, 2, 16, 32, num_classes=3)
    shallow.load_state_dict({k: v for k, v in model.state_dict().items() if "encoder_layer_1" not in k})
    below = torch.eye(17) * 0.5 + 0.5 * one_layer(shallow.eval(), images(32))
    wanted = ((expected + torch.eye(17)) / 2 @ below)[:, 0, 1:]
    torch.testing.assert_close(first, wanted, rtol=1e-4, atol=1e-6)


def one_layer(model: nn.Module, batch: Tensor) -> Tensor:
    kept: list[Tensor] = []
    attend = model.encoder.layers[0].self_attention  # pyright: ignore[reportAttributeAccessIssue]
    attend.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        model(batch)
    return attend(kept[0], kept[0], kept[0], need_weights=True)[1].detach()


def test_without_a_class_token_all_tokens_count() -> None:
    torch.manual_seed(0)
    options = {"img_size": 32, "num_classes": 3, "depth": 2, "class_token": False, "global_pool": "avg"}
    model = timm.create_model("vit_tiny_patch16_224", **options).eval()
    wanted = by_hand(model, images(32)).mean(1).view(-1, 1, 2, 2)
    found = rollout(model, images(32)).unflatten(3, (2, 16)).unflatten(2, (2, 16)).sum((3, 5)).sum(1, keepdim=True)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [("small", 32, "no attention was seen"), ("swin_tiny_patch4_window7_224", 56, "attend over the same tokens")],
)
def test_what_has_no_rollout_says_so(name: str, size: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        heatmaps("rollout", build_model(name, 3, size=size), images(size))
