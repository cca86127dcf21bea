"""Networks that learn masks, in one run: how well they draw, and that a run in two stages can be stopped anywhere."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fasterisnet.cli import main
from fasterisnet.errors import InputError, UsageError
from fasterisnet.evaluation.export import export_model
from fasterisnet.methods import unet_classifier
from fasterisnet.models.unets import SegmentedClassifier
from fasterisnet.runs.config import Config
from fasterisnet.runs.folder import Run
from fasterisnet.training import loop
from training.driving import driven
from training.nets import plain_segmenter

COMMON: dict[str, Any] = {
    "data": "drawn?size=16&per_class=8", "size": 16, "batch": 12, "optimizer": "sgd", "lr": 0.1, "workers": 0,
    "schedule": "constant", "settled": 0.0, "accelerator": "cpu", "tensorboard": False,
}  # fmt: skip
STAGES = {**COMMON, "method": "unet-classifier", "model": "small", "epochs": 5, "segmentation_epochs": 3}


@pytest.fixture(autouse=True)
def no_pictures() -> Iterator[None]:
    """They take longer than the training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fasterisnet.runs.report.picture", lambda *_: None)
        yield


def rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open() as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


# --- how well they draw -----------------------------------------------------------------------------------------------


def test_the_unet_learns_the_masks_and_the_classifier_what_it_leaves(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    changes = {"data": "drawn?size=32&per_class=32", "size": 32, "schedule": "onecycle", "batch": 8}
    loop.train(Config(**{**STAGES, **changes, "epochs": 4, "out": str(folder)}))
    logged = rows(folder)
    best = max(logged[:3], key=lambda row: row["val_iou"])
    assert [row["val_segmentation"] == row["val_loss"] for row in logged] == [True] * 3 + [False]
    assert logged[3]["val_iou"] == best["val_iou"] > 0.9 and logged[3]["val_threshold"] == best["val_threshold"]
    run = Run(folder)
    assert run.report is not None and all(test["iou"] > 0.9 for test in run.report["tests"].values())
    assert "| IoU |" in (folder / "report.md").read_text()
    segmenter, card = run.load_weights("best-until-3")
    final, last = run.load_weights()
    assert card.epoch == best["epoch"] and last.epoch == 4 and last.shape == {"segmenter": "resnet18", "empty": "black"}
    assert all(torch.equal(final[key], value) for key, value in segmenter.items() if not key.startswith("classifier"))
    assert not torch.equal(final["classifier.0.weight"], segmenter["classifier.0.weight"])
    model, _ = run.load_model()
    assert isinstance(model, SegmentedClassifier) and float(model.threshold) == pytest.approx(best["val_threshold"])
    export_model(model, tmp_path / "run.onnx", "onnx", example=torch.rand(2, 3, 32, 32))


def test_the_multitask_unet_draws_and_classifies(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    changes = {"data": "drawn?size=32&per_class=32", "size": 32, "schedule": "onecycle", "batch": 8, "epochs": 4}
    options = {**COMMON, **changes, "method": "multitask-unet", "model": "multitask_unet_small", "out": str(folder)}
    loop.train(Config(**options))
    last = rows(folder)[-1]
    assert last["val_iou"] > 0.9
    total = 0.99 * last["val_segmentation"] + 0.01 * last["val_classification"]
    assert last["val_loss"] == pytest.approx(total, rel=1e-6)
    report = Run(folder).report
    assert report is not None and all(t["iou"] > 0.9 and "accuracy" in t for t in report["tests"].values())


# --- stopped anywhere -------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """Where a test ends a run."""


@pytest.fixture
def small_segmenter(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_encoder: str, channels: int, _size: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(channels), plain_segmenter(channels))

    monkeypatch.setattr(unet_classifier, "unet", build)


def outcome(folder: Path) -> dict[str, bytes]:
    state = Run(folder).load_state()
    assert state is not None
    names = ("best.safetensors", "best-until-3.safetensors", "metrics.csv", "report.json")
    return {n: (folder / n).read_bytes() for n in names} | {k: v.numpy().tobytes() for k, v in state["model"].items()}


def stopping(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, calls: int) -> None:
    """The function ends the run when it is called for the so-manieth time."""
    function, left = getattr(place, name), iter(range(calls - 1))

    def stopped(*arguments: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise Stopped
        return function(*arguments, **options)

    monkeypatch.setattr(place, name, stopped)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("stages") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fasterisnet.runs.report.picture", lambda *_: None)
        patch.setattr(unet_classifier, "unet", lambda _e, c, _s: nn.Sequential(nn.BatchNorm2d(c), plain_segmenter(c)))
        loop.train(Config(**STAGES, checkpoint_every=1, out=str(folder)))
    return outcome(folder)


# two updates an epoch and a state after each; states: one at the start, then two an epoch
PLACES = [(loop.Training, "_update", n) for n in (2, 7)] + [(Run, "save_state", n) for n in (7, 9)]


@pytest.mark.parametrize(("place", "name", "calls"), PLACES)
def test_stopped_in_any_stage_it_ends_with_the_same_bytes(
    tmp_path: Path, whole: dict[str, bytes], small_segmenter: None, place: Any, name: str, calls: int
) -> None:
    """Also between the best weights of an epoch and the state that knows of them."""
    config = Config(**STAGES, checkpoint_every=1, out=str(tmp_path / "run"))
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, place, name, calls)
        with pytest.raises(Stopped):
            loop.train(config)
    loop.train(config, resume=True)
    assert outcome(tmp_path / "run") == whole


def test_each_stage_has_its_own_schedule(tmp_path: Path, small_segmenter: None) -> None:
    loop.train(Config(**{**STAGES, "schedule": "cosine", "out": str(tmp_path / "run")}))
    rates = [row["lr"] for row in rows(tmp_path / "run")]
    assert rates[0] > rates[1] > rates[2] < rates[3] > rates[4]


def test_the_classifier_may_stop_early_the_segmenter_may_not(tmp_path: Path, small_segmenter: None) -> None:
    options = {"lr": 0.0, "epochs": 8, "early_stopping": 1, "model": "training.nets:without_norm"}
    loop.train(Config(**{**STAGES, **options, "out": str(tmp_path / "run")}), trust=True)
    assert len(rows(tmp_path / "run")) == 5  # three of the segmenter, the best of the classifier, and one without gain


# --- two processes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "model"), [("unet-classifier", "behind_plain_segmenter"), ("multitask-unet", "Drawing")]
)
def test_two_processes_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, model: str) -> None:
    """In float64, with masks missing and a last batch that only one process has samples of."""
    options = {**COMMON, "method": method, "model": f"training.nets:{model}", "epochs": 2, "precision": "64-true"}
    options |= {"batch": 23, "momentum": 0.9, "mask_share": 0.6, "clip": 0}
    monkeypatch.setattr(unet_classifier, "unet", unet_classifier.unet)  # the model replaces it
    loop.train(Config(**options, out=str(tmp_path / "one")), trust=True)
    done = driven(tmp_path / "two", {**options, "devices": 2})
    assert done.returncode == 0, done.stderr
    one, two = (Run(tmp_path / name).load_state() for name in ("one", "two"))
    assert one is not None and two is not None
    for name, value in one["model"].items():
        torch.testing.assert_close(two["model"][name], value, rtol=1e-6, atol=1e-9, msg=name)
    for row, other in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        assert other == pytest.approx(row, rel=1e-6, abs=1e-9)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"segmentation_epochs": 5}, "both need at least one"),
        ({"segmenter": "resnet19"}, "no encoder 'resnet19'"),
        ({"method": "multitask-unet", "segmentation_epochs": 0}, "draws masks, which a Sequential does not"),
        ({"method": "standard"}, "segmentation_epochs is 3, but the method standard has no such option"),
        ({"method": "standard", "segmentation_epochs": 0, "model": "vit_b_16", "size": 20}, "not a multiple"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((InputError, UsageError), match=words) as caught:
        loop.train(Config.read(None, {**STAGES, **changes, "out": str(tmp_path / "run")}))
    assert "\n" not in str(caught.value) and not (tmp_path / "run" / "config.yaml").exists()


def test_the_multitask_unet_needs_no_model() -> None:
    assert Config(data="drawn", method="multitask-unet").model == "multitask_unet"
    assert Config(data="drawn", method="unet-classifier").model == Config(data="drawn").model == "resnet50"


def test_a_hostile_card_builds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = {
        "model": "small", "classes": ["a", "b"], "multi_label": False, "preparation": {"size": 16}, "zb": True,
        "method": "unet-classifier", "epoch": 1, "validation_loss": 0.5, "shape": {"segmenter": "../x"},
    }  # fmt: skip
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "best.safetensors", {"card": json.dumps(card)})
    with pytest.raises(InputError, match=r"no encoder '../x'"):
        Run(tmp_path).load_model()
    card["shape"] = {"segmenter": ["resnet18"]}
    save_file({"x": torch.zeros(1)}, tmp_path / "best.safetensors", {"card": json.dumps(card)})
    with pytest.raises(InputError, match="'shape' of its card"):
        Run(tmp_path).load_model()
    assert main(["explain", str(tmp_path), str(tmp_path / "best.safetensors")]) != 0
    capsys.readouterr()
