"""A run that goes on notices what changed under it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from attacks.conftest import PER_EPOCH, copied, draw, main, stopping, train


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a run that was stopped; the path in its options is relative."""
    place = tmp_path_factory.mktemp("changing")
    draw(place / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patched = stopping(PER_EPOCH + 1)
        assert train("data", "run", "--method", "stochastic", "--calibration-epochs", "0") == 130
        patched.undo()
    return place


@pytest.fixture
def place(begun: Path, tmp_path: Path) -> Path:
    """A copy, whose run looks at the copied data."""
    copy = Path(shutil.copytree(begun, tmp_path / "copy"))
    edit(copy, data=str(copy / "data"))
    return copy


def edit(place: Path, **changes: object) -> None:
    path = place / "run" / "config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))


def add(data: Path) -> None:
    shutil.copy(data / "train/disc/0.png", data / "train/disc/new.png")


def remove(data: Path) -> None:
    (data / "train/disc/0.png").unlink()


def repaint(data: Path) -> None:
    path = data / "train/disc/0.png"
    with Image.open(path) as picture:
        changed = picture.copy()
    changed.putpixel((3, 3), (255, 0, 0))
    changed.save(path)


def repaint_mask(data: Path) -> None:
    Image.new("L", (16, 16), 255).save(data / "masks/train/disc/0.png")


def relabel(data: Path) -> None:
    for top in (data, data / "masks"):
        (top / "train/disc/0.png").rename(top / "train/cross/0.png")


def rename(data: Path) -> None:
    for folder in (*data.glob("*/disc"), *data.glob("masks/*/disc")):
        folder.rename(folder.with_name("zylinder"))


CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (add, "1 added"), (remove, "1 removed"), (repaint, "1 edited"), (repaint_mask, "1 edited"),
    (relabel, "1 added"), (rename, "the classes were"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_changed_data_is_refused(
    change: Callable[[Path], None], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(place / "data")
    before = (place / "run" / "state.pt").read_bytes()
    assert main(["train", "--resume", str(place / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert (place / "run" / "state.pt").read_bytes() == before
    assert main(["train", "--resume", str(place / "run"), "--data-changed-ok"]) == (2 if change is rename else 0)


def test_a_manifest_that_labels_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = draw(tmp_path / "data")
    pictures = sorted(p for p in data.rglob("*.png") if "masks" not in p.parts)
    rows = [f"{p.relative_to(data)},{p.parts[-3]},{p.parts[-2]}" for p in pictures]
    (data / "manifest.csv").write_text("\n".join(["image,split,label", *rows]))
    patched = stopping(PER_EPOCH + 1)
    assert train(data / "manifest.csv", tmp_path / "run") == 130
    patched.undo()
    path, split, label = rows[0].split(",")
    rows[0] = f"{path},{split},{'disc' if label == 'cross' else 'cross'}"
    (data / "manifest.csv").write_text("\n".join(["image,split,label", *rows]))
    capsys.readouterr()
    assert main(["train", "--resume", str(tmp_path / "run")]) == 2
    assert "1 labelled anew" in capsys.readouterr().err


def test_a_relative_path_means_what_it_meant(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(tmp_path / "data")
    remove(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    assert yaml.safe_load((begun / "run" / "config.yaml").read_text())["data"] == str(begun / "data")


def test_the_same_data_elsewhere_is_the_same(place: Path) -> None:
    """What `place` is: the data was copied, and config.yaml says so."""
    assert main(["train", "--resume", str(place / "run")]) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"lr": 0.5}, "lr = 0.002, not 0.5"), ({"epochs": 3}, "epochs = 2, not 3"), ({"seed": 1}, "seed = 0, not 1")],
)
def test_changed_options_are_refused(
    changes: dict[str, object], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(place, **changes)
    assert main(["train", "--resume", str(place / "run")]) == 2
    assert message in capsys.readouterr().err


def test_where_it_computes_may_change(place: Path) -> None:
    edit(place, workers=1, tensorboard=True)
    assert main(["train", "--resume", str(place / "run")]) == 0


@pytest.mark.parametrize("how", ["deleted", "edited"])
def test_the_calibration_has_to_be_the_same(how: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = place / "run" / "calibration.json"
    if how == "deleted":
        path.unlink()
    else:
        path.write_text('{"format": 1, "depths": {"input": {"c1": [0.5], "c2": [2.0]}}}')
    assert main(["train", "--resume", str(place / "run")]) == 1
    assert "calibration.json" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["stopped", "finished"])
@pytest.mark.parametrize("name", ["state.pt", "best.safetensors"])
def test_what_a_run_goes_on_from_has_to_be_there(
    name: str, which: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it the run would begin anew over its results, or say that it has weights which are gone."""
    run = copied(request.getfixturevalue(which), tmp_path)
    (run / name).unlink()
    kept = {path: path.read_bytes() for path in run.glob("*.*")}
    assert main(["train", "--resume", str(run)]) == 1
    assert f"{name} is gone" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.glob("*.*")} == kept


def test_files_that_a_run_began_with_are_not_needed_again(tmp_path: Path) -> None:
    """`ranges: FILE` may be edited and `pretrained: FILE` removed; the run has what it needs of them."""
    from fasterisnet.models import build_model

    data = draw(tmp_path / "data")
    torch.save(build_model("small", 3).state_dict(), tmp_path / "w.pt")
    ranges = '{"format": 1, "depths": {"input": {"c1": [0.5], "c2": [2.0]}}}'
    (tmp_path / "ranges.json").write_text(ranges)
    options = [
        "--method",
        "stochastic",
        "--ranges",
        str(tmp_path / "ranges.json"),
        "--pretrained",
        str(tmp_path / "w.pt"),
    ]
    assert train(data, tmp_path / "whole", *options) == 0
    patched = stopping(PER_EPOCH + 1)
    assert train(data, tmp_path / "run", *options) == 130
    patched.undo()
    (tmp_path / "ranges.json").write_text(ranges.replace("0.5", "0.9"))
    (tmp_path / "w.pt").unlink()
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    for name in ("best.safetensors", "metrics.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_state_of_an_older_version_is_taken(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(stopped, tmp_path)
    state = torch.load(run / "state.pt", weights_only=True)
    old = {key: state[key] for key in ("model", "optimizer", "precision", "progress", "sums")}
    torch.save(old, run / "state.pt")
    assert main(["train", "--resume", str(run)]) == 0
    assert "older version" in " ".join(capsys.readouterr().out.split())


def with_patients(data: Path, twice: dict[str, bool]) -> None:
    """A manifest in which everybody has one picture, but for Ann: she has the first of each split in `twice`."""
    rows, first = [], dict(twice)
    for i, p in enumerate(sorted(p for p in data.rglob("*.png") if "masks" not in p.parts)):
        patient = "Ann" if first.pop(p.parts[-3], False) else f"p{i}"
        mask = data / "masks" / p.relative_to(data)
        rows.append(f"{p.relative_to(data)},{mask.relative_to(data)},{p.parts[-3]},{p.parts[-2]},{patient}")
    (data / "manifest.csv").write_text("\n".join(["image,mask,split,label,patient", *rows]))


def test_the_paths_of_patients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = draw(tmp_path / "data")
    for other in ("val", "test"):
        with_patients(data, {"train": True, other: True})
        assert train(data, tmp_path / "run") == 1
        error = capsys.readouterr().err
        assert "'Ann'" in error and f"'train' and '{other}'" in error
        assert not (tmp_path / "run").exists()


def test_patients_of_a_validation_set_that_is_there_with_and_without_marks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = draw(tmp_path / "data")
    with_patients(data, {})
    options = ["--watch", "val_unbiased", "--epochs", "1"]
    assert train(Path(f"{data}?bias=mark"), tmp_path / "run", *options) == 0
    with_patients(data, {"train": True, "val": True})
    assert train(Path(f"{data}?bias=mark"), tmp_path / "other", *options) == 1
    assert "'train' and 'val'" in capsys.readouterr().err


def test_skipping_does_not_remove_a_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = draw(tmp_path / "data")
    for path in (data / "train" / "disc").glob("*.png"):
        path.write_bytes(b"\x89PNG no more")
    assert train(data, tmp_path / "run", "--on-bad-image", "skip") == 1
    assert "No image of disc can be read" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_test_that_cannot_be_read_is_no_end(tmp_path: Path) -> None:
    data = draw(tmp_path / "data")
    for path in (data / "test").rglob("*.png"):
        path.write_bytes(b"\x89PNG no more")
    assert train(data, tmp_path / "run", "--on-bad-image", "skip", "--epochs", "1") == 0
    assert "The split test has no image that can be read" in (tmp_path / "run" / "report.md").read_text()
    assert main(["evaluate", str(tmp_path / "run"), "--workers", "0"]) == 1
