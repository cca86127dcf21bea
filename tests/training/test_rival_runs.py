"""Runs of the methods that are no ISNets: cut and resumed, refused in a line, begun from another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fasterisnet.cli import main
from fasterisnet.errors import InputError, UsageError
from fasterisnet.models import build_model, load_weights
from fasterisnet.runs.config import Config
from fasterisnet.runs.folder import Run
from fasterisnet.training import loop
from fasterisnet.training.console import Watcher
from fasterisnet.training.setup import build_method
from training.test_data_first import data, remove_masks, train

__all__ = ["data"]

OPTIONS: dict[str, Any] = {
    "data": "drawn?per_class=8&size=16", "model": "small", "size": 16, "epochs": 1, "batch": 7, "lr": 0.02,
    "workers": 0, "checkpoint_every": 2, "accelerator": "cpu", "tensorboard": False, "audit": 0,
    "statistics_batches": 0,
}  # fmt: skip
RIVALS: dict[str, dict[str, Any]] = {
    "rrr": {"penalty": 10},
    "gain": {},
    "energy": {},
    "distillation": {},
    "background-swap": {"feather": 1},
    "background-erase": {"fill": "noise"},
    "stochastic": {"augment_background": "swap", "feather": 1, "ranges": [0.1, 10]},
}


class Said(Watcher):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def outcome(folder: Path) -> dict[str, bytes]:
    """What has to be the same to the last bit."""
    state = Run(folder).load_state()
    assert state is not None
    tensors = {key: value.numpy().tobytes() for key, value in state["model"].items()}
    names = ("best.safetensors", "metrics.csv")
    return {**{name: (folder / name).read_bytes() for name in names}, **tensors}


def without_report(*_arguments: Any, **_options: Any) -> None:
    """The tests after the last epoch are not what is tested here."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of masked-input."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "write_report", without_report)
        loop.train(Config(**OPTIONS, method="masked-input", out=str(folder)))
    return folder


@pytest.mark.parametrize("method", RIVALS)
def test_cut_and_resumed_it_ends_with_the_same_bytes(
    method: str, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**OPTIONS, **RIVALS[method], "method": method}
    options |= {"teacher": str(teacher)} if method == "distillation" else {}
    said = Said()
    monkeypatch.setattr(loop, "write_report", without_report)
    loop.train(Config(**options, out=str(tmp_path / "whole")), watcher=said)
    assert any("Grad-CAM at '17': 128 maps of 2 x 2." in line for line in said.lines) == (method == "gain")
    update, count = loop.Training._update, iter(range(100))

    def cut(training: loop.Training) -> None:
        if next(count) == 3:  # the last one was saved after the second
            raise KeyboardInterrupt
        update(training)

    monkeypatch.setattr(loop.Training, "_update", cut)
    with pytest.raises(KeyboardInterrupt):
        loop.train(Config(**options, out=str(tmp_path / "cut")))
    monkeypatch.setattr(loop.Training, "_update", update)
    loop.train(Config(**options, out=str(tmp_path / "cut")), resume=True)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_a_run_can_begin_where_another_one_ended(teacher: Path, tmp_path: Path) -> None:
    model = build_model("small", 3, pretrained=str(teacher))
    weights, _ = Run(teacher).load_weights()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert Config(data="drawn", pretrained=str(teacher)).pretrained == str(teacher)
    with pytest.raises(InputError, match=r"best\.safetensors is not a file; weights come from .* or from a run folder"):
        load_weights(model, tmp_path)


@pytest.mark.parametrize("method", ["rrr", "gain", "background-swap"])
def test_without_any_mask_they_say_so(method: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remove_masks(data)
    capsys.readouterr()
    assert train(data, method=method) == 1
    error = capsys.readouterr().err.strip()
    assert f"The method {method} needs to know where the object is, but none of the 12 training images" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "rrr", "rule": "zplus"}, "rule is 'zplus', but the method rrr has no such option"),
        ({"method": "gain", "penalty": 3}, "penalty is 3.0, but the method gain has no such option"),
        ({"optimizer": "adamw", "momentum": 0.5}, "momentum is 0.5, but adamw has none; add --optimizer sgd"),
        ({"method": "energy", "cam_layer": "layer4"}, "cam_layer is 'layer4', but the method energy"),
        ({"method": "masked-input", "feather": 1}, "feather is 1, but the method masked-input"),
        ({"method": "background-swap", "fill": "blur"}, "fill is 'blur', but the method background-swap"),
        ({"method": "stochastic", "feather": 1}, "feather is 1, but the method stochastic"),
        ({"method": "stochastic", "augment_background": "swap", "fill": "blur"}, "fill is 'blur', but the method"),
        ({"method": "standard", "augment_background": "swap"}, "augment_background is 'swap', but the method standard"),
    ],
)
def test_options_of_others_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Config.read(None, {"data": "drawn", **options})


def test_options_reach_the_method() -> None:
    def built(**options: Any) -> str:
        return repr(build_method(Config.read(None, {"data": "drawn", **options})))

    assert built(method="rrr") == "RRR(penalty=1000.0)" and built(method="rrr", penalty=2) == "RRR(penalty=2.0)"
    assert "rule='zplus'" in built(method="energy", rule="zplus")
    assert "cam_layer='layer3', exact=False" in built(method="gain", cam_layer="layer3", exact=False)
    assert built(method="background-erase", fill="blur", feather=2) == "BackgroundErase(fill='blur', feather=2)"
    swapped = built(method="stochastic", augment_background="swap", feather=2)
    assert swapped.endswith("augment=BackgroundSwap(feather=2))")
    assert "BackgroundErase(fill='noise'" in built(method="gain", augment_background="erase", fill="noise")


def test_what_a_method_needs_is_said_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [
        "train",
        "--data",
        "drawn?per_class=8&size=16",
        "--model",
        "small",
        "--size",
        "16",
        "--out",
        str(tmp_path / "run"),
    ]
    common += ["--accelerator", "cpu", "--workers", "0"]
    for more, message in (
        (["--method", "distillation"], "distillation needs a teacher"),
        (["--method", "distillation", "--teacher", str(tmp_path / "none.pt")], "none.pt is not a file"),
        (["--method", "gain", "--cam-layer", "layer9"], "cam_layer names 'layer9', which is not a module"),
    ):
        assert main([*common, *more]) == 1
        error = capsys.readouterr().err.strip()
        assert message in error and len(error.splitlines()) == 1
        assert not (tmp_path / "run" / "state.pt").exists()
