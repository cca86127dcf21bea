"""Tables and figures of an experiment, made from its result files and from nothing else."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fasterisnet.benchmark.pictures import heatmap_grid
from fasterisnet.benchmark.recipe import Recipe
from fasterisnet.benchmark.results import Results, read_results
from fasterisnet.data.sources import parts_of
from fasterisnet.errors import InputError
from fasterisnet.evaluation.figures import accuracy_panels, curve_of_f, loss_panels, save_figure
from fasterisnet.evaluation.intervals import Estimate
from fasterisnet.evaluation.posterior import posterior
from fasterisnet.files import write_text

FEW = 5  # classes that have a column each
DRAWS = 20_000  # an interval to three digits
INFERENCE = "inference, × standard"
MORE = {"macro AUC": "macro_auc", "relevance in the background": "background_mass"}
CAUSAL = {
    "answers changed by a background of another class": "changed",
    "the background's part in what moves the outputs": "influence",
    "right with the object erased": "without_object",
}


def write_tables(recipe: Recipe, folder: Path) -> str:
    """table.md, details.md, causal.md; of the first seed of each row accuracy.png, losses.png, heatmaps.png, f.png.

    Returns the first table.
    """
    results = read_results(folder, list(recipe.rows))
    if not results:
        raise InputError(f"{folder} has no finished run yet.")
    content = table(recipe, results)
    write_text(folder / "table.md", content + "\n")
    write_text(folder / "details.md", details(recipe, results) + "\n")
    audited = causal(results)
    if audited:
        write_text(folder / "causal.md", audited + "\n")
    histories = {row: _history(recipe, runs[0]["epochs"]) for row, runs in results.items()}
    histories = {row: history for row, history in histories.items() if history}
    if histories:
        save_figure(accuracy_panels(histories), folder / "accuracy.png")
    losses = {row: _losses(runs[0]["epochs"]) for row, runs in results.items()}
    save_figure(loss_panels(losses), folder / "losses.png")
    seeds = {row: runs[0]["config"]["seed"] for row, runs in results.items()}
    left_out = heatmap_grid(
        {row: folder / f"{row}-seed{seed}.safetensors" for row, seed in seeds.items()}, folder / "heatmaps.png"
    )
    ranges = next((runs[0]["ranges"] for runs in results.values() if "ranges" in runs[0]), None)
    if ranges is not None:
        bounds = ranges["depths"]["input"]
        save_figure(curve_of_f(bounds["c1"][0], bounds["c2"][0]), folder / "f.png")
    return content + "".join(f"\nheatmaps.png is without {row}: it was tested on other images." for row in left_out)


def table(recipe: Recipe, results: Results) -> str:
    """One line a row: mean over the seeds on every test, the paper's number in brackets."""
    every = [run for runs in results.values() for run in runs]
    known = COSTS if any("parameters" in run for run in every) else {}
    facts = [
        "largest gap, points",
        f"relevance in the background, {recipe.tests[-1]}",
        f"training, {'processor ' if all('processor_seconds' in r for r in every) else ''}min",
        *known,
        "command",
    ]
    head = ["row", "seeds", "samples", "epochs", *recipe.tests, *facts]
    lines = [
        f"{recipe.metric}, mean over seeds; in brackets the paper's",
        "",
        f"| {' | '.join(head)} |",
        "| --- " * len(head) + "|",
    ]
    for row, runs in results.items():
        papers = recipe.paper.get(row, [None] * len(recipe.tests))
        values = [[run["tests"].get(test, {}).get(recipe.metric) for run in runs] for test in recipe.tests]
        cells = [_cell(v, p) for v, p in zip(values, papers, strict=True)]
        minutes = statistics.mean(map(_seconds, runs)) / 60
        epochs = "/".join(sorted({str(run["config"]["epochs"]) for run in runs}))
        samples = "/".join(sorted({f"{run['training_samples']:,}" for run in runs}))
        seeds = [str(run["config"]["seed"]) for run in runs]
        command = command_of(runs[0]["command"], seeds)
        costs = [_times(runs, results.get("standard", []), cost) for cost in known]
        facts = [_gap(values), _attention(recipe, runs), f"{minutes:.1f}", *costs, f"`{command}`"]
        lines.append(f"| {' | '.join([row, ', '.join(seeds), samples, epochs, *cells, *facts])} |")
    machines = sorted({run["machine"] for run in every})
    return "\n".join([*lines, "", f"Machine: {'; '.join(machines)}."])


def details(recipe: Recipe, results: Results) -> str:
    """One line a run and test: what its confusion matrix leaves open, F1 by class if they are few, AUC, background."""
    tests = [(row, run, test) for row, runs in results.items() for run in runs for test in recipe.tests]
    tests = [(row, run, test) for row, run, test in tests if run["tests"].get(test)]
    classes = list(tests[0][1]["tests"][tests[0][2]]["per_class"]) if tests else []
    classes = classes if len(classes) <= FEW else []
    head = ["row", "seed", "test", "samples", "accuracy", "macro F1", *(f"F1 {c}" for c in classes), *MORE]
    lines = [
        "posterior mean and 95 % highest-density interval (flat Dirichlet priors); AUC and background as measured",
        "",
        f"| {' | '.join(head)} |",
        "| --- " * len(head) + "|",
    ]
    for row, run, test in tests:
        found = run["tests"][test]
        known = posterior(found["confusion"], draws=DRAWS)
        there = [any(answers) for answers in found["confusion"]]
        cells = [_estimate(known.accuracy), _estimate(known.macro["f1"]) if all(there) else "-"]
        cells += [_estimate(known.per_class[i]["f1"]) if there[i] else "-" for i in range(len(classes))]
        cells += [f"{found[key]:.3f}" if found.get(key) is not None else "-" for key in MORE.values()]
        lines.append(f"| {' | '.join([row, str(run['config']['seed']), test, str(found['samples']), *cells])} |")
    return "\n".join(lines)


def causal(results: Results) -> str:
    """One line an audited run: what became of its answers when backgrounds were exchanged or objects erased."""
    audited = [(row, run) for row, runs in results.items() for run in runs if "audit" in run]
    head = ["row", "seed", "test", "images", "verdict", *CAUSAL]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for row, run in audited:
        audit = run["audit"]
        known = [Estimate(**audit[key]) if audit[key] else None for key in CAUSAL.values()]
        cells = [_estimate(estimate) if estimate else "-" for estimate in known]
        seed, images = run["config"]["seed"], audit["images"]
        lines.append(f"| {' | '.join([row, str(seed), audit['split'], str(images), audit['verdict'], *cells])} |")
    return "\n".join(lines) if audited else ""


def _estimate(estimate: Estimate) -> str:
    return f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _seconds(run: dict[str, Any]) -> float:
    """Of training: processor time, which others on the machine hardly change; older results have the clock's."""
    return run.get("processor_seconds", run["training_seconds"])


def _step(run: dict[str, Any]) -> float | None:
    """Seconds of training for each update."""
    updates = run["epochs"][-1].get("updates") if run["epochs"] else None
    return _seconds(run) / updates if updates else None


STEP = "step, × standard"
# What is compared with the standard classifier of the same recipe; results of older versions do not know all of it.
# Inference was measured beside the standard network and is such a comparison already.
COSTS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    STEP: _step,
    INFERENCE: lambda run: run.get("inference_times_standard"),
    "parameters, × standard": lambda run: run.get("parameters"),
}


def _times(runs: list[dict[str, Any]], standard: list[dict[str, Any]], cost: str) -> str:
    """How many times as much as the standard classifier on the same machine, means over the seeds."""
    machines = {run["machine"] for run in runs}
    standard = [run for run in standard if cost != STEP or {run["machine"]} == machines]
    mine, theirs = ([value for run in found if (value := COSTS[cost](run))] for found in (runs, standard))
    unit = 1 if cost == INFERENCE else statistics.mean(theirs) if theirs else None
    return f"{statistics.mean(mine) / unit:.2f}" if mine and unit else "-"


def command_of(command: str, seeds: list[str]) -> str:
    """The command of the first seed for all of them, on data of the reader's own."""
    words = shlex.split(command)
    at = words.index("--seeds") + 1
    words[at : at + 1] = seeds
    if "--data" in words:
        at = words.index("--data") + 1
        words[at] = "DIR" + words[at].removeprefix(parts_of(words[at])[0])
    return shlex.join(words)


def _gap(values: list[list[float | None]]) -> str:
    """Between the best and the worst test of one run, in points; the largest of all runs."""
    runs = [[v for v in run if v is not None] for run in zip(*values, strict=True)]
    return f"{100 * max(max(run) - min(run) for run in runs):.2f}" if all(runs) else "-"


def _attention(recipe: Recipe, runs: list[dict[str, Any]]) -> str:
    """The share of relevance that lies in the background of the last, hardest test, mean over the seeds."""
    shares = [run["tests"].get(recipe.tests[-1], {}).get("background_mass") for run in runs]
    known = [share for share in shares if share is not None]
    return f"{statistics.mean(known):.2%}" if known else "-"


def _cell(values: list[float | None], paper: float | None) -> str:
    known = [v for v in values if v is not None]
    mean = f"{statistics.mean(known):.3f}" if known else "-"
    spread = f" ± {statistics.stdev(known):.3f}" if len(known) > 1 else ""
    return mean + spread + (f" [{paper:.3f}]" if paper is not None else "")


def _history(recipe: Recipe, epochs: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Accuracy after every epoch on the tests, None for those that were not watched; nothing if none was."""
    history = {test: [epoch.get(f"{test}_accuracy") for epoch in epochs] for test in recipe.tests}
    return history if any(v is not None for values in history.values() for v in values) else {}


def _losses(epochs: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """The classification loss after every epoch, and what the background costs where a method punishes it."""
    found = {}
    for loss in ("classification", "background"):
        for part, spoken in (("train", "training"), ("val", "validation")):
            values = [epoch.get(f"{part}_{loss}") or None for epoch in epochs]  # zero: no such loss in this epoch
            if any(values):
                found[f"{loss}, {spoken}"] = values
    return found
