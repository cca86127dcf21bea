"""What `train` refuses before it begins, and what it says of masks while it goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fasterisnet.cli import main
from fasterisnet.runs.config import Config
from fasterisnet.runs.folder import Run
from fasterisnet.training import loop
from fasterisnet.training.console import Watcher

SIDE, EACH = 16, 6
MASK = np.zeros((SIDE, SIDE), np.uint8)
MASK[4:12, 4:12] = 255


def save(path: Path, picture: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two classes, six pictures each to learn from, all with masks."""
    rng = np.random.default_rng(0)
    for split, count in (("train", EACH), ("val", 2), ("test", 2)):
        for k, label in enumerate("ab"):
            for i in range(count):
                picture = rng.integers(0, 100, (SIDE, SIDE), dtype=np.uint8) + np.uint8(100 * k)
                save(tmp_path / "data" / split / label / f"{i}.png", picture)
                save(tmp_path / "data/masks" / split / label / f"{i}.png", MASK)
    return tmp_path / "data"


def train(data: Path | str, *more: str, method: str = "stochastic", out: str = "run") -> int:
    folder = Path(str(data).partition("?")[0]).parent / out
    return main([
        "train", "--data", str(data), "--method", method, "--model", "small", "--size", str(SIDE), "--epochs", "1",
        "--batch", "4", "--workers", "0", "--ranges", "[0.1, 10]", "--tensorboard", "false", "--accelerator", "cpu",
        "--out", str(folder), *more,
    ])  # fmt: skip


def remove_masks(data: Path, keep: int = 0) -> None:
    for path in sorted((data / "masks/train").rglob("*.png"))[keep:]:
        path.unlink()


def label_maps(data: Path) -> None:
    for path in (data / "masks").rglob("*.png"):
        save(path, MASK // 255 + np.eye(SIDE, dtype=np.uint8))


def misnamed(data: Path) -> None:
    for path in (data / "masks").rglob("*.png"):
        path.rename(path.with_stem(f"{path.stem}_mask"))


def black(data: Path) -> None:
    for path in (data / "masks").rglob("*.png"):
        save(path, MASK * 0)


def white(data: Path) -> None:
    for path in (data / "masks").rglob("*.png"):
        save(path, MASK * 0 + 255)


WITHOUT = {
    "no folder": (lambda data: shutil.rmtree(data / "masks"), ["masks/train/a/0.png", "nearest is no mask at all"]),
    "other names": (misnamed, ["masks/train/a/0.png", "nearest is masks/train/a/0_mask.png"]),
    "label maps": (label_maps, ["masks/train/a/0.png", "0, 1, 2", "--foreground"]),
    "white": (white, ["masks/train/a/0.png", "none of the 12 training images", "full mask"]),
    "black": (black, ["masks/train/a/0.png", "none of the 12 training images"]),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_a_heatmap_method_without_masks_is_an_error(data: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    spoil, words = WITHOUT[name]
    spoil(data)
    assert train(data) != 0
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    assert "Traceback" not in error and not (data.parent / "run").exists()


def test_the_standard_classifier_needs_no_masks(data: Path) -> None:
    shutil.rmtree(data / "masks")
    assert train(data, method="standard") == 0
    assert "mask" not in (data.parent / "run/report.md").read_text()


def test_label_maps_train_when_the_labels_are_chosen(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    label_maps(data)
    assert train(data, "--foreground", "1,2") == 0
    assert "(100%)" in capsys.readouterr().out
    assert Run(data.parent / "run").config.foreground == [1, 2]
    assert main(["evaluate", str(data.parent / "run"), "--workers", "0"]) == 0


def test_missing_masks_are_shown_at_the_start_every_epoch_and_in_the_report(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remove_masks(data, keep=9)
    assert train(data) == 0
    said = capsys.readouterr().out
    assert "Masks: 9 of 12 training images (75%)" in said
    assert "masks 75%" in next(line for line in said.splitlines() if line.startswith("epoch 1/1"))
    assert "image without mask (3)" in said
    assert "usable mask: 9 of 12 (75%)" in (data.parent / "run/report.md").read_text()
    assert json.loads((data.parent / "run/data.json").read_text())["masks"]["train"] == 9


def test_masks_that_cannot_be_used_are_not_counted(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted((data / "masks").rglob("*.png"))[::2]:
        save(path, MASK * 0)
    assert train(data) == 0
    said = capsys.readouterr().out
    assert "Masks: 6 of 12 training images (50%)" in said
    assert said.count("masks for 50%") == 3 and "masks for 100%" not in said  # train, val, test


def test_few_masks_have_to_be_meant(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remove_masks(data, keep=5)
    assert train(data) == 2
    error = capsys.readouterr().err
    assert "5 of 12" in error and "--allow-missing-masks" in error and not (data.parent / "run").exists()
    assert train(data, "--allow-missing-masks") == 0
    assert "Masks: 5 of 12" in capsys.readouterr().out


def test_fewer_masks_by_choice_are_no_missing_masks(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(data, "--mask-share", "0.25") == 0
    assert "25% of them are used" in capsys.readouterr().out
    assert "25% of them were used" in (data.parent / "run/report.md").read_text()
    assert train(data, "--mask-share", "0", out="none") == 2
    assert "would use no mask" in capsys.readouterr().err


def test_what_the_data_check_finds_fatal_is_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data / "test/b/1.png").write_bytes(b"no picture")
    assert train(data) == 1
    error = capsys.readouterr().err
    assert "test/b/1.png: is not an image" in error and not (data.parent / "run").exists()
    assert train(data, "--on-bad-image", "skip") == 0


def manifest(data: Path, patients: str) -> Path:
    rows = ["image,mask,split,label,patient"]
    paths = [path.relative_to(data) for split in ("train", "val") for path in sorted((data / split).rglob("*.png"))]
    for path, patient in zip(paths, patients, strict=True):
        rows.append(f"{path},masks/{path},{path.parts[0]},{path.parts[1]},number-{patient}")
    (data / "m.csv").write_text("\n".join(rows))
    return data / "m.csv"


def test_a_patient_in_training_and_validation_is_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(manifest(data, "abcdefghijklmnoa")) == 1
    error = capsys.readouterr().err
    assert all(word in error for word in ("number-a", "train", "val", "patient")) and "number-b" not in error
    assert train(manifest(data, "abcdefghijklmnop")) == 0


def test_a_class_that_is_held_out_with_its_patient_is_told(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All images of b are of one patient, who is drawn for validation with one of the seeds."""
    shutil.rmtree(data / "val")
    path = manifest(data, "abcdefffffff")
    codes = [
        train(path, "--seed", str(seed), "--holdout", "0.5", method="standard", out=f"{seed}") for seed in range(4)
    ]
    assert 1 in codes and "The split 'train' has no image that is left to learn from of b" in capsys.readouterr().err


def test_one_logit_is_no_matter_of_several_labels(data: Path) -> None:
    paths = [path.relative_to(data) for path in sorted(data.rglob("*/[ab]/*.png")) if "masks" not in path.parts]
    rows = [f"{path},masks/{path},{path.parts[0]},{int(path.parts[1] == 'a')}" for path in paths]
    (data / "m.csv").write_text("\n".join(["image,mask,split,label:a", *rows]))
    assert train(data / "m.csv", method="selective") == 0


def test_a_patient_of_the_xrays_in_training_and_validation_is_refused(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    splits = [("train", "p0", "normal"), ("train", "p1", "covid"), ("train", "p2", "pneumonia"), ("val", "p1", "covid")]
    rows = [f"train/a/{i}.png,masks/train/a/{i}.png,{c},{p},here,{s},{s}" for i, (s, p, c) in enumerate(splits)]
    text = "\n".join(["image,mask,label,patient,source,split_mixed,split_covid", *rows])
    (data / "index.csv").write_text(text)
    (data / "images").mkdir()
    assert main(["train", "--data", f"xray:{data}", "--model", "small", "--size", "16", "--out", f"{data}-run"]) == 1
    error = capsys.readouterr().err
    assert "p1" in error and "p0" not in error and not Path(f"{data}-run").exists()
    assert main(["data", "check", f"xray:{data}"]) == 1
    said = capsys.readouterr().out
    assert "group in two splits" in said and "4 images, 3 classes" in said


def test_skipping_does_not_remove_a_class(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (data / "train/b").iterdir():
        path.write_bytes(b"no picture")
    assert train(data, "--on-bad-image", "skip") == 1
    assert "No image of b can be read" in capsys.readouterr().err


def test_windows_are_kept_with_the_weights(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained on 12 bits in 16, tested and explained as it was trained; values below zero are no option."""
    for path in [p for split in ("train", "val", "test") for p in (data / split).rglob("*.png")]:
        save(path, np.array(Image.open(path)).astype(np.uint16) * 16)
    assert train(data) == 0
    assert "unused gray values (20)" in capsys.readouterr().out
    assert train(data, "--window", "-100,4095", out="windowed") == 0
    assert "unused" not in capsys.readouterr().out
    run = Run(data.parent / "windowed")
    assert run.config.window == [-100, 4095] and run.load_weights()[1].prepare.window == (-100, 4095)
    assert main(["evaluate", str(run.folder), "--workers", "0"]) == 0
    assert main(["explain", str(run.folder), str(data / "test/a/0.png"), "--out", str(data.parent / "pictures")]) == 0


def test_rare_classes_are_seen_as_often_when_balanced(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(4):
        (data / f"train/b/{i}.png").unlink()
        (data / f"masks/train/b/{i}.png").unlink()
    updates = []
    for sampling in ("natural", "balanced"):
        assert train(data, "--sampling", sampling, out=sampling) == 0
        rows = (data.parent / sampling / "metrics.csv").read_text().splitlines()
        updates.append(int(rows[1].split(",")[rows[0].split(",").index("updates")]))
        assert json.loads((data.parent / sampling / "report.json").read_text())["training_samples"] == 8
    assert updates == [2, 3]  # 6 + 2 pictures, 6 + 6 pictures, in batches of 4
    rows = "train/a/0.png,train,1,0\ntrain/a/1.png,train,0,1\nval/a/0.png,val,0,1\n"
    (data / "m.csv").write_text(f"image,split,label:a,label:b\n{rows}")
    assert train(data / "m.csv", "--sampling", "balanced", method="standard", out="several") == 2
    assert "several labels" in capsys.readouterr().err


class Stop(Watcher):
    """Ends a run in its second epoch."""

    def step(self, epoch: int, batch: int, *_: object) -> None:
        if (epoch, batch) == (1, 2):
            raise KeyboardInterrupt


def test_adamw_goes_on_exactly(data: Path) -> None:
    options: dict[str, Any] = {
        "data": str(data), "method": "stochastic", "model": "small", "size": SIDE, "epochs": 2, "batch": 4,
        "workers": 0, "ranges": [0.1, 10.0], "tensorboard": False, "accelerator": "cpu", "checkpoint_every": 1,
    }  # fmt: skip
    whole, cut, other = (
        Config(**options, out=str(data.parent / name), optimizer=optimizer)
        for name, optimizer in (("whole", "adamw"), ("cut", "adamw"), ("other", "sgd"))
    )
    loop.train(whole)
    with pytest.raises(KeyboardInterrupt):
        loop.train(cut, watcher=Stop())
    loop.train(cut, resume=True)
    loop.train(other)
    weights = [(Path(config.out) / "best.safetensors").read_bytes() for config in (whole, cut, other)]
    assert weights[0] == weights[1] != weights[2]
    state = Run(whole.out).load_state()
    assert state is not None and "exp_avg" in state["optimizer"]["state"][0]
