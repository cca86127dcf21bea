"""Tables and figures of an experiment, made from its result files and from nothing else."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from fasterisnet.benchmark.pictures import heatmap_grid
from fasterisnet.benchmark.runner import Recipe
from fasterisnet.errors import InputError
from fasterisnet.evaluation.figures import accuracy_panels, curve_of_f, save_figure
from fasterisnet.writing import write_text

Results = dict[str, list[dict[str, Any]]]


def read_results(folder: Path, known: list[str]) -> Results:
    """Finished runs by row, in the order of the recipe."""
    found: Results = defaultdict(list)
    for path in sorted(folder.glob("*-seed*.json")):
        try:
            found[path.stem.rsplit("-seed", 1)[0]].append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is not a result of a benchmark: {error}") from error
    return {row: found[row] for row in [*known, *(row for row in found if row not in known)] if row in found}


def write_tables(recipe: Recipe, folder: Path) -> str:
    """table.md, accuracy.png, heatmaps.png and f.png, of the first seed of each row; returns the table."""
    results = read_results(folder, list(recipe.rows))
    if not results:
        raise InputError(f"{folder} has no finished run yet.")
    content = table(recipe, results)
    write_text(folder / "table.md", content + "\n")
    histories = {row: _history(recipe, runs[0]["epochs"]) for row, runs in results.items()}
    histories = {row: history for row, history in histories.items() if history}
    if histories:
        save_figure(accuracy_panels(histories), folder / "accuracy.png")
    seeds = {row: runs[0]["config"]["seed"] for row, runs in results.items()}
    heatmap_grid(
        {row: folder / f"{row}-seed{seed}.safetensors" for row, seed in seeds.items()}, folder / "heatmaps.png"
    )
    ranges = next((runs[0]["ranges"] for runs in results.values() if "ranges" in runs[0]), None)
    if ranges is not None:
        bounds = ranges["depths"]["input"]
        save_figure(curve_of_f(min(bounds["c1"]), max(bounds["c2"])), folder / "f.png")
    return content


def table(recipe: Recipe, results: Results) -> str:
    """One line a row: mean over the seeds on every test, the paper's number in brackets."""
    head = ["row", "seeds", "samples", "epochs", *recipe.tests, "largest gap, points", "training, min", "command"]
    lines = [
        f"{recipe.metric}, mean over seeds; in brackets the paper's",
        "",
        f"| {' | '.join(head)} |",
        "| --- " * len(head) + "|",
    ]
    for row, runs in results.items():
        papers = recipe.paper.get(row, [None] * len(recipe.tests))
        values = [[run["tests"][test][recipe.metric] for run in runs] for test in recipe.tests]
        cells = [_cell(v, p) for v, p in zip(values, papers, strict=True)]
        gap = max(max(seed) - min(seed) for seed in zip(*values, strict=True))
        minutes = statistics.mean(run["training_seconds"] for run in runs) / 60
        epochs = "/".join(sorted({str(run["config"]["epochs"]) for run in runs}))
        samples = "/".join(sorted({f"{run['training_samples']:,}" for run in runs}))
        seeds = [str(run["config"]["seed"]) for run in runs]
        command = runs[0]["command"].replace(f"--seeds {seeds[0]}", f"--seeds {' '.join(seeds)}")
        facts = [row, ", ".join(seeds), samples, epochs, *cells, f"{100 * gap:.2f}", f"{minutes:.1f}", f"`{command}`"]
        lines.append(f"| {' | '.join(facts)} |")
    notes = [f"- {row}: {text}" for row, text in recipe.notes.items() if row in results]
    machines = sorted({run["machine"] for runs in results.values() for run in runs})
    return "\n".join([*lines, "", *notes, *[""][: len(notes)], f"Machine: {'; '.join(machines)}."])


def _cell(values: list[float], paper: float | None) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}" + (f" [{paper:.3f}]" if paper is not None else "")


def _history(recipe: Recipe, epochs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Accuracy after every epoch on the tests that were watched."""
    watched = [test for test in recipe.tests if epochs and f"{test}_accuracy" in epochs[0]]
    return {test: [epoch[f"{test}_accuracy"] for epoch in epochs] for test in watched}
