"""Images, masks, labels, batches and answers as other libraries make them; a classification loss of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import tv_tensors

import fasterisnet as fi
from fasterisnet.errors import InputError
from fasterisnet.methods import METHODS, Method, options_of
from fasterisnet.models.unets import MultitaskUNet, SegmentedClassifier
from training.nets import plain_segmenter

# Those that draw masks have networks of their own; the others take any.
DRAWING = ["multitask-unet", "unet-classifier"]
ANY = [name for name in METHODS if name not in DRAWING]


def made(name: str, **options: Any) -> Method:
    own: dict[str, Any] = {"ranges": (0.1, 0.4)} if METHODS[name].needs_ranges else {}
    if name == "distillation":
        own["teacher"] = network()
    if name == "unet-classifier":
        own["segmentation_epochs"] = 1
    method = METHODS[name](**own, **options)
    method.set_epoch(1)
    method.generator = torch.Generator().manual_seed(3)
    return method


def network(name: str = "") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 5, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(20, 3)),
    )
    if name == "multitask-unet":
        drawing = MultitaskUNet(3, 3, width=4, depth=2, dense=8)
        drawing.head[4].p = drawing.head[7].p = 0.0
        return drawing
    return SegmentedClassifier(plain_segmenter(3), model) if name == "unet-classifier" else model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    masks = torch.zeros(4, 1, 8, 8)
    masks[:, :, 2:6, 2:6] = 1
    return torch.rand(4, 3, 8, 8, generator=source), torch.tensor([0, 1, 2, 0]), masks


class Meta(Tensor):
    """Like MONAI's MetaTensor: whatever is computed of one is one."""


KINDS: dict[str, Any] = {
    "like MetaTensor": [lambda t: t.as_subclass(Meta)] * 3,
    "tv_tensors": [tv_tensors.Image, lambda t: t, lambda t: tv_tensors.Mask(t.to(torch.uint8))],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_subclasses_of_tensors(name: str, kind: str) -> None:
    """The same numbers, as plain tensors; `state` of the subclass is of no interest to a loss."""
    given = [of(t) for of, t in zip(KINDS[kind], batch(), strict=True)]
    assert type(given[0]) is not Tensor
    wanted, found = (made(name).loss(network(name), *tensors) for tensors in (batch(), given))
    for part in ("total", "classification", "background", "foreground", "heatmap", "logits"):
        assert type(getattr(found, part)) is Tensor, part
        assert torch.equal(getattr(found, part), getattr(wanted, part)), part


def test_explain_takes_subclasses() -> None:
    model, images = network().eval(), batch()[0]
    found = fi.explain(model, images.as_subclass(Meta), box=(0, 1))
    assert type(found) is Tensor and torch.equal(found, fi.explain(model, images, box=(0, 1)))


@dataclass
class Answer:
    """As of HuggingFace."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...] = ()


class Answering(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pixel_values: Tensor) -> Answer:
        return Answer(self.inner(pixel_values))


@pytest.mark.parametrize("name", ANY)
def test_answers_that_hold_logits(name: str) -> None:
    wanted, found = (made(name).loss(model, *batch()) for model in (network(), Answering(network())))
    assert torch.equal(found.total, wanted.total) and torch.equal(found.logits, wanted.logits)


def test_batches_that_are_dictionaries() -> None:
    images, labels, masks = batch()
    as_tuples = fi.calibrate(fi.Dual(), network(), [(images, labels, masks)], epochs=1)
    named = {"image": images.as_subclass(Meta), "label": labels, "mask": masks}
    assert fi.calibrate(fi.Dual(), network(), [named], epochs=1) == as_tuples
    others = {"pixel_values": images, "labels": labels}
    assert fi.calibrate(fi.Dual(), network(), [others], epochs=1, keys=("pixel_values", "labels")) == as_tuples
    with pytest.raises(InputError, match=r"no 'image', only pixel_values, labels; .*keys="):
        fi.calibrate(fi.Dual(), network(), [others], epochs=1)


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


LOSSES = {
    "class weights": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])),
    "label smoothing": partial(F.cross_entropy, label_smoothing=0.2),
    "focal": focal,
}


@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("name", METHODS)
def test_a_classification_loss_of_ones_own(name: str, which: str) -> None:
    images, labels, masks = batch()
    method, plain = made(name, classification=LOSSES[which]), made(name)
    found, usual = (m.loss(network(name), images, labels, masks) for m in (method, plain))
    wanted = LOSSES[which](usual.logits, labels)
    assert torch.allclose(found.classification, wanted) and not torch.allclose(wanted, usual.classification)
    assert torch.equal(found.heatmap, usual.heatmap)
    assert torch.allclose(found.total, method.combine(wanted, usual.heatmap))


def test_calibration_trains_with_it() -> None:
    images, labels, _ = batch()
    steps: list[float] = []
    method = fi.Dual(classification=focal)
    fi.calibrate(method, network(), [(images, labels)], epochs=0, progress=lambda *step: steps.append(step[2]))
    assert steps == [pytest.approx(float(focal(network()(images).detach(), labels)), rel=1e-5)]


@pytest.mark.parametrize(("bad", "words"), [(3, "function of logits"), (lambda a, b: 1.0, "float"),
                                            (partial(F.cross_entropy, reduction="none"), r"shape \(4,\)")])  # fmt: skip
@pytest.mark.parametrize("name", METHODS)
def test_what_is_no_loss_is_refused(name: str, bad: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        made(name, classification=bad).loss(network(name), *batch())


@pytest.mark.parametrize("name", ANY)
def test_logits_keep_their_gradient_on_request(name: str) -> None:
    """A further loss on the logits adds its own gradient to that of the method."""
    assert not made(name).loss(network(), *batch()).logits.requires_grad
    models = [network().double() for _ in range(2)]
    images, labels, masks = batch()
    parts = made(name, attached_logits=True).loss(models[0], images.double(), labels, masks)
    (parts.total + 3 * parts.classification.detach() * parts.logits.sum()).backward()
    parts = made(name, attached_logits=True).loss(models[1], images.double(), labels, masks)
    parts.total.backward(retain_graph=True)
    (3 * parts.classification.detach() * parts.logits.sum()).backward()
    assert parts.logits.requires_grad
    for both, one in zip(*(model.parameters() for model in models), strict=True):
        assert both.grad is not None and one.grad is not None
        assert torch.allclose(both.grad, one.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", METHODS)
def test_repr_shows_what_makes_the_loss(name: str) -> None:
    """A change of any option of the loss changes it; where draws come from does not."""
    changes: dict[str, Any] = {
        "heatmap_weight": 0.37, "decay": 0.37, "background_weight": 0.37, "foreground_weight": 0.0, "e": 0.37,
        "epsilon": 0.37, "box": None, "ranges": (0.37, 0.38), "deep_supervision": ["4"], "foreground": "square",
        "maps_at_once": 2, "classification": focal, "penalty": 0.37, "mining_weight": 0.37, "supervision_weight": 0.37,
        "exact": False, "mining_score": "probability", "rule": "zplus", "feather": 3, "fill": "blur",
        "segmentation_weight": 0.37, "segmentation_epochs": 37, "segmenter": "resnet34", "empty": "whole",
    }  # fmt: skip
    kind, usual = METHODS[name], repr(made(name))
    assert usual.startswith(f"{kind.__name__}(") and " at 0x" not in usual
    assert repr(made(name)) == usual and "classification=focal" in repr(made(name, classification=focal))
    for option in options_of(kind):
        if option in changes and not (option == "box" and getattr(made(name), "box", None) is None):
            other = made(name)
            setattr(other, option, changes[option])
            assert repr(other) != usual, option
