"""Heatmaps that a run draws at its end, without axes and a scale, which would take longer than the training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from PIL import Image
from torch import Tensor

from fasterisnet.evaluation.overlays import overlay
from fasterisnet.losses import prepare_masks
from fasterisnet.runs import report


def sketch(images: Tensor, maps: Mapping[str, Tensor], masks: Tensor) -> Image.Image:
    """The same pixels as in `heatmap_figure`, one under the other, and nothing around them."""
    outlines, (heatmaps,) = prepare_masks(masks, images.shape[2:]), maps.values()
    pixels = [overlay(*parts) for parts in zip(images, heatmaps, outlines, strict=True)]
    return Image.fromarray(torch.cat(pixels, 1).permute(1, 2, 0).numpy())


@pytest.fixture(autouse=True, scope="module")
def sketches() -> Iterator[None]:
    """For every test in the folder whose conftest.py imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "heatmap_figure", sketch)
        patch.setattr(report, "save_figure", Image.Image.save)
        yield
