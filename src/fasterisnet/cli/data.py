"""`fasterisnet data check`: what is wrong with images, masks, classes and splits."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fasterisnet.cli.arguments import DONE, FAILED, amount, command
from fasterisnet.errors import UsageError


def add(commands: Any) -> None:
    """What it takes."""
    p = command(
        commands, "data", "Look after data.", "  fasterisnet data check DIR", None,
    )  # fmt: skip
    inner = p.add_subparsers(title="commands", metavar="COMMAND", required=True)
    p = command(
        inner, "check", "Find what is wrong with images, masks, classes and splits before a training does.",
        "  fasterisnet data check DIR", work,
    )  # fmt: skip
    p.add_argument("data", metavar="DIR", help="folder, CSV manifest, xray:DIR, dogs:DIR or mnist[:DIR]")
    p.add_argument("--foreground", metavar="X", help="labels that are the object, if masks are label maps: 1,2")
    p.add_argument("--window", metavar="X", help="what of more than 8 bits is black and white: low,high or auto")
    p.add_argument("--workers", type=amount, default=2)


def work(options: argparse.Namespace) -> int:
    """Does it; returns the exit code."""
    from fasterisnet.data.check import check_data
    from fasterisnet.data.sources import is_own, parts_of

    if is_own(options.data) and not Path(parts_of(options.data)[0]).expanduser().exists():
        raise UsageError(f"{options.data} does not exist.")
    report = check_data(
        options.data, foreground=options.foreground, window=options.window, workers=max(options.workers, 1)
    )
    print(report)
    return FAILED if report.fatal else DONE
