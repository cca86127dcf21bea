"""Options: what is taken, what is refused, and that errors name the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fasterisnet.errors import UsageError
from fasterisnet.runs.config import Config
from fasterisnet.training.setup import learning_rate


def read(tmp_path: Path, content: str, **changes: Any) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    return Config.read(path, changes)


def test_yaml_and_changes(tmp_path: Path) -> None:
    config = read(tmp_path, "data: DIR\nlr: 1e-2\nheatmap-weight: [0.3, 0.9]\nzb: false\n", epochs=7)
    assert (config.data, config.lr, config.heatmap_weight, config.zb, config.epochs) == (
        "DIR",
        0.01,
        [0.3, 0.9],
        False,
        7,
    )
    assert config.out == "runs/stochastic-resnet50"


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    config = Config(data="DIR", pretrained=True, deep_supervision=["layer1"], ranges=[0.5, 2], watch=["a"])
    assert config.mean[0] == 0.485
    assert read(tmp_path, config.write()) == config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("data: D\nlearning_rat: 1\n", "'learning_rat'"),
        ("data: D\nepoch: 3\n", "did you mean 'epochs'"),
        ("data: D\nmetod: dual\n", "did you mean 'method'"),
        ("data: D\nmethod: duel\n", "one of standard, "),
        ("data: D\nepochs: 0\n", "epochs is 0; it has to be a whole number, 1 or more"),
        ("data: D\nepochs: 2.5\n", "a whole number"),
        ("data: D\nlr: fast\n", "lr is 'fast'; it has to be auto, or a number"),
        ("data: D\nlr: -1\n", "from 0 on"),
        ("data: D\nzb: 3\n", "true or false"),
        ("data: D\nheatmap_weight: 1.5\n", "from 0 to 1"),
        ("data: D\nheatmap_weight: []\n", "one for each epoch"),
        ("data: D\nranges: [3, 1]\n", "0 < C1 <= C2"),
        ("data: D\nmean: [0.5]\nstd: [0.5]\n", "3 numbers"),
        ("data: D\nchannels: 2\n", "3 or 1"),
        ("epochs: 3\n", "data is missing"),
        ("- a\n- b\n", "key: value"),
        ("data: [unclosed\n", "cannot be read as YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(UsageError, match=None) as raised:
        read(tmp_path, content)
    assert message in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing.yaml cannot be read"):
        Config.read(tmp_path / "nothing.yaml", {})


@pytest.mark.parametrize("schedule", ["constant", "cosine", "onecycle"])
def test_learning_rates(schedule: str) -> None:
    config = Config(data="D", lr=0.5, schedule=schedule)
    rates = [learning_rate(config, done, 100) for done in range(100)]
    assert max(rates) <= 0.5 + 1e-12 and min(rates) >= 0
    if schedule == "constant":
        assert set(rates) == {0.5}
    if schedule == "cosine":
        assert rates[0] == 0.5 and rates[50] == pytest.approx(0.25) and rates == sorted(rates, reverse=True)
    if schedule == "onecycle":
        assert rates[0] == pytest.approx(0.02) and rates[30] == pytest.approx(0.5) and rates[-1] < 0.001
        assert rates[:31] == sorted(rates[:31]) and rates[30:] == sorted(rates[30:], reverse=True)
