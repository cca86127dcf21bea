"""Small files that somebody else may have written: never endless, never deeper than Python can go."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from fasterisnet.errors import InputError

TEXT = 64 * 2**20  # bytes; no options, recipe, result or card comes near it


def read_file(path: str | os.PathLike[str], most: int = TEXT, *, pipes: bool = False) -> bytes:
    """The content of a file; a device, an endless file or a pipe (unless the user named it: `pipes`) is an error."""
    with open(path, "rb", opener=_at_once) as file:
        about = os.fstat(file.fileno())
        if not pipes and not stat.S_ISREG(about.st_mode):
            raise InputError(f"{path} is not a file but a pipe or device; it is not read.")
        content = file.read(most + 1) if pipes else file.read() if about.st_size <= most else None
    if content is None or len(content) > most:
        raise InputError(f"{path} is larger than {most / 2**20:g} MiB; it is not what it should be.")
    return content


def read_json(path: str | os.PathLike[str]) -> Any:
    """A JSON file; whatever is wrong with its text is a ValueError."""
    try:
        return json.loads(read_file(path).decode("utf-8"))
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply.") from error


def _at_once(path: str, flags: int) -> int:
    """Does not wait for somebody to open the other end of a pipe."""
    opened = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    os.set_blocking(opened, True)
    return opened
