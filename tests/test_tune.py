"""Choosing P and d on data that is biased on purpose."""

import json
from pathlib import Path

import pytest

from fasterisnet.cli import main
from fasterisnet.errors import UsageError
from fasterisnet.runs.config import Config
from fasterisnet.tune import Trial, plan, tune

DATA = "drawn?size=16&per_class=15"


def options(out: Path, **changes: object) -> Config:
    values = {
        "data": DATA, "method": "stochastic", "model": "small", "size": 16, "epochs": 9, "batch": 16, "workers": 0,
        "optimizer": "sgd", "lr": 0.05, "tensorboard": False, "out": str(out),
    }  # fmt: skip
    return Config(**{**values, **changes})  # pyright: ignore[reportArgumentType]


def test_the_plan_costs_less_than_a_third_of_the_grid() -> None:
    assert plan(12, 27) == [(12, 3), (4, 9), (1, 27)]
    for count in (9, 12, 15, 18, 30):
        for epochs in (9, 27, 40, 90):
            assert sum(n * length for n, length in plan(count, epochs)) <= count * epochs / 3 + 3 * count
    assert plan(5, 1) == [(5, 1)]


def test_finds_a_robust_candidate_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    weights, decays = (0.0, 0.9), (0.9, 0.999)
    tuned = tune(options(tmp_path / "tuned"), weights=weights, decays=decays)
    last = [trial for trial in tuned.trials if trial.epochs == 9]
    assert tuned.best == max(last, key=lambda trial: trial.rank)
    assert tuned.best.candidate.heatmap_weight > 0
    content = json.loads((tmp_path / "tuned/tune.json").read_text())
    assert content["best"]["robust"] == tuned.best.robust
    assert content["epochs"] == tuned.epochs < tuned.grid_epochs
    assert (tmp_path / "tuned/trade-off.png").stat().st_size > 5000
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "tuned").rglob("state.pt")}
    again = tune(options(tmp_path / "tuned"), weights=weights, decays=decays)
    assert again == tuned
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "tuned").rglob("state.pt")}
    config = Config.read(tmp_path / "tuned/tuned.yaml", {"data": DATA})
    assert (config.heatmap_weight, config.decay) == (
        tuned.best.candidate.heatmap_weight,
        tuned.best.candidate.decay,
    )
    assert config.ranges is None
    assert not config.watch


def test_the_whole_grid_gives_no_candidate_up(tmp_path: Path) -> None:
    config, weights = options(tmp_path, epochs=3), (0.5, 0.9)
    quick = tune(config, weights=weights, decays=(0.9,))
    whole = tune(config, weights=weights, decays=(0.9,), whole_grid=True)
    assert quick.epochs == 5 and whole.epochs == whole.grid_epochs == 6
    assert quick.best in whole.trials and whole.best == max(whole.trials, key=lambda trial: trial.rank)


def test_candidates_are_not_tested(tmp_path: Path) -> None:
    tuned = tune(options(tmp_path, epochs=1), weights=(0.5,), decays=(0.9,))
    assert isinstance(tuned.best, Trial)
    assert not list(tmp_path.rglob("report.json"))


def test_methods_without_p_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no P and d"):
        tune(options(tmp_path, method="standard", zb=True))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tune"
    code = main(
        ["tune", "--data", "drawn?size=16&per_class=10", "--model", "small", "--size", "16", "--epochs", "1",
         "--workers", "0", "--weights", "0.5", "--decays", "0.9", "--out", str(out), "--tensorboard", "false"]
    )  # fmt: skip
    assert code == 0
    assert "Chosen: P0.5-d0.9" in capsys.readouterr().out
    assert (out / "tuned.yaml").is_file()
