"""Trained networks compute on a GPU if there is one, and nothing asks it for float64, which Apple's does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fasterisnet.cli import main
from fasterisnet.errors import UsageError
from fasterisnet.evaluation.attention import background_mass, highest_pixel_inside, rank_accuracy
from fasterisnet.evaluation.causal import careful
from fasterisnet.evaluation.metrics import evaluate
from fasterisnet.models import build_model
from fasterisnet.runs.device import chosen_device


class Single(Tensor):
    """A tensor on a device without float64; `cpu` brings it home."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.double:
            raise TypeError("this device has no float64")
        found = super().__torch_function__(func, types, args, kwargs)
        return found.as_subclass(Tensor) if func is Tensor.cpu else found


@pytest.fixture
def images() -> Tensor:
    torch.manual_seed(0)
    return torch.rand(4, 3, 16, 16)


@pytest.mark.parametrize("measure", [background_mass, highest_pixel_inside, rank_accuracy])
def test_maps_are_measured_elsewhere(measure: Callable[[Tensor, Tensor], Tensor], images: Tensor) -> None:
    masks = torch.zeros(4, 1, 16, 16, dtype=torch.bool)
    masks[..., 4:12, 4:12] = True
    found = measure(images.as_subclass(Single), masks.as_subclass(Single))
    assert found.dtype == torch.float64 and torch.equal(found, measure(images, masks))


def test_logits_are_measured_elsewhere(images: Tensor) -> None:
    model = build_model("small", 3).eval()
    labels = torch.tensor([0, 1, 2, 0])
    masks = torch.zeros(4, 1, 16, 16)
    wanted, found = (
        evaluate(model, [(given, labels, masks)], ["a", "b", "c"], attention=False)
        for given in (images, images.as_subclass(Single))
    )
    assert found == wanted
    assert careful(model, images.as_subclass(Single))[0].dtype == torch.float64


@pytest.mark.parametrize(
    ("accelerator", "cuda", "mps", "found"),
    [
        ("auto", True, False, "cuda"), ("auto", False, True, "mps"), ("auto", False, False, "cpu"),
        ("gpu", True, True, "cuda"), ("gpu", False, True, "mps"), ("gpu", False, False, None),
        ("mps", True, False, None), ("cpu", True, True, "cpu"),
    ],
)  # fmt: skip
def test_what_is_there_is_taken(
    accelerator: str, cuda: bool, mps: bool, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    if found is None:
        with pytest.raises(UsageError, match="cannot be had"):
            chosen_device(accelerator)
    else:
        assert chosen_device(accelerator).type == found


@pytest.mark.parametrize("command", [["evaluate", "RUN"], ["explain", "RUN", "a.png"], ["audit", "RUN", "--data", "d"]])
def test_every_command_takes_it(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert main([*command, "--accelerator", "gpu"]) == 2
    assert "accelerator 'gpu' cannot be had" in capsys.readouterr().err
