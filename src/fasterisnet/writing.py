"""Files that are either the old ones or wholly the new ones, whenever a process dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file to write; it takes the place of `path` when the block ends well and vanishes otherwise."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    temporary.touch()
    mode = temporary.stat().st_mode
    temporary.unlink()
    try:
        yield temporary
        temporary.chmod(mode)  # some libraries write files that only their owner may read
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], content: str) -> None:
    """Write a text file at once."""
    with replacing(path) as temporary:
        temporary.write_text(content, encoding="utf-8")
