"""Samples of which one does not come."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from fasterisnet.data.base import Reading, Samples, Subset


class Trouble(Subset):
    """One sample, once, ends the process that reads it ("dies"), or keeps it for an hour ("sleeps")."""

    def __init__(self, samples: Samples, what: str, once: Path) -> None:
        super().__init__(samples, range(len(samples)))
        self.what, self.once = what, once

    def read(self, index: int) -> Reading:
        if index == 7 and not self.once.exists():
            self.once.touch()
            if self.what == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return super().read(index)
