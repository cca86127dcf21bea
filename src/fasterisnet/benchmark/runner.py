"""Runs the rows of a recipe. Whatever is finished is not repeated, whatever was stopped goes on."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fasterisnet.audit.audit import audit_run
from fasterisnet.benchmark.pictures import save_maps
from fasterisnet.benchmark.recipe import Recipe, change
from fasterisnet.benchmark.results import difference, finished, read_result
from fasterisnet.benchmark.tables import write_tables
from fasterisnet.errors import FasterISNetError, UsageError
from fasterisnet.evaluation.attention import logits_of
from fasterisnet.files import read_json, remove_leftovers, write_text
from fasterisnet.models import check_trust
from fasterisnet.runs.config import Config
from fasterisnet.runs.fingerprint import absolute
from fasterisnet.runs.folder import Run
from fasterisnet.runs.inputs import source_of
from fasterisnet.training.console import Terminal
from fasterisnet.training.distributed import is_first_process
from fasterisnet.training.loop import train

BATCH, ROUNDS = 32, 50  # of the measurement of inference


def begun(config: Config) -> bool:
    """Whether a run goes on; it is refused if it was begun with other options."""
    run = Run(config.out)
    if not run.path("config.yaml").exists():
        return False
    made, wanted = (replace(c, data=absolute(c.data)) for c in (run.config, config))
    unlike = difference(vars(made), vars(wanted))
    if unlike:
        raise UsageError(f"{run.folder} was begun with {unlike}; remove it, or name another folder with --runs.")
    return True


def run_row(recipe: Recipe, config: Config, goes_on: bool, result: Path, command: str, *, trust: bool = False) -> None:
    """One run, from wherever it is to its result file."""
    with Terminal() as watcher:
        if is_first_process():
            watcher.say(f"--- {result.stem}{' (going on)' if goes_on else ''}")
        run = train(config, resume=goes_on, watcher=watcher, trust=trust)
        if is_first_process() and config.audit:
            audit_run(run, config.audit, watcher.say, trust=trust)
    if is_first_process():
        _write_result(recipe, run, config, result, command, trust)


def _write_result(recipe: Recipe, run: Run, config: Config, result: Path, command: str, trust: bool) -> None:
    """Maps of samples of the first test come first: a run with a result file is finished."""
    shown = source_of(config).split(recipe.tests[0])
    try:
        save_maps(run, shown, result.with_suffix(".safetensors"), outlines=recipe.outlines, trust=trust)
    except FasterISNetError as error:
        print(f"No picture of {result.stem}: {error}")
    report, progress = run.report or {}, (run.load_state() or {})["progress"]
    content = {
        "command": command,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__.split('+')[0]}",
        "config": vars(config),
        "training_samples": report["training_samples"],
        "training_seconds": round(progress["seconds"], 3),
        "processor_seconds": round(progress["processor_seconds"], 3),
        "best_epoch": report["epoch"],
        **_size_and_speed(run, trust),
        "tests": report["tests"],
        "epochs": progress["rows"],
        **_audited(run),
    }
    calibration = run.path("calibration.json")
    if calibration.exists():
        content["ranges"] = json.loads(calibration.read_text(encoding="utf-8"))
    write_text(result, json.dumps(content, indent=1) + "\n")


def _audited(run: Run) -> dict[str, Any]:
    """The causal tests of the audit of a run, if it has one."""
    path = run.path("audit/audit.json")
    if not path.is_file():
        return {}
    audit = read_json(path)
    causal = audit["models"][0]["causal"]
    found = {
        "changed": causal["tests"].get("mixed_other", {}).get("changed"),
        "influence": causal["influence"],
        "without_object": causal["tests"].get("object_erased", {}).get("accuracy"),
    }
    return {"audit": {**{key: audit[key] for key in ("split", "images", "verdict")}, **found}}


def _size_and_speed(run: Run, trust: bool) -> dict[str, float]:
    """Parameters of the network that comes out, and milliseconds it takes for an image."""
    model, card = run.load_model(trust=trust)
    images = torch.rand(BATCH, card.prepare.channels, card.prepare.size, card.prepare.size)
    times = []
    with torch.inference_mode():
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            logits_of(model, images)
            times.append(time.perf_counter() - begin)
    milliseconds = 1000 * min(times) / BATCH  # whatever else the machine does only adds to it
    return {"parameters": sum(p.numel() for p in model.parameters()), "inference_milliseconds": milliseconds}


def main(options: argparse.Namespace) -> int:
    """`fasterisnet benchmark`."""
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
            print(f"{files[run].stem}: {state}\n  {vars(config)}")
        return 0
    if not options.report:
        for config in plan.values():
            check_trust(config.model, options.trust)
        if is_first_process():
            remove_leftovers(results)
        done = {run for run, config in plan.items() if finished(files[run], config)}
        goes_on = {run for run, config in plan.items() if run not in done and begun(config)}
        for run, config in plan.items():
            if run not in done:
                command = _command(options, *run)
                run_row(recipe, config, run in goes_on, files[run], command, trust=options.trust)
            elif is_first_process():
                data = read_result(files[run])["config"]["data"]
                print(f"{files[run].stem} is finished ({data}); from scratch: --runs NEW --results NEW/results")
    if is_first_process():
        print(write_tables(recipe, results))
    return 0


def _command(options: argparse.Namespace, row: str, seed: int) -> str:
    """What runs one row again."""
    words = ["fasterisnet", "benchmark", options.name, "--methods", row, "--seeds", str(seed)]
    words += ["--data", options.data] if options.data else []
    words += ["--recipe", options.recipe] if options.recipe else []
    words += ["--quick"] if options.quick else []
    for text in options.set:
        words += ["--set", text]
    return shlex.join(words)
