"""`fasterisnet tune`: P, d and the learning rate for one's own data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fasterisnet.cli.arguments import DONE, command
from fasterisnet.cli.options import add_options, given_options


def add(commands: Any) -> None:
    """What it takes."""
    p = command(
        commands, "tune", "Choose P, d and the learning rate on a copy of your data that is biased on purpose.",
        "  fasterisnet tune --data DIR --method stochastic --model resnet18 --size 64 --epochs 30 --out runs/tune\n"
        "  fasterisnet train --data DIR --config runs/tune/tuned.yaml --out runs/mine", work,
    )  # fmt: skip
    p.usage = "fasterisnet tune --data DIR [--weights P ...] [--decays D ...] [--rates LR ...] [option of train ...]"
    p.add_argument("--config", metavar="FILE", help="YAML file with options; those given here come on top")
    p.add_argument("--trust", action="store_true", help="import the model that --config names as code")
    p.add_argument("--weights", metavar="P", nargs="+", type=float, help="values of P to try")
    p.add_argument("--decays", metavar="D", nargs="+", type=float, help="values of d to try")
    p.add_argument("--rates", metavar="LR", nargs="+", type=float, help="learning rates to try (default: lr alone)")
    p.add_argument("--whole-grid", action="store_true", help="train every candidate to the end: three times the cost")
    add_options(p)


def work(options: argparse.Namespace) -> int:
    """Does it; returns the exit code."""
    from fasterisnet.runs.config import Config
    from fasterisnet.training.console import Terminal
    from fasterisnet.tune import DECAYS, WEIGHTS, table, tune

    given = given_options(options)
    config = Config.read(Path(options.config) if options.config else None, given)
    if "out" not in given:
        config.out = f"runs/tune-{config.method}-{Path(config.model).name.replace(':', '-')}"
    with Terminal() as watcher:
        tuned = tune(
            config, weights=options.weights or WEIGHTS, decays=options.decays or DECAYS, rates=options.rates or (),
            whole_grid=options.whole_grid, say=watcher.say, trust=options.trust or "model" in given,
        )  # fmt: skip
    print(table(tuned))
    print(f"Chosen: {tuned.best.candidate}; train with: --config {Path(config.out) / 'tuned.yaml'}")
    return DONE
