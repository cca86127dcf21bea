"""A run as it is seen from outside: on the terminal a bar where one can be drawn and lines everywhere else, and
TensorBoard's files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from lightning.fabric.loggers import TensorBoardLogger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fasterisnet.data.pictures import readable
from fasterisnet.runs.folder import Row


class Watcher:
    """What a run tells while it works; this one does not listen."""

    def say(self, text: str) -> None:
        """Something worth a line."""

    def step(self, epoch: int, batch: int, batches: int, averages: Row) -> None:
        """A batch is done; averages are its own."""


class Terminal(Watcher):
    """Shows a run in the terminal."""

    def __init__(self) -> None:
        self.console = Console(soft_wrap=True, highlight=False)
        columns = (
            TextColumn("epoch {task.fields[epoch]}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[parts]}"),
        )  # fmt: skip
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task: Any = None

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        """A line above the bar; names come from files, so nothing in it moves the cursor."""
        self.console.print("\n".join(map(readable, text.split("\n"))), markup=False)

    def step(self, epoch: int, batch: int, batches: int, averages: Row) -> None:
        """Moves the bar."""
        parts = "  ".join(f"{key.removeprefix('train_')} {value:.3f}" for key, value in averages.items())
        if self.task is None:
            self.task = self.bar.add_task("", total=batches, epoch=epoch + 1, parts=parts)
        self.bar.update(self.task, completed=batch, total=batches, epoch=epoch + 1, parts=parts)


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
