"""`fasterisnet export`: the network alone, in a file."""

from __future__ import annotations

import argparse
from typing import Any

from fasterisnet.cli.arguments import DONE, add_run, check_file, command


def add(commands: Any) -> None:
    """What it takes."""
    p = command(
        commands, "export", "Write the trained network alone, for use without this package.",
        "  fasterisnet export runs/mine --format onnx --out mine.onnx", work,
    )  # fmt: skip
    add_run(p)
    p.add_argument(
        "--format", default="onnx", choices=("onnx", "pt2"), help="ONNX or torch.export (default: %(default)s)"
    )
    p.add_argument("--out", metavar="FILE", required=True, help="the model card and predict.py go beside it")
    p.add_argument("--audit", metavar="DIR", help="of `fasterisnet audit`, for the card (default: in the run folder)")


def work(options: argparse.Namespace) -> int:
    """Does it; returns the exit code."""
    from fasterisnet.runs.export import export_run
    from fasterisnet.runs.folder import Run

    check_file(options.out)
    for path in export_run(Run(options.run), options.out, options.format, trust=options.trust, audit=options.audit):
        print(path)
    return DONE
