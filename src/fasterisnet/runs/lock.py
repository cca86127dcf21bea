"""A run folder that one process alone writes to, until that process ends in whatever way."""

from __future__ import annotations

import errno
import os
from fnmatch import fnmatch
from pathlib import Path

from fasterisnet.files import remove_leftovers

try:
    import fcntl
except ImportError:  # Windows has no lock that needs no file
    fcntl = None

FILES = (
    "config.yaml", "data.json", "calibration.json", "metrics.csv", "best.*", "state.pt", "report.*", "heatmaps-*",
    "tensorboard", "audit",
)  # fmt: skip
STATE = "state.pt"
BEFORE = ("config.yaml", "data.json", "calibration.json")  # what a run writes before it has a state
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class Claim:
    """Locks a folder (the system lets go when the process dies) and creates it if need be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.created: list[Path] = []
        self.entry: int | None = None
        self.new = False

    def take(self, *, new: bool) -> str | None:
        """What is in the way, or None. A new run goes where no file of a run is."""
        try:
            problem = self._make() or self._lock()
        except OSError as error:
            problem = f"{self.folder} cannot be used as a run folder: {error.strerror}."
        if problem is None and new:
            problem = self._occupied()
        if problem is None:
            self.new = new
            remove_leftovers(self.folder, of_anyone=True)
        else:
            self.release()
        return problem

    def release(self) -> None:
        """A folder that was made for nothing is taken away again, and so is a new run that came to no state."""
        if self.new and not (self.folder / STATE).exists():
            for name in BEFORE:
                (self.folder / name).unlink(missing_ok=True)
        for folder in reversed(self.created):
            if any(folder.iterdir()):
                break
            folder.rmdir()
        self.created = []
        if self.entry is not None:
            os.close(self.entry)
            self.entry = None

    def _make(self) -> str | None:
        missing = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        for folder in reversed(missing):
            try:
                folder.mkdir()
                self.created.append(folder)
            except FileExistsError:
                continue
        return None if self.folder.is_dir() else f"{self.folder} is not a folder; choose another --out."

    def _lock(self) -> str | None:
        """Of the folder itself, so that nothing is left behind."""
        if fcntl is None:
            return None
        self.entry = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self.entry, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                return f"Another process is working on {self.folder}; wait for it, or choose another --out."
            return None  # a file system without locks
        if not os.path.samestat(os.fstat(self.entry), self.folder.stat()):
            return f"{self.folder} was removed and made anew by another process; try again."
        return None

    def _occupied(self) -> str | None:
        names = sorted(path.name for path in self.folder.iterdir())
        if "config.yaml" in names:
            return (
                f"{self.folder} holds a run: go on with `--resume {self.folder}`, remove it, or choose another --out."
            )
        found = [name for name in names if any(fnmatch(name, pattern) for pattern in FILES)]
        if found:
            more = ", ..." if found[3:] else ""
            return (
                f"{self.folder} has no config.yaml but files that a run would replace ({', '.join(found[:3])}{more}); "
                "they are not of this run. Choose another --out."
            )
        return None
