"""Nothing is written outside a run, over what is not its own, or by two at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from attacks.conftest import OPTIONS, copied, main, train
from commands import Command
from fasterisnet import demo
from fasterisnet.errors import UsageError


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_odd_names_of_splits_stay_in_the_run(pictures: Path, tmp_path: Path) -> None:
    """A folder may be called nearly anything."""
    data = Path(shutil.copytree(pictures, tmp_path / "data"))
    for top in (data, data / "masks"):
        (top / "test").rename(top / "te|st\x1b[31m <b>")
    assert train(data, tmp_path / "run", "--epochs", "1", "--audit", "6") == 0
    report = (tmp_path / "run" / "report.md").read_text()
    assert "\x1b" not in report and "<b>" not in report and "te\\|st" in report
    assert [path.name for path in (tmp_path / "run").glob("heatmaps-*")] == ["heatmaps-te%7Cst%1B[31m %3Cb%3E.png"]


def test_explain_does_not_replace_its_input(
    pictures: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    picture = Path(shutil.copy(next((pictures / "test").rglob("*.png")), tmp_path / "pic.png"))
    before = picture.read_bytes()
    assert main(["explain", str(finished), "pic.png", "--out", "."]) == 2
    assert "--out" in capsys.readouterr().err and picture.read_bytes() == before
    (tmp_path / "out").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "out" / "pic.png")
    assert main(["explain", str(finished), "pic.png", "--out", "out"]) == 2
    (tmp_path / "out" / "pic.png").unlink()
    for _ in range(2):  # its own pictures it replaces
        assert main(["explain", str(finished), "pic.png", "--out", "out"]) == 0


@pytest.mark.parametrize("content", ["run", "notes"])
def test_demo_removes_only_demos(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(demo, "train", lambda *_, **__: pytest.fail("trained"))
    if content == "run":
        shutil.copytree(finished, tmp_path / "standard")
    else:
        (tmp_path / "standard").mkdir()
        (tmp_path / "standard" / "notes.txt").write_text("mine")
    before = everything(tmp_path)
    with pytest.raises(UsageError, match="choose another --out"):
        demo.run(tmp_path)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("name", ["state.pt", "best.safetensors", "report.md", "metrics.csv"])
def test_what_is_not_of_a_run_is_not_adopted(
    name: str, finished: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(finished / name, tmp_path / "run")
    before = everything(tmp_path / "run")
    assert train(pictures, tmp_path / "run") == 2
    assert name in capsys.readouterr().err and everything(tmp_path / "run") == before


def test_a_log_in_the_folder_is_no_run(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.txt").write_text("mine")
    assert train(pictures, tmp_path / "run", "--epochs", "1") == 0


@pytest.mark.parametrize("which", ["new", "resumed"])
def test_one_process_at_a_time(
    which: str, stopped: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lock of another process; it is gone when that one is killed."""
    run = copied(stopped, tmp_path) if which == "resumed" else tmp_path / "run"
    run.mkdir(exist_ok=True)
    hold = "import fcntl, os, sys, time; f = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(f, 2); print(1, flush=True)"
    other = subprocess.Popen(
        [sys.executable, "-c", f"{hold}; time.sleep(600)", str(run)], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdout.readline()
    before = everything(run)
    command = ["train", "--resume", str(run)]
    if which == "new":
        command = ["train", "--data", str(pictures), "--out", str(run), *OPTIONS]
    assert main(command) == 2
    assert "Another process is working on" in capsys.readouterr().err and everything(run) == before
    other.kill()
    other.wait()
    other.stdout.close()
    assert main(command) == 0


@pytest.mark.slow
def test_two_trainings_into_one_new_folder(pictures: Path, tmp_path: Path) -> None:
    command = ["-m", "fasterisnet", "train", "--data", str(pictures), "--out", str(tmp_path / "run"), *OPTIONS]
    both = [Command([*command, "--seed", seed]) for seed in "12"]
    ends = [process.wait(timeout=120) for process in both]
    assert sorted(end.returncode for end in ends) == [0, 2], [end.stderr for end in ends]
    winner = next(i for i, end in enumerate(ends) if end.returncode == 0)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["seed"] == winner + 1


def test_temporary_files_of_killed_runs_go(stopped: Path, tmp_path: Path) -> None:
    run = copied(stopped, tmp_path)
    for name in (".state.12345.tmp.pt", ".best.12345.tmp.safetensors", f".metrics.{os.getpid()}.tmp.csv"):
        (run / name).write_bytes(b"half")
    (run / ".mine").write_text("kept")
    assert main(["train", "--resume", str(run)]) == 0
    assert [path.name for path in run.glob(".*")] == [".mine"]


@pytest.mark.parametrize(
    "options", [["--data", "nowhere"], ["--model", "resnet19"], ["--validation", "dev"], ["--pretrained", "absent.pt"]]
)
def test_a_failed_start_leaves_nothing(options: list[str], pictures: Path, tmp_path: Path) -> None:
    assert train(pictures, tmp_path / "new" / "run", *options) in (1, 2)
    assert not list(tmp_path.iterdir())
