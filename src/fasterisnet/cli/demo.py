"""`fasterisnet demo`: a classifier that cheats and one that does not."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fasterisnet.cli.arguments import DONE, amount, command


def add(commands: Any) -> None:
    """What it takes."""
    p = command(
        commands, "demo", "Train a classifier that cheats and one that does not, and show both on one page.",
        "  fasterisnet demo --out runs/demo", work,
    )  # fmt: skip
    p.add_argument("--out", metavar="DIR", default="runs/demo", help="(default: %(default)s)")
    p.add_argument("--seed", type=amount, default=0)


def work(options: argparse.Namespace) -> int:
    """Does it; returns the exit code."""
    from fasterisnet import demo

    demo.run(Path(options.out), seed=options.seed, say=print)
    return DONE
