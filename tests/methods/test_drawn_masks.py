"""The methods that draw masks, against their formulas written out in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet.errors import InputError
from fasterisnet.evaluation.metrics import evaluate
from fasterisnet.losses import intersection_over_union, segmentation_loss
from fasterisnet.methods import MultitaskUNet, Parts, UNetClassifier
from fasterisnet.methods.unet_classifier import THRESHOLDS
from fasterisnet.models.unets import MultitaskUNet as Network
from fasterisnet.models.unets import SegmentedClassifier
from methods.tester import filled, masks_for, pictures
from training.nets import plain_segmenter

WITHOUT = 2  # the sample whose mask is missing


def network(classes: int = 3) -> Network:
    model = filled(Network(classes, 2, width=4, depth=2, dense=8).double())
    model.head[4].p = model.head[7].p = 0.0  # what dropout takes is not repeated
    return model


def pipeline(classes: int = 3, **options: Any) -> SegmentedClassifier:
    torch.manual_seed(3)
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(2 * 9 * 8, classes))
    return SegmentedClassifier(plain_segmenter(2), classifier, **options).double()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    images = pictures()
    masks = masks_for(images)
    masks[WITHOUT] = False
    return images, torch.tensor([0, 2, 1, 2]), masks


def pixel_loss(drawn: Tensor, masks: Tensor) -> Tensor:
    """L_S, one pixel after the other."""
    losses = []
    for i in range(len(drawn)):
        if i != WITHOUT:
            chances = [
                (1 / (1 + (-z).exp()), bool(m)) for z, m in zip(drawn[i].flatten(), masks[i].flatten(), strict=True)
            ]
            losses.append(sum((-(p if m else 1 - p).log() for p, m in chances), torch.zeros(())) / len(chances))
    return sum(losses, torch.zeros(())) / len(losses)


def share(inside: Tensor, mask: Tensor) -> float:
    both = sum(int(a and b) for a, b in zip(inside.flatten(), mask.flatten(), strict=True))
    either = sum(int(a or b) for a, b in zip(inside.flatten(), mask.flatten(), strict=True))
    return both / either


# --- multi-task U-Net -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.99, 0.3])
def test_multitask_formula(weight: float) -> None:
    model, (images, labels, masks) = network(), batch()
    method = MultitaskUNet(weight)
    parts = method.loss(model, images, labels, masks)
    logits, drawn = model.both(images)
    classification = -sum(logits[i].log_softmax(0)[label] for i, label in enumerate(labels)) / 4
    segmentation = pixel_loss(drawn, masks)
    torch.testing.assert_close(parts.total, weight * segmentation + (1 - weight) * classification)
    assert parts.without_mask == 1 and torch.equal(parts.logits, logits)
    overlaps = [share(drawn[i] > 0, masks[i]) for i in range(4) if i != WITHOUT]
    assert float(parts.counts) == pytest.approx(sum(overlaps))
    assert method.measured(model, {"with_mask": 3, "heatmap": 6.0, "overlap": sum(overlaps)}) == {
        "segmentation": 2.0, "iou": pytest.approx(sum(overlaps) / 3),
    }  # fmt: skip
    parts.total.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("labels", [torch.tensor([[0], [1], [1], [0]]), torch.eye(4, 3)])
@pytest.mark.parametrize("make", [network, pipeline])
def test_one_logit_and_several_labels(labels: Tensor, make: Any) -> None:
    images, _, masks = batch()
    model = make(labels.shape[1])
    method = MultitaskUNet(0.5) if make is network else UNetClassifier(1)
    method.set_epoch(1)
    parts = method.loss(model, images, labels, masks)
    wanted = F.binary_cross_entropy_with_logits(model(images), labels.double())
    torch.testing.assert_close(parts.classification, wanted)
    assert len(parts.logits) == 4


def test_no_masks_at_all_leave_the_classification() -> None:
    model, (images, labels, _) = network(), batch()
    parts = MultitaskUNet(0.25).loss(model, images, labels)
    torch.testing.assert_close(parts.total, 0.75 * parts.classification)
    assert parts.without_mask == 4 and float(parts.heatmap.detach()) == 0


def test_a_network_that_draws_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="draws masks, which a Sequential does not; leave the model out"):
        MultitaskUNet.network(nn.Sequential(), 3, 32)
    with pytest.raises(InputError, match=r"UNetClassifier.network\(model, channels, size\) of the Sequential"):
        UNetClassifier(1).loss(nn.Sequential(), *batch())


# --- U-Net + classifier -----------------------------------------------------------------------------------------------


def test_the_first_stage_is_the_segmenters() -> None:
    model, (images, labels, masks) = pipeline(), batch()
    method = UNetClassifier(2)
    method.epoch_begins(model)
    parts = method.loss(model, images, labels, masks)
    drawn = model.segmenter(images)
    torch.testing.assert_close(parts.total, pixel_loss(drawn, masks))
    assert parts.without_mask == 1 and float(parts.classification) == 0 and parts.logits.numel() == 0
    parts.total.backward()
    assert all(p.grad is None for p in model.classifier.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.segmenter.parameters())


@pytest.mark.parametrize("share_of_zeros", [0.3, 0.7])
def test_the_second_stage_sees_zeros_for_background(share_of_zeros: float) -> None:
    model, (images, labels, masks) = pipeline(), batch()
    chances = model.segmenter(images).detach().sigmoid()
    threshold = float(chances.quantile(share_of_zeros))
    model.threshold.fill_(threshold)
    method = UNetClassifier(2)
    method.set_epoch(2)
    method.epoch_begins(model)
    model.train()
    assert model.classifier.training and not model.segmenter.training
    parts = method.loss(model, images, labels, masks)
    cut = images.clone()
    for i in range(4):
        for row in range(9):
            for column in range(8):
                if float(chances[i, 0, row, column]) <= threshold:
                    cut[i, :, row, column] = 0
    assert 0 < int((cut == 0).sum()) < cut.numel()
    logits = model.classifier(cut)
    torch.testing.assert_close(parts.total, F.cross_entropy(logits, labels))
    torch.testing.assert_close(model(images), logits)
    parts.total.backward()
    assert all(p.grad is None for p in model.segmenter.parameters())
    assert all(p.grad is not None for p in model.classifier.parameters())


def test_the_threshold_is_the_one_of_the_highest_overlap() -> None:
    model, (images, labels, masks) = pipeline(), batch()
    method = UNetClassifier(1)
    parts = method.loss(model, images, labels, masks)
    sums = dict(zip(method.counts, parts.counts.tolist(), strict=True)) | {"with_mask": 3.0, "heatmap": 0.0}
    chances = model.segmenter(images).sigmoid()
    by_hand = {
        t: sum(share(chances[i] > t, masks[i]) for i in range(4) if i != WITHOUT) / 3
        for t in THRESHOLDS
    }  # fmt: skip
    best = max(by_hand, key=lambda t: by_hand[t])
    found = method.measured(model, sums)
    assert found["threshold"] == best and found["iou"] == pytest.approx(by_hand[best])
    row = {f"{part}_{key}": value for part in ("train", "val") for key, value in found.items()} | {"val_loss": 7.0}
    assert f"IoU {by_hand[best]:.3f} above {best}" in method.epoch_ends(model, row)
    assert float(model.threshold) == best and method.score(row) == -found["iou"]
    method.set_epoch(1)
    model.threshold.fill_(0.2)
    assert method.measured(model, sums)["iou"] == pytest.approx(by_hand[0.2]), "frozen: no longer chosen"
    assert method.score(row) == 7.0


@pytest.mark.parametrize("empty", ["black", "whole"])
def test_no_foreground_is_counted_and_said(empty: Any) -> None:
    images, labels, masks = batch()
    model = pipeline(whole=empty == "whole")
    nn.init.constant_(model.segmenter[2].bias, -1e3)  # pyright: ignore[reportIndexIssue, reportArgumentType]
    method = UNetClassifier(1, empty=empty)
    method.set_epoch(1)
    parts = method.loss(model, images, labels, masks)
    assert parts.counts[-1] == 4
    torch.testing.assert_close(model(images), model.classifier(images if empty == "whole" else images * 0))
    row = {"train_empty": 4.0, "val_empty": 0.0, "val_iou": 0.0, "val_threshold": 0.5}
    said = method.epoch_ends(model, row)
    assert f"no foreground in 4 training and 0 validation images ({empty} to the classifier)" in said
    found = evaluate(model, [(images, labels, masks)], ["a", "b", "c"], attention=False)
    assert found["empty_foreground"] == 4 and found["iou"] == 0


def test_stages_need_their_epochs() -> None:
    assert UNetClassifier().plan(9) == [4] and UNetClassifier(2).plan(9) == [2]
    for method, epochs in ((UNetClassifier(), 1), (UNetClassifier(5), 5)):
        with pytest.raises(InputError, match="both need at least one"):
            method.plan(epochs)
    with pytest.raises(InputError, match=r"call plan\(epochs\)"):
        UNetClassifier().loss(pipeline(), *batch())
    with pytest.raises(InputError, match="no encoder 'resnet19'"):
        UNetClassifier.network(nn.Flatten(), 3, 32, segmenter="resnet19")


# --- pieces -----------------------------------------------------------------------------------------------------------


def test_overlap_and_loss_of_nothing() -> None:
    nothing, something = torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    assert intersection_over_union(nothing, nothing) == 1 and intersection_over_union(nothing, something) == 0
    assert float(segmentation_loss(something, nothing, torch.tensor([False]))) == 0
    torch.testing.assert_close(segmentation_loss(nothing, something, torch.tensor([True])), torch.tensor(math.log(2)))


def test_parts_are_means_over_masked_samples() -> None:
    """So that the mean over processes, weighted by their masks, is that of the batch."""
    images, labels, masks = batch()
    for model, method in ((network().eval(), MultitaskUNet()), (pipeline(), UNetClassifier(1))):
        whole, *single = (
            method.loss(model, images[s], labels[s], masks[s]) for s in (slice(0, 4), slice(0, 2), slice(2, 4))
        )
        parts: list[Parts] = single
        together = (2 * parts[0].heatmap + 1 * parts[1].heatmap) / 3
        torch.testing.assert_close(together, whole.heatmap)
        torch.testing.assert_close(parts[0].counts + parts[1].counts, whole.counts)
