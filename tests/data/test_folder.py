"""Decoding, folders and manifests: what is read is what was drawn, and what is wrong is named."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fasterisnet.data.base import BadImageError, Source
from fasterisnet.data.folder import FolderSamples, open_folder
from fasterisnet.data.manifest import Columns
from fasterisnet.data.masks import decode_mask, thresholded
from fasterisnet.data.pictures import readable
from fasterisnet.data.reader import read_image, read_mask
from fasterisnet.errors import InputError

RNG = np.random.default_rng(0)
GRAY = RNG.integers(0, 256, (6, 9), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (6, 9, 3), dtype=np.uint8)
SHAPE = np.zeros((6, 9), bool)
SHAPE[1:4, 2:7] = True


def save(path: Path, picture: np.ndarray | Image.Image, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
    picture.save(path, **options)
    return path


def chw(picture: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(picture[None] if picture.ndim == 2 else picture.transpose(2, 0, 1).copy())


# Decoding ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "tiff", "webp", "ppm", "PNG"])
def test_colour_pictures_come_back_as_they_were(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path / f"x.{suffix}", COLOUR, **({"lossless": True} if suffix == "webp" else {}))
    image = read_image(path)
    assert image.dtype == torch.uint8 and image.is_contiguous() and torch.equal(image, chw(COLOUR))


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "pgm", "gif"])
def test_gray_pictures_have_one_channel(tmp_path: Path, suffix: str) -> None:
    image = read_image(save(tmp_path / f"x.{suffix}", GRAY))
    wanted = chw(GRAY)
    assert torch.equal(image, wanted if len(image) == 1 else wanted.expand(3, -1, -1))
    assert len(image) == 1 or suffix == "gif"


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg(tmp_path: Path, channels: int) -> None:
    smooth = np.add.outer(np.arange(64), np.arange(80)).astype(np.uint8)
    picture = smooth if channels == 1 else np.stack([smooth, 255 - smooth, smooth // 2], axis=2)
    image = read_image(save(tmp_path / "x.jpg", picture, quality=95))
    assert image.shape == (channels, 64, 80)
    assert (image.int() - chw(picture).int()).abs().max() < 12


def test_alpha_is_dropped_and_palettes_are_looked_up(tmp_path: Path) -> None:
    alpha = RNG.integers(0, 256, (6, 9, 1), dtype=np.uint8)
    assert torch.equal(read_image(save(tmp_path / "a.png", np.concatenate([COLOUR, alpha], axis=2))), chw(COLOUR))
    gray_alpha = np.stack([GRAY, alpha[..., 0]], axis=2)
    assert torch.equal(read_image(save(tmp_path / "la.png", Image.fromarray(gray_alpha))), chw(GRAY))
    indexed = Image.new("P", (9, 6))
    indexed.putpalette([10, 20, 30, 200, 100, 50])
    indexed.putdata(SHAPE.astype(int).ravel().tolist())
    wanted = np.where(SHAPE[..., None], [200, 100, 50], [10, 20, 30]).astype(np.uint8)
    assert torch.equal(read_image(save(tmp_path / "p.png", indexed)), chw(wanted))
    assert torch.equal(read_image(save(tmp_path / "t.png", indexed, transparency=bytes([0, 128]))), chw(wanted))


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path, suffix: str) -> None:
    deep = RNG.integers(0, 65536, (6, 9)).astype(np.uint16)
    deep[0, :4] = 0, 65535, 257, 128
    wanted = np.rint(deep / 257.0).astype(np.uint8)
    assert torch.equal(read_image(save(tmp_path / f"x.{suffix}", deep)), chw(wanted))


def test_one_bit_pictures_are_black_and_white(tmp_path: Path) -> None:
    assert torch.equal(read_image(save(tmp_path / "x.png", Image.fromarray(SHAPE))), chw(SHAPE.astype(np.uint8) * 255))


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path: Path, suffix: str, orientation: int) -> None:
    """What is stored for each orientation is written here by hand; read, all have to be the same picture."""
    upright = np.zeros((16, 24), np.uint8)
    upright[:8, :16] = 240
    upright[:8, 16:] = 120
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright),
        7: upright[::-1, ::-1].T,
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if suffix == "webp" else {}
    image = read_image(save(tmp_path / f"x.{suffix}", np.ascontiguousarray(stored), exif=exif, **options))
    assert image.shape[1:] == (16, 24)
    assert (image[0].int() - torch.from_numpy(upright).int()).abs().max() < 10


def test_damaged_exif_is_ignored(tmp_path: Path) -> None:
    path = save(tmp_path / "x.jpg", GRAY, exif=b"Exif\0\0this is no TIFF header at all")
    assert read_image(path).shape == (1, 6, 9)


def test_fractions_are_refused_rather_than_guessed(tmp_path: Path) -> None:
    path = save(tmp_path / "x.tif", GRAY.astype(np.float32) / 255)
    with pytest.raises(BadImageError, match="16 bits"):
        read_image(path)


@pytest.mark.parametrize("reader", [read_image, read_mask])
@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "tif", "webp"])
def test_truncated_files_are_named(tmp_path: Path, suffix: str, reader: object) -> None:
    noise = RNG.integers(0, 256, (100, 100), dtype=np.uint8)
    whole = save(tmp_path / f"whole.{suffix}", noise).read_bytes()
    path = tmp_path / f"cut.{suffix}"
    for share in (0.02, 0.5, 0.9):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(BadImageError) as caught:
            reader(path)  # type: ignore[operator]
        assert str(caught.value).startswith(f"{path}:")


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "program.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n")
    bomb = bytearray(save(tmp_path / "bomb.png", GRAY).read_bytes())
    bomb[16:24] = struct.pack(">II", 10**9, 10**9)
    (tmp_path / "bomb.png").write_bytes(bomb)
    for name in ("empty", "text", "folder", "program", "bomb", "absent", "nul\0"):
        path = str(tmp_path / f"{name}.png")
        with pytest.raises(BadImageError) as caught:
            read_image(path)
        assert str(caught.value).startswith(readable(path) + ":")


def test_messages_can_be_printed_whatever_the_name() -> None:
    shown = readable(os.fsdecode(b"caf\xe9\n\x1b[31m.png"))
    assert shown == "caf\\udce9\\n\\x1b[31m.png" and readable("café 猫.png") == "café 猫.png"
    shown.encode()


@pytest.mark.parametrize("top", [1, 255])
@pytest.mark.parametrize("suffix", ["png", "tif", "bmp"])
def test_masks_of_one_and_of_255_are_the_same(tmp_path: Path, top: int, suffix: str) -> None:
    path = save(tmp_path / f"m.{suffix}", SHAPE.astype(np.uint8) * np.uint8(top))
    mask = read_mask(path)
    assert mask.dtype == torch.bool and torch.equal(mask, torch.from_numpy(SHAPE)[None])
    assert decode_mask(path.read_bytes(), path).verdict == "binary"


def test_masks_of_other_modes(tmp_path: Path) -> None:
    wanted = torch.from_numpy(SHAPE)[None]
    indexed = Image.new("P", (9, 6))
    indexed.putpalette([255, 255, 255, 0, 0, 0])  # index 0 is white
    indexed.putdata((~SHAPE).astype(int).ravel().tolist())
    red = np.where(SHAPE[..., None], [255, 0, 0], [0, 0, 0]).astype(np.uint8)
    pictures = {
        "bit.png": Image.fromarray(SHAPE),
        "palette.png": indexed,
        "red.png": red,
        "deep.png": SHAPE.astype(np.uint16) * 65535,
        "deep255.png": SHAPE.astype(np.uint16) * 255,
        "deep1.png": SHAPE.astype(np.uint16),
        "alpha.png": np.dstack([red, np.full((6, 9), 7, np.uint8)]),
        "opaque.png": np.dstack([np.full((6, 9, 3), 255, np.uint8), SHAPE * np.uint8(255)]),
        "opaque_black.png": np.dstack([np.zeros((6, 9, 3), np.uint8), SHAPE * np.uint8(255)]),
        "opaque_gray.png": Image.merge("LA", [Image.new("L", (9, 6), 255), Image.fromarray(SHAPE * np.uint8(255))]),
        "float.tif": SHAPE.astype(np.float32),
    }
    for name, picture in pictures.items():
        path = save(tmp_path / name, picture)
        mask = decode_mask(path.read_bytes(), path)
        assert torch.equal(mask.foreground, wanted), name
        assert mask.verdict == "binary", name


def test_gray_masks_can_be_cut_at_a_threshold_but_are_known_as_not_binary(tmp_path: Path) -> None:
    values = np.array([[0, 1, 127, 128, 129, 255]], np.uint8)
    path = save(tmp_path / "m.png", values)
    assert thresholded(path.read_bytes(), path)[0, 0].tolist() == [False, False, False, True, True, True]
    assert thresholded(path.read_bytes(), path, 1)[0, 0].tolist() == [False] + 5 * [True]
    with pytest.raises(BadImageError, match="between black and white"):
        read_mask(path)
    path = save(tmp_path / "class_numbers.png", SHAPE.astype(np.uint8) * np.uint8(3))
    with pytest.raises(BadImageError, match=r"label map of 0, 3; .* --foreground 3"):
        read_mask(path)
    path = save(tmp_path / "nan.tif", np.full((2, 2), np.nan, np.float32))
    with pytest.raises(BadImageError, match="not numbers"):
        read_mask(path)


# Folders -------------------------------------------------------------------------------------------------------------


def folder(root: Path) -> Path:
    save(root / "train/cat/a.png", COLOUR)
    save(root / "train/cat/b.c.jpg", COLOUR)
    save(root / "train/dog/a.bmp", GRAY)
    save(root / "test_ood/bird/z.png", GRAY)
    save(root / "val/dog/q.webp", COLOUR)
    save(root / "masks/train/cat/a.png", SHAPE.astype(np.uint8) * 255)
    save(root / "masks/train/cat/b.c.tif", SHAPE.astype(np.uint8))
    save(root / "masks/test_ood/bird/z.png", SHAPE)
    for hidden in (".DS_Store", "train/.hidden", "train/cat/.a.png", "masks/train/cat/._a.png", "train/cat/notes.txt"):
        (root / hidden).write_text("not an image")
    (root / ".git/x").mkdir(parents=True)
    (root / "README.txt").write_text("about")
    return root


def test_a_folder(tmp_path: Path) -> None:
    source = open_folder(folder(tmp_path))
    assert isinstance(source, Source) and not source.multi_label
    assert source.classes == ["bird", "cat", "dog"]
    assert list(source.splits) == ["train", "val", "test_ood"]
    train = source.split("train")
    assert [train.name(i) for i in range(len(train))] == [
        str(tmp_path / name) for name in ("train/cat/a.png", "train/cat/b.c.jpg", "train/dog/a.bmp")
    ]
    assert [train.label(i) for i in range(3)] == [1, 1, 2] and [train.group(i) for i in range(3)] == [None] * 3
    image, mask, label = train.read(0)
    assert torch.equal(image, chw(COLOUR)) and mask is not None and torch.equal(mask[0], torch.from_numpy(SHAPE))
    assert label == 1
    assert (second := train.read(1).mask) is not None and torch.equal(second[0], torch.from_numpy(SHAPE))
    assert train.read(2).mask is None and torch.equal(train.read(2).image, chw(GRAY))
    bird = source.split("test_ood").read(0)
    assert bird.label == 0 and bird.mask is not None
    with pytest.raises(InputError, match="no split 'test'"):
        source.split("test")


def test_splits_can_be_sent_to_other_processes(tmp_path: Path) -> None:
    train = open_folder(folder(tmp_path)).split("train")
    copy = pickle.loads(pickle.dumps(train))
    assert isinstance(copy, FolderSamples) and len(copy) == 3
    assert all(torch.equal(copy.read(i).image, train.read(i).image) for i in range(3))


def test_classes_of_a_trained_model_are_kept_in_their_order(tmp_path: Path) -> None:
    source = open_folder(folder(tmp_path), classes=["dog", "cow", "cat", "bird"])
    assert source.classes == ["dog", "cow", "cat", "bird"]
    assert [source.split("train").label(i) for i in range(3)] == [2, 2, 0]
    with pytest.raises(InputError, match="differ in bird"):
        open_folder(tmp_path, classes=["dog", "cat"])
    test_only = tmp_path / "test_only"
    save(test_only / "test/cat/a.png", GRAY)
    assert open_folder(test_only, classes=["dog", "cat"]).split("test").label(0) == 1


def test_of_two_masks_the_png_counts(tmp_path: Path) -> None:
    save(tmp_path / "train/a/x.jpg", GRAY)
    for suffix in ("bmp", "png", "tif"):
        save(tmp_path / f"masks/train/a/x.{suffix}", SHAPE.astype(np.uint8) * np.uint8(255 if suffix == "png" else 0))
    mask = open_folder(tmp_path).split("train").read(0).mask
    assert mask is not None and bool(mask.any())


def test_a_mask_of_another_size_is_named(tmp_path: Path) -> None:
    save(tmp_path / "train/a/x.png", GRAY)
    path = save(tmp_path / "masks/train/a/x.png", SHAPE[:5])
    with pytest.raises(BadImageError, match=r"the mask is 9 x 5, but .*x\.png is 9 x 6") as caught:
        open_folder(tmp_path).split("train").read(0)
    assert str(caught.value).startswith(str(path))


def test_folders_that_are_no_data_say_what_was_expected(tmp_path: Path) -> None:
    def refused(path: Path, words: str) -> None:
        with pytest.raises(InputError, match=words) as caught:
            open_folder(path)
        assert str(path) in str(caught.value)

    refused(tmp_path / "absent", "no such folder.*DIR/<split>/<class>")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "no folder for a split.*DIR/<split>/<class>")
    save(tmp_path / "flat/train/x.png", GRAY)
    refused(tmp_path / "flat", "train: holds no class with images")
    save(tmp_path / "masks_only/masks/train/a/x.png", SHAPE)
    refused(tmp_path / "masks_only", "no folder for a split")
    save(tmp_path / "no_train/test/a/x.png", GRAY)
    refused(tmp_path / "no_train", "no split 'train', only: test")
    save(tmp_path / "odd/train/a/x.png", GRAY)
    (tmp_path / "odd/notes").mkdir()
    refused(tmp_path / "odd", "notes: holds no class with images.*move it away")
    (tmp_path / "file.txt").write_text("hello")
    refused(tmp_path / "file.txt", "lacks the column")


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    try:
        save(tmp_path / "train/a" / name, GRAY)
    except OSError:
        pytest.skip("this file system wants UTF-8")
    save(tmp_path / "masks/train/a" / name, SHAPE)
    train = open_folder(tmp_path).split("train")
    assert train.read(0).mask is not None
    assert train.name(0).endswith("caf\\udce9.png")
    save(tmp_path / "train" / os.fsdecode(b"\xff") / "x.png", GRAY)
    with pytest.raises(InputError, match="not UTF-8"):
        open_folder(tmp_path)


# Manifests -----------------------------------------------------------------------------------------------------------


def manifest(root: Path, text: str, name: str = "set.csv") -> Path:
    for file, picture in (("i/a.png", COLOUR), ("i/b.png", GRAY), ("i/c.png", GRAY), ("m/a.png", SHAPE)):
        if not (root / file).exists():
            save(root / file, picture)
    (root / name).write_text(text, encoding="utf-8")
    return root / name


def test_a_manifest(tmp_path: Path) -> None:
    outside = save(tmp_path / "outside.png", GRAY)
    path = manifest(
        tmp_path / "set",
        "\ufeffImage, split,label,mask,patient,extra\n"
        "i/a.png,train,dog,m/a.png,p1,\n"
        '"i/b.png",train,"a, b",,p2,x\n\n'
        f"{outside},test,dog\n"
        "i/c.png,,dog,,p3,\n",
    )
    source = open_folder(path)
    assert source.classes == ["a, b", "dog"] and list(source.splits) == ["train", "test"]
    train, test = source.split("train"), source.split("test")
    assert [train.label(i) for i in range(len(train))] == [1, 0] and [train.group(i) for i in (0, 1)] == ["p1", "p2"]
    image, mask, _ = train.read(0)
    assert torch.equal(image, chw(COLOUR)) and mask is not None and torch.equal(mask[0], torch.from_numpy(SHAPE))
    assert train.read(1).mask is None
    assert test.name(0) == str(outside) and test.group(0) is None and len(test) == 1


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators(tmp_path: Path, separator: str) -> None:
    path = manifest(tmp_path, "image,split,label\r\ni/a.png,train,x\r\n".replace(",", separator))
    assert open_folder(path).classes == ["x"]


def test_several_labels(tmp_path: Path) -> None:
    path = manifest(
        tmp_path,
        "image,split,label:sick,label:Old,mask\ni/a.png,train,1,0,m/a.png\ni/b.png,train,0.0,0,\ni/c.png,val,1,1.0,\n",
    )
    source = open_folder(path)
    assert source.multi_label and source.classes == ["Old", "sick"]
    assert [source.split("train").label(i) for i in (0, 1)] == [(0.0, 1.0), (0.0, 0.0)]
    assert source.split("val").read(0).label == (1.0, 1.0)
    assert open_folder(path, classes=["sick", "Old"]).split("train").label(0) == (1.0, 0.0)
    with pytest.raises(InputError, match="differ in thin"):
        open_folder(path, classes=["sick", "Old", "thin"])


def test_columns_of_other_names(tmp_path: Path) -> None:
    path = manifest(tmp_path, "image,part,kind,who,group\ni/a.png,train,x,me,1\n")
    source = open_folder(path, columns=Columns(label="kind", split="part", group="who"))
    assert source.split("train").group(0) == "me" and source.classes == ["x"]


def test_a_manifest_in_the_folder(tmp_path: Path) -> None:
    rows = "image,split,label\ni/a.png,train,x\n"
    manifest(tmp_path / "one", rows, "manifest.csv")
    manifest(tmp_path / "two", rows, "index.csv")
    assert open_folder(tmp_path / "one").classes == open_folder(tmp_path / "two").classes == ["x"]
    save(tmp_path / "three/train/y/a.png", GRAY)
    (tmp_path / "three/index.csv").write_text("page,words\n1,2\n")
    assert open_folder(tmp_path / "three").classes == ["y"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lacks the column 'image' and 'split' and 'label'.*this one has none"),
        ("image,label\ni/a.png,x\n", "lacks the column 'split'.*image, label"),
        ("image,split,label,label:a\ni/a.png,train,x,1\n", "keep one kind"),
        ("image,split,label,LABEL\ni/a.png,train,x,1\n", "same name"),
        ("image,split,label\n", "names no image"),
        ("image,split,label\ni/a.png,train\n", "line 2: has no label"),
        ("image,split,label\ni/a.png,train,nan\n", "line 2: has no label"),
        ("image,split,label,group,patient\ni/a.png,train,x,1,2\n", "columns group and patient.*keep one"),
        ("image,split,label\n\n\n,train,x\n", "line 4: names no image"),
        ("image,split,label\ni/a.png,train,x,y\n", "4 cells, but there are 3"),
        ("image,split,label:a\ni/a.png,train,2\n", "line 2: has '2' for 'a'"),
        ("image,split,label:a\ni/a.png,train,\n", "has '' for 'a'"),
        ("image,split,label,x,y,w,h\ni/a.png,train,k,1,2,3,\n", "a number for each of x, y, w, h"),
        ("image,split,label,x,y,w,h\ni/a.png,train,k,1,2,3,four\n", "1, 2, 3, four"),
        ("image,split,label\ni/a.png,test,x\n", "no split 'train', only: test"),
        ('image,split,label\n"i/a.png,train,x\n', "is not CSV"),
        ("image,split,label\ni/a.png,train,\ni/b.png,train,\ni/c.png,train,\n", "line 2.*2 more problems"),
    ],
)
def test_broken_manifests_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = manifest(tmp_path, text)
    with pytest.raises(InputError, match=words) as caught:
        open_folder(path)
    assert str(caught.value).startswith(str(path) if "no split" not in words else str(tmp_path))


def test_a_manifest_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes("image,split,label\nä.png,train,x\n".encode("latin-1"))
    with pytest.raises(InputError, match="UTF-8"):
        open_folder(path)
    with pytest.raises(InputError, match="cannot be read"):
        open_folder(tmp_path / "absent.csv")


def test_a_missing_file_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = manifest(tmp_path, "image,split,label,mask\nnone.png,train,x,\ni/a.png,train,x,gone.png\n")
    train = open_folder(path).split("train")
    for i, name in enumerate(("none.png", "gone.png")):
        with pytest.raises(BadImageError) as caught:
            train.read(i)
        assert str(caught.value).startswith(str(tmp_path / name))


# Boxes ---------------------------------------------------------------------------------------------------------------


def box_mask(*boxes: tuple[int, int, int, int]) -> torch.Tensor:
    mask = torch.zeros(1, 6, 9, dtype=torch.bool)
    for x, y, w, h in boxes:
        mask[0, y : y + h, x : x + w] = True
    return mask


def masks_of(source: Source, split: str = "train") -> list[torch.Tensor | None]:
    samples = source.split(split)
    return [samples.read(i).mask for i in range(len(samples))]


def test_boxes_in_a_manifest(tmp_path: Path) -> None:
    path = manifest(
        tmp_path,
        "image,split,label,mask,x,y,w,h\ni/a.png,train,k,,1,2,3,4\ni/b.png,train,k,,,,,\ni/a.png,train,k,,7,0,2,1\n"
        "i/c.png,train,k,m/a.png,0,0,1,1\ni/c.png,test,k,,50,0,1,1\n",
    )
    source = open_folder(path)
    first, second, third = masks_of(source)
    assert first is not None and torch.equal(first, box_mask((1, 2, 3, 4), (7, 0, 2, 1)))
    assert second is None
    assert third is not None and torch.equal(third[0], torch.from_numpy(SHAPE))
    with pytest.raises(BadImageError, match=r"c\.png: The box .* outside"):
        source.split("test").read(0)


def test_coco_boxes(tmp_path: Path) -> None:
    for name in ("train/cat/a.png", "train/cat/b.png", "train/dog/a.png", "val/dog/c.png"):
        save(tmp_path / name, GRAY)
    save(tmp_path / "masks/train/cat/b.png", SHAPE)
    names = ["train/cat/a.png", "b.png", "./dog/a.png", "c.png"]
    content = {
        "images": [{"id": i, "file_name": name} for i, name in enumerate(names)],
        "annotations": [
            {"image_id": 0, "bbox": [0, 0, 2, 2], "category_id": 1},
            {"image_id": 0, "bbox": [4, 4, 2, 2], "category_id": 2},
            {"image_id": 1, "bbox": [0, 0, 1, 1], "category_id": 1},
            {"image_id": 2, "bbox": [3, 3, 1, 1], "category_id": 1},
        ],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "person"}],
    }
    (tmp_path / "annotations.json").write_text(json.dumps(content))
    source = open_folder(tmp_path)
    first, second, third = masks_of(source)
    assert first is not None and torch.equal(first, box_mask((0, 0, 2, 2)))
    assert second is not None and torch.equal(second[0], torch.from_numpy(SHAPE))
    assert third is not None and torch.equal(third, box_mask((3, 3, 1, 1)))
    assert masks_of(source, "val") == [None]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "annotations.json").rename(tmp_path / "elsewhere/boxes.json")
    (tmp_path / "elsewhere").rename(tmp_path / ".elsewhere")
    assert masks_of(open_folder(tmp_path))[0] is None
    assert masks_of(open_folder(tmp_path, boxes=tmp_path / ".elsewhere/boxes.json"))[0] is not None
    with pytest.raises(InputError, match="cannot be read as JSON"):
        open_folder(tmp_path, boxes=tmp_path / "absent.json")


def test_a_coco_name_that_fits_two_images_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "train/cat/a.png", GRAY)
    save(tmp_path / "test/cat/a.png", GRAY)
    (tmp_path / "annotations.json").write_text(
        json.dumps({"images": [{"id": 1, "file_name": "a.png"}], "annotations": []})
    )
    with pytest.raises(InputError, match=r"'a\.png' fits .*test/cat/a\.png and .*train/cat/a\.png"):
        open_folder(tmp_path)


def test_voc_boxes(tmp_path: Path) -> None:
    save(tmp_path / "train/cat/a.png", GRAY)
    save(tmp_path / "train/cat/b.png", GRAY)
    (tmp_path / "boxes/train/cat").mkdir(parents=True)
    corners = "<xmin>2</xmin><ymin>3</ymin><xmax>4</xmax><ymax>3</ymax>"
    text = f"<annotation><object><name>cat</name><bndbox>{corners}</bndbox></object></annotation>"
    (tmp_path / "boxes/train/cat/a.xml").write_text(text)
    first, second = masks_of(open_folder(tmp_path))
    assert first is not None and torch.equal(first, box_mask((1, 2, 3, 1))) and second is None
    (tmp_path / "boxes/train/cat/b.xml").write_text("<annotation>")
    with pytest.raises(InputError, match=r"b\.xml: cannot be read as XML"):
        open_folder(tmp_path)


def test_refining_is_asked_for_when_the_data_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = manifest(tmp_path, "image,split,label,x,y,w,h\ni/a.png,train,k,1,2,3,4\n")
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(InputError, match="opencv-python-headless"):
        open_folder(path, refine_boxes=True)
    monkeypatch.setitem(sys.modules, "cv2", object())
    train = open_folder(path, refine_boxes=True).split("train")
    monkeypatch.setattr("fasterisnet.data.folder.refine", lambda image, mask: ~mask)
    refined = train.read(0).mask
    assert refined is not None and torch.equal(refined, ~box_mask((1, 2, 3, 4)))


def test_what_is_no_file_does_not_hang(tmp_path: Path) -> None:
    """A device has no end, and a pipe nobody writes to no beginning; wherever a file is expected."""
    for name in ("pipe.png", "pipe.dcm", "pipe.nii", "pipe", "pipe.csv"):
        os.mkfifo(tmp_path / name)
    save(tmp_path / "a.png", GRAY)
    images = ["/dev/zero", "pipe.png", "pipe.dcm", "pipe.nii", "pipe"]
    rows = [f"{name},,train,cat" for name in images] + ["a.png,/dev/zero,train,dog", "a.png,pipe.nii,train,dog"]
    (tmp_path / "m.csv").write_text("\n".join(["image,mask,split,label", *rows]))
    samples = open_folder(tmp_path / "m.csv").split("train")
    for i in range(len(rows)):
        with pytest.raises(BadImageError, match="is not a file"):
            samples.read(i)
    for path in (tmp_path / "pipe.csv", "/dev/zero"):
        with pytest.raises(InputError, match="is not a file"):
            open_folder(path)
    for file in ("/dev/zero", tmp_path / "pipe"):
        with pytest.raises(InputError, match="is not a file"):
            open_folder(tmp_path / "m.csv", boxes=file)
