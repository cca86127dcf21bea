"""Choosing P, d and the learning rate for one's own data, as the paper does: on a copy that is biased on purpose.

Every candidate is trained on data with a bias in the background and judged on the validation set without it. Most are
given up after a few epochs (successive halving): of each rung the better third goes on to three times the epochs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fasterisnet.benchmark.runner import begun
from fasterisnet.data.sources import open_source
from fasterisnet.errors import UsageError
from fasterisnet.evaluation.figures import new_figure, save_figure
from fasterisnet.files import write_text
from fasterisnet.methods import method_class, options_of
from fasterisnet.runs.config import Config
from fasterisnet.runs.fingerprint import absolute
from fasterisnet.runs.folder import Run
from fasterisnet.training.console import Watcher
from fasterisnet.training.loop import train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JUDGE = "val_unbiased"
KEPT = 3  # one of so many goes on, to so many times the epochs
WEIGHTS = (0.5, 0.7, 0.8, 0.9, 0.95)
DECAYS = (0.9, 0.99, 0.999)


@dataclass(frozen=True)
class Candidate:
    """One choice."""

    heatmap_weight: float
    decay: float
    lr: float

    def __str__(self) -> str:
        return f"P{self.heatmap_weight:g}-d{self.decay:g}-lr{self.lr:g}"


@dataclass(frozen=True)
class Trial:
    """What a candidate came to: accuracy without the bias and with it, and the background loss, of its best epoch."""

    candidate: Candidate
    epochs: int
    robust: float
    biased: float
    background: float
    best_epoch: int

    @property
    def rank(self) -> tuple[float, float]:
        """Larger is better."""
        return self.robust, -self.background


@dataclass(frozen=True)
class Tuned:
    """The best candidate, all trials, and what they cost beside a full grid, in epochs."""

    best: Trial
    trials: list[Trial]
    epochs: int
    grid_epochs: int


def tune(
    config: Config,
    *,
    weights: Sequence[float] = WEIGHTS,
    decays: Sequence[float] = DECAYS,
    rates: Sequence[float] = (),
    whole_grid: bool = False,
    say: Callable[[str], None] = lambda _: None,
    watcher: Watcher | None = None,
    trust: bool = False,
) -> Tuned:
    """Searches P, d and the rate around the options of a run; goes on where it was stopped.

    whole_grid: every candidate is trained to the end, none given up.
    Leaves `tuned.yaml` (for `train --config`), `tune.json`, `table.md` and `trade-off.png` in `config.out`.
    """
    missing = {"heatmap_weight", "decay"} - set(options_of(method_class(config.method)))
    if missing:
        raise UsageError(f"The method {config.method} has no P and d to choose; tune dual, selective or stochastic.")
    candidates = [Candidate(*c) for c in itertools.product(weights, decays, rates or (config.lr,))]
    if not candidates:
        raise UsageError("There is nothing to choose from: give at least one P and one d.")
    data, out = judged(config.data, config.seed), Path(config.out)
    first = candidates
    rungs = [(len(first), config.epochs)] if whole_grid else plan(len(first), config.epochs)
    say(
        f"{len(candidates)} candidates, judged on {JUDGE} of {data}: "
        + ", then ".join(f"{count} for {epochs} epochs" for count, epochs in rungs)
    )
    trials: list[Trial] = []
    for count, epochs in rungs:
        rung = []
        for candidate in candidates[:count]:
            trial = _trial(replace(config, data=data, epochs=epochs), candidate, out, watcher, trust)
            say(f"{epochs} epochs, {candidate}: {trial.robust:.3f} without the bias, {trial.biased:.3f} with it")
            rung.append(trial)
        rung.sort(key=lambda trial: trial.rank, reverse=True)
        trials += rung
        candidates = [trial.candidate for trial in rung]
    longest = [trial for trial in trials if trial.epochs == config.epochs]
    tuned = Tuned(longest[0], trials, sum(trial.epochs for trial in trials), len(first) * config.epochs)
    _write(config, tuned, out, data)
    return tuned


def plan(candidates: int, epochs: int) -> list[tuple[int, int]]:
    """How many candidates are trained for how many epochs, rung by rung."""
    rungs: list[tuple[int, int]] = []
    for back in (2, 1, 0):
        length = max(1, round(epochs / KEPT**back))
        if rungs and rungs[-1][1] == length:
            continue
        rungs.append((candidates, length))
        candidates = max(1, candidates // KEPT)
    return rungs


def judged(data: str, seed: int) -> str:
    """The data if it has a validation set without its bias, otherwise a copy with a bias that is planted."""
    if JUDGE in open_source(data, seed=seed).splits:
        return data
    return f"{data}{'&' if '?' in data else '?'}bias=mark"


def _trial(config: Config, candidate: Candidate, out: Path, watcher: Watcher | None, trust: bool) -> Trial:
    """One run, from wherever it is to its end; C1 and C2, which depend on none of the choices, are measured once."""
    ranges = out / "calibration.json"
    run = Run(out / f"{config.epochs}-epochs" / str(candidate))
    chosen = replace(
        config, **asdict(candidate), out=str(run.folder), watch=[JUDGE],
        ranges=str(ranges) if ranges.is_file() and not run.path("config.yaml").exists() else config.ranges,
    )  # fmt: skip
    if run.path("config.yaml").exists():
        chosen = replace(chosen, ranges=run.config.ranges)
    goes_on = begun(chosen)
    state = run.load_state() if goes_on else None
    if state is None or not state["progress"]["finished"]:
        train(chosen, resume=goes_on, watcher=watcher, trust=trust, report=False)
        state = run.load_state()
    assert state is not None
    if not ranges.is_file() and run.path("calibration.json").is_file():
        write_text(ranges, run.path("calibration.json").read_text(encoding="utf-8"))
    _, card = run.load_weights()
    row = state["progress"]["rows"][card.epoch - 1]
    return Trial(
        candidate, config.epochs, row[f"{JUDGE}_accuracy"], row["val_accuracy"], row["val_background"], card.epoch
    )


# --- what is left for the user ---------------------------------------------------------------------------------------


def _write(config: Config, tuned: Tuned, out: Path, data: str) -> None:
    best = replace(config, **asdict(tuned.best.candidate), data=absolute(config.data))
    options = {key: value for key, value in yaml.safe_load(best.write()).items() if key not in ("data", "out")}
    write_text(out / "tuned.yaml", yaml.safe_dump(options, sort_keys=False, allow_unicode=True, width=110))
    content: dict[str, Any] = {
        "data": data, "method": config.method, "model": config.model, "seed": config.seed,
        "epochs": tuned.epochs, "epochs_of_the_full_grid": tuned.grid_epochs,
        "best": asdict(tuned.best), "trials": [asdict(trial) for trial in tuned.trials],
    }  # fmt: skip
    write_text(out / "tune.json", json.dumps(content, indent=2) + "\n")
    write_text(out / "table.md", table(tuned) + "\n")
    save_figure(trade_off(tuned), out / "trade-off.png")


def table(tuned: Tuned) -> str:
    """All trials, the longest first, as Markdown."""
    lines = [
        "| P | d | learning rate | epochs | accuracy without the bias | with it | background loss |",
        "| --- " * 7 + "|",
    ]
    for t in sorted(tuned.trials, key=lambda trial: (trial.epochs, trial.rank), reverse=True):
        c = t.candidate
        lines.append(
            f"| {c.heatmap_weight:g} | {c.decay:g} | {c.lr:g} | {t.epochs} | {t.robust:.3f} | {t.biased:.3f} | "
            f"{t.background:.3f} |"
        )
    lines += ["", f"{tuned.epochs} epochs; a full grid takes {tuned.grid_epochs}."]
    return "\n".join(lines)


def trade_off(tuned: Tuned) -> Figure:
    """Accuracy without the bias over the background loss, every trial a point; the chosen one is named."""
    figure = new_figure(6.4, 4.2)
    axis = figure.subplots()
    for epochs in sorted({trial.epochs for trial in tuned.trials}):
        points = [trial for trial in tuned.trials if trial.epochs == epochs]
        axis.scatter(
            [t.background for t in points], [100 * t.robust for t in points], label=f"{epochs} epochs", alpha=0.7
        )
    best = tuned.best
    axis.annotate(
        f"P {best.candidate.heatmap_weight:g}, d {best.candidate.decay:g}, lr {best.candidate.lr:g}",
        (best.background, 100 * best.robust), textcoords="offset points", xytext=(8, -14),
    )  # fmt: skip
    axis.set(xlabel="background loss L1 (validation)", ylabel="accuracy without the bias, %")
    axis.grid(color="0.9")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    return figure
