"""Right for the Right Reasons, against its formula spelled out with Jacobians."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.errors import InputError
from methods.tester import Residual, filled, labels_for, masks_for, pictures


def network(classes: int = 3) -> Residual:
    return filled(Residual(classes=classes, width=3).double()).eval()


def spelled_out(model: nn.Module, images: Tensor, masks: Tensor, binary: bool) -> list[float]:
    """Of every sample: `sum over the background of (sum_c d log P_c / dx)^2`, from the Jacobian of the logits."""
    found = []
    for image, mask in zip(images, masks, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda x: model(x[None])[0], image)
        logits = model(image[None])[0].detach()
        if binary:  # d(log P + log(1-P)) = (1 - 2 P) dz
            gradient = ((1 - 2 * logits.sigmoid()).view(-1, 1, 1, 1) * jacobian).sum(0)
        else:  # sum_c (dz_c - sum_k P_k dz_k)
            gradient = jacobian.sum(0) - len(logits) * (logits.softmax(0).view(-1, 1, 1, 1) * jacobian).sum(0)
        found.append(float(sum(gradient[c][~mask[0]].square().sum() for c in range(len(image)))))
    return found


@pytest.mark.parametrize("task", ["classes", "one logit", "several labels"])
def test_the_formula(task: str) -> None:
    model, images = network(1 if task == "one logit" else 3), pictures()
    masks = masks_for(images)
    labels = labels_for(images) if task == "classes" else torch.tensor([0, 1, 1, 0])
    labels = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]]).double() if "labels" in task else labels
    parts = fi.RRR(penalty=7.0).loss(model, images, labels, masks)
    penalty = sum(spelled_out(model, images, masks, task != "classes")) / 4
    logits = model(images)
    if task == "classes":
        plain = F.cross_entropy(logits, labels)
    else:
        plain = F.binary_cross_entropy_with_logits(logits, labels.double().view_as(logits))
    torch.testing.assert_close(float(parts.background.detach()), penalty, rtol=1e-10, atol=0)
    torch.testing.assert_close(parts.total, plain + 7 * penalty, rtol=1e-10, atol=0)
    assert penalty > 1e-3


def test_a_sample_counts_the_same_in_any_batch_and_without_a_mask_not_at_all() -> None:
    model, images = network(), pictures()
    labels, masks = labels_for(images), masks_for(images)
    of_each = spelled_out(model, images, masks, False)
    alone = fi.RRR().loss(model, images[:1], labels[:1], masks[:1])
    assert float(alone.background.detach()) == pytest.approx(of_each[0], rel=1e-10)
    parts = fi.RRR().loss(model, images, labels, [masks[0], None, masks[2], torch.zeros_like(masks[0])])
    assert float(parts.background.detach()) == pytest.approx((of_each[0] + of_each[2]) / 2, rel=1e-10)
    assert parts.without_mask == 2
    none = fi.RRR().loss(model, images, labels)
    assert float(none.heatmap.detach()) == 0 and none.without_mask == 4
    torch.testing.assert_close(none.total, F.cross_entropy(model(images), labels), rtol=1e-12, atol=0)


def test_the_papers_weight() -> None:
    assert fi.RRR().penalty == 1000
    with pytest.raises(InputError, match="penalty is -1"):
        fi.RRR(penalty=-1)
