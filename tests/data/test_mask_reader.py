"""Masks of every kind: one reader, and the same verdict for training, the data check and whoever reads one file."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from fasterisnet.data.base import BadImageError
from fasterisnet.data.check import KINDS, check_data
from fasterisnet.data.masks import AmbiguousMaskError, decode_mask
from fasterisnet.data.reader import read_mask
from fasterisnet.data.sources import open_source
from fasterisnet.errors import UsageError

SIDE = 40
LABELS = np.zeros((SIDE, SIDE), np.uint8)
LABELS[5:20, 5:20], LABELS[15:30, 25:35] = 1, 2
SHAPE = LABELS > 0


def save(path: Path, picture: np.ndarray | Image.Image, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
    picture.save(path, **options)
    return path


def voc(labels: np.ndarray) -> Image.Image:
    """A picture with the palette of Pascal VOC, in which class 8 is the dark red (64, 0, 0)."""
    palette = []
    for label in range(256):
        colour = [0, 0, 0]
        for bit in range(8):
            for channel in range(3):
                colour[channel] |= (label >> (3 * bit + channel) & 1) << (7 - bit)
        palette += colour
    picture = Image.fromarray(labels)
    picture.putpalette(palette)
    return picture


def data(root: Path, mask: np.ndarray | Image.Image, **options: Any) -> Path:
    rng = np.random.default_rng(0)
    for label in "ab":
        for i in range(3):
            save(root / "train" / label / f"{i}.png", rng.integers(0, 256, (SIDE, SIDE), dtype=np.uint8))
            save(root / "masks/train" / label / f"{i}.png", mask, **options)
    return root


def soft() -> Image.Image:
    return Image.fromarray(SHAPE.astype(np.uint8) * 255).filter(ImageFilter.GaussianBlur(0.8))


def jpeg() -> Image.Image:
    content = io.BytesIO()
    Image.fromarray(SHAPE.astype(np.uint8) * 255).save(content, "JPEG", quality=80)
    return Image.open(content)


VERDICTS: dict[str, tuple[Any, str]] = {
    "0 and 255": (SHAPE.astype(np.uint8) * 255, "binary"),
    "0 and 1": (SHAPE.astype(np.uint8), "binary"),
    "red on black": (np.dstack([SHAPE * 255, SHAPE * 0, SHAPE * 0]).astype(np.uint8), "binary"),
    "soft edges": (soft(), "soft"),
    "JPEG": (jpeg(), "soft"),
    "labels": (LABELS, "labels"),
    "one label that is not 1": (LABELS // 2 * 2, "labels"),
    "labels with void": (np.where(LABELS == 2, 255, LABELS).astype(np.uint8), "labels"),
    "labels of 16 bits": (LABELS.astype(np.uint16), "labels"),
    "VOC class 8": (voc((SHAPE * 8).astype(np.uint8)), "labels"),
    "VOC class 15": (voc((SHAPE * 15).astype(np.uint8)), "labels"),
    "photograph": (np.random.default_rng(1).integers(0, 256, (SIDE, SIDE), dtype=np.uint8), "gray"),
    "instances": (LABELS.astype(np.uint16) * 1000, "gray"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_everybody_has_the_same_verdict(tmp_path: Path, name: str) -> None:
    mask, verdict = VERDICTS[name]
    root = data(tmp_path, mask)
    path = root / "masks/train/a/0.png"
    assert decode_mask(path.read_bytes(), path).verdict == verdict
    report = check_data(root)
    samples = open_source(root).split("train")
    if verdict in ("binary", "soft"):
        for found in (read_mask(path), samples.read(0).mask):
            assert found is not None and (found[0].numpy() ^ SHAPE).mean() < 0.02 and found.any()
        assert not report.fatal and report.masks == report.splits and report.missing == ""
        assert (report.found("soft") is not None) == (verdict == "soft")
        return
    for read in (lambda: read_mask(path), lambda: samples.read(0)):
        with pytest.raises(AmbiguousMaskError, match="--foreground") as caught:
            read()
        assert caught.value.verdict == verdict and str(path) in str(caught.value)
        sent = pickle.loads(pickle.dumps(caught.value))  # as from a process that loads images
        assert str(sent) == str(caught.value) and sent.verdict == verdict
    row = report.found(verdict)
    assert row is not None and row.count == 6 and report.fatal and report.masks == {"train": 0}
    assert "Usable masks: train 0 of 6." in str(report)


@pytest.mark.parametrize(
    ("mask", "foreground", "wanted"),
    [
        (LABELS, "1,2", LABELS > 0),
        (LABELS, "2", LABELS == 2),
        (LABELS.astype(np.uint16) * 1000, "2000", LABELS == 2),
        (voc(LABELS * 8), "8", LABELS == 1),
        (voc(LABELS * 8), "8,16", LABELS > 0),
        (np.dstack([LABELS] * 3), "1", LABELS == 1),
        (SHAPE.astype(np.uint8) * 255, "255", SHAPE),
        (SHAPE.astype(np.uint8) * 255, "0", ~SHAPE),
    ],
)
def test_labels_can_be_chosen(tmp_path: Path, mask: Any, foreground: str, wanted: np.ndarray) -> None:
    root = data(tmp_path, mask)
    for given in ({"spec": root, "foreground": foreground}, {"spec": f"{root}?foreground={foreground}"}):
        found = open_source(**given).split("train").read(0).mask
        assert found is not None and torch.equal(found[0], torch.from_numpy(wanted))
    report = check_data(root, foreground=foreground)
    assert report.rows == [] and report.masks == {"train": 6}


def test_labels_that_are_not_there_are_shown(tmp_path: Path) -> None:
    report = check_data(data(tmp_path, LABELS), foreground=[7])
    row = report.found("empty")
    assert row is not None and row.examples[0].endswith("none of its labels 0, 1, 2 is chosen")
    assert report.masks == {"train": 0}


def test_colours_are_no_labels(tmp_path: Path) -> None:
    root = data(tmp_path, np.dstack([LABELS * 60, LABELS * 0, LABELS]))
    with pytest.raises(BadImageError, match=r"coloured; --foreground chooses among numbers"):
        open_source(root, foreground="1").split("train").read(0)


@pytest.mark.parametrize("foreground", ["cat", "1,", "1;2", "1.5"])
def test_labels_are_numbers(tmp_path: Path, foreground: str) -> None:
    with pytest.raises(UsageError, match="the numbers of labels"):
        open_source(tmp_path, foreground=foreground)


# --- what was looked for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "nearest"),
    [
        ("masks/train/a/0_mask.png", "masks/train/a/0_mask.png"),
        ("masks/train/0.png", "masks/train/0.png"),
        ("masks/a/0.png", "masks/a/0.png"),
        (None, "no mask at all"),
    ],
)
def test_a_missing_mask_is_shown_with_the_nearest_that_is_there(
    tmp_path: Path, there: str | None, nearest: str
) -> None:
    root = data(tmp_path, LABELS)
    for path in (root / "masks").rglob("*.png"):
        path.unlink()
    if there:
        save(root / there, SHAPE)
    row = check_data(root).found("no mask")
    assert row is not None and row.count == 6
    assert row.examples[0].endswith(
        f"train/a/0.png: there is no masks/train/a/0.png (or .jpg, ...); nearest is {nearest}"
    )


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("image,split,label,mask_file", "the table has no column 'mask', but mask_file"),
        ("image,split,label,mask", "the column 'mask' of the table is empty"),
    ],
)
def test_a_table_without_masks(tmp_path: Path, header: str, words: str) -> None:
    data(tmp_path, SHAPE)
    (tmp_path / "m.csv").write_text(f"{header}\ntrain/a/0.png,train,a,\ntrain/b/0.png,train,b,\n")
    row = check_data(tmp_path / "m.csv").found("no mask")
    assert row is not None and row.examples[0].endswith(words)


def test_two_pictures_of_one_name_do_not_share_a_mask(tmp_path: Path) -> None:
    root = data(tmp_path, SHAPE)
    rng = np.random.default_rng(3)
    save(root / "train/a/0.jpg", rng.integers(0, 256, (SIDE, SIDE), dtype=np.uint8))
    report = check_data(root)
    row = report.found("shared")
    assert [r.problem for r in report.rows] == [KINDS["shared"].problem] and report.fatal
    assert row is not None and "train/a/0.jpg and " in row.examples[0]
    (root / "masks/train/a/0.png").unlink()
    for suffix, mask in (("jpg", SHAPE), ("png", ~SHAPE)):
        save(root / f"masks/train/a/0.{suffix}.png", mask)
    assert check_data(root).rows == []
    samples = open_source(root).split("train")
    for i, mask in ((0, SHAPE), (1, ~SHAPE)):
        found = samples.read(i).mask
        assert found is not None and torch.equal(found[0], torch.from_numpy(mask)), samples.name(i)


@pytest.mark.parametrize(("orientation", "found"), [(1, False), (3, True), (6, True)])
def test_a_turned_picture_whose_mask_is_not(tmp_path: Path, orientation: int, found: bool) -> None:
    root = data(tmp_path, SHAPE)
    exif = Image.Exif()
    exif[0x0112] = orientation
    save(root / "train/a/0.png", np.random.default_rng(5).integers(0, 256, (SIDE, SIDE), dtype=np.uint8), exif=exif)
    report = check_data(root)
    assert (report.found("turned") is not None) == found and not report.fatal
    save(root / "masks/train/a/0.png", SHAPE, exif=exif)
    assert check_data(root).rows == []


def test_what_a_jpeg_lost_is_no_label() -> None:
    """Only values near black and 255 are left of this one."""
    content, mask = io.BytesIO(), SHAPE * False
    mask[7:16, 7:16] = True
    Image.fromarray(mask.astype(np.uint8) * 255).save(content, "JPEG", quality=90)
    found = decode_mask(content.getvalue(), "a.jpg")
    assert found.verdict == "soft" and np.array_equal(found.clear("a.jpg")[0].numpy(), mask)
