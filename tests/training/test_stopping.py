"""A signal ends a run between two updates with nothing lost, and a run that has ended can be given more epochs."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fasterisnet.cli import main
from fasterisnet.data.drawn import drawn_source
from fasterisnet.data.loader import Loader
from fasterisnet.data.preparation import Preparation
from fasterisnet.methods import Standard
from fasterisnet.runs import report
from fasterisnet.runs.config import Config
from fasterisnet.runs.folder import Run
from fasterisnet.training import loop
from fasterisnet.training.console import Watcher
from fasterisnet.training.setup import learning_rate
from fasterisnet.training.stopping import Signals, Stopped
from training.driving import driven

OPTIONS: dict[str, Any] = {
    "data": "drawn?per_class=6&size=16", "method": "stochastic", "model": "training.nets:without_norm", "size": 16,
    "epochs": 2, "batch": 5, "lr": 0.05, "workers": 0, "ranges": [0.1, 10.0], "tensorboard": False,
    "accelerator": "cpu",
}  # fmt: skip
OUTCOME = ("best.safetensors", "metrics.csv", "report.json")


def config(out: Path, **changes: Any) -> Config:
    return Config(**{**OPTIONS, "out": str(out), **changes})


def outcome(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in OUTCOME]


@pytest.fixture(autouse=True, scope="module")
def no_pictures() -> Iterator[None]:
    """They take longer than everything else here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "picture", lambda *_: None)
        yield


class Sender(Watcher):
    """Sends this process a signal after a batch of the second epoch."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def step(self, epoch: int, batch: int, *_: object) -> None:
        if (epoch, batch) == (1, 1):
            os.kill(os.getpid(), self.number)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stopping") / "whole"
    loop.train(config(out, accumulate=2), trust=True)
    return out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_state_where_it_is(number: signal.Signals, whole: Path, tmp_path: Path) -> None:
    """After the first of two batches whose gradients are added up: the state is of after the second."""
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=rf"{number.name} in epoch 2 after batch 2; the state is saved") as stopped:
        loop.train(config(tmp_path / "run", accumulate=2), watcher=Sender(number), trust=True)
    assert stopped.value.code == 128 + number and signal.getsignal(number) == before
    state = Run(tmp_path / "run").load_state()
    assert state is not None and (state["progress"]["epoch"], state["progress"]["batch"]) == (1, 2)
    loop.train(config(tmp_path / "run", accumulate=2), resume=True, trust=True)
    assert outcome(tmp_path / "run") == outcome(whole)


def test_saving_changes_nothing(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock after every update and before the validation, and said by an option that may change."""
    count, save = 0, loop.Training.save

    def counted(training: loop.Training) -> None:
        nonlocal count
        count += 1
        save(training)

    monkeypatch.setattr(loop.Training, "save", counted)
    monkeypatch.setattr(loop, "MINUTE", 1e-9)
    loop.train(config(tmp_path / "run", accumulate=2, checkpoint_minutes=1e-9), trust=True)
    assert count == 1 + 2 * (2 + 1 + 1)  # at the beginning; in each epoch two updates, before and after validation
    assert outcome(tmp_path / "run") == outcome(whole)
    loop.train(config(tmp_path / "run", accumulate=2, checkpoint_minutes=0), resume=True, trust=True)


def test_a_second_signal_does_not_wait() -> None:
    with Signals(speaks=False) as signals:
        with signals.waiting():
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.received == signal.SIGINT
            with pytest.raises(Stopped):
                os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Stopped, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_command_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = loop.Training._update

    def interrupted(training: loop.Training) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        update(training)

    monkeypatch.setattr(loop.Training, "_update", interrupted)
    command = [f"--{key.replace('_', '-')}={value}" for key, value in OPTIONS.items()]
    out = str(tmp_path / "run")
    assert main(["train", *command, "--out", out]) == 143
    last = capsys.readouterr().err.splitlines()[-1]
    assert "SIGTERM in epoch 1 after batch 1" in last and f"train --resume {out} --trust" in last
    assert main(["train", "--resume", out, "--epochs", "3", "--trust"]) == 2
    assert "epochs = 2, not 3" in capsys.readouterr().err


def test_epochs_added_to_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a constant rate it becomes the run that was long from the beginning."""
    steady = {"schedule": "constant", "settled": 0.0}
    loop.train(config(tmp_path / "long", **steady), trust=True)
    loop.train(config(tmp_path / "run", epochs=1, **steady), trust=True)
    command = ["train", "--resume", str(tmp_path / "run"), "--trust", "--epochs"]
    (tmp_path / "run" / "audit").mkdir()
    (tmp_path / "run" / "audit" / "audit.html").write_text("of one epoch")
    assert main([*command, "2"]) == 0
    assert (tmp_path / "run" / "audit" / "audit.html").read_text() != "of one epoch"
    assert "goes on to 2." in " ".join(capsys.readouterr().out.split())
    assert outcome(tmp_path / "run")[:2] == outcome(tmp_path / "long")[:2]
    assert Run(tmp_path / "run").config.epochs == 2
    assert "had ended after epoch 1" in (tmp_path / "run" / "report.md").read_text()
    assert Run(tmp_path / "run").report == {**(Run(tmp_path / "long").report or {}), "extended_after": [1]}
    assert main([*command, "2"]) == 0
    assert main([*command, "1"]) == 2
    assert "epochs = 2, not 1" in capsys.readouterr().err


def test_added_epochs_have_a_cycle_of_their_own(tmp_path: Path) -> None:
    options = {"epochs": 1, "schedule": "onecycle", "method": "standard", "ranges": None}
    loop.train(config(tmp_path, **options), trust=True)
    longer = config(tmp_path, **{**options, "epochs": 3})
    loop.train(longer, resume=True, trust=True)
    with (tmp_path / "metrics.csv").open() as file:
        rates = [float(row["lr"]) for row in csv.DictReader(file)]
    assert rates == [learning_rate(longer, *place) for place in ((3, 4), (3, 8), (7, 8))]
    assert "a onecycle schedule of their own" in (tmp_path / "report.md").read_text()


def test_stages_stay_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that halves its epochs would otherwise begin its first stage again."""
    seen: list[list[int]] = []
    monkeypatch.setattr(Standard, "plan", lambda _, epochs: [epochs // 2])
    stage_of = loop.stage_of
    monkeypatch.setattr(loop, "stage_of", lambda bounds, epoch: seen.append(bounds) or stage_of(bounds, epoch))
    options = {"epochs": 2, "method": "standard", "ranges": None}
    loop.train(config(tmp_path, **options), trust=True)
    assert seen[-1] == [0, 1, 2]
    loop.train(config(tmp_path, **{**options, "epochs": 3}), resume=True, trust=True)
    assert seen[-1] == [0, 1, 3]
    assert Run(tmp_path).load_weights()[1].method == "standard"


def test_workers_leave_signals_to_the_process_they_work_for() -> None:
    loader = Loader(drawn_source(per_class=4, size=16).split("train"), Preparation(16), 3, workers=1)
    batches = loader.epoch(0)
    next(batches)
    (worker,) = loader._loader._iterator._workers  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    subprocess.run(["kill", "-INT", str(worker.pid)], check=True)
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    time.sleep(0.2)
    assert worker.is_alive() and len(list(batches)) == 3
    worker.terminate()
    worker.join(20)
    assert not worker.is_alive()


@pytest.mark.slow
def test_one_of_two_processes_is_told(tmp_path: Path) -> None:
    """The other one ends with it, after the same update."""
    options = {**OPTIONS, "devices": 2}
    stopped = driven(tmp_path / "run", options, "signal", "5", "rank1")
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    state = Run(tmp_path / "run").load_state()
    assert state is not None and (state["progress"]["epoch"], state["progress"]["batch"]) == (1, 1)
    assert state["sums"].shape[0] == 2
    for name, arguments in (("run", ["resume"]), ("whole", [])):
        done = driven(tmp_path / name, options, *arguments)
        assert done.returncode == 0, done.stderr
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
