"""Back to where the state of a run was saved, if nothing changed under it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fasterisnet.errors import InputError, UsageError
from fasterisnet.methods import Guided
from fasterisnet.runs import fingerprint
from fasterisnet.training.state import Progress, stage_of

if TYPE_CHECKING:
    from fasterisnet.training.loop import Training


def restore(training: Training, data_changed_ok: bool) -> None:
    """Back to where the state was saved, if it was."""
    state = training.state
    if state is None:
        return
    path = training.run.path("state.pt")
    _check_same(training, state, data_changed_ok)
    epochs_before = fingerprint.epochs_of(state, training.config)
    try:
        training.progress = Progress(**state["progress"])
        batches = training.loader.batches.count() if not data_changed_ok else 2**53
        training.progress.check(epochs_before, batches, early=training.config.early_stopping > 0)
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        _check_momentum(training)
        training.fabric.strategy.precision.load_state_dict(state["precision"])
        training.sums = _my_sums(training, state)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise InputError(f"{path} does not fit this run: {error}") from error
    if isinstance(training.method, Guided):
        training.method.skipped = training.progress.skipped
    _check_weights(training)
    if epochs_before < training.config.epochs:
        _extend(training)
    if training.progress.stretches:  # stages are those of the epochs that the run began with
        training.stages = [0, *training.method.plan(training.progress.stretches[0][0]), training.config.epochs]
    if not state["checked"] or "options" not in state:
        training.say(f"{path} is of an older version: it cannot be told whether it, its data or its options changed.")
    if not training.progress.finished:
        training.say(f"Going on in epoch {training.progress.epoch + 1}, batch {training.progress.batch + 1}.")


def _check_weights(training: Training) -> None:
    """The best epoch so far is only in its own file, which has to be there and whole."""
    progress = training.progress
    ends = stage_of(training.stages, max(progress.epoch - 1, 0))[1]
    last = progress.finished or progress.stretches or ends == training.config.epochs
    path = training.run.path("best.safetensors" if last else f"best-until-{ends}.safetensors")
    if progress.epoch == 0:
        return
    if not path.is_file():
        raise InputError(f"{path} is gone, and with it the best epoch; put it back, or train again.")
    training.run.load_weights(path.stem)


def _extend(training: Training) -> None:
    """More epochs for a run that had ended: config.yaml says so from now on; its report and audit are past."""
    progress = training.progress
    progress.finished = False
    progress.stretches = [*progress.stretches, [progress.epoch, progress.updates]]
    if training.fabric.is_global_zero:
        for name in ("report.json", "report.md", "audit/audit.json", "audit/audit.html"):
            training.run.path(name).unlink(missing_ok=True)
        training.run.create(training.config)
    cycle = "" if training.config.schedule == "constant" else f"; the {training.config.schedule} schedule begins anew"
    training.say(
        f"{training.run.folder} had ended after {progress.epoch} epochs: it goes on to {training.config.epochs}{cycle}."
    )


def _my_sums(training: Training, state: dict[str, Any]) -> Tensor:
    """What this process had added up for the log; with another number of processes the first takes all."""
    rows = state["sums"].reshape(-1, len(training.logged.sums))
    rows = rows + state["open"] if "open" in state else rows  # of an older version
    rank, processes = training.place.share
    if len(rows) == processes:
        return rows[rank].clone()
    return rows.sum(0) if rank == 0 else torch.zeros_like(rows[0])


def _check_momentum(training: Training) -> None:
    for parameter, kept in training.optimizer.state.items():
        for value in kept.values():
            if isinstance(value, torch.Tensor) and value.shape not in (parameter.shape, ()):
                raise ValueError(f"the optimiser has {tuple(value.shape)} for {tuple(parameter.shape)} parameters")


def _check_same(training: Training, state: dict[str, Any], data_changed_ok: bool) -> None:
    problem = None
    if training.fabric.is_global_zero:
        problem = fingerprint.why_not(
            state, training.config, training.data, training.source, str(training.run.folder),
            data_changed_ok=data_changed_ok,
        )  # fmt: skip
    problem = training.fabric.broadcast(problem)
    if problem is not None:
        raise UsageError(problem)
