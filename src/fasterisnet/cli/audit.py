"""`fasterisnet audit`: does a classifier look at the background?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fasterisnet.cli.arguments import DONE, add_accelerator, amount, check_folder, command, count


def add(commands: Any) -> None:
    """What it takes."""
    p = command(
        commands, "audit", "Does a classifier look at the background? Tests that need no heatmap, on one page.",
        "  fasterisnet audit runs/mine --data DIR --split test --against runs/standard --out audit\n"
        "  fasterisnet audit resnet50@weights.pt --data DIR --mean 0.485 0.456 0.406 --std 0.229 0.224 0.225", work,
    )  # fmt: skip
    p.add_argument("models", metavar="MODEL", nargs="+", help="run folder, NAME@WEIGHTS, FILE.onnx or module:function")
    p.add_argument("--data", required=True, help="folder, manifest or benchmark")
    p.add_argument("--split", help="split to test on (default: test, or the first test split)")
    p.add_argument("--against", metavar="MODEL", action="append", default=[], help="another beside it; may be repeated")
    p.add_argument("--out", metavar="DIR", default="audit", help="for audit.html and audit.json (default: %(default)s)")
    p.add_argument("--trust", action="store_true", help="import a model that is named as package.module:function")
    p.add_argument("--limit", type=count, default=1000, help="images at most (default: %(default)s)")
    p.add_argument("--explained", type=amount, default=200, help="of them, with heatmaps (default: %(default)s)")
    p.add_argument(
        "--explainer",
        action="append",
        help="epsilon, zplus, gradient, integrated, gradcam, occlusion or rollout; may be repeated",
    )
    p.add_argument("--batch", type=count, default=32)
    p.add_argument("--seed", type=amount, default=0)
    add_accelerator(p)
    for_others = p.add_argument_group("how images become input, for models whose files do not say it")
    for_others.add_argument("--size", type=count, default=224, help="pixels of the square (default: %(default)s)")
    for_others.add_argument("--channels", type=count, default=3)
    for_others.add_argument("--mean", type=float, nargs="+", default=[], help="normalisation (default: none)")
    for_others.add_argument("--std", type=float, nargs="+", default=[])
    for_others.add_argument("--fit", default="stretch", choices=("stretch", "pad"))


def work(options: argparse.Namespace) -> int:
    """Does it; returns the exit code."""
    from fasterisnet.audit.audit import Settings, audit
    from fasterisnet.data.preparation import Preparation
    from fasterisnet.evaluation.explainers import DEFAULT
    from fasterisnet.runs.device import chosen_device

    check_folder(options.out)
    settings = Settings(
        options.limit, options.explained, explainers=tuple(options.explainer or DEFAULT), batch=options.batch,
        seed=options.seed,
    )  # fmt: skip
    prepare = Preparation(options.size, options.channels, tuple(options.mean), tuple(options.std), options.fit)
    audit(
        [*options.models, *options.against], options.data, options.out, split=options.split, prepare=prepare,
        trust=options.trust, settings=settings, say=print, device=chosen_device(options.accelerator),
    )  # fmt: skip
    print(f"The page: {Path(options.out) / 'audit.html'}   the numbers: {Path(options.out) / 'audit.json'}")
    return DONE
