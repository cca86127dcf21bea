"""What can go wrong around a run ends with one line that says what it was, exit code 1 or 2, and how to go on."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from attacks.conftest import OPTIONS, copied, main, train
from commands import Command, environment
from fasterisnet.runs.config import Config
from fasterisnet.training.distributed import processes, resume_hint

ABSENT = "mps" if torch.cuda.is_available() else "gpu"  # what this machine does not have


def started(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fasterisnet", *arguments]
    return subprocess.run(command, env={**environment(), **variables}, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heatmap-weight", "[0.1, 0.2, 0.3]", "--method", "stochastic"], "has 3 numbers for 2 epochs"),
        (["--lr", "1e400"], "lr is '1e400'"),
        (["--workers", "5000"], "workers is 5000"),
        (["--size", "1"], "1 px"),
        (["--accelerator", ABSENT], f"accelerator '{ABSENT}' cannot be had"),
        (["--epochs", "9" * 5000], "epochs is"),
        (["--mean", "[.nan, 0, 0]", "--std", "[1, 1, 1]"], "mean is"),
        (["--model", "training.nets:with_softmax"], "ends with a softmax"),
        (["--model", "training.nets:frozen"], "no parameter that can be trained"),
        (["--model", "training.nets:Careless"], "cannot take images of 16 px"),
    ],
)
def test_options(
    options: list[str], message: str, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(pictures, tmp_path / "run", *options) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1 and len(error) < 500
    assert not (tmp_path / "run").exists()


def test_evaluate_looks_at_its_file_first(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fasterisnet.runs.report.metrics_of", lambda *_, **__: pytest.fail("worked first"))
    for place in (str(tmp_path), str(finished / "config.yaml" / "x.json")):
        assert main(["evaluate", str(finished), "--json", place]) == 2
        assert "Traceback" not in capsys.readouterr().err


def test_dollars_in_a_name(finished: Path, pictures: Path, tmp_path: Path) -> None:
    picture = shutil.copy(next((pictures / "test").rglob("*.png")), tmp_path / "cost $\\frac{$ and $x^$.png")
    run = shutil.copytree(finished, tmp_path / "run $\\frac{$")
    assert main(["explain", str(run), str(picture), "--out", str(tmp_path / "out")]) == 0


def test_a_pipe_or_device_in_a_manifest(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    good = next((pictures / "train").rglob("*.png"))
    for bad in ("pipe.png", "zero.png"):
        rows = [f"{good},train,a", f"{good},val,a", f"{tmp_path / bad},train,b", f"{good},val,b"]
        (tmp_path / "data.csv").write_text("\n".join(["image,split,label", *rows]))
        assert train(tmp_path / "data.csv", tmp_path / "run", "--batch", "2") == 1
        assert f"{bad}: is not a file" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_terminal_that_knows_ascii_only(pictures: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(pictures, tmp_path / "Bücher"))
    for top in (data, data / "masks"):
        (top / "test").rename(top / "prüfung")
    command = ["train", "--data", str(data), "--out", str(tmp_path / "run"), *OPTIONS, "--epochs", "1", "--audit", "6"]
    done = started(*command, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "pr\\xfcfung" in done.stdout


def test_the_hint_can_be_pasted(tmp_path: Path) -> None:
    assert resume_hint(Config(data="drawn", out="my runs/it's")) == (
        "go on with: fasterisnet train --resume 'my runs/it'\"'\"'s'"
    )
    assert resume_hint(Config(data="drawn", out="a", model="x:y")).endswith("--resume a --trust")


def test_slurm_without_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    from fasterisnet.errors import UsageError

    for name in [name for name in os.environ if name.startswith(("SLURM", "TORCHELASTIC"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("lightning.fabric.plugins.environments.SLURMEnvironment.detect", lambda: True)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(UsageError, match="srun"):
        processes(Config(data="drawn"))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert processes(Config(data="drawn")) == (4, 1)


@pytest.mark.slow
def test_a_port_in_use(pictures: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = ["train", "--data", str(pictures), "--out", str(tmp_path / "run"), *OPTIONS, "--devices", "2"]
        done = started(*command, MASTER_PORT=port, MASTER_ADDR="127.0.0.1")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("fasterisnet: ") and port in last and "MASTER_PORT" in last
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk(stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """State, weights and both exports; afterwards there is room again, and the run goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=False).returncode:
        pytest.fail("root cannot mount a tmpfs here")
    try:
        run = Path(shutil.copytree(stopped, disk / "run"))
        before = (run / "state.pt").read_bytes()
        filler = disk / "filler"
        room = os.statvfs(disk)
        filler.write_bytes(bytes(room.f_bavail * room.f_bsize - 2**19))
        capsys.readouterr()
        assert main(["train", "--resume", str(run)]) == 1
        last = capsys.readouterr().err.splitlines()
        assert len(last) == 1 and "No space left" in last[0] and f"--resume {run}" in last[0]
        assert (run / "state.pt").read_bytes() == before
        for kind in ("pt2", "onnx"):
            words = ["export", str(run), "--format", kind, "--out", str(disk / f"x.{kind}")]
            done = Command(["-m", "fasterisnet", *words]).wait()
            assert done.returncode == 1 and "No space left" in done.stderr.splitlines()[-1], done.stderr
            assert not list(disk.glob("*x.*"))
        filler.unlink()
        assert main(["train", "--resume", str(run)]) == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_options_of_a_run_can_be_read_again(finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert Path(config["data"]).is_absolute() and config["loader_timeout"] == 600.0
