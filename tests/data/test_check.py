"""The data check: every kind of problem is found, counted and shown; nothing in a folder makes it crash."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fasterisnet.data.check import EXAMPLES, KINDS, Report, Row, check_data
from fasterisnet.data.manifest import Columns
from fasterisnet.errors import InputError

SHAPE = np.zeros((20, 30), np.uint8)
SHAPE[5:15, 10:20] = 255


def save(path: Path, picture: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(path)
    return path


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def sound(root: Path, number: int = 3) -> Path:
    """train, val and test of two classes, all as it should be."""
    seed = 0
    for split in ("train", "val", "test"):
        for name in ("cat", "dog"):
            for i in range(number):
                seed += 1
                save(root / split / name / f"{i}.png", noise(seed))
                save(root / "masks" / split / name / f"{i}.png", SHAPE)
    return root


def row(report: Report, kind: str) -> Row:
    found = [row for row in report.rows if row.problem == KINDS[kind].problem]
    assert len(found) == 1, f"{kind} is not among {[r.problem for r in report.rows]}"
    return found[0]


def kinds(report: Report) -> dict[str, int]:
    names = {kind.problem: key for key, kind in KINDS.items()}
    return {names[row.problem]: row.count for row in report.rows}


def test_a_sound_folder_has_no_problems(tmp_path: Path) -> None:
    report = check_data(sound(tmp_path), workers=2)
    assert report.rows == [] and not report.fatal
    assert (report.images, report.classes, report.splits) == (18, ["cat", "dog"], {"train": 6, "val": 6, "test": 6})
    assert "18 images, 2 classes (cat, dog), splits: train 6, val 6, test 6." in str(report)
    assert str(report).endswith("No problems found.")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-300])


def several_pictures(folder: Path) -> None:
    pages = [Image.open(folder / f"train/cat/{i}.png").convert("L") for i in range(3)]
    pages[1].save(folder / "train/cat/1.png", format="TIFF", save_all=True, append_images=[pages[0], pages[2]])


SPOILT: dict[str, tuple[Callable[[Path], object], dict[str, int], str]] = {
    "truncated image": (lambda d: cut(d / "train/cat/1.png"), {"image": 1}, "train/cat/1.png"),
    "empty image": (lambda d: (d / "test/dog/1.png").write_bytes(b""), {"image": 1}, "test/dog/1.png"),
    "text for image": (lambda d: (d / "val/dog/1.png").write_text("x"), {"image": 1}, "val/dog/1.png"),
    "dead link": (lambda d: (d / "val/dog/l.png").symlink_to("gone"), {"missing": 1, "no mask": 1}, "val/dog/l.png"),
    "broken mask": (
        lambda d: (d / "masks/train/cat/0.png").write_bytes(b"\x89PNG"),
        {"mask": 1},
        "masks/train/cat/0.png",
    ),
    "mask without image": (
        lambda d: (d / "train/dog/2.png").unlink(),
        {"mask without image": 1},
        "masks/train/dog/2.png",
    ),
    "mask of no class": (lambda d: save(d / "masks/more/x.png", SHAPE), {"mask without image": 1}, "masks/more/x.png"),
    "image without mask": (lambda d: (d / "masks/train/dog/2.png").unlink(), {"no mask": 1}, "train/dog/2.png"),
    "size": (lambda d: save(d / "masks/val/dog/0.png", SHAPE[:, 1:]), {"size": 1}, "masks/val/dog/0.png"),
    "empty mask": (lambda d: save(d / "masks/val/dog/0.png", SHAPE * 0), {"empty": 1}, "masks/val/dog/0.png"),
    "full mask": (lambda d: save(d / "masks/val/dog/0.png", SHAPE * 0 + 255), {"full": 1}, "masks/val/dog/0.png"),
    "full mask of ones": (lambda d: save(d / "masks/val/dog/0.png", SHAPE * 0 + 1), {"full": 1}, "masks/val/dog/0.png"),
    "gray mask": (
        lambda d: save(d / "masks/val/dog/0.png", SHAPE // 2 + 100),
        {"gray": 1, "full": 0},
        "masks/val/dog/0.png",
    ),
    "inverted masks": (
        lambda d: [save(path, 255 - SHAPE) for path in (d / "masks").rglob("*.png")],
        {"inverted": 1},
        "masks/train/cat/0.png",
    ),
    "some inverted masks": (
        lambda d: [save(path, 255 - SHAPE) for path in (d / "masks/test").rglob("*.png")],
        {"inverted": 1},
        "masks/test/cat/0.png",
    ),
    "several pictures": (several_pictures, {"pages": 1}, "train/cat/1.png: holds 3 pictures"),
    "class numbers": (
        lambda d: save(d / "masks/val/dog/0.png", SHAPE // 85),
        {"labels": 1},
        "masks/val/dog/0.png",
    ),
    "class never trained": (
        lambda d: save(d / "val/owl/0.png", noise(99)),
        {"not trained": 1, "not tested": 1, "no mask": 1},
        "train",
    ),
    "class never tested": (
        lambda d: save(d / "train/owl/0.png", noise(99)),
        {"not tested": 2, "no mask": 1, "unmasked": 1},
        "val",
    ),
    "class without masks": (
        lambda d: shutil.rmtree(d / "masks/train/dog"),
        {"no mask": 3, "unmasked": 1},
        "train/dog/0.png",
    ),
    "duplicate": (
        lambda d: (d / "test/dog/0.png").write_bytes((d / "train/cat/0.png").read_bytes()),
        {"duplicate": 1},
        "train/cat/0.png",
    ),
    "duplicate within a class": (
        lambda d: (d / "train/cat/1.png").write_bytes((d / "train/cat/0.png").read_bytes()),
        {},
        "",
    ),
    "same file under two classes": (
        lambda d: (d / "train/dog/0.png").write_bytes((d / "train/cat/0.png").read_bytes()),
        {"two classes": 1},
        "train/cat/0.png",
    ),
    "no train": (
        lambda d: (d / "train").rename(d / "training"),
        {"no train split": 1, "split name": 1, "mask without image": 6, "no mask": 6},
        "",
    ),
    "empty split": (lambda d: (d / "notes").mkdir(), {"layout": 1}, "notes"),
    "masks beside images": (
        lambda d: (d / "masks/train/cat/0.png").rename(d / "train/cat/0_mask.png"),
        {"among": 1, "no mask": 2},
        "train/cat/0_mask.png",
    ),
    "stray": (lambda d: (d / "train/cat/x.png").mkdir(), {"stray": 1}, "train/cat/x.png"),
    "similar classes": (
        lambda d: (d / "val/dog").rename(d / "val/Dog"),
        {"not trained": 1, "not tested": 2, "class name": 1, "mask without image": 3, "no mask": 3},
        "",
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_every_problem_of_a_folder_is_found_and_nothing_else(tmp_path: Path, name: str) -> None:
    change, wanted, example = SPOILT[name]
    change(sound(tmp_path))
    report = check_data(tmp_path, workers=1)
    wanted = {kind: count for kind, count in wanted.items() if count}
    assert kinds(report) == wanted
    assert report.fatal == any(KINDS[kind].severity == "fatal" for kind in wanted)
    if example:
        shown = row(report, next(iter(wanted))).examples[0]
        assert os.path.join(tmp_path, example) in shown or shown.startswith(example)
        assert example in str(report)


def test_severities() -> None:
    fatal = {kind for kind, (_, severity, _) in KINDS.items() if severity == "fatal"}
    assert fatal >= {"image", "mask", "missing", "size", "gray", "group", "not trained", "label", "row", "box"}
    assert not fatal & {"empty", "full", "no mask", "mask without image", "not tested", "duplicate", "split name"}


def test_counts_examples_and_width(tmp_path: Path) -> None:
    root = sound(tmp_path / ("long_name_" * 12), number=40)
    for i in range(25):
        (root / f"masks/train/cat/{i}.png").unlink()
        save(root / f"masks/train/dog/{i}.png", SHAPE[:10])
    (root / "masks/train/dog/30.png").write_text("x")
    report = check_data(root, workers=2)
    assert kinds(report) == {"size": 25, "mask": 1, "no mask": 25}
    assert len(row(report, "size").examples) == EXAMPLES == 3
    text = str(report)
    assert max(map(len, text.splitlines())) <= 120
    assert text.count("... and 22 more") == 2 and "30 x 10" in text
    assert [r.severity for r in report.rows] == ["fatal", "fatal", "warning"]
    assert "Kinds of problems: 2 fatal, 1 warnings." in text


def test_names_are_shown_so_that_a_terminal_can_take_them(tmp_path: Path) -> None:
    root = sound(tmp_path)
    (root / "val/dog" / os.fsdecode(b"caf\xe9\n\x1b[31m.png")).write_text("x")
    report = check_data(root)
    assert kinds(report) == {"image": 1, "no mask": 1}
    assert "val/dog/caf\\udce9\\n\\x1b[31m.png" in str(report)


def test_the_number_of_workers_changes_nothing(tmp_path: Path) -> None:
    root = sound(tmp_path)
    for name in ("truncated image", "broken mask", "image without mask", "size", "class never trained", "duplicate"):
        SPOILT[name][0](root)
    report = check_data(root, workers=1)
    assert len(report.rows) == 7 and report == check_data(root, workers=3)
    with pytest.raises(InputError, match="workers is 0"):
        check_data(root, workers=0)


def test_whatever_lies_in_the_folder_it_does_not_crash(tmp_path: Path) -> None:
    root = sound(tmp_path)
    rng = np.random.default_rng(0)
    whole = (root / "train/cat/0.png").read_bytes()
    for i in range(60):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(damaged), 6):
            damaged[place] = rng.integers(256)
        (root / f"train/cat/d{i}.png").write_bytes(damaged)
        (root / f"masks/train/cat/d{i}.png").write_bytes(damaged[: rng.integers(len(damaged))])
    for suffix in ("jpg", "tif", "webp", "gif", "bmp", "jp2"):
        (root / f"train/cat/noise.{suffix}").write_bytes(rng.bytes(500))
        (root / f"train/cat/empty.{suffix}").touch()
        (root / f"train/dog/folder.{suffix}").mkdir()
    (root / "masks/train/dog/0.png").unlink()
    (root / "masks/train/dog/0.png").mkdir()
    (root / "masks/train/more").write_text("a file")
    (root / "val/dog/loop.png").symlink_to("loop.png")
    (root / "annotations.json").write_text("{")
    (root / "boxes").write_text("a file")
    os.mkfifo(root / "val/dog/pipe.png")
    for name in (b"caf\xe9.png", b"line\nbreak.png", b"\x1b[31m.png"):
        (root / "val/dog" / os.fsdecode(name)).write_text("x")
    (root / "test" / os.fsdecode(b"\xff\xfe")).mkdir()
    save(root / "test" / os.fsdecode(b"\xff\xfe") / "x.png", noise(0))
    report = check_data(root, workers=2)
    str(report).encode()
    found = kinds(report)
    assert found["image"] >= 12 + 3 + 1 and found["mask"] >= 50 and found["box file"] == 1 and report.fatal
    assert "\x1b" not in str(report)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b"image,split\n", b'image,split,label\n"a', b"\0\0\0", b"image,split,label\n"]
)
def test_broken_manifests_are_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.csv").write_bytes(content)
    report = check_data(tmp_path)
    assert kinds(report) == {"cannot be opened": 1} and report.fatal and report.images == 0
    assert "manifest.csv" in str(report)
    assert check_data(tmp_path / "manifest.csv").fatal


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_no_data_at_all(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    report = check_data(tmp_path / name)
    assert kinds(report) == {"cannot be opened": 1}
    assert "DIR/<split>/<class>" in "".join(row(report, "cannot be opened").examples)


def test_a_manifest_with_every_problem(tmp_path: Path) -> None:
    for i in range(9):
        save(tmp_path / f"i{i}.png", noise(i))
    save(tmp_path / "m.png", SHAPE)
    lines = [
        "image,split,label,mask,patient,x,y,w,h",
        "i0.png,train,cat,m.png,p0,,,,",
        "i1.png,train,dog,m.png,p1,,,,",
        "i1.png,train,cat,m.png,p1,,,,",  # another label
        "i2.png,test,cat,m.png,p1,,,,",  # patient in train
        "i3.png,test,owl,m.png,p3,,,,",  # class not in train, and test has no dog
        "gone.png,train,cat,m.png,p4,,,,",
        "i4.png,train,cat,gone_mask.png,p5,,,,",
        "i5.png,train,,m.png,p6,,,,",  # no label
        "i6.png,,cat,m.png,p7,,,,",  # no split
        "i7.png,train,cat,m.png,p8,,,,,,,",  # too many cells
        "i7.png,train,cat,,p9,0,0,5,",  # half a box
        "i7.png,train,cat,,p10,0,0,5,0",  # empty box
        "i8.png,train,dog,,p11,99,0,5,5",  # outside
        ",train,cat,,,,,,",
    ]
    (tmp_path / "manifest.csv").write_text("\n".join(lines))
    report = check_data(tmp_path)
    assert kinds(report) == {
        "row": 3,
        "label": 1,
        "missing": 2,
        "box": 2,
        "group": 1,
        "not trained": 1,
        "not tested": 1,
        "two labels": 1,
        "no split": 1,
    }
    assert "line 9: has no label" in row(report, "label").examples[0]
    assert row(report, "group").examples == [f"p1: {tmp_path}/i1.png (train) and {tmp_path}/i2.png (test)"]
    assert [e.split(":")[0] for e in row(report, "missing").examples] == [
        f"{tmp_path}/gone.png",
        f"{tmp_path}/gone_mask.png",
    ]
    assert "'owl'" in row(report, "not trained").examples[0] and "'dog'" in row(report, "not tested").examples[0]
    assert report.splits == {"train": 7, "test": 2}


@pytest.mark.parametrize("column", ["patient_id", "Subject", "PatientID"])
def test_whose_an_image_is_may_be_called_otherwise(tmp_path: Path, column: str) -> None:
    for i in range(4):
        save(tmp_path / f"i{i}.png", noise(i))
    rows = ["i0.png,train,cat,p0", "i1.png,train,dog,p1", "i2.png,test,cat,p1", "i3.png,test,dog,p2"]
    (tmp_path / "manifest.csv").write_text("\n".join([f"image,split,label,{column}", *rows]))
    assert kinds(check_data(tmp_path))["group"] == 1


def test_columns_that_are_not_used_and_classes_that_are_one_number_are_named(tmp_path: Path) -> None:
    for i in range(3):
        save(tmp_path / f"i{i}.png", noise(i))
    text = "image,split,label,xmin,age\ni0.png,train,0,1,9\ni1.png,train,1,1,9\ni2.png,train,1.0,1,9\n"
    (tmp_path / "manifest.csv").write_text(text)
    report = check_data(tmp_path)
    assert kinds(report) == {"column": 2, "class name": 1, "no mask": 3}
    assert "'xmin'" in row(report, "column").examples[0] and "'1.0'" in row(report, "class name").examples[0]


def test_several_labels(tmp_path: Path) -> None:
    for i in range(3):
        save(tmp_path / f"i{i}.png", noise(i))
    text = "image,part,label:a,label:b\ni0.png,train,1,0\ni1.png,train,0,0\ni2.png,test,1,yes\ni2.png,test,0,1\n"
    (tmp_path / "x.csv").write_text(text)
    report = check_data(tmp_path / "x.csv", columns=Columns(split="part"))
    assert kinds(report) == {"label": 1, "not trained": 1, "not tested": 1, "no mask": 3}
    assert "instead of 0 or 1" in row(report, "label").examples[0]


def test_boxes_count_as_masks(tmp_path: Path) -> None:
    for i, split in enumerate(("train", "test")):
        save(tmp_path / split / "cat" / f"{i}.png", noise(i))
    content = {
        "images": [{"id": 0, "file_name": "0.png"}, {"id": 1, "file_name": "1.png"}, {"id": 2, "file_name": "2.png"}],
        "annotations": [{"image_id": 0, "bbox": [1, 1, 5, 5]}, {"image_id": 1, "bbox": [0, 0, 30, 20]}],
    }
    (tmp_path / "annotations.json").write_text(json.dumps(content))
    assert kinds(check_data(tmp_path)) == {"one class": 1, "mask without image": 1, "full": 1}
    (tmp_path / "boxes/train/cat").mkdir(parents=True)
    (tmp_path / "boxes/train/cat/9.xml").write_text("<annotation/>")
    (tmp_path / "boxes/train/cat/0.xml").write_text("<annotation")
    assert kinds(check_data(tmp_path)) == {"one class": 1, "mask without image": 2, "full": 1, "box file": 1}


@pytest.mark.parametrize(
    ("splits", "kind"), [("train val", "group"), ("val test", "group"), ("ood deceiving", "group of tests")]
)
def test_a_patient_may_be_in_two_tests_but_not_in_training_and_test(tmp_path: Path, splits: str, kind: str) -> None:
    first, second = splits.split()
    for i in range(4):
        save(tmp_path / f"i{i}.png", noise(i))
    rows = ["i0.png,train,x,p0", f"i1.png,{first},x,me", f"i2.png,{second},x,me", f"i3.png,{second},x,me"]
    (tmp_path / "manifest.csv").write_text("\n".join(["image,split,label,group", *rows]))
    assert kinds(check_data(tmp_path)) == {"one class": 1, "no mask": 4, kind: 1}


def test_data_known_by_name_is_checked_too(tmp_path: Path) -> None:
    report = check_data("drawn?size=16&per_class=3&classes=2")
    assert report.rows == [] and report.splits["train"] == 6 and report.masks == report.splits
    lines = ["split,class_id,class_name,image,mask"]
    for i in range(12):
        save(tmp_path / "images" / f"{i}.png", noise(i))
        save(tmp_path / "masks" / f"{i}.png", SHAPE)
        lines.append(
            f"{'trainval' if i < 10 else 'test'},{i % 2},{('pug', 'poodle')[i % 2]},images/{i}.png,masks/{i}.png"
        )
    (tmp_path / "index.csv").write_text("\n".join(lines))
    assert not check_data(f"dogs:{tmp_path}").fatal
    cut(tmp_path / "images/10.png")
    save(tmp_path / "masks/11.png", SHAPE[:, 1:])
    report = check_data(f"dogs:{tmp_path}")
    assert row(report, "image").count == 6 and "images/10.png" in row(report, "image").examples[0]  # in three tests
    assert check_data(f"dogs:{tmp_path / 'images'}").found("cannot be opened") is not None
