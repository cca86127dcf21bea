"""A run as it is seen from outside: on the terminal a bar where one can be drawn and lines everywhere else, and
TensorBoard's files.
"""

from __future__ import annotations

import errno
import os
import textwrap
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Self

from lightning.fabric.loggers import TensorBoardLogger
from rich.console import Console
from rich.live import Live
from rich.text import Text

from fasterisnet.data.pictures import readable
from fasterisnet.runs.folder import Row

WIDEST = 100  # columns of a line
BAR = 24  # columns
BEAT = 60.0  # seconds between two signs of life in a file


class Watcher:
    """What a run tells while it works; this one does not listen."""

    def say(self, text: str) -> None:
        """Something worth a line."""

    def begin(self, epochs: int, heatmaps: bool) -> None:
        """Batches will follow, of so many epochs; heatmaps: their averages have a background and a foreground."""

    def step(self, epoch: int, batch: int, batches: int, averages: Row) -> None:
        """A batch is done; averages are its own."""

    def work(self, what: str, done: int, total: int) -> None:
        """How far anything else is: the calibration, or a split that is validated or tested on."""


class Output(Console):
    """Where lines go; a reader that has gone (`train ... | head`) ends the run with a word."""

    def on_broken_pipe(self) -> None:
        """Rich would end the process without one."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from None


class Terminal(Watcher):
    """Shows a run: in a terminal what is going on now, in a last line that changes; in a file a line every minute."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Output()
        self.clock = clock
        self.now: tuple[str, int, int, str] | None = None
        self.live: Live | None = None
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self.live = Live(get_renderable=self._shown, console=self.console, transient=True, refresh_per_second=4)
        self.epochs, self.heatmaps = 0, True
        self.first: tuple[float, int] | None = None  # when, and how many batches of the run were done
        self.left: float | None = None
        self.spoken = clock()

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def say(self, text: str) -> None:
        """A line above the last one; names come from files, so nothing in it moves the cursor."""
        for line in map(readable, text.split("\n")):
            indent = " " * (len(line) - len(line.lstrip()))
            parts = textwrap.wrap(
                line, min(self._width, WIDEST), subsequent_indent=indent + "  ", break_long_words=False,
                break_on_hyphens=False, drop_whitespace=True,
            )  # fmt: skip
            self.console.print("\n".join(parts), markup=False, highlight=False, soft_wrap=True)
        self.spoken = self.clock()

    def begin(self, epochs: int, heatmaps: bool) -> None:
        """Another run may have been shown before."""
        self.epochs, self.heatmaps, self.first, self.left = epochs, heatmaps, None, None

    def step(self, epoch: int, batch: int, batches: int, averages: Row) -> None:
        """Shows an epoch, and reckons when the run will end."""
        done = epoch * batches + batch
        begun, before = self.first = self.first or (self.clock(), done)
        if done > before:
            self.left = (self.clock() - begun) / (done - before) * (self.epochs * batches - done)
        self._show(f"epoch {epoch + 1}/{self.epochs}", batch, batches, parts_of(averages, "train", self.heatmaps))

    def work(self, what: str, done: int, total: int) -> None:
        """Shows anything else."""
        self._show(readable(what), done, total, "")

    def _show(self, what: str, done: int, total: int, parts: str) -> None:
        self.now = (what, done, total, parts)
        if self.live is None and self.clock() - self.spoken >= BEAT:
            left = f", {remaining(self.left)} left" if self.left is not None else ""
            stamp = datetime.now().astimezone().isoformat(" ", "seconds")
            self.say(f"{stamp}  {what}, {done}/{total}{left}{f', {parts}' if parts else ''}")

    @property
    def _width(self) -> int:
        return self.console.width if self.console.is_terminal else WIDEST

    def _shown(self) -> Text:
        return Text(bar_line(*self.now, self.left, self.console.width) if self.now else "", no_wrap=True)


def bar_line(what: str, done: int, total: int, parts: str, left: float | None, width: int) -> str:
    """The last line of a terminal: what, a bar, a counter and the time left of the run; numbers if there is room."""
    counter = f"{done}/{total}"
    ending = f"{remaining(left)} left" if left is not None else ""
    room = max(4, min(BAR, width - len(what) - len(counter) - len(ending) - 5))
    filled = room * done // max(total, 1)
    line = f"{what} {'━' * filled}{'─' * (room - filled)} {counter}  {ending}".rstrip()
    for part in parts.split(", ") if parts else []:
        if len(line) + 2 + len(part) < width:
            line += f"  {part}"
    return line[: max(width - 1, 1)]


def parts_of(row: Row, prefix: str, heatmaps: bool) -> str:
    """The averages that say something: a method without heatmaps has neither background nor foreground."""
    names = ("loss", "accuracy", *(("background", "foreground") if heatmaps else ()))
    return ", ".join(f"{name} {row[f'{prefix}_{name}']:.3f}" for name in names if f"{prefix}_{name}" in row)


def epoch_line(row: Row, epochs: int, heatmaps: bool, better: bool, masks: float) -> str:
    """What an epoch came to; masks: the share of the samples that had one."""
    missing = f"  masks {masks:.0%}" if masks < 1 else ""
    maps = f" (background {row['train_background']:.3f}, foreground {row['train_foreground']:.3f})" if heatmaps else ""
    return (
        f"epoch {row['epoch']}/{epochs}{missing}  loss {row['train_loss']:.3f}{maps}  val {row['val_loss']:.3f}, "
        f"accuracy {row['val_accuracy']:.3f}{' *' if better else ''}"
    )


def remaining(seconds: float) -> str:
    """A length of time as h:mm:ss, or in days."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Board:
    """The rows of the log for TensorBoard; of a run that goes on, rows after the first new one are dropped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logger: TensorBoardLogger | None = None

    def log(self, epoch: int, row: Row) -> None:
        """The numbers of an epoch."""
        if self.logger is None:
            self.logger = TensorBoardLogger(self.folder, name="tensorboard", version="", purge_step=epoch)
        numbers = {key: float(value) for key, value in row.items() if key != "epoch"}
        self.logger.log_metrics(numbers, step=epoch)
        self.logger.save()
