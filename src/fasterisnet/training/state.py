"""Where a run is: what is saved besides weights, and checked when it is read again."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from fasterisnet.runs.config import Config
from fasterisnet.runs.folder import Row
from fasterisnet.runs.report import came_apart


def stage_of(bounds: list[int], epoch: int) -> tuple[int, int]:
    """The first epoch of the stage that an epoch belongs to, and the one after its last; bounds: of all stages."""
    return max(b for b in bounds if b <= epoch), min(b for b in bounds if b > epoch)


@dataclass(frozen=True)
class Moment:
    """Now, by the clock and in processor time."""

    wall: float = field(default_factory=time.perf_counter)
    processor: float = field(default_factory=time.process_time)


@dataclass
class Progress:
    """Where a run is.

    seconds and processor_seconds: what training took the first process, by the clock and in all its threads.
    stretches: epoch and updates at which epochs were added to a run that had ended.
    """

    epoch: int = 0
    batch: int = 0
    updates: int = 0
    best_loss: float = math.inf
    best_epoch: int = -1
    skipped: int = 0
    in_a_row: int = 0
    finished: bool = False
    seconds: float = 0.0
    processor_seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    stretches: list[list[int]] = field(default_factory=list)

    @property
    def stretch(self) -> tuple[int, int]:
        """Epoch and updates at which the present schedule began."""
        epoch, updates = self.stretches[-1] if self.stretches else (0, 0)
        return epoch, updates

    def is_better(self, loss: float, config: Config, stage: tuple[int, int] | None = None) -> bool:
        """Whether the network of this epoch is to be kept: the lowest loss of those after `settled`, if there are any.

        Before the learning rate has come down, a low loss is luck; but where the training has come apart since, the
        earlier epoch stays. stage: its first epoch and the one after, of a run with several; those before the last one
        are chosen from whole, and so are epochs that were added to a run.
        """
        first, after = stage or (0, config.epochs)
        share = config.settled if after == config.epochs and not self.stretches else 0.0
        begin = first + min(math.ceil(share * (after - first)), after - first - 1)
        now = self.best_epoch < begin <= self.epoch and math.isfinite(loss) and begin > first
        return loss < self.best_loss or (now and not came_apart(self.rows[first:], config))

    def check(self, epochs: int, batches: int, *, early: bool) -> None:
        """Raises a ValueError for what no run of so many epochs, or fewer if it may end `early`, can have come to."""
        counts = (self.epoch, self.batch, self.updates, self.skipped, self.in_a_row, self.best_epoch + 1)
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError("a count is not a number from 0 on")
        if not all(type(value) in (int, float) for value in (self.best_loss, self.seconds, self.processor_seconds)):
            raise ValueError("a loss or time is not a number")
        if self.epoch > epochs or self.batch > batches or self.best_epoch >= max(self.epoch, 1):
            raise ValueError(f"epoch {self.epoch + 1}, batch {self.batch} of {batches} does not exist in this run")
        if self.updates > (self.epoch + 1) * batches:
            raise ValueError(f"{self.updates} updates are more than there can have been")
        if not isinstance(self.rows, list) or len(self.rows) != self.epoch:
            raise ValueError(f"there have to be {self.epoch} rows of the log")
        ended = self.epoch == epochs
        if type(self.finished) is not bool or (self.finished != ended and not (self.finished and early)):
            raise ValueError(f"after {self.epoch} of {epochs} epochs it says finished = {self.finished!r}")
        places = [[0, 0], *self.stretches, [self.epoch, self.updates]]
        if any(
            type(count) is not int or not before <= count
            for i, place in enumerate(places[1:])
            for before, count in zip(places[i], place, strict=True)
        ):
            raise ValueError(f"epochs were added at {self.stretches!r}")
