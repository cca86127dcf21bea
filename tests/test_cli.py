"""The command line from end to end, on a folder of pictures drawn for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fasterisnet.cli import main, parser
from fasterisnet.cli.options import given_options
from fasterisnet.data.drawn import drawn_source
from fasterisnet.data.reader import Reader
from fasterisnet.runs.folder import Run

KEYS = {"accuracy", "macro_f1", "macro_auc", "confusion", "background_mass"}
LINES, COLUMNS = 36, 100  # a screen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DIR/<split>/<class>/n.png with masks; no split called val."""
    base = tmp_path_factory.mktemp("data") / "shapes"
    source = drawn_source(per_class=18, size=24)
    for split, name in (("train", "train"), ("ood", "test")):
        samples = source.split(split)
        for i in range(len(samples)):
            image, mask, label = samples.read(i)
            assert isinstance(label, int) and mask is not None
            for top, pixels in (
                ("", image.permute(1, 2, 0).numpy()),
                ("masks", mask[0].numpy().astype(np.uint8) * 255),
            ):
                path = base / top / name / source.classes[label] / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    return base


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    out = folder.parent / "run"
    assert main(train_command(folder, out)) == 0
    return out


def train_command(folder: Path, out: Path, *more: str) -> list[str]:
    return [
        "train", "--data", str(folder), "--method", "stochastic", "--model", "small", "--epochs", "2", "--size", "24",
        "--out", str(out), "--workers", "0", "--batch", "12", "--calibration-epochs", "1",
        "--accelerator", "cpu", *more,
    ]  # fmt: skip


def test_a_run_leaves_what_it_promises(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    promised = {
        "config.yaml",
        "calibration.json",
        "metrics.csv",
        "best.safetensors",
        "best.json",
        "state.pt",
        "report.md",
    }
    assert promised <= names
    assert not [name for name in names if "tmp" in name]
    assert len((run / "metrics.csv").read_text().splitlines()) == 3
    assert "| test | 18 |" in (run / "report.md").read_text()


def test_samples_held_out_are_not_counted_as_trained_on(run: Path, folder: Path) -> None:
    there = len(list((folder / "train").rglob("*.png")))
    counted = json.loads((run / "report.json").read_text())["training_samples"]
    assert counted == there - round(0.2 * there / 3) * 3


def test_evaluate(run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "metrics.json"
    assert (
        main(["evaluate", str(run), "--data", str(folder), "--split", "test", "--json", str(out), "--workers", "0"])
        == 0
    )
    metrics = json.loads(out.read_text())
    assert metrics.keys() >= KEYS
    confusion = np.array(metrics["confusion"])
    assert confusion.shape == (3, 3) and confusion.sum() == 18
    assert metrics["accuracy"] == pytest.approx(confusion.trace() / 18)
    assert 0 <= metrics["background_mass"] <= 1
    assert "| test | 18 |" in capsys.readouterr().out


def test_explain(run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = next((folder / "test").rglob("*.png"))
    masks = folder / "masks" / image.relative_to(folder).parent
    command = ["explain", str(run), str(image), str(image), "--out", str(tmp_path / "pictures")]
    assert main([*command, "--compare", str(run), "--masks", str(masks)]) == 0
    written = capsys.readouterr().out.split()
    assert len(set(written)) == 2
    for path in written:
        with Image.open(path) as picture:
            assert picture.width > 300


def test_explain_names_runs_of_different_sizes(
    run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, sizes = Run.load_model, iter((24, 16))

    def resized(self: Run, **options: Any) -> Any:
        model, card = load(self, **options)
        return model, replace(card, preparation=card.preparation | {"size": next(sizes)})

    monkeypatch.setattr(Run, "load_model", resized)
    image = next((folder / "test").rglob("*.png"))
    assert main(["explain", str(run), str(image), "--compare", str(run), "--out", str(tmp_path / "pictures")]) == 2
    assert f"{run.name} sees 24 px, {run.name} sees 16 px" in capsys.readouterr().err


def test_explain_takes_folders(
    run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures in folders of the folder too, each with the mask that lies where it lies."""
    for i, shape in enumerate(("disc", "cross")):
        for top, new in (("", "pictures"), ("masks", "masks")):
            first = sorted((folder / top / "test" / shape).iterdir())[0]
            (tmp_path / new / shape).mkdir(parents=True)
            (tmp_path / new / shape / f"{i}.png").write_bytes(first.read_bytes())
    (tmp_path / "pictures" / "notes.txt").write_text("no picture")
    read: list[Path] = []
    mask = Reader.mask
    monkeypatch.setattr(Reader, "mask", lambda self, path, *rest: read.append(path) or mask(self, path, *rest))
    command = ["explain", str(run), str(tmp_path / "pictures"), "--out", str(tmp_path / "out"), "--accelerator", "cpu"]
    assert main([*command, "--masks", str(tmp_path / "masks")]) == 0
    assert len(capsys.readouterr().out.split()) == 2
    assert [p.relative_to(tmp_path) for p in read] == [Path("masks/cross/1.png"), Path("masks/disc/0.png")]
    Image.new("L", (7, 9), 255).save(tmp_path / "masks" / "disc" / "0.png")
    assert main([*command, "--masks", str(tmp_path / "masks")]) == 1
    assert "but its mask 7 x 9" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["explain", str(run), str(tmp_path / "empty")]) == 2
    assert "no image files" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["explain", "RUN", "a.png"], ["audit", "RUN", "--data", "drawn"]])
def test_pictures_cannot_go_into_a_file(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before the work: not even the run is looked for."""
    (tmp_path / "file").touch()
    assert main([*command, "--out", str(tmp_path / "file" / "inside")]) == 2
    assert "file is not a folder that you may write to" in capsys.readouterr().err


def test_explain_reads_fractions_with_a_window(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.fromarray(np.random.default_rng(0).random((16, 16), dtype=np.float32)).save(tmp_path / "a.tif")
    command = ["explain", str(run), str(tmp_path / "a.tif"), "--out", str(tmp_path / "out"), "--accelerator", "cpu"]
    assert main(command) == 1 and "--window low,high or auto" in capsys.readouterr().err
    assert main([*command, "--window", "1,0"]) == 2 and "low below high" in capsys.readouterr().err
    assert main([*command, "--window", "auto"]) == 0


def test_explain_an_unknown_class(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = next((folder / "test").rglob("*.png"))
    assert main(["explain", str(run), str(image), "--target", "disk"]) == 2
    assert "did you mean 'disc'" in capsys.readouterr().err


def test_export(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.pt2"
    assert main(["export", str(run), "--format", "pt2", "--out", str(out)]) == 0
    model, _ = Run(run).load_model()
    images = torch.rand(5, 3, 24, 24)
    torch.testing.assert_close(torch.export.load(out).module()(images), model(images))


def test_data_check(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(folder)]) == 0
    (tmp_path / "bad" / "train" / "a").mkdir(parents=True)
    (tmp_path / "bad" / "train" / "a" / "x.png").write_bytes(b"\x89PNG no more")
    assert main(["data", "check", str(tmp_path / "bad")]) == 1
    assert "x.png" in capsys.readouterr().out


def test_a_finished_run_is_not_begun_again(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "metrics.csv").read_bytes()
    assert main(train_command(folder, run)) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["train", "--resume", str(run)]) == 0
    assert (run / "metrics.csv").read_bytes() == before


def spoiled(folder: Path, tmp_path: Path) -> Path:
    import shutil

    copy = tmp_path / "spoiled"
    shutil.copytree(folder, copy)
    path = sorted((copy / "train").rglob("*.png"))[5]
    path.write_bytes(path.read_bytes()[:60])
    return copy


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_corrupt_image_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    data = spoiled(folder, tmp_path)
    path = sorted((data / "train").rglob("*.png"))[5]
    assert main(train_command(data, tmp_path / "run", "--workers", workers, "--holdout", "0.1")) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"fasterisnet: {path}") and "Traceback" not in message


def test_a_corrupt_image_is_skipped_and_counted(folder: Path, tmp_path: Path) -> None:
    data = spoiled(folder, tmp_path)
    assert main(train_command(data, tmp_path / "run", "--on-bad-image", "skip", "--method", "standard")) == 0
    report = (tmp_path / "run" / "report.md").read_text()
    assert "skipped: 1" in report and str(sorted((data / "train").rglob("*.png"))[5]) in report


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--data", "nowhere-at-all"],
        ["train", "--epochs", "3"],
        ["train", "--data", "drawn", "--method", "duel"],
        ["train", "--data", "drawn", "--epochs", "many"],
        ["train", "--resume", "nowhere-at-all"],
        ["train", "--resume", "x", "--epochs", "3"],
        ["train", "--data", "drawn", "--config", "nowhere.yaml"],
        ["train", "--data", "drawn", "--model", "resnet19", "--out", "OUT"],
        ["train", "--data", "drawn", "--model", "vgg11", "--size", "8", "--out", "OUT"],
        ["train", "--data", "drawn", "--model", "small", "--watch", "tset", "--out", "OUT"],
        ["evaluate", "nowhere-at-all"],
        ["explain", "nowhere-at-all", "x.png"],
        ["export", "nowhere-at-all", "--out", "x"],
        ["data", "check", "nowhere-at-all"],
        ["benchmark", "mnist", "--methods", "stocastic"],
    ],
)
def test_wrong_usage_is_exit_code_2(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tmp_path / "run") if word == "OUT" else word for word in command]
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("fasterisnet: ") and "Traceback" not in message


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["trian"], "invalid choice: 'trian'"),
        (["train", "--metod", "dual"], "did you mean '--method'?"),
        (["train", "--data", "drawn", "--epoch", "3"], "did you mean '--epochs'?"),
        (["evaluate", "RUN", "extra"], "unknown word 'extra'"),
        (["train", "--learning-rate", "0.1"], "did you mean '--lr'?"),
        (["train", "--optimiser=adamw"], "did you mean '--optimizer'?"),
        (["train", "--gpu"], "did you mean '--accelerator gpu'?"),
        (["audit", "RUN", "--data", "x", "--gpu", "0"], "did you mean '--accelerator gpu'?"),
        (["train", "--batch-size", "8"], "did you mean '--batch'?"),
        (["evaluate", "RUN", "--num-workers", "8"], "did you mean '--workers'?"),
        (["export", "RUN"], "required: --out"),
        ([], "required: COMMAND"),
    ],
)
def test_unknown_words_are_exit_code_2(command: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["", "train", "evaluate", "explain", "export", "data", "data check", "benchmark", "demo"]
)
def test_help_fits_a_screen_and_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), "--help"])
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    assert any(line.startswith("  fasterisnet ") for line in lines[lines.index("example:") :])


def test_every_option_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import yaml

    assert main(["train", "--show-config"]) == 0
    shown: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    assert {"method", "heatmap_weight", "precision", "e"} <= shown.keys()


def test_validation_is_comparable_when_p_changes(folder: Path, tmp_path: Path) -> None:
    """P is 0 in the first epoch and 1 in the second; the validation loss has P = 1 in both."""
    assert main(train_command(folder, tmp_path / "run", "--heatmap-weight", "[0.0, 1.0]", "--lr", "0")) == 0
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    names = rows[0].split(",")
    first, second = (dict(zip(names, map(float, row.split(",")), strict=True)) for row in rows[1:])
    assert first["train_loss"] == pytest.approx(first["train_classification"])
    assert first["val_loss"] == pytest.approx(first["val_background"] + first["val_foreground"], rel=1e-5)
    assert second["val_loss"] == pytest.approx(second["val_background"] + second["val_foreground"], rel=1e-5)


def test_one_class_is_no_task(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    shutil.copytree(folder / "train" / "disc", tmp_path / "data" / "train" / "disc")
    assert main(train_command(tmp_path / "data", tmp_path / "run")) == 1
    assert "nothing to tell apart" in capsys.readouterr().err
    assert main(["data", "check", str(tmp_path / "data")]) == 1
    assert not (tmp_path / "run").exists()


def test_a_run_inside_its_data_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(train_command(folder, folder / "runs" / "a")) == 2
    assert "inside the data" in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_a_class_that_is_not_trained_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    shutil.copytree(folder, tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "train" / "disc")
    assert main(train_command(tmp_path / "data", tmp_path / "run")) == 1
    assert "'train' has no image of disc" in capsys.readouterr().err


def test_what_is_known_at_the_start_is_said_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--data", "drawn", "--model", "small", "--accelerator", "cpu", "--out", str(tmp_path / "run")]
    assert main([*command, "--deep-supervision", "[nope]"]) == 2
    assert "'nope'" in capsys.readouterr().err
    assert main([*command, "--precision", "16-mixed"]) == 2
    assert "bf16-mixed" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["standard", "stochastic"])
def test_a_loss_that_is_not_a_number_ends_the_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    changes = ["--method", method, "--lr", "1e30", "--clip", "0", "--ranges", "[0.5, 2]", "--epochs", "1"]
    assert main(train_command(folder, tmp_path / "run", *changes)) == 1
    assert "not" in capsys.readouterr().err
    assert not (tmp_path / "run" / "best.safetensors").exists()


@pytest.mark.parametrize(("text", "value"), [("010", 10), ("7", 7), ("0.5", 0.5), ("true", True), ("[1, 2]", [1, 2])])
def test_values_as_they_are_read(text: str, value: Any) -> None:
    options = parser().parse_args(["train", "--data", "DIR", "--seed", text])
    assert given_options(options) == {"data": "DIR", "seed": value}


def test_benchmarks_take_their_data_as_other_commands_call_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "dogs", "--data", "dogs:somewhere", "--list"]) == 0
    assert "standard-seed0: " in (shown := capsys.readouterr().out)
    assert "\n  dogs:somewhere method=standard model=resnet18_half epochs=30 " in shown
