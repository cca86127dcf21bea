"""SIGINT and SIGTERM: while batches are trained they are heeded between two updates, everywhere else at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

HEEDED = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A run was ended by a signal; `code` is what its process should exit with."""

    def __init__(self, number: int, where: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}{where}")
        self.code = 128 + number


class Signals:
    """Receives the signals that end a run, as long as the block lasts; in threads other than the main one, none.

    received: the signal that waits for the end of an update. A second one does not wait.
    """

    def __init__(self, speaks: bool = True) -> None:
        self.received = 0
        self.speaks = speaks
        self._waiting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in HEEDED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block that asks itself, where it can be left, whether a signal was received."""
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def _receive(self, number: int, _frame: object) -> None:
        if not self._waiting or self.received:
            raise Stopped(number)
        self.received = number
        if self.speaks:  # not through the console, which may be in the middle of a line
            name = signal.Signals(number).name
            text = f"\nfasterisnet: {name}: the state is saved after this update; once more to end at once\n"
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
