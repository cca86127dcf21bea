"""A run that was killed anywhere and resumed ends with the same bytes as one that was not."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from fasterisnet.runs.folder import Run
from training.driving import driven

OPTIONS: dict[str, Any] = {
    "data": "drawn?per_class=8&size=16", "method": "stochastic", "model": "small", "size": 16, "epochs": 3, "batch": 6,
    "augmentation": "crop", "workers": 1, "calibration_epochs": 1, "checkpoint_every": 2,
    "watch": ["ood"], "accelerator": "cpu",
}  # fmt: skip


def drive(folder: Path, *arguments: str, **changes: Any) -> int:
    """One process of the run in `folder`; returns its exit code."""
    done = driven(folder, {**OPTIONS, **changes}, *arguments)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def outcome(folder: Path) -> dict[str, bytes]:
    """What has to be the same to the last bit; state.pt is compared by its tensors."""
    names = ("best.safetensors", "metrics.csv", "calibration.json", "report.json")
    state = Run(folder).load_state()
    assert state is not None
    tensors = {key: value.numpy().tobytes() for key, value in state["model"].items()}
    return {**{name: (folder / name).read_bytes() for name in names}, **tensors}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert drive(folder) == 0
    return outcome(folder)


@pytest.mark.slow
def test_killed_at_random_steps(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    folder = tmp_path / "run"
    chosen = random.Random(os.getpid())
    steps = [chosen.randrange(1, 7), chosen.randrange(1, 7)]
    assert drive(folder, "step", str(steps[0])) != 0
    assert drive(folder, "resume", "step", str(steps[1])) != 0
    assert drive(folder, "resume") == 0
    assert outcome(folder) == uninterrupted, f"killed at updates {steps}"


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    folder = tmp_path / "run"
    assert drive(folder, "checkpoint", "1", workers=0) != 0
    assert drive(folder, "resume", "checkpoint", "4", workers=0) != 0
    assert drive(folder, "resume", workers=0) == 0
    assert outcome(folder) == uninterrupted


@pytest.mark.slow
def test_loading_in_the_same_process_changes_nothing(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    folder = tmp_path / "run"
    assert drive(folder, workers=0) == 0
    assert outcome(folder) == uninterrupted


@pytest.mark.slow
def test_another_seed_is_another_run(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    folder = tmp_path / "run"
    assert drive(folder, seed=1, workers=0) == 0
    assert outcome(folder)["metrics.csv"] != uninterrupted["metrics.csv"]


@pytest.mark.slow
def test_dropout_and_accumulation_go_on_exactly(tmp_path: Path) -> None:
    """A network with dropout draws from the global generator; gradients of two batches make one update."""
    changes = {
        "model": "training.nets:with_dropout",
        "method": "dual",
        "accumulate": 2,
        "epochs": 2,
        "checkpoint_every": 1,
        "workers": 0,
    }
    assert drive(tmp_path / "whole", **changes) == 0
    assert drive(tmp_path / "cut", "step", "2", **changes) != 0
    assert drive(tmp_path / "cut", "resume", **changes) == 0
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
