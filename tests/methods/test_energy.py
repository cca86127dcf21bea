"""Relevance inside the mask, and maps learned from a teacher: their formulas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.errors import InputError
from methods.tester import Residual, filled, labels_for, masks_for, pictures


def network(seed: int = 0, classes: int = 3) -> Residual:
    return filled(Residual(classes=classes, width=3).double(), seed).eval()


def test_energy_of_a_linear_network() -> None:
    """There gradient times input is `x * w`."""
    model, images = nn.Sequential(nn.Flatten(), nn.Linear(144, 3)).double(), pictures()
    labels, masks = labels_for(images), masks_for(images)
    parts = fi.Energy(penalty=2.5, rule="gradient").loss(model, images, labels, masks)
    outside = 0.0
    for image, label, mask in zip(images, labels, masks, strict=True):
        relevance = (image * model[1].weight[label].view_as(image)).abs().detach()
        outside += float(1 - relevance[:, mask[0]].sum() / relevance.sum()) / len(images)
    assert float(parts.background.detach()) == pytest.approx(outside, rel=1e-8)
    wanted = F.cross_entropy(model(images), labels) + 2.5 * outside
    torch.testing.assert_close(parts.total, wanted, rtol=1e-8, atol=0)


@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gamma", "gradient"])
@pytest.mark.parametrize("task", ["classes", "one logit", "several labels"])
def test_energy_of_any_rule(rule: str, task: str) -> None:
    model, images = network(classes=1 if task == "one logit" else 3), pictures()
    masks, box = masks_for(images), None if rule == "gradient" else (0.0, 1.0)
    labels = labels_for(images) if task == "classes" else torch.tensor([0, 1, 1, 0])
    labels = torch.tensor([[1, 0, 1], [0, 0, 1], [0, 1, 0], [1, 1, 1]]).double() if "labels" in task else labels
    target = {
        "classes": labels,
        "one logit": 0,
        "several labels": lambda logits: (logits * labels).sum(1),
    }[task]
    maps = fi.explain(model, images, target, rule=rule, box=box).abs()
    share = (maps * masks).sum((1, 2, 3)) / maps.sum((1, 2, 3))
    parts = fi.Energy(rule=rule, box=(0.0, 1.0)).loss(model, images, labels, masks)
    torch.testing.assert_close(parts.heatmap, (1 - share).mean(), rtol=1e-7, atol=0)
    if task == "several labels":  # nothing is there: nothing is explained
        nothing = fi.Energy(rule=rule).loss(model, images, torch.zeros_like(labels), masks)
        assert nothing.heatmap.item() == 0 and not nothing.skipped


def test_samples_without_mask_stay_out() -> None:
    model, images = network(), pictures()
    labels, masks = labels_for(images), masks_for(images)
    for method in (fi.Energy(), fi.Distillation(teacher=network(3))):
        some = method.loss(model, images, labels, [masks[0], None, None, None])
        alone = method.loss(model, images[:1], labels[:1], masks[:1])
        torch.testing.assert_close(some.heatmap, alone.heatmap, rtol=1e-10, atol=0)
        assert method.loss(model, images, labels).heatmap.item() == 0


def test_distillation() -> None:
    """`1 - cos` of the student's map of the image and the teacher's of the object alone."""
    model, teacher, images = network(), network(3), pictures()
    labels, masks = labels_for(images), masks_for(images)
    parts = fi.Distillation(penalty=3.0, teacher=teacher, box=(0.0, 1.0)).loss(model, images, labels, masks)
    mine = fi.explain(model, images, labels, box=(0.0, 1.0)).flatten(1)
    wanted = fi.explain(teacher, images * masks, labels, box=(0.0, 1.0)).flatten(1)
    cosine = (mine * wanted).sum(1) / (mine.norm(dim=1) * wanted.norm(dim=1))
    torch.testing.assert_close(parts.heatmap, (1 - cosine).mean(), rtol=1e-8, atol=0)
    plain = F.cross_entropy(model(images), labels)
    torch.testing.assert_close(parts.total, plain + 3 * (1 - cosine).mean(), rtol=1e-8, atol=0)
    parts.total.backward()
    assert all(p.grad is None for p in teacher.parameters())


def test_a_teacher_from_a_file_is_read_before_the_first_step(tmp_path: Path) -> None:
    images = pictures()
    batch = images, labels_for(images), masks_for(images)
    torch.save(network(3).state_dict(), tmp_path / "teacher.pt")
    method = fi.Distillation(teacher=tmp_path / "teacher.pt")
    assert method.begin(network(), images) == [f"Teacher: {tmp_path / 'teacher.pt'}."]
    wanted = fi.Distillation(teacher=network(3)).loss(network(), *batch).total
    torch.testing.assert_close(method.loss(network(), *batch).total, wanted, rtol=1e-10, atol=0)
    with pytest.raises(InputError, match="distillation needs a teacher"):
        fi.Distillation()
    with pytest.raises(InputError, match=r"has no fc\.weight that fits the model"):
        fi.Distillation(teacher=tmp_path / "teacher.pt").begin(network(classes=4), images)
