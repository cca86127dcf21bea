"""Runs the rows of a recipe. Whatever is finished is not repeated, whatever was stopped goes on."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fasterisnet.audit.audit import audit_run
from fasterisnet.benchmark.pictures import save_maps
from fasterisnet.benchmark.recipe import Recipe
from fasterisnet.benchmark.results import difference
from fasterisnet.errors import FasterISNetError, UsageError
from fasterisnet.evaluation.attention import logits_of
from fasterisnet.files import read_json, write_text
from fasterisnet.models.factory import build_model
from fasterisnet.runs.config import Config
from fasterisnet.runs.fingerprint import absolute
from fasterisnet.runs.folder import Run
from fasterisnet.runs.inputs import source_of
from fasterisnet.training.console import Terminal
from fasterisnet.training.distributed import is_first_process
from fasterisnet.training.loop import train

BATCH, ROUNDS = 32, 50  # of the measurement of inference
STANDARD = "standard"  # the row that others are compared with


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
        "machine": f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__.split('+')[0]}",
        "config": vars(config),
        "training_samples": report["training_samples"],
        "training_seconds": round(progress["seconds"], 3),
        "processor_seconds": round(progress["processor_seconds"], 3),
        "best_epoch": report["epoch"],
        **_size_and_speed(recipe, run, trust),
        "tests": report["tests"],
        "epochs": progress["rows"],
        **_audited(run),
    }
    calibration = run.path("calibration.json")
    if calibration.exists():
        content["ranges"] = read_json(calibration)
    write_text(result, json.dumps(content, indent=1) + "\n")


def _processor() -> str:
    """What computes here, as far as the system tells."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text(encoding="utf-8", errors="replace").splitlines() if listed.is_file() else []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return ", ".join([platform.machine(), *sorted(names)])


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


def _size_and_speed(recipe: Recipe, run: Run, trust: bool) -> dict[str, float]:
    """Parameters of the network that comes out, and how many times as long as the standard one it takes for an image.

    Both are run in turn, and the fastest round of each counts: whatever else the machine does only slows them down.
    """
    model, card = run.load_model(trust=trust)
    found: dict[str, float] = {"parameters": sum(p.numel() for p in model.parameters())}
    if STANDARD in recipe.rows:
        plain = recipe.config(STANDARD, 0, None, run.folder, {})
        standard = build_model(plain.model, len(card.classes), channels=plain.channels, size=plain.size, trust=trust)
        subjects = [(standard.eval(), plain.channels, plain.size), (model, card.prepare.channels, card.prepare.size)]
        theirs, mine = (min(times) for times in zip(*_in_turn(subjects), strict=True))
        found["inference_times_standard"] = mine / theirs
    return found


def _in_turn(subjects: list[tuple[nn.Module, int, int]]) -> Iterator[list[float]]:
    """Seconds that each of (network, channels, pixels) takes for a batch, round by round."""
    batches = [(model, torch.rand(BATCH, channels, size, size)) for model, channels, size in subjects]
    with torch.inference_mode():
        for _ in range(ROUNDS):
            times = []
            for model, images in batches:
                begin = time.perf_counter()
                logits_of(model, images)
                times.append(time.perf_counter() - begin)
            yield times
