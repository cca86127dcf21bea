"""A box that does not fit the images is never silent, and the message says what would fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasterisnet as fi
from fasterisnet.errors import InputError
from fasterisnet.lrp.box import IMAGENET


def network(channels: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def values(channels: int = 3) -> Tensor:
    """From 0 to 1, both reached."""
    return torch.linspace(0, 1, 2 * channels * 36).view(2, channels, 6, 6)


def normalised() -> Tensor:
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
    return (values() - mean) / std


def _relevance(model: nn.Module, images: Tensor, box: Any) -> None:
    images = images.clone().requires_grad_()
    fi.relevance(model(images).sum(1), images, box=box)


WAYS: dict[str, Callable[[nn.Module, Tensor, Any], Any]] = {
    "explain": lambda model, images, box: fi.explain(model, images, box=box),
    "relevance": _relevance,
    "check": lambda model, images, box: fi.check(model, images, box=box),
    "captum's": lambda model, images, box: fi.LRP(model, box=box).attribute(images),
    "loss": lambda model, images, box: fi.Dual(ranges=(0.1, 1.0), box=box).loss(
        model, images, torch.tensor([0, 1]), torch.ones(2, 6, 6)
    ),
    "calibration": lambda model, images, box: fi.calibrate(
        fi.Dual(box=box), model, [(images, torch.tensor([0, 1]))], epochs=0
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_refuses(way: str) -> None:
    with pytest.raises(InputError, match="normalised_box"):
        WAYS[way](network(), normalised(), (0.0, 1.0))
    WAYS[way](network(), normalised(), fi.normalised_box(*IMAGENET))


IMAGES: dict[str, tuple[Callable[[], Tensor], Any, str]] = {
    "ImageNet's normalisation": (
        normalised, (0, 1), r"normalised_box\(\[0.485, 0.456, 0.406\], \[0.229, 0.224, 0.225\]\)"
    ),
    "unit images, a normalised box": (lambda: values(), ([0.5] * 3, [2.0] * 3), r"box=\(0, 1\)"),
    "signed": (lambda: 2 * values() - 1, (0, 1), r"box=\(-1, 1\)"),
    "bytes": (lambda: 255 * values(), (0, 1), r"by 255, or use box=\(0, 255\)"),
    "one channel, unknown": (lambda: (values(1) - 0.1307) / 0.3081, (0, 1), r"normalised_box\(mean, std\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", IMAGES)
def test_the_message_says_what_fits(case: str) -> None:
    images, box, words = IMAGES[case]
    with pytest.raises(InputError, match=words):
        fi.explain(network(images().shape[1]), images(), box=box)


def test_the_first_bad_sample_is_named() -> None:
    images = values()
    images[1, 2, 3, 3] = 1.5
    with pytest.raises(InputError, match="first outside: sample 1"):
        fi.explain(network(), images, box=(0, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_is_no_offence(dtype: torch.dtype) -> None:
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
    images = ((values().to(dtype) - mean.to(dtype)) / std.to(dtype)).float()
    fi.explain(network(), images, box=fi.normalised_box(*IMAGENET))


@pytest.mark.parametrize(("mean", "std"), [([0.5], [0.0]), ([0.5], [0.1, 0.2]), ([0.5], [-0.5])])
def test_a_normalisation_that_is_none(mean: list[float], std: list[float]) -> None:
    with pytest.raises(InputError, match="one of each a channel, with std above 0"):
        fi.normalised_box(mean, std)
