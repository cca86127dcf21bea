"""C1 and C2 of a run: given, found in its folder, or measured before the first epoch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from fasterisnet.data.loader import Epochs
from fasterisnet.errors import InputError
from fasterisnet.methods import ISNet, calibrate
from fasterisnet.methods.ranges import Ranges
from fasterisnet.runs.fingerprint import digest
from fasterisnet.training.distributed import CALIBRATION

if TYPE_CHECKING:
    from fasterisnet.training.loop import Training


def set_ranges(training: Training) -> None:
    """C1 and C2: given, found in the run folder, or measured now."""
    if not isinstance(training.method, ISNet):
        return
    config, path = training.config, training.run.path("calibration.json")
    if isinstance(config.ranges, list):
        training.method.ranges = (config.ranges[0], config.ranges[1])
        training.say(f"C1 {config.ranges[0]:.3g}, C2 {config.ranges[1]:.3g}, as given")
        return
    if path.exists() or isinstance(config.ranges, str):
        training.method.ranges = Ranges.load(path if path.exists() else config.ranges)
        known = (training.state or {}).get("calibration")
        if known is not None and known != digest_of(training.method.ranges):
            raise InputError(f"{path} is not the calibration this run was trained with; put that one back.")
    elif training.state is not None:
        raise InputError(f"{path} is gone, and cannot be measured on a network in training; put it back.")
    else:
        length = f" of {config.calibration_batches} batches" if config.calibration_batches else ""
        training.say(f"Calibrating C1 and C2: plain epochs{length}: {config.calibration_epochs}, and one to measure.")
        _heard(training, 0, 0, 0.0)
        training.place.seed(training.method, CALIBRATION)
        training.method.ranges = calibrate(
            training.method, training.model, Epochs(training.loader, config.calibration_batches or None),
            config.calibration_epochs,
            optimizer=lambda parameters: torch.optim.SGD(parameters, config.calibration_lr, momentum=0.9),
            clip=config.clip or None, progress=partial(_heard, training),
        )  # fmt: skip
        training.loader.waited = 0.0
    training.fabric.barrier()
    if training.fabric.is_global_zero and not path.exists():
        training.method.ranges.save(path)
    training.fabric.barrier()
    for depth, (c1, c2) in training.method.ranges.depths.items():
        training.say(
            f"  {depth}: C1 {min(c1):.3g}, C2 {max(c2):.3g}" + (f" over {len(c1)} maps" if len(c1) > 1 else "")
        )


def _heard(training: Training, epoch: int, step: int, _loss: float) -> None:
    batches = training.loader.batches.count()
    batches = min(training.config.calibration_batches or batches, batches)
    training.watcher.work("calibration", epoch * batches + step, (training.config.calibration_epochs + 1) * batches)


def digest_of(ranges: Ranges) -> str:
    """What a state says of the ranges it was trained with."""
    return digest({depth: list(map(list, bounds)) for depth, bounds in ranges.depths.items()})
