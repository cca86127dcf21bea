"""The command line: `fasterisnet train | tune | evaluate | explain | audit | export | data | benchmark | app | demo`.

Every command is a module with `add`, which says what it takes, and `work`, which does it. Exit codes: 0 done, 1 the
work failed, 2 wrong usage, 128 + N stopped by signal N (Ctrl-C: 130, SIGTERM: 143).
"""

from __future__ import annotations

import argparse
import io
import sys
import traceback
from collections.abc import Sequence

from fasterisnet import __version__
from fasterisnet.cli import app, audit, benchmark, data, demo, evaluate, explain, export, train, tune
from fasterisnet.cli.arguments import FAILED, INTERRUPTED, USAGE, Help, say_error, told
from fasterisnet.errors import FasterISNetError, UsageError
from fasterisnet.extras import install_module

COMMANDS = (train, tune, evaluate, explain, audit, export, data, benchmark, app, demo)


def parser() -> argparse.ArgumentParser:
    """All commands."""
    main = argparse.ArgumentParser(
        prog="fasterisnet", formatter_class=Help, allow_abbrev=False,
        description="Train image classifiers that ignore the background, and show where they look.",
        epilog="example:\n  fasterisnet train --data DIR --method stochastic --model resnet50 --out runs/mine\n"
        "  fasterisnet evaluate runs/mine --data DIR --split test",
    )  # fmt: skip
    main.add_argument("--version", action="version", version=f"fasterisnet {__version__}")
    commands = main.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add(commands)
    return main


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may not have every letter of a file name
    try:
        options, unknown = parser().parse_known_args(arguments)
        if unknown:
            _refuse(options, unknown)
        return options.work(options)
    except FasterISNetError as error:
        if not _known_to_all(error):
            say_error(str(error))
        return USAGE if isinstance(error, UsageError) else FAILED
    except KeyboardInterrupt as error:
        say_error(f"{str(error) or 'stopped'}")
        return getattr(error, "code", INTERRUPTED)
    except OSError as error:
        say_error(told(error))
    except ModuleNotFoundError as error:
        say_error(f"{error}; install what it needs with: {install_module(error.name)}")
    except Exception as error:  # noqa: BLE001  the last line of a traceback is what a user needs first
        traceback.print_exc()
        say_error(f"{type(error).__name__}: {error}")
    return FAILED


def _refuse(options: argparse.Namespace, unknown: list[str]) -> None:
    """Ends with the usage of the command that was meant and the option nearest to the one that was written."""
    from fasterisnet.runs.spelling import nearest_option

    word = unknown[0].partition("=")[0]
    known = [flag for action in options.parser._actions for flag in action.option_strings]
    hint = nearest_option(word, known, "--") if word.startswith("-") else "."
    options.parser.error(f"unknown {'option' if word.startswith('-') else 'word'} '{word}'{hint}")


def _known_to_all(error: FasterISNetError) -> bool:
    """Whether the first process of a run says the same as this one, which is another."""
    launching = sys.modules.get("fasterisnet.training.distributed")
    if launching is None or launching.is_first_process():
        return False
    return isinstance(error, UsageError | launching.LostProcessError)
