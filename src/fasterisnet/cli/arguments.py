"""What commands share: exit codes, kinds of values, options that several take."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fasterisnet.errors import UsageError
from fasterisnet.files import readable

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class Help(argparse.RawDescriptionHelpFormatter):
    """Texts as they are written, for 96 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=96)


def command(commands: Any, name: str, does: str, example: str, work: Any) -> argparse.ArgumentParser:
    """The parser of one command."""
    p = commands.add_parser(
        name, help=does, description=does, epilog=f"example:\n{example}", formatter_class=Help, allow_abbrev=False
    )
    p.set_defaults(work=work, parser=p)
    p._negative_number_matcher = re.compile(r"-\d[\d.,e+-]*$")  # --window -1000,400 is a value, not an option
    return p


def add_run(p: argparse.ArgumentParser) -> None:
    """The run folder, and whether its code may run."""
    p.add_argument("run", metavar="RUN", help="run folder")
    p.add_argument("--trust", action="store_true", help="import the model a run names as package.module:function")


def add_accelerator(p: argparse.ArgumentParser) -> None:
    """Where to compute."""
    p.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "gpu", "mps"), help="where to compute")


def count(text: str) -> int:
    """A whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def amount(text: str) -> int:
    """A whole number from 0 on."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def check_file(path: str | None) -> None:
    """Whether a file can be written there, before the work that would fill it."""
    if path is None:
        return
    if Path(path).is_dir():
        raise UsageError(f"{path} is a folder; give the name of the file to write.")
    check_folder(path, Path(path).absolute().parents)


def check_folder(path: str, folders: Iterable[Path] | None = None) -> None:
    """Whether files can be written into a folder that is there or will be. folders: from the innermost on."""
    place = Path(path).absolute()
    there = next(folder for folder in folders or (place, *place.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UsageError(f"{path} cannot be written: {there} is not a folder that you may write to.")


def told(error: Exception) -> str:
    """What an error says; the system names the file that cannot be written, but not the output of a command."""
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.EPIPE, errno.ENOSPC):
        return f"The output cannot be written: {error.strerror}."
    return str(error)


def say_error(text: str) -> None:
    """One line, in which no name moves the cursor; of several processes of a run only the first one speaks of what all
    of them know.
    """
    print(f"fasterisnet: {readable(' '.join(text.split()))}", file=sys.stderr)
