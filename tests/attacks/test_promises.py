"""What a run promises besides: of the files it finds, of starts that fail, of names, of processes that die."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import shutil
import signal
import stat
import struct
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import yaml
from PIL import Image

from attacks.conftest import OPTIONS, copied, main, train
from attacks.hostile import ANY_FILE, DEEP
from attacks.test_code import disguise, mark
from attacks.test_one_line import ABSENT
from attacks.test_places import everything
from commands import Command
from fasterisnet import files
from fasterisnet.app import Viewer
from fasterisnet.data.base import Source
from fasterisnet.data.boxes import read_voc
from fasterisnet.data.files import Files
from fasterisnet.data.reader import Reader
from fasterisnet.data.sources import open_source
from fasterisnet.errors import InputError, UsageError
from fasterisnet.methods.ranges import Ranges
from fasterisnet.runs import fingerprint, lock
from fasterisnet.training import calibration, loop
from fasterisnet.training import data as training_data
from trouble import Trouble

__all__ = ["mark"]
WITH_MAPS = ["--method", "stochastic", "--calibration-epochs", "0"]
SAME = ("best.safetensors", "metrics.csv", "report.json", "report.md")
ODD = "di\x1b[31m|<b>$\\frac{$"  # moves colours on a terminal, and means something in Markdown, HTML and mathtext


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line of the errors."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


# --- it does not hang -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("what", "message"), [("sleeps", "sent no batch for 8 s"), ("dies", "died")])
def test_a_worker_in_trouble_ends_the_command_and_resume_goes_on(
    what: str, message: str, pictures: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source_of, run = training_data.source_of, tmp_path / "my run"

    def troubled(config: Any) -> Source:
        source = source_of(config)
        return Source(
            source.classes, {**source.splits, "train": Trouble(source.split("train"), what, tmp_path / "once")}
        )

    monkeypatch.setattr(training_data, "source_of", troubled)
    assert train(pictures, run, "--workers", "1", "--loader-timeout", "8") == 1
    line = last_line(capsys)
    assert "split 'train' failed in process 0 of 1: worker 0" in line and message in line
    assert line.endswith(f"go on with: fasterisnet train --resume '{run}'")
    options = run / "config.yaml"
    options.write_text(options.read_text().replace("loader_timeout: 8.0", "loader_timeout: 300.0"))
    assert main(["train", "--resume", str(run)]) == 0
    assert all((run / name).read_bytes() == (finished / name).read_bytes() for name in SAME)


def of_session(leader: int) -> list[int]:
    """The processes that were started, directly or not, by one that leads a session, itself among them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
        except OSError:
            continue
        found += [int(entry.name)] if int(session) == leader and state != "Z" else []
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes where Linux shows them")
def test_nobody_stays_when_the_first_process_is_killed(pictures: Path, tmp_path: Path) -> None:
    """The other process of the run, the loader workers of both, their servers."""
    words = ["-m", "fasterisnet", "train", "--data", str(pictures), "--out", str(tmp_path / "run"), *OPTIONS]
    command = Command([*words, "--devices", "2", "--workers", "1", "--epochs", "10000"], processes=2)
    try:
        end = time.monotonic() + 120
        while not (tmp_path / "run" / "metrics.csv").exists() and time.monotonic() < end:
            time.sleep(0.1)
        assert len(of_session(command.pid)) >= 6
        os.kill(command.pid, signal.SIGKILL)
        end = time.monotonic() + 30
        while of_session(command.pid) and time.monotonic() < end:
            time.sleep(0.1)
        assert of_session(command.pid) == []
    finally:
        for pid in of_session(command.pid):
            os.kill(pid, signal.SIGKILL)
        command.wait()


def packed_volume(path: Path) -> None:
    """A header of a few voxels, and half a gigabyte behind them."""
    nibabel.save(nibabel.Nifti1Image(np.ones((4, 4, 1), np.uint8), np.eye(4)), path.with_suffix(""))
    content = path.with_suffix("").read_bytes()
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(content)
        for _ in range(32):
            file.write(bytes(2**24))


def test_a_packed_volume_is_read_as_far_as_its_header_says(tmp_path: Path) -> None:
    import resource

    packed_volume(tmp_path / "x.nii.gz")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert Reader(window="auto").image(tmp_path / "x.nii.gz", 0).shape == (1, 4, 4)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


ENTITIES = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 12))
XML = {
    "laughs": f'<!DOCTYPE x [<!ENTITY a0 "ha">{ENTITIES}]><annotation><object>&a11;</object></annotation>',
    "a file": '<!DOCTYPE x [<!ENTITY a SYSTEM "SECRET">]><annotation><object><name>&a;</name></object></annotation>',
    "deep": "<a>" * DEEP,
}


@pytest.mark.parametrize("kind", XML)
def test_hostile_xml(kind: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of another file")
    (tmp_path / "x.xml").write_text(XML[kind].replace("SECRET", (tmp_path / "secret").as_uri()))
    with pytest.raises(InputError) as raised:
        read_voc(tmp_path / "x.xml")
    assert "of another file" not in str(raised.value) and len(str(raised.value)) < 1000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hostile", ANY_FILE)
def test_a_hostile_calibration_is_an_error(
    hostile: str, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ANY_FILE[hostile](tmp_path / "calibration.json")
    with pytest.raises(InputError, match=r"calibration\.json"):
        Ranges.load(tmp_path / "calibration.json")
    ranges = ["--ranges", str(tmp_path / "calibration.json")]
    assert train(pictures, tmp_path / "run", *WITH_MAPS, *ranges) == 1
    assert "calibration.json" in last_line(capsys) and not (tmp_path / "run").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hostile", ANY_FILE)
@pytest.mark.parametrize("name", ["metrics.csv", "data.json", "report.json", "report.md"])
def test_what_only_tells_of_a_run_is_made_again(name: str, hostile: str, finished: Path, tmp_path: Path) -> None:
    """The log is in the state, the report comes from the weights; neither is believed because it lies there."""
    run = copied(finished, tmp_path)
    for path in (run / "report.json", run / name):
        path.unlink(missing_ok=True)
    if (hostile, name) in (("folder", "metrics.csv"), ("folder", "report.md"), ("folder", "report.json")):
        (run / name).mkdir()
        assert main(["train", "--resume", str(run)]) == 1
        return
    ANY_FILE[hostile](run / name)
    assert main(["train", "--resume", str(run)]) == 0
    assert all((run / known).read_bytes() == (finished / known).read_bytes() for known in SAME)


# --- no code from files -----------------------------------------------------------------------------------------------


@pytest.fixture
def sent(finished: Path, tmp_path: Path) -> Path:
    """A run that names code in both places that name its model."""
    run = copied(finished, tmp_path)
    disguise(run, "evil_net:build", config=True, card=True)
    return run


@pytest.mark.parametrize(
    "command",
    [
        ["audit", "SENT", "--data", "DATA", "--out", "OUT"],
        ["audit", "FINISHED", "--against", "SENT", "--data", "DATA", "--out", "OUT"],
        ["audit", "evil_net:build", "--data", "DATA", "--out", "OUT"],
        ["audit", "evil_net:build@SENT/best.safetensors", "--data", "DATA", "--out", "OUT"],
        ["audit", "timm:resnet18.evil_net:build@SENT/best.safetensors", "--data", "DATA", "--out", "OUT"],
        ["audit", "resnet18@SENT/best.safetensors", "--data", "DATA", "--out", "OUT"],
        ["explain", "FINISHED", "DATA/test", "--compare", "SENT", "--out", "OUT"],
        ["export", "SENT", "--format", "onnx", "--out", "OUT.onnx"],
        ["train", "--resume", "SENT", "--epochs", "3"],
        ["tune", "--config", "SENT/config.yaml", "--out", "OUT"],
    ],
)
def test_every_command_has_the_gate(
    command: list[str], sent: Path, finished: Path, pictures: Path, mark: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    places = {"SENT": sent, "FINISHED": finished, "DATA": pictures, "OUT": tmp_path / "out"}
    words = []
    for word in command:
        for name, place in places.items():
            word = word.replace(name, str(place))
        words.append(word)
    assert main(words) in (1, 2)
    assert len(capsys.readouterr().err.splitlines()) == 1 and not mark.exists()


@pytest.mark.parametrize("options", [["--pretrained", "SENT"], ["--method", "distillation", "--teacher", "SENT"]])
def test_of_other_runs_only_weights_are_taken(
    options: list[str], sent: Path, pictures: Path, mark: Path, tmp_path: Path
) -> None:
    assert train(pictures, tmp_path / "new", *[word.replace("SENT", str(sent)) for word in options]) == 0
    assert not mark.exists()


def test_the_app_has_the_gate(sent: Path, mark: Path) -> None:
    with pytest.raises(UsageError, match="--trust"):
        Viewer.open(sent)
    assert not mark.exists()


def test_a_benchmark_does_not_believe_the_cards_of_its_runs(
    pictures: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report and the pictures of a row are made from weights that may have been put there."""
    common = {"model": "small", "size": 16, "epochs": 1, "batch": 6, "workers": 0, "tensorboard": False, "audit": 0}
    recipe = {"data": str(pictures), "seeds": [0], "tests": ["test"], "common": common}
    recipe["rows"] = {"standard": {"method": "standard"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = ["benchmark", "mnist", "--recipe", str(tmp_path / "recipe.yaml"), "--runs", str(tmp_path / "runs")]
    command += ["--results", str(tmp_path / "results")]
    assert main(command) == 0
    disguise(tmp_path / "runs" / "standard-seed0", "evil_net:build", card=True)
    for gone in ("results/standard-seed0.json", "runs/standard-seed0/report.json"):
        (tmp_path / gone).unlink()
        capsys.readouterr()
        assert main(command) in (1, 2)
        assert "config.yaml says small" in last_line(capsys) and not mark.exists()


# --- nothing outside, nothing of others -------------------------------------------------------------------------------


def test_odd_names_move_nothing(
    pictures: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of classes, splits and files: on the terminal, in the report, on the page of the audit, in pictures."""
    data, run = Path(shutil.copytree(pictures, tmp_path / "data")), tmp_path / "run"
    for top in (data, data / "masks"):
        for split in ("train", "val", "test"):
            (top / split / "disc").rename(top / split / ODD)
        (top / "test").rename(top / f"te{ODD}")
    shutil.copytree(data / f"te{ODD}", tmp_path / "shown")
    next((tmp_path / "shown").rglob("*.png")).rename(tmp_path / "shown" / "a\x1b[31m\n.png")
    assert train(data, run, "--class-weights", "balanced", "--audit", "6") == 0
    for command in (
        ["train", "--resume", str(run)],
        ["evaluate", str(run), "--workers", "0"],
        ["explain", str(run), str(tmp_path / "shown"), "--out", str(tmp_path / "out")],
        ["export", str(run), "--format", "onnx", "--out", str(tmp_path / "x.onnx")],
        ["audit", str(run), "--data", str(data), "--out", str(tmp_path / "audit")],
        ["data", "check", str(data)],
    ):
        assert main(command) == 0, command
    for path in (data / "train" / ODD).iterdir():
        path.write_bytes(b"no picture")
    assert train(data, tmp_path / "other") == 1
    assert train(data, tmp_path / "other", "--on-bad-image", "skip") == 1
    assert main(["train", "--resume", str(run)]) == 2
    said = "".join(capsys.readouterr())
    assert "\\x1b[31m" in said and "\x1b" not in said
    for name in ("run/report.md", "run/audit/audit.html", "audit/audit.html", "MODEL_CARD.md"):
        assert "<b>" not in (tmp_path / name).read_text(), name
    assert "\x1b" not in (run / "report.md").read_text()
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_files_of_others_that_are_called_like_ours_stay(
    finished: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "data.json").write_text("mine")
    assert train(pictures, tmp_path / "run") == 2
    assert "data.json" in last_line(capsys) and (tmp_path / "run" / "data.json").read_text() == "mine"
    before = everything(pictures)
    picture, masks = next((pictures / "test").rglob("*.png")), pictures / "masks" / "test" / "disc"
    words = ["explain", str(finished), str(picture), "--masks", str(masks), "--out", str(masks)]
    assert main(words) == 2 and everything(pictures) == before


def test_a_file_system_without_locks_is_no_obstacle(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    assert train(pictures, tmp_path / "run", "--epochs", "1") == 0


def test_archives_stay_packed(tmp_path: Path) -> None:
    """Members that climb out of the folder, links, devices: nothing is written, and only plain members are read."""
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "secret").write_text("of another file")
    with tarfile.open(data / "x.tar", "w") as archive:
        for name in ("../climbed.png", "/climbed.png", "images/a.png"):
            entry = tarfile.TarInfo(name)
            entry.size = 3
            archive.addfile(entry, io.BytesIO(b"abc"))
        for name, kind in (("link", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE), ("pipe", tarfile.FIFOTYPE)):
            entry = tarfile.TarInfo(f"images/{name}.png")
            entry.type, entry.linkname = kind, str(tmp_path / "secret")
            archive.addfile(entry)
    packed = Files(data)
    assert packed.read("images/a.png") == b"abc"
    assert not any(f"images/{name}.png" in packed for name in ("link", "hard", "pipe"))
    assert sorted(everything(tmp_path)) == ["data/x.tar", "secret"]


# --- a start that fails, a run that is stopped ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        [*WITH_MAPS, "--ranges", "absent.json"],
        [*WITH_MAPS, "--calibration-epochs", "1", "--calibration-lr", "1e30", "--clip", "0"],
        ["--pretrained", "absent"],
        ["--method", "distillation", "--teacher", "absent"],
    ],
)
def test_a_start_that_fails_leaves_nothing_in_the_way(options: list[str], pictures: Path, tmp_path: Path) -> None:
    """So that the same command, repaired, can be given again."""
    assert train(pictures, tmp_path / "new" / "run", *options) == 1
    assert not list(tmp_path.iterdir())
    (tmp_path / "log.txt").write_text("mine")
    assert train(pictures, tmp_path, *options) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["log.txt"]


@pytest.mark.parametrize("where", ["examine_data", "calibrate"])
def test_a_run_without_a_state_is_not_said_to_go_on(
    where: str, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while the data is examined or C1 and C2 are measured."""

    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(loop if where == "examine_data" else calibration, where, interrupted)
        assert train(pictures, tmp_path / "run", *WITH_MAPS) == 130
    line = last_line(capsys)
    assert "SIGINT" in line and "--resume" not in line and not (tmp_path / "run").exists()
    assert train(pictures, tmp_path / "run", *WITH_MAPS, "--epochs", "1") == 0


def test_a_resumed_run_says_where_it_goes_on_and_ends_as_if_it_had_not_been_stopped(
    stopped: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(stopped, tmp_path)
    assert main(["train", "--resume", str(run)]) == 0
    assert "Going on in epoch 2, batch 1." in capsys.readouterr().out
    assert all((run / name).read_bytes() == (finished / name).read_bytes() for name in SAME)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: shutil.rmtree(run), "is not a run folder"),
        (lambda run: (run / "config.yaml").unlink(), "has no config.yaml"),
        (lambda run: (run / "config.yaml").write_text("data: /nowhere-at-all"), "neither a known data set nor"),
        (lambda run: (run / "state.pt").write_bytes(b""), "state.pt is damaged"),
    ],
)
def test_what_cannot_be_gone_on_with_is_said_in_a_line(
    damage: Callable[[Path], Any], message: str, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(stopped, tmp_path)
    damage(run)
    assert main(["train", "--resume", str(run)]) in (1, 2)
    assert message in last_line(capsys)


FULL = ["config.yaml", "data.json", "state.pt", "best.json", "best.safetensors", "metrics.csv", "report.json"]


@pytest.mark.parametrize("name", FULL)
def test_a_disk_that_is_full_at_any_file(
    name: str, pictures: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The line names the file; before there is a state nothing stays, afterwards the run goes on to the same bytes."""
    run, replacing = tmp_path / "run", files.replacing

    def full(path: Path) -> Any:
        if Path(path).name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return replacing(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "replacing", full)
        assert train(pictures, run) == 1
    line = last_line(capsys)
    begun = name not in FULL[:3]
    assert "No space left" in line and name in line
    assert run.exists() == begun and ("go on with: fasterisnet train --resume" in line) == begun
    assert (main(["train", "--resume", str(run)]) if begun else train(pictures, run)) == 0
    assert all((run / known).read_bytes() == (finished / known).read_bytes() for known in SAME)
    assert not list(run.glob(".*"))


def test_a_file_is_on_the_disk_before_its_name_and_then_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(entry: int) -> None:
        events.append("folder" if stat.S_ISDIR(os.fstat(entry).st_mode) else "file")
        fsync(entry)

    def renamed(path: Path, target: Path) -> Path:
        events.append("name")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    files.write_bytes(tmp_path / "x", b"content")
    assert events == ["file", "name", "folder"]


@pytest.mark.parametrize("which", ["stopped", "finished"])
def test_weights_with_a_flipped_byte_are_not_gone_on_with(
    which: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said before an epoch is trained that could not be compared with them."""
    run = copied(request.getfixturevalue(which), tmp_path)
    content = bytearray((run / "best.safetensors").read_bytes())
    content[-5] ^= 0x10
    (run / "best.safetensors").write_bytes(content)
    before = everything(run)
    assert main(["train", "--resume", str(run)]) == 1
    assert "best.safetensors is damaged" in last_line(capsys) and everything(run) == before


@pytest.mark.parametrize("command", ["train", "evaluate", "explain", "audit"])
def test_an_accelerator_that_is_not_there(
    command: str, finished: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out")]
    words = {
        "train": ["--data", str(pictures), *OPTIONS, *out], "evaluate": [str(finished)],
        "explain": [str(finished), str(pictures / "test"), *out],
        "audit": [str(finished), "--data", str(pictures), *out],
    }  # fmt: skip
    assert main([command, *words[command], "--accelerator", ABSENT]) == 2
    assert f"accelerator '{ABSENT}' cannot be had" in last_line(capsys) and not (tmp_path / "out").exists()


def test_workers_that_no_machine_has(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(finished), "--workers", "5000"]) == 2
    assert "workers is 5000" in last_line(capsys)


# --- a result is of what it says --------------------------------------------------------------------------------------


def picture(path: Path, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    pixels[:4] = 0
    Image.fromarray(pixels if "masks" not in path.parts else (pixels[..., 0] > 99).astype(np.uint8) * 255).save(path)


def listed(data: Path, header: str, row: Callable[[int, str], str], labels: Sequence[str] = "ab") -> None:
    """Pictures and masks with a table of them; every other one is of the other class."""
    for i in range(8):
        picture(data / "images" / f"{i}.png", i)
        picture(data / "masks" / f"{i}.png", i)
    rows = [row(i, labels[i % 2]) for i in range(8)]
    (data / "index.csv").write_text("\n".join([header, *rows]))


def xrays(data: Path) -> str:
    header = "image,mask,label,patient,source,split_mixed,split_covid"
    splits = ["train"] * 4 + ["val"] * 2 + ["iid"] * 2

    def row(i: int, label: str) -> str:
        return f"images/{i}.png,masks/{i}.png,{label},p{i},here,{splits[i]},{splits[i]}"

    listed(data, header, row, ("normal", "covid"))
    return f"xray:{data}"


def dogs(data: Path) -> str:
    header = "split,class_id,class_name,image,mask"
    listed(data, header, lambda i, c: f"{'trainval' if i < 6 else 'test'},{i % 2},{c},images/{i}.png,masks/{i}.png")
    return f"dogs:{data}"


def folder(data: Path) -> None:
    for i in range(8):
        picture(data / ("train", "val")[i // 6] / "ab"[i % 2] / f"{i}.png", i)
        picture(data / "masks" / ("train", "val")[i // 6] / "ab"[i % 2] / f"{i}.png", i)


def marked(data: Path) -> str:
    folder(data)
    return f"{data}?bias=mark"


def boxed(data: Path) -> str:
    folder(data)
    shutil.rmtree(data / "masks")
    images = [{"id": i, "file_name": f"{i}.png"} for i in range(8)]
    boxes = [{"image_id": i, "bbox": [1, 1, 5, 5]} for i in range(8)]
    (data / "annotations.json").write_text(json.dumps({"images": images, "annotations": boxes}))
    return str(data)


def owned(data: Path) -> str:
    splits = ["train"] * 4 + ["val"] * 4
    listed(data, "image,mask,split,label,patient", lambda i, c: f"images/{i}.png,masks/{i}.png,{splits[i]},{c},p{i}")
    (data / "index.csv").rename(data / "manifest.csv")
    return str(data)


def digits(data: Path) -> str:
    data.mkdir()
    for part, count in (("train", 100), ("t10k", 20)):
        head = struct.pack(">4I", 0x0803, count, 28, 28)
        pixels = np.random.default_rng(count).integers(0, 256, count * 784, dtype=np.uint8)
        (data / f"{part}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
        labels = struct.pack(">2I", 0x0801, count) + bytes(i % 10 for i in range(count))
        (data / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    return f"mnist:{data}"


def redrawn(name: str) -> Callable[[Path], None]:
    return lambda data: picture(data / name, 77)


def rewritten(name: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(data: Path) -> None:
        text = (data / name).read_text()
        assert old in text
        (data / name).write_text(text.replace(old, new, 1))

    return edit


def another_digit(data: Path) -> None:
    path = data / "t10k-images-idx3-ubyte"
    content = bytearray(path.read_bytes())
    content[5000] ^= 255
    path.write_bytes(content)


EDITED: list[tuple[Callable[[Path], str], Callable[[Path], None], str]] = [
    (xrays, redrawn("images/0.png"), "1 edited"), (xrays, redrawn("masks/0.png"), "1 edited"),
    (xrays, rewritten("index.csv", "p0", "p9"), "1 labelled anew"),
    (dogs, redrawn("images/6.png"), "1 edited"), (dogs, redrawn("masks/6.png"), "1 edited"),
    (marked, redrawn("train/a/0.png"), "edited"), (marked, redrawn("masks/train/a/0.png"), "edited"),
    (boxed, rewritten("annotations.json", "[1, 1, 5, 5]", "[1, 1, 5, 6]"), "1 edited"),
    (owned, rewritten("manifest.csv", "p0", "p9"), "1 labelled anew"),
    (owned, rewritten("manifest.csv", "masks/0.png", "masks/1.png"), "1 edited"),
    (digits, another_digit, "1 edited"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "edit", "message"), EDITED)
def test_data_of_every_kind_is_known_again(
    make: Callable[[Path], str], edit: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    data = make(tmp_path / "data")

    def now() -> tuple[dict[str, Any], Source]:
        source = open_source(data)
        return fingerprint.data_of(source, data, 1), source

    before = now()[0]
    assert fingerprint.changed_data(before, *now()) is None
    edit(tmp_path / "data")
    change = fingerprint.changed_data(before, *now())
    assert change is not None and message in change, change


def test_where_and_how_fast_it_computes_may_change(stopped: Path, finished: Path, tmp_path: Path) -> None:
    """All of it at once; the weights come out the same."""
    run = copied(stopped, tmp_path)
    options = yaml.safe_load((run / "config.yaml").read_text())
    options |= {"workers": 1, "loader_timeout": 60.0, "accelerator": "auto", "explained": 3, "checkpoint_every": 1}
    options |= {"checkpoint_minutes": 0.001, "tensorboard": True, "audit": 6}
    (run / "config.yaml").write_text(yaml.safe_dump(options))
    assert main(["train", "--resume", str(run)]) == 0
    assert all((run / name).read_bytes() == (finished / name).read_bytes() for name in SAME[:2])


@pytest.mark.parametrize("count", [5, 1])
def test_less_data_than_a_stopped_epoch_had(count: int, pictures: Path, tmp_path: Path) -> None:
    """--data-changed-ok in the middle of an epoch that now has fewer batches, or none that are left."""
    data, run = Path(shutil.copytree(pictures, tmp_path / "data")), tmp_path / "run"
    update, done = loop.Training._update, 0

    def interrupted(training: loop.Training) -> None:
        nonlocal done
        done += 1
        update(training)
        if done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Training, "_update", interrupted)
        assert train(data, run) == 130
    for label in (data / "train").iterdir():
        for path in sorted(label.iterdir())[count:]:
            path.unlink()
    assert main(["train", "--resume", str(run)]) == 2
    assert main(["train", "--resume", str(run), "--data-changed-ok"]) == 0


def test_a_patient_of_validation_and_test_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What chose the best epoch must not test it."""
    splits = ["train"] * 4 + ["val"] * 2 + ["test"] * 2
    owner = ["a", "b", "c", "d", "e", "me", "me", "f"]
    header = "image,mask,split,label,patient"
    listed(tmp_path, header, lambda i, c: f"images/{i}.png,masks/{i}.png,{splits[i]},{c},{owner[i]}")
    assert train(tmp_path / "index.csv", tmp_path / "run") == 1
    line = last_line(capsys)
    assert all(word in line for word in ("'me'", "'val'", "'test'"))


def test_skipping_does_not_remove_a_class_of_the_validation(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path(shutil.copytree(pictures, tmp_path / "data"))
    for path in (data / "val" / "disc").iterdir():
        path.write_bytes(b"no picture")
    assert train(data, tmp_path / "run", "--on-bad-image", "skip") == 1
    assert "No image of disc can be read" in last_line(capsys) and not (tmp_path / "run").exists()


def test_one_picture_with_two_labels_is_refused(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the same name, and by two names of one file."""
    one, other = (next((pictures / "train" / label).glob("*.png")) for label in ("disc", "cross"))
    rows = [f"{one},train,a", f"{one},train,b", f"{other},train,b", f"{other},val,b"]
    (tmp_path / "m.csv").write_text("\n".join(["image,split,label", *rows]))
    assert train(tmp_path / "m.csv", tmp_path / "run", "--batch", "2") == 1
    assert "is a and b" in last_line(capsys) and not (tmp_path / "run").exists()
    rows[1] = f"{one.parent}/../disc/{one.name},train,b"
    (tmp_path / "m.csv").write_text("\n".join(["image,split,label", *rows]))
    assert main(["data", "check", str(tmp_path / "m.csv")]) in (0, 1)
    assert "same image, two classes" in capsys.readouterr().out
