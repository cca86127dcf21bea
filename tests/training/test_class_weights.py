"""Samples of rare classes count for more in the classification loss, in every method and every process alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fasterisnet.data.base import Source, Subset
from fasterisnet.data.drawn import drawn_source
from fasterisnet.errors import InputError, UsageError
from fasterisnet.losses.classification import class_weights, classification_loss
from fasterisnet.methods import Standard, Stochastic
from fasterisnet.models import build_model
from fasterisnet.runs.config import Config
from fasterisnet.training import loop
from fasterisnet.training.console import Watcher
from fasterisnet.training.setup import check_options, weights_of
from fasterisnet.training.step import LoggedStep

LABELS = torch.tensor([0, 0, 0, 1, 2, 0])
WEIGHTS = torch.tensor([0.5, 2.0, 3.0])


def test_the_loss_is_a_sum_over_samples_by_the_weight_of_their_class() -> None:
    logits = torch.randn(6, 3, dtype=torch.float64)
    each = F.cross_entropy(logits, LABELS, reduction="none")
    with class_weights(WEIGHTS):
        found = classification_loss(logits, LABELS)
        halves = [classification_loss(logits[i::2], LABELS[i::2]) for i in range(2)]
        with pytest.raises(InputError, match="class indices"):
            classification_loss(logits, torch.zeros(6, 3))
    assert found == pytest.approx(float((each * WEIGHTS[LABELS]).sum() / 6))
    assert sum(halves) / 2 == pytest.approx(float(found))  # what two processes have is the whole
    assert classification_loss(logits, LABELS) == pytest.approx(float(each.mean()))


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32])
def test_class_indices_of_any_integer_type(kind: torch.dtype) -> None:
    logits = torch.randn(6, 3)
    for weights in (None, WEIGHTS):
        with class_weights(weights):
            assert classification_loss(logits, LABELS.to(kind)) == classification_loss(logits, LABELS)


@pytest.mark.parametrize("method", [Standard(), Stochastic(0.5, ranges=(0.1, 10.0))])
def test_every_method_is_weighted(method: Any) -> None:
    torch.manual_seed(0)
    model, images = build_model("small", 3), torch.rand(6, 3, 16, 16)
    masks = torch.zeros(6, 1, 16, 16)
    masks[..., 4:12, 4:12] = 1
    losses = []
    for weights in (None, torch.ones(3), WEIGHTS):
        torch.manual_seed(1)
        method.generator = torch.Generator().manual_seed(0)
        losses.append([part.detach() for part in LoggedStep(model, method, weights)(images, LABELS, masks)])
    assert losses[0][0] == pytest.approx(float(losses[1][0]), rel=1e-6)
    with torch.no_grad():
        each = F.cross_entropy(model(images), LABELS, reduction="none")
    assert losses[2][1][0] == pytest.approx(float((each * WEIGHTS[LABELS]).sum()), rel=1e-4)
    assert abs(float(losses[2][0] - losses[0][0])) > 1e-3
    assert "weights" not in LoggedStep(model, method, WEIGHTS).state_dict()


def config(**options: Any) -> Config:
    return Config(data="drawn", method="standard", **options)


def test_balanced_and_given() -> None:
    source = drawn_source(per_class=4, size=16)
    train = source.split("train")
    chosen = [i for i in range(len(train)) if train.label(i) != 0] + [
        next(i for i in range(len(train)) if train.label(i) == 0)
    ]
    found = weights_of(config(class_weights="balanced"), source, Subset(train, chosen))
    torch.testing.assert_close(found, torch.tensor([9 / 3, 9 / 12, 9 / 12]))
    torch.testing.assert_close(weights_of(config(class_weights="1,2,0.5"), source, train), torch.tensor([1, 2, 0.5]))
    assert weights_of(config(), source, train) is None
    with pytest.raises(UsageError, match="2 numbers for 3 classes"):
        weights_of(config(class_weights=[1, 2]), source, train)
    with pytest.raises(UsageError, match="several can be true"):
        weights_of(config(class_weights="balanced"), Source(source.classes, source.splits, True), train)
    with pytest.raises(UsageError, match="twice"):
        check_options(config(class_weights="balanced", sampling="balanced"))
    for wrong in ("even", [1, -1], [], 0):
        with pytest.raises(UsageError, match="balanced, or a list"):
            config(class_weights=wrong)


class Listener(Watcher):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def test_a_run_says_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "write_report", lambda *_, **__: None)
    heard = Listener()
    options: dict[str, Any] = {
        "model": "small",
        "size": 16,
        "epochs": 1,
        "batch": 9,
        "workers": 0,
        "accelerator": "cpu",
    }
    options |= {"tensorboard": False, "out": str(tmp_path), "class_weights": [1.0, 2.0, 0.25]}
    loop.train(Config(data="drawn?per_class=3&size=16", method="standard", **options), watcher=heard)
    assert "Weights of the classes in the classification loss: disc 1, cross 2, triangle 0.25" in heard.lines
