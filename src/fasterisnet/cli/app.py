"""`fasterisnet app`: trained networks in the browser."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from fasterisnet.cli.arguments import DONE, command, count


def add(commands: Any) -> None:
    """What it takes."""
    p = command(
        commands, "app", "A page in the browser: drop an image, see what trained networks say and where they look.",
        "  fasterisnet app runs/mine runs/standard --port 7860", work,
    )  # fmt: skip
    p.add_argument("runs", metavar="RUN", nargs="+", help="run folders, shown side by side")
    p.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine alone)")
    p.add_argument("--port", type=count, help="(default: the first free one from 7860 on)")
    p.add_argument("--trust", action="store_true", help="import models that runs name as package.module:function")


def work(options: argparse.Namespace) -> int:
    """Does it; returns the exit code."""
    from fasterisnet.app import serve

    serve(options.runs, partial(print, flush=True), port=options.port, host=options.host, trust=options.trust)
    return DONE
