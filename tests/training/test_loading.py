"""Processes that load images: where they come from, and what is said when one hangs or dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fasterisnet.data.drawn import drawn_source
from fasterisnet.data.loader import Loader, LoadingError
from fasterisnet.data.preparation import Preparation
from fasterisnet.runs.config import Config
from fasterisnet.runs.folder import Run
from fasterisnet.training import loop
from trouble import Trouble

PREPARATION = Preparation(16)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "message"), [("sleeps", "sent no batch for 5 s"), ("dies", "died")])
def test_the_worker_is_named(what: str, message: str, tmp_path: Path) -> None:
    loader = Loader(
        Trouble(drawn_source(per_class=4, size=16).split("train"), what, tmp_path / "once"),
        PREPARATION,
        3,
        name="odd",
        workers=2,
        timeout=5 if what == "sleeps" else 600,
        share=(1, 2),
    )
    with pytest.raises(
        LoadingError, match=rf"split 'odd' failed in process 1 of 2: worker \d \(process \d+\) {message}"
    ):
        list(loader.epoch(0))


@pytest.mark.slow
def test_a_worker_that_leaves_in_the_middle_of_a_batch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection ends before the system says that it has died."""

    def reset(iterator: Any, timeout: float) -> Any:
        iterator._workers[1].kill()
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_try_get_data", reset)
    loader = Loader(drawn_source(per_class=4, size=16).split("train"), PREPARATION, 3, name="odd", workers=2)
    with pytest.raises(LoadingError, match=r"worker 1 \(process \d+\) died"):
        list(loader.epoch(0))


@pytest.mark.slow
def test_workers_stay_and_come_from_a_server(tmp_path: Path) -> None:
    """None is forked from this process, which may have threads and their locks; all are there in the next epoch."""
    samples = drawn_source(per_class=4, size=16).split("val")
    loader = Loader(samples, PREPARATION, 3, workers=2)
    first = [batch[0] for batch in loader.epoch(0)]
    workers = loader._loader._iterator._workers  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    pids = [worker.pid for worker in workers]
    parents = {int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) for pid in pids}
    assert os.getpid() not in parents
    second = [batch[0] for batch in loader.epoch(1)]
    assert [worker.pid for worker in workers] == pids and all(worker.is_alive() for worker in workers)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


@pytest.mark.slow
def test_the_start_of_workers_is_no_waiting_for_data() -> None:
    loader = Loader(drawn_source(per_class=4, size=16).split("train"), PREPARATION, 3, workers=1)
    begin = time.perf_counter()
    batches = loader.epoch(0)
    next(batches)
    assert loader.waited == 0 < time.perf_counter() - begin
    assert len(list(batches)) and loader.waited > 0


@pytest.mark.slow
def test_a_worker_that_dies_between_epochs_is_missed_at_once() -> None:
    """An epoch begins with a word from every worker; what is dead is not waited for until the time is up."""
    loader = Loader(drawn_source(per_class=4, size=16).split("val"), PREPARATION, 3, name="val", workers=2, timeout=600)
    assert list(loader.epoch(0))
    victim = loader._loader._iterator._workers[1]  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(LoadingError, match=rf"split 'val' failed .* worker 1 \(process {victim.pid}\) died"):
        list(loader.epoch(1))


@pytest.mark.slow
def test_a_time_out_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is saved where it happened, in the middle of an epoch; resumed, the run ends with the same bytes."""

    def config(name: str) -> Config:
        return Config(
            data="drawn?per_class=4&size=16", method="standard", model="small", size=16, epochs=2, batch=3, workers=1,
            accelerator="cpu", tensorboard=False, loader_timeout=2.0, out=str(tmp_path / name),
        )  # fmt: skip

    loop.train(config("whole"))
    epoch, trouble = Loader.epoch, True

    def troubled(loader: Loader, number: int, start: int = 0) -> Iterator[Any]:
        for i, batch in enumerate(epoch(loader, number, start)):
            if trouble and loader.name == "train" and number == 1 and i == 2:
                raise LoadingError("Loading the split 'train' failed")
            yield batch

    monkeypatch.setattr(Loader, "epoch", troubled)
    with pytest.raises(LoadingError):
        loop.train(config("cut"))
    state = Run(tmp_path / "cut").load_state()
    assert state is not None and (state["progress"]["epoch"], state["progress"]["batch"]) == (1, 2)
    trouble = False
    loop.train(config("cut"), resume=True)
    for name in ("best.safetensors", "metrics.csv", "report.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
