"""Two processes (gloo) train as one does; when one of them dies the run ends, says so, and can go on."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from fasterisnet.methods.ranges import Ranges
from fasterisnet.runs.folder import Run
from training.driving import driven

WHOLE = 36  # all training pictures in one batch: one update an epoch
OPTIONS: dict[str, Any] = {
    "data": "drawn?per_class=12&size=16", "model": "training.nets:without_norm", "size": 16, "epochs": 2,
    "batch": WHOLE, "optimizer": "sgd", "lr": 0.1, "schedule": "constant", "clip": 0, "momentum": 0, "workers": 0,
    "ranges": [0.5, 2.0], "precision": "64-true", "watch": ["deceiving"], "accelerator": "cpu",
}  # fmt: skip


def trained(folder: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    done = driven(folder, {**OPTIONS, **changes})
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
    state = Run(folder).load_state()
    assert state is not None
    with (folder / "metrics.csv").open() as file:
        return state["model"], [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "masks", "deep"), [("stochastic", 1.0, False), ("dual", 0.4, False), ("selective", 0.2, True)]
)
def test_two_processes_are_one(tmp_path: Path, method: str, masks: float, deep: bool) -> None:
    """Also when masks are missing, and one process has more of them than the other, or the only ones.

    With deep supervision both rank the depths as one process would.
    """
    changes = {"method": method, "mask_share": masks, "deep_supervision": deep}
    one, metrics = trained(tmp_path / "one", **changes)
    two, logged = trained(tmp_path / "two", devices=2, **changes)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(two[name], value, rtol=1e-6, atol=1e-9, msg=name)
    for row, other in zip(metrics, logged, strict=True):
        assert other == pytest.approx(row, rel=1e-6, abs=1e-9)
    assert metrics[0]["train_loss"] != metrics[1]["train_loss"]


@pytest.mark.slow
def test_batches_that_do_not_divide(tmp_path: Path) -> None:
    """24 pictures in batches of 7: 4 and 3, and of the last three all for one process; with the calibration."""
    changes = {"data": "drawn?per_class=8&size=16", "method": "stochastic", "batch": 7, "ranges": None, "momentum": 0.9}
    changes |= {"calibration_epochs": 1, "calibration_lr": 0.1, "heatmap_weight": 0.7}
    one, metrics = trained(tmp_path / "one", **changes)
    two, logged = trained(tmp_path / "two", devices=2, **changes)
    assert [row["updates"] for row in logged] == [row["updates"] for row in metrics] == [4, 8]
    ranges = [Ranges.load(tmp_path / name / "calibration.json").depths["input"] for name in ("one", "two")]
    for mine, other in zip(*ranges, strict=True):
        assert mine == pytest.approx(other, rel=1e-9)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-6, atol=1e-9, msg=name)
    for row, other in zip(metrics, logged, strict=True):
        assert other == pytest.approx(row, rel=1e-6, abs=1e-9)


MORTAL = {**OPTIONS, "method": "stochastic", "batch": WHOLE // 3, "checkpoint_every": 1, "devices": 2, "model": "small"}
MORTAL |= {"ranges": None, "calibration_epochs": 1, "precision": "32-true"}


@pytest.fixture(scope="module")
def alive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The metrics of a run none of whose processes died."""
    folder = tmp_path_factory.mktemp("ddp") / "whole"
    done = driven(folder, MORTAL)
    assert done.returncode == 0, done.stderr
    return (folder / "metrics.csv").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["step", "error"])
def test_a_process_that_dies_ends_the_run_and_resume_goes_on(tmp_path: Path, alive: bytes, end: str) -> None:
    broken = driven(tmp_path / "run", MORTAL, end, "5", "rank1")
    assert broken.returncode == 1
    cause = {"step": "process 1 was killed (signal 9)", "error": "RuntimeError: something went wrong here"}[end]
    last = broken.stderr.splitlines()[-1]
    assert cause in last and f"go on with: fasterisnet train --resume {tmp_path / 'run'}" in last
    done = driven(tmp_path / "run", MORTAL, "resume")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == alive
