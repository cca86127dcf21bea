"""Masks, tasks and refusals beyond those of test_family.py: gradients, depths, other dimensions, messages."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.errors import FasterISNetError
from fasterisnet.losses import gwrp, heatmap_loss, resize_masks
from fasterisnet.losses.masks import _warn_none
from fasterisnet.methods import METHODS as METHODS_BY_NAME
from fasterisnet.methods.ranges import Range
from fasterisnet.targets import EtaOfLowest
from methods.tester import (
    ALL,
    IDS,
    METHODS,
    Residual,
    Tester,
    distance,
    filled,
    gradients,
    labels_for,
    masks_for,
    pictures,
)

FAMILY = [case for case in ALL if case[0] != "Standard"]
NAMES = [name for name in IDS if name != "Standard"]


@pytest.mark.parametrize("case", FAMILY, ids=NAMES)
def test_without_any_mask_only_the_classification_is_trained(case: tuple[str, bool]) -> None:
    model, images, labels, masks = Tester.batch()
    wanted = gradients(model, 0.4 * F.cross_entropy(model(images), labels))
    for absent in (None, [None] * 4, torch.zeros_like(masks), [torch.zeros_like(m) for m in masks]):
        parts = Tester(*case).method().loss(model, images, labels, absent)
        assert parts.without_mask == 4
        assert [float(v.detach()) for v in (parts.background, parts.foreground, parts.heatmap)] == [0, 0, 0]
        assert distance(gradients(model, parts.total), wanted) < 1e-12


@pytest.mark.parametrize("case", FAMILY, ids=NAMES)
def test_a_sample_without_mask_has_no_part_in_the_heatmap_terms(case: tuple[str, bool]) -> None:
    """Neither in their values nor in their gradients, whatever it shows; the classification counts it."""
    model, images, labels, masks = Tester.batch()
    method, kept = Tester(*case).independent(), [0, 2, 3]
    wanted = method.loss(model, images[kept], labels[kept], masks[kept])
    gradient = gradients(model, wanted.heatmap)
    other = images.clone()
    other[1] = pictures(2, 9, 8, seed=8)
    for shown in (images, other):
        parts = method.loss(model, shown, labels, [masks[0], None, masks[2], masks[3]])
        assert (parts.samples, parts.without_mask) == (4, 1)
        for name in ("background", "foreground", "heatmap"):
            torch.testing.assert_close(getattr(parts, name), getattr(wanted, name), rtol=1e-12, atol=0)
        assert distance(gradients(model, parts.heatmap), gradient) < 1e-10
        parts = method.loss(model, shown, labels, [masks[0], None, masks[2], masks[3]])
        plain = F.cross_entropy(model(shown), labels)
        torch.testing.assert_close(parts.classification, plain, rtol=1e-12, atol=0)
        assert distance(gradients(model, parts.classification), gradients(model, plain)) < 1e-12


def test_masks_as_lists_with_or_without_channel() -> None:
    model, images, labels, masks = Tester.batch()
    method = Tester("Dual", True).method()
    wanted = method.loss(model, images, labels, masks).total
    forms: list[Any] = [list(masks), [m[0] for m in masks], tuple(masks.float()), masks.expand(-1, 2, -1, -1)]
    for form in forms:
        assert torch.equal(method.loss(model, images, labels, form).total, wanted)


def test_channels_with_masks_of_their_own() -> None:
    """At the input each channel has its own; at a depth (of any size) a cell is foreground if it is in any channel."""
    model, images, labels, masks = Tester.batch()
    different = torch.cat([torch.zeros_like(masks), masks], 1)
    for depth in ("bn1", "layer1"):
        method = fi.Selective(ranges=(0.3, 0.6), deep_supervision=[depth], decay=0.9)
        maps = fi.explain(model, images, EtaOfLowest(), layers=[depth])
        assert isinstance(maps, dict)
        small = resize_masks(masks, maps[depth].shape[2:])
        cases = ((maps["input"], different), (maps[depth], small))
        wanted = gwrp(torch.stack([heatmap_loss(m.unsqueeze(1), mask, 0.3, 0.6).total for m, mask in cases]), 0.7)
        torch.testing.assert_close(method.loss(model, images, labels, different).heatmap, wanted, rtol=1e-10, atol=0)


@pytest.mark.filterwarnings("ignore:Masks of size")
@pytest.mark.parametrize("factor", [2, 3])
def test_larger_masks_are_shrunk_and_smaller_ones_repeated(factor: int) -> None:
    model, images, labels, masks = Tester.batch()
    method = Tester("Selective").method()
    wanted = method.loss(model, images, labels, masks).total
    large = masks.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    images_large = images.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    assert torch.equal(method.loss(model, images, labels, large).total, wanted)
    small = method.loss(model, images_large, labels, masks).total
    assert torch.equal(small, method.loss(model, images_large, labels, large).total)


@pytest.mark.parametrize("dims", [1, 3])
def test_masks_of_signals_and_volumes(dims: int) -> None:
    model = filled(Residual(dims=dims).double()).eval()
    images = pictures(3, 2, *(8, 6, 7)[:dims])
    labels, masks = labels_for(images), masks_for(images)
    method = Tester("Dual", True).method()
    wanted = method.loss(model, images, labels, masks)
    assert torch.equal(method.loss(model, images, labels, masks[:, 0].float() * 255).total, wanted.total)
    parts = method.loss(model, images, labels, [masks[0], None, masks[2]])
    assert parts.without_mask == 1 and not torch.equal(parts.heatmap, wanted.heatmap)


# --- tasks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_binary_labels_in_any_form(name: str) -> None:
    model, images, _, masks = Tester.batch(classes=1)
    labels = torch.tensor([0, 1, 1, 0])
    forms = [labels, labels.bool(), labels.float(), labels[:, None], labels[:, None].double()]
    found = [Tester(name).method().loss(model, images, form, masks).total for form in forms]
    assert all(torch.equal(total, found[0]) for total in found)


@pytest.mark.parametrize("name", ["Standard", "Original", "Original, two maps at once", "Dual", "Stochastic"])
def test_multi_label_gradient(name: str) -> None:
    model, images, _, masks = Tester.batch()
    labels = torch.tensor([[0, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    parts = Tester(name).method(heatmap_weight=0.0).loss(model, images, labels, masks)
    plain = F.binary_cross_entropy_with_logits(model(images), labels.double())
    assert distance(gradients(model, parts.total), gradients(model, plain)) < 1e-12


# --- refusals -------------------------------------------------------------------------------------------------------


def ranges(**depths: int) -> fi.Ranges:
    return fi.Ranges({name: Range((0.3,) * maps, (0.6,) * maps) for name, maps in depths.items()})


BAD: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "soft masks of 8 bits": ("Dual", {}, {"masks": torch.full((4, 1, 9, 8), 100).byte()}, "masks >= 128"),
    "NaN in masks": ("Dual", {}, {"masks": torch.full((4, 1, 9, 8), torch.nan)}, "[Tt]hreshold"),
    "one None too few": ("Dual", {}, {"masks": [None] * 3}, "3 masks for 4 images; give one for each"),
    "masks that differ": ("Dual", {}, {"masks": [torch.ones(9, 8)] * 3 + [torch.ones(9, 9)]}, "share one shape"),
    "masks without space": ("Dual", {}, {"masks": torch.ones(4, 8)}, "must have 3 dimensions"),
    "masks without a pixel": ("Dual", {}, {"masks": torch.ones(4, 1, 0, 0)}, "have no pixel; give None"),
    "masks of arrays": ("Dual", {}, {"masks": [None] * 3 + [torch.ones(9, 8).numpy()]}, "ndarray; give a tensor"),
    "masks of three channels": ("Dual", {}, {"masks": torch.eye(3)[torch.ones(4, 9, 8).long()].movedim(3, 1)}, "1:2"),
    "masks that fit no channel": (
        "Dual", {}, {"masks": torch.cat([torch.ones(4, 2, 9, 8), torch.zeros(4, 1, 9, 8)], 1)}, "need one channel",
    ),
    "no number as label": ("Original", {}, {"labels": torch.full((4, 3), torch.nan)}, "between 0 and 1"),
    "negative label": ("Selective", {}, {"labels": torch.tensor([0, -1, 0, 0])}, "0 to 2"),
    "two columns for three": ("Original", {}, {"labels": torch.zeros(4, 2)}, "multi-label targets are"),
    "labels between": ("Original", {}, {"labels": torch.full((4, 3), 1.5)}, "between 0 and 1"),
    "bool indices": ("Original", {}, {"labels": torch.zeros(4, dtype=torch.bool)}, "give integers"),
    "a single label": ("Original", {}, {"labels": torch.tensor(1)}, "give one for each"),
    "softmax of multi-label": ("SoftmaxGradInput", {}, {"labels": torch.zeros(4, 3)}, "use Stochastic"),
    "Stochastic's ranges for Dual": ("Dual", {"ranges": ranges(input=1)}, {}, "calibrate again"),
    "Dual's ranges for Original": ("Original", {"ranges": ranges(input=2)}, {}, "calibrate again"),
    "the same, in groups": ("Original, two maps at once", {"ranges": ranges(input=2)}, {}, "calibrate again"),
    "five maps, in groups": ("Original, two maps at once", {"ranges": ranges(input=5)}, {}, "calibrate again"),
    "a depth is missing": (
        "Selective", {"ranges": ranges(input=1, layer1=1), "deep_supervision": ["layer2"]}, {}, "layer2.*calibrate",
    ),
    "no such layer": ("Selective", {"deep_supervision": ["layer9"]}, {}, "layer9.*not a module"),
    "no module names": ("Selective", {"deep_supervision": [3]}, {}, "module names"),
    "a vector": ("Selective", {"deep_supervision": ["fc"]}, {}, "name modules"),
    "box upside down": ("Selective", {"box": (1, 0)}, {}, "low is above high"),
    "box of three channels": ("Selective", {"box": ([0, 0, 0], [1, 1, 1])}, {}, "3 numbers for images of 2 channels"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refusals_say_what_to_do(case: str) -> None:
    name, settings, changes, message = BAD[case]
    model, images, labels, masks = Tester.batch()
    arguments: dict[str, Any] = {"labels": labels, "masks": masks, **changes}
    with pytest.raises(FasterISNetError) as caught:
        Tester(name).method(**settings).loss(model, images, **arguments)
    assert re.search(message, str(caught.value)), caught.value


def test_calibrated_ranges_fit_groups_of_maps() -> None:
    """Every map keeps its own C1 and C2, whether maps come together or in groups."""
    model, images, labels, masks = Tester.batch()
    own = fi.Ranges({"input": Range((0.1, 0.5, 2.0), (0.2, 0.9, 5.0))})
    losses: list[Tensor] = []
    for maps_at_once in (None, 1, 2):
        method = fi.Original(ranges=own, maps_at_once=maps_at_once)
        losses.append(method.loss(model, images, labels, masks).total)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(losses[2], losses[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["background-swap", "background-erase", "gain", "rrr", "energy", "masked-input"])
def test_classes_of_a_segmentation_are_no_mask(name: str) -> None:
    """Background and object as two channels would be an object that fills the image."""
    model, images, labels, masks = Tester.batch()
    with pytest.raises(FasterISNetError, match=r"masks\[:, 1:2\]"):
        METHODS_BY_NAME[name]().loss(model, images, labels, torch.cat([~masks, masks], 1))


def test_forgotten_masks_are_told() -> None:
    model, images, labels, _ = Tester.batch()
    _warn_none.cache_clear()
    with pytest.warns(UserWarning, match="No masks were given"):
        fi.Stochastic(ranges=(0.1, 10)).loss(model, images, labels)


@pytest.mark.parametrize("name", ["stochastic", "rrr", "energy", "gain"])
def test_half_images_under_autocast(name: str) -> None:
    """Trainers hand over images in the precision of autocast; the weights stay in float32."""
    model, images, labels, masks = Tester.batch()
    method = METHODS_BY_NAME[name](**({"ranges": (0.1, 10)} if METHODS_BY_NAME[name].needs_ranges else {}))
    model, images = model.float(), images.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parts = method.loss(model, images.bfloat16(), labels, masks)
    assert parts.total.dtype == torch.float32 and bool(torch.isfinite(parts.total.detach()))
