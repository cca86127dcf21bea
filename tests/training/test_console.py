"""What a run shows: it fits the terminal, says when it will end, and in a file it gives signs of life."""

from __future__ import annotations

import errno
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fasterisnet.cli.arguments import told
from fasterisnet.losses.gwrp import decay_for
from fasterisnet.runs import report
from fasterisnet.runs.config import Config
from fasterisnet.training import loop
from fasterisnet.training.console import BEAT, Output, Terminal, Watcher, bar_line, epoch_line, parts_of, remaining

ROW = {f"train_{name}": 0.5 for name in ("loss", "classification", "background", "foreground", "accuracy")}
PARTS = parts_of(ROW, "train", True)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("left", [None, 59.0, 3600.0 * 47, 3600.0 * 800])
@pytest.mark.parametrize("what", ["epoch 1/1", "epoch 1000/1000", "calibration"])
def test_counter_and_time_left_are_never_squeezed_out(width: int, left: float | None, what: str) -> None:
    line = bar_line(what, 5000, 10000, PARTS, left, width)
    assert len(line) < width
    assert what in line and "5000/10000" in line and "━" in line and "─" in line
    assert left is None or f"{remaining(left)} left" in line
    assert ("loss 0.500" in line) or width < 80


def test_numbers_are_shown_where_there_is_room() -> None:
    assert bar_line("epoch 3/40", 2, 9, PARTS, 75.0, 120).endswith("  1:15 left  " + PARTS.replace(", ", "  "))
    assert "background" not in parts_of(ROW, "train", False)


@pytest.mark.parametrize("heatmaps", [True, False])
def test_the_line_of_an_epoch_fits(heatmaps: bool) -> None:
    row = {**ROW, "epoch": 100, "val_loss": 10.25, "val_accuracy": 0.875}
    line = epoch_line(row, 100, heatmaps, True, 1.0) + "  3600 s"
    assert len(line) <= 100
    assert "epoch 100/100  masks 75%" in epoch_line(row, 100, heatmaps, True, 0.75)
    assert ("background 0.500" in line) == heatmaps and line.startswith("epoch 100/100  loss 0.500")


def test_the_time_left_is_of_the_run() -> None:
    now = 0.0
    shown = Terminal(Console(file=io.StringIO(), force_terminal=True, width=80), clock=lambda: now)
    shown.begin(4, True)
    for epoch in range(2):
        for batch in range(1, 11):
            shown.step(epoch, batch, 10, ROW)
            now += 2
        shown.work("val", 0, 3)
        now += 10  # validation counts as well
    shown.step(2, 1, 10, ROW)
    assert shown.left == pytest.approx((40 + 20) / 20 * 19)


def test_a_file_gets_a_line_a_minute() -> None:
    now, file = 0.0, io.StringIO()
    shown = Terminal(Console(file=file), clock=lambda: now)
    assert shown.live is None
    shown.begin(1, False)
    for batch in range(1, 13):
        now += BEAT / 4
        shown.step(0, batch, 1000, ROW)
    lines = file.getvalue().splitlines()
    assert len(lines) == 3 and all(len(line) <= 100 for line in lines)
    assert re.match(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S* +epoch 1/1, 8/1000, 4:08:00 left, loss 0.500, accuracy", lines[1]
    )


def test_long_lines_are_broken_between_words() -> None:
    file = io.StringIO()
    path = "/somewhere/" + "x" * 120
    Terminal(Console(file=file)).say("word " * 40 + path)
    lines = file.getvalue().splitlines()
    assert path in lines[-1] and all(len(line) <= 100 for line in lines[:-1]) and lines[1].startswith("  word")


class Recorder(Watcher):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.works: list[tuple[str, int, int]] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def work(self, what: str, done: int, total: int) -> None:
        self.works.append((what, done, total))


def test_a_run_tells_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "picture", lambda *_: None)
    options: dict[str, Any] = {
        "data": "drawn?per_class=6&size=16", "method": "stochastic", "model": "small", "size": 16, "epochs": 1,
        "batch": 6, "workers": 0, "calibration_epochs": 1, "calibration_batches": 2, "tensorboard": False,
        "accelerator": "cpu", "heatmap_weight": 0.7, "out": str(tmp_path / "run"),
    }  # fmt: skip
    heard = Recorder()
    loop.train(Config(**options), watcher=heard)
    said = "\n".join(heard.lines)
    for text in (
        "Device: cpu", " parameters, 3 x 16 x 16 px", f"Method: stochastic (P 0.7, d {decay_for(256):.4g}", "zB",
        "C1 ", "C2 ",
        "train: 18 samples (disc 6, cross 6, triangle 6), masks for 100%", "val: ",
        f"Log: {tmp_path / 'run'}/metrics.csv",
    ):  # fmt: skip
        assert text in said, text
    assert [work for work in heard.works if work[0] == "calibration"][-1] == ("calibration", 4, 4)
    names = [what for what, *_ in heard.works]
    assert names.index("calibration") < names.index("val") < names.index("ood")
    assert ("val", 0, 1) in heard.works and ("val", 1, 1) in heard.works
    plain = Recorder()
    loop.train(
        Config(**{**options, "method": "standard", "heatmap_weight": None, "out": str(tmp_path / "plain")}),
        watcher=plain,
    )
    assert not any("background" in line for line in plain.lines)


class Gone(io.StringIO):
    def write(self, _text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_reader_that_has_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.dup2", lambda *_: None)
    monkeypatch.setattr("sys.stdout", SimpleNamespace(fileno=lambda: -1))
    with pytest.raises(BrokenPipeError) as caught:
        Terminal(Output(file=Gone())).say("a line")
    assert told(caught.value) == "The output cannot be written: Broken pipe."


def test_an_output_that_is_full_is_told() -> None:
    assert told(OSError(errno.ENOSPC, "No space left")) == "The output cannot be written: No space left."
    assert "a.png" in told(OSError(errno.ENOSPC, "No space left", "a.png"))
