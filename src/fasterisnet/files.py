"""Files: the old ones or wholly the new ones whenever a process dies, and never endless or too deep when read."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

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


TEMPORARY = re.compile(r"^\..*\.(\d+)\.tmp(\.\w+)?$")
RESERVED = frozenset('/\\:*?"<>|%')
LONGEST = 100  # bytes


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file to write; it takes the place of `path` when the block ends well and vanishes otherwise."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        temporary.unlink()
        yield temporary
        temporary.chmod(mode)  # some libraries write files that only their owner may read
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        _keep_entries(path.parent)
    except OSError as error:
        if error.errno is not None and error.filename in (
            None,
            str(temporary),
        ):  # of a full disk, say; nobody knows the temporary name
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: str | os.PathLike[str], content: bytes | memoryview) -> None:
    """Write a file at once."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content)


def write_text(path: str | os.PathLike[str], content: str) -> None:
    """Write a text file at once."""
    write_bytes(path, content.encode("utf-8"))


def remove_leftovers(folder: Path, *, of_anyone: bool = False) -> list[str]:
    """Temporary files that killed processes left in a folder; of_anyone: nobody else can be writing there."""
    gone = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        found = TEMPORARY.match(path.name)
        if found and path.is_file() and not path.is_symlink() and (of_anyone or not _alive(int(found[1]))):
            path.unlink(missing_ok=True)
            gone.append(path.name)
    return gone


def readable(path: str | os.PathLike[str]) -> str:
    """A path for messages: what cannot be printed (bytes that are not UTF-8, line breaks) becomes an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in os.fspath(path))


def file_name(text: str) -> str:
    """Any text as a part of a file name: what could be a path or cannot be printed is written as %XX."""
    name = "".join(c if c.isprintable() and c not in RESERVED else quote(c, "", errors="surrogatepass") for c in text)
    longest = name.encode()[:LONGEST].decode(errors="ignore")
    return name if longest == name else f"{longest}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _keep_entries(folder: Path) -> None:
    """The new name outlives a power cut only when the folder is on the disk too."""
    if hasattr(os, "O_DIRECTORY"):
        entry = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(entry)
        finally:
            os.close(entry)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return process != os.getpid()
