"""The methods that are no ISNets, through the checks that all methods have in common (see tester.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fasterisnet as fi
from fasterisnet.methods.base import METHODS, Method
from methods.tester import NETS, SETTINGS, Residual, Settled, Tester, distance, filled, gradients

RIVALS: dict[str, Callable[[], Method]] = {
    "RRR": lambda: fi.RRR(penalty=10.0),
    "GAIN": fi.GAIN,
    "GAIN, constant weights": lambda: fi.GAIN(exact=False),
    "Energy": lambda: fi.Energy(box=(0.0, 1.0)),
    "Energy, z+": lambda: fi.Energy(rule="zplus", box=(0.0, 1.0)),
    "Energy, gradient": lambda: fi.Energy(rule="gradient"),
    "Distillation": lambda: fi.Distillation(teacher=filled(Residual(classes=11).double(), 9)),
    "MaskedInput": fi.MaskedInput,
    "BackgroundSwap": lambda: fi.BackgroundSwap(feather=1),
    "BackgroundErase": lambda: fi.BackgroundErase("noise"),
    "Settled, swapped": lambda: Settled(**SETTINGS, augment=fi.BackgroundSwap()),
}
PENALTIES = ["RRR", "GAIN", "Energy", "Distillation"]
DRAWING = ["BackgroundSwap", "BackgroundErase", "Settled, swapped"]
OF_ALL = ["reproducible", "pickle_and_deepcopy", "frozen_parameters", "step_is_the_loss"]
OF_PENALTIES = [
    "batches_do_not_matter", "bfloat16", "few_and_many_classes", "model_is_left_alone", "without_gradients",
    "one_method_serves_several_models", "training_lowers_the_loss",
]  # fmt: skip


class Rival(Tester):
    """A tester of methods that have none of the ISNets' settings."""

    def method(self, **_settings: Any) -> Any:
        method = RIVALS[self.name]()
        method.generator = torch.Generator().manual_seed(4) if self.name in DRAWING else None
        return method

    def independent(self, **settings: Any) -> Any:
        return self.method(**settings)

    def at_work(self) -> tuple[str, ...]:
        return ("background", "foreground") if self.name.startswith("GAIN") else ("background",)

    def check_frozen_parameters(self) -> None:
        """Draws go on from call to call: here everything is drawn anew."""
        if self.name in DRAWING:
            model, images, labels, masks = self.batch()
            wanted = gradients(model, self.method().loss(model, images, labels, masks).total)
            model.conv1.requires_grad_(False)
            self.method().loss(model, images, labels, masks).total.backward()
            assert model.conv1.weight.grad is None
            torch.testing.assert_close(model.fc.weight.grad, wanted["fc.weight"], rtol=1e-9, atol=1e-12)
        else:
            super().check_frozen_parameters()


@pytest.mark.parametrize("check", OF_ALL)
@pytest.mark.parametrize("name", RIVALS)
def test_rival(name: str, check: str) -> None:
    getattr(Rival(name), f"check_{check}")()


@pytest.mark.parametrize("check", OF_PENALTIES)
@pytest.mark.parametrize("name", PENALTIES)
def test_penalty(name: str, check: str) -> None:
    getattr(Rival(name), f"check_{check}")()


@pytest.mark.parametrize("name", ["RRR", "GAIN", "Energy", "Energy, z+", "Energy, gradient"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    Rival(name).check_gradient_with_zb()


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", ["RRR", "GAIN", "Energy"])
def test_finite_on_random_nets(name: str, net: str) -> None:
    Rival(name).finite_on(net, 0)


@pytest.mark.parametrize("name", PENALTIES)
def test_parts_can_be_trained_alone(name: str) -> None:
    model, images, labels, masks = Rival.batch()
    method = Rival(name).method()
    parts = [method.loss(model, images, labels, masks) for _ in range(3)]
    torch.testing.assert_close(
        parts[0].total, method.combine(parts[0].classification, parts[0].heatmap), rtol=1e-12, atol=0
    )
    total, one, two = (gradients(model, loss) for loss in (parts[0].total, parts[1].classification, parts[2].heatmap))
    weight = getattr(method, "penalty", 1.0)
    assert distance({n: one[n] + weight * two[n] for n in one}, total) < 1e-12


def test_every_method_has_its_paragraph() -> None:
    text = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    for name, kind in METHODS.items():
        assert f"**`{name}`**" in text and f"`{kind.__name__}`" in text, name
