"""Runs the rows of a recipe. Whatever is finished is not repeated, whatever was stopped goes on."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import yaml

from fasterisnet.benchmark.pictures import save_maps
from fasterisnet.data.sources import open_source
from fasterisnet.errors import FasterISNetError, InputError, UsageError
from fasterisnet.training.config import Config, nearest
from fasterisnet.training.loop import train
from fasterisnet.training.run import Run
from fasterisnet.training.watching import Terminal
from fasterisnet.writing import write_text

RESULT = ("command", "machine", "config", "training_samples", "training_seconds", "tests", "epochs")
KEYS = ("data", "seeds", "tests", "metric", "common", "rows", "paper")


@dataclass(frozen=True)
class Recipe:
    """An experiment: what its rows share, the rows, the splits that test them and what the paper has for each."""

    name: str
    data: str
    seeds: list[int]
    tests: list[str]
    common: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    paper: dict[str, list[float | None]]
    metric: str = "accuracy"

    @classmethod
    def read(cls, name: str, file: str | None = None) -> Recipe:
        """The recipe that comes with the package, or a file."""
        try:
            source = Path(file) if file else resources.files("fasterisnet.benchmark") / "recipes" / f"{name}.yaml"
            content = yaml.safe_load(source.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise UsageError(f"The recipe {file or name} cannot be read: {error}") from error
        for key in content:
            if key not in KEYS:
                raise UsageError(f"The recipe {file or name} has an unknown key '{key}'{nearest(key, list(KEYS))}")
        return cls(name=name, **content)

    def config(self, row: str, seed: int, data: str | None, out: Path, changes: dict[str, Any]) -> Config:
        """The options of one run."""
        if row not in self.rows:
            raise UsageError(f"There is no row '{row}'{nearest(row, list(self.rows))}")
        options = {**self.common, **self.rows[row]}
        query = options.pop("data_options", {})
        place = f"{self.data}:{data}" if data else self.data
        options["data"] = place + ("?" + "&".join(f"{key}={value}" for key, value in query.items()) if query else "")
        return Config(**{**options, "seed": seed, "out": str(out), **changes})


def run_row(config: Config, result: Path, command: str, shown: str) -> None:
    """One run, from wherever it is to its result file; `shown` is the split whose samples are explained in pictures."""
    run = Run(config.out)
    begun = run.path("config.yaml").exists()
    if begun and run.config != config:
        raise UsageError(f"{run.folder} was begun with other options; remove it, or name another folder with --runs.")
    with Terminal() as watcher:
        watcher.say(f"--- {result.stem}{' (going on)' if begun else ''}")
        train(config, resume=begun, watcher=watcher)
    report = json.loads(run.path("report.json").read_text())
    progress = (run.load_state() or {})["progress"]
    source = open_source(config.data, seed=config.seed, refine_boxes=config.refine_boxes or None)
    content = {
        "command": command,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__.split('+')[0]}",
        "config": vars(config),
        "training_samples": report["training_samples"],
        "training_seconds": round(progress["seconds"], 1),
        "best_epoch": report["epoch"],
        "tests": report["tests"],
        "epochs": progress["rows"],
    }
    calibration = run.path("calibration.json")
    if calibration.exists():
        content["ranges"] = json.loads(calibration.read_text(encoding="utf-8"))
    write_text(result, json.dumps(content, indent=1) + "\n")
    try:
        save_maps(run, source.split(shown), result.with_suffix(".safetensors"))
    except FasterISNetError as error:
        print(f"No picture of {result.stem}: {error}")


def read_result(path: Path) -> dict[str, Any]:
    """A result file, if it is one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in RESULT if key not in content]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} is not a result of a benchmark: {error}") from error
    if missing:
        raise InputError(f"{path} is not a result of this version of the benchmark: it has no {', '.join(missing)}.")
    return content


def finished(result: Path, config: Config) -> bool:
    """Whether a run has its result; one that was made with other options is not passed off as this one's.

    Options that are younger than the result had their default. The same data may lie in another folder.
    """
    if not result.exists():
        return False
    defaults = vars(Config(data="any"))
    made = {**defaults, **read_result(result)["config"]}
    for key, value in json.loads(json.dumps(vars(config))).items():
        before = made[key]
        if key != "out" and before != value and not (key == "data" and _placeless(before) == _placeless(value)):
            raise UsageError(
                f"{result} was made with {key} = {before}, not {value}; remove it, or take other --results."
            )
    return True


def _placeless(data: str) -> tuple[str, bool, str]:
    """Data by name and settings, wherever its folder is."""
    place, _, query = data.partition("?")
    name, separator, _ = place.partition(":")
    return name, bool(separator), query


def main(options: argparse.Namespace) -> int:
    """`fasterisnet benchmark`."""
    recipe = Recipe.read(options.name, options.recipe)
    runs = Path(options.runs or f"runs/{recipe.name}")
    results = Path(options.results or f"results/{recipe.name}")
    rows = options.methods or list(recipe.rows)
    changes = dict(_change(text) for text in options.set)
    plan = [
        (f"{row}-seed{seed}", recipe.config(row, seed, options.data, runs / f"{row}-seed{seed}", changes))
        for seed in options.seeds or recipe.seeds
        for row in rows
    ]
    if options.list:
        for name, config in plan:
            print(f"{name}: {'finished' if (results / f'{name}.json').exists() else 'to do'}\n  {vars(config)}")
        return 0
    if not options.report:
        for name, config in plan:
            if finished(results / f"{name}.json", config):
                print(f"{name} is finished; from scratch: --runs NEW --results NEW/results")
            else:
                row, seed = name.rsplit("-seed", 1)
                place = f" --data {options.data}" if options.data else ""
                settings = "".join(f" --set {text}" for text in options.set)
                command = f"fasterisnet benchmark {recipe.name} --methods {row} --seeds {seed}{place}{settings}"
                run_row(config, results / f"{name}.json", command, recipe.tests[0])
    from fasterisnet.benchmark.tables import write_tables

    print(write_tables(recipe, results))
    return 0


def _change(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    known = list(Config.__dataclass_fields__)
    if not separator or key not in known:
        raise UsageError(f"--set {text}: give KEY=VALUE with a known key{nearest(key, known)}")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {text}: the value cannot be read: {error}") from error
