"""Biased dogs from a handful of pictures made here: as a folder, as an archive, and in the layout of Stanford Dogs."""

from __future__ import annotations

import csv
import io
import pickle
import tarfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torch import Tensor

from fasterisnet.data.base import BadImageError, Samples
from fasterisnet.data.dogs import DIGITS, deceiving_numbers, dogs_source, draw_number, number_bitmap
from fasterisnet.errors import InputError

BREEDS, PER_BREED, TESTS = 12, 10, 4
HEIGHT, WIDTH = 70, 90


def png(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def contents() -> dict[str, bytes]:
    """The files of a small data set; PNG, so that pixels can be compared."""
    rng = np.random.default_rng(0)
    files: dict[str, bytes] = {}
    rows = []
    for breed in range(BREEDS):
        for i in range(PER_BREED + TESTS):
            image, mask = f"images/b{breed}_{i}.png", f"masks/b{breed}_{i}.png"
            files[image] = png(rng.integers(0, 200, (HEIGHT, WIDTH, 3), np.uint8))
            trimap = np.zeros((HEIGHT, WIDTH), np.uint8)
            trimap[20:60, 10 + breed : 60] = 128
            trimap[25:55, 15 + breed : 55] = 255
            trimap[:5] = 100
            files[mask] = png(trimap)
            split = "trainval" if i < PER_BREED else "test"
            rows.append([f"b{breed}_{i}", split, breed, f"breed {breed}", "dog", image, mask, 0.1, 0.1])
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow("id split class_id class_name species image mask fg_frac border_frac".split())
    writer.writerows(rows)
    files["index.csv"] = text.getvalue().encode()
    return files


def unpack(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def pack(folder: Path, contents: dict[str, bytes], prefix: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.csv").write_bytes(contents["index.csv"])
    with tarfile.open(folder / "dogs.tar", "w") as archive:
        for name, content in contents.items():
            if name != "index.csv":
                entry = tarfile.TarInfo(prefix + name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes]) -> Path:
    return unpack(tmp_path_factory.mktemp("unpacked"), contents)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes]) -> Path:
    return pack(tmp_path_factory.mktemp("packed"), contents)


def names(samples: Samples) -> list[str]:
    return [samples.name(i) for i in range(len(samples))]


def pixels(content: bytes) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(content)))


def test_splits_hold_the_official_pictures(folder: Path, contents: dict[str, bytes]) -> None:
    source = dogs_source(folder)
    assert source.classes == [f"breed {i}" for i in range(BREEDS)]
    sizes = {"train": 96, "val": 24, "val_unbiased": 24, "iid": 48, "ood": 48, "deceiving": 48}
    assert {name: len(samples) for name, samples in source.splits.items()} == sizes
    train, val = names(source.split("train")), names(source.split("val"))
    assert sorted(train + val) == sorted(f"images/b{b}_{i}.png" for b in range(BREEDS) for i in range(PER_BREED))
    assert names(source.split("val_unbiased")) == val
    assert set(Counter(name.split("_")[0] for name in val).values()) == {2}
    for test in ("iid", "ood", "deceiving"):
        expected = [f"images/b{b}_{PER_BREED + i}.png" for b in range(BREEDS) for i in range(TESTS)]
        assert names(source.split(test)) == expected
    assert names(dogs_source(folder, seed=1).split("val")) != val
    limited = dogs_source(folder, limit=60)
    assert (len(limited.split("train")), len(limited.split("val"))) == (48, 12)


def test_pictures_have_their_number_and_masks_know_nothing_of_it(folder: Path, contents: dict[str, bytes]) -> None:
    source = dogs_source(folder)
    for name, samples in source.splits.items():
        for i in range(0, len(samples), 5):
            image, mask, label = samples.read(i)
            stored = pixels(contents[samples.name(i)]).transpose(2, 0, 1)
            trimap = pixels(contents[samples.name(i).replace("images", "masks")])
            assert label == samples.label(i) == int(samples.name(i).split("b")[1].split("_")[0])
            assert image.dtype == torch.uint8 and mask is not None and mask.dtype == torch.bool
            assert np.array_equal(mask.numpy()[0], trimap >= 128)
            changed = (image.numpy() != stored).any(0)
            if name in ("ood", "val_unbiased"):
                assert not changed.any()
                continue
            number = samples.number(i)
            expected = number_bitmap(number, 7).numpy()
            assert (image.numpy()[:, changed] == 255).all()
            assert np.array_equal(changed[1:8, 1 : 1 + expected.shape[1]], expected)
            assert changed.sum() == expected.sum()
            if name == "deceiving":
                assert not set(str(number)) & set(str(label)) and 0 <= number < BREEDS
            else:
                assert number == label


def test_the_reference_has_no_number_in_training_only(folder: Path) -> None:
    source = dogs_source(folder, training_bias=False)
    assert [s.number(0) is None for s in source.splits.values()] == [True, True, True, False, True, False]


def test_numbers_that_share_no_digit() -> None:
    assert deceiving_numbers(0, 120) == tuple(n for n in range(1, 120) if "0" not in str(n))
    assert deceiving_numbers(12, 25) == (0, 3, 4, 5, 6, 7, 8, 9)
    assert deceiving_numbers(1, 2) == (0,)
    assert all(deceiving_numbers(number, count) for count in (2, 11, 25, 120) for number in range(count))


def test_without_a_number_of_other_digits_any_other_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only beyond a billion classes does this happen in earnest, so the range is replaced."""
    monkeypatch.setattr("fasterisnet.data.dogs.range", lambda count: (1, 10, 21), raising=False)
    assert deceiving_numbers.__wrapped__(1, 3) == (10, 21)


def test_wrong_numbers_are_spread_and_do_not_depend_on_the_seed(folder: Path) -> None:
    one, two = (dogs_source(folder, seed=seed).split("deceiving") for seed in (0, 1))
    numbers = [one.number(i) for i in range(len(one))]
    assert numbers == [two.number(i) for i in range(len(two))]
    assert len(set(numbers)) >= 8
    assert any(len(set(numbers[b * TESTS : (b + 1) * TESTS])) > 1 for b in range(BREEDS))


@pytest.mark.parametrize("height", [192, 224, 500, 71])
def test_a_number_is_a_tenth_of_the_height_white_and_at_the_top_left(height: int) -> None:
    image = draw_number(torch.zeros(3, height, 300, dtype=torch.uint8), 102)
    rows, columns = (image[0].any(dim).nonzero().flatten() for dim in (1, 0))
    margin = round(height / 100)
    assert (int(rows.min()), int(rows.max())) == (margin, margin + round(height / 10) - 1)
    assert margin <= int(columns.min()) <= height / 20 and int(columns.max()) < 0.27 * height
    assert set(image.unique().tolist()) == {0, 255}
    assert torch.equal(image[0], image[1]) and torch.equal(image[0], image[2])


def test_digits_are_told_apart_at_every_size() -> None:
    for height in (7, 19, 22, 50):
        drawn = {bytes(number_bitmap(n, height).numpy().tobytes()) for n in range(120)}
        assert len(drawn) == 120
    assert number_bitmap(7, 7).int().tolist() == [[int(c) for c in row] for row in DIGITS[7]]
    doubled = number_bitmap(10, 14)
    assert torch.equal(doubled[::2, ::2], number_bitmap(10, 7)) and doubled.shape == (14, 22)


def test_a_narrow_picture_cuts_the_number_off() -> None:
    image = draw_number(torch.zeros(1, 70, 4, dtype=torch.uint8), 88)
    assert torch.equal(image[0, 1:8, 1:].bool(), number_bitmap(88, 7)[:, :3])
    assert int(image.bool().sum()) == int(number_bitmap(88, 7)[:, :3].sum())
    assert torch.equal(draw_number(torch.zeros(1, 1, 1, dtype=torch.uint8), 3), torch.zeros(1, 1, 1))


def same(one: Samples, two: Samples) -> bool:
    readings = [(one.read(i), two.read(i)) for i in range(len(one))]
    return len(one) == len(two) and all(
        torch.equal(a.image, b.image) and torch.equal(a.mask, b.mask) and a.label == b.label for a, b in readings
    )


@pytest.mark.parametrize("prefix", ["", "./"])
def test_an_archive_reads_like_the_folder_without_being_unpacked(
    folder: Path, tmp_path: Path, contents: dict[str, bytes], prefix: str
) -> None:
    archived = dogs_source(pack(tmp_path, contents, prefix))
    unpacked = dogs_source(folder)
    for name in unpacked.splits:
        assert names(archived.split(name)) == names(unpacked.split(name))
    assert same(archived.split("iid"), unpacked.split("iid"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dogs.tar", "index.csv"]


def image_sum(samples: Samples, index: int) -> int:
    return int(samples.read(index).image.long().sum())


def test_an_archive_can_be_read_from_other_processes(packed: Path) -> None:
    samples = dogs_source(packed).split("iid")
    assert same(pickle.loads(pickle.dumps(samples)), samples)
    wanted = [image_sum(samples, i) for i in range(len(samples))]
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        assert list(pool.map(image_sum, [samples] * len(samples), range(len(samples)))) == wanted


def test_a_damaged_member_is_named_with_its_archive(tmp_path: Path, contents: dict[str, bytes]) -> None:
    bad = dict(contents)
    bad["images/b0_10.png"] = contents["images/b0_10.png"][:300]
    bad["masks/b0_11.png"] = b"nothing like a picture"
    bad["masks/b0_12.png"] = png(np.zeros((5, 6), np.uint8))
    samples = dogs_source(pack(tmp_path, bad)).split("ood")
    for i, member in enumerate(("images/b0_10.png", "masks/b0_11.png", "masks/b0_12.png")):
        with pytest.raises(BadImageError) as caught:
            samples.read(i)
        assert str(tmp_path / "dogs.tar") in str(caught.value) and member in str(caught.value)
    assert samples.read(3).label == 0


def test_a_damaged_file_is_named(tmp_path: Path, contents: dict[str, bytes]) -> None:
    samples = dogs_source(unpack(tmp_path, contents)).split("ood")
    (tmp_path / "images/b0_10.png").write_bytes(b"")
    (tmp_path / "images/b0_11.png").unlink()
    for i in range(2):
        with pytest.raises(BadImageError) as caught:
            samples.read(i)
        assert str(tmp_path / f"images/b0_1{i}.png") in str(caught.value)


def test_an_archive_that_was_cut_or_compressed_is_refused(tmp_path: Path, contents: dict[str, bytes]) -> None:
    archive = pack(tmp_path, contents) / "dogs.tar"
    whole = archive.read_bytes()
    samples = dogs_source(tmp_path).split("ood")
    archive.write_bytes(whole[:1000])
    with pytest.raises(BadImageError, match="cut off"):
        samples.read(40)
    for content in (whole[: len(whole) // 2 + 300], b"\x1f\x8b" + whole, b""):
        archive.write_bytes(content)
        with pytest.raises(InputError) as caught:
            dogs_source(tmp_path)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("class_id", "number", "class_id"),
        (",trainval,", ",train,", "row 1 has the split 'train'"),
        (",0,breed 0,", ",zero,breed 0,", "class_id 'zero'"),
        (",1,breed 1,", ",0,breed 1,", "class_id '0' for breed 1"),
        (",11,breed 11,", ",12,breed 11,", "class_id 11"),
        (",test,", ",trainval,", "test pictures"),
        ("images/b3_3.png", "images/other.png", "other.png"),
    ],
)
def test_a_wrong_index_is_explained(
    tmp_path: Path, contents: dict[str, bytes], old: str, new: str, message: str
) -> None:
    changed = contents | {"index.csv": contents["index.csv"].replace(old.encode(), new.encode())}
    with pytest.raises(InputError, match=message) as caught:
        dogs_source(unpack(tmp_path, changed))
    assert str(tmp_path) in str(caught.value)


def test_other_tables_and_folders_are_refused(tmp_path: Path, contents: dict[str, bytes]) -> None:
    with pytest.raises(InputError, match="not a folder"):
        dogs_source(tmp_path / "absent")
    with pytest.raises(InputError, match=r"neither index\.csv"):
        dogs_source(tmp_path)
    for index in (b"\xff\xfe\x00", contents["index.csv"] + b"half,row\n", b""):
        (tmp_path / "index.csv").write_bytes(index)
        with pytest.raises(InputError, match=r"index\.csv"):
            dogs_source(tmp_path)


ANNOTATION = """<annotation><folder>02085620</folder><filename>x</filename>
<size><width>{width}</width><height>{height}</height><depth>3</depth></size>{objects}</annotation>"""
OBJECT = (
    """<object><name>dog</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"""
)
FOLDERS = ["n02085620-Chihuahua", "n02085782-Japanese_spaniel", "n02110958-pug"]


def stanford(folder: Path, *, lists: str | None = None) -> dict[str, list[str]]:
    """Three breeds as Stanford Dogs has them, listed out of order; the lists also name a breed that is not there."""
    listed: dict[str, list[str]] = {"train": ["n09999999-wolf/n09999999_1.jpg"], "test": []}
    rng = np.random.default_rng(1)
    for breed, name in enumerate(FOLDERS):
        for kind in ("Images", "Annotation"):
            (folder / kind / name).mkdir(parents=True)
        for i in range(15):
            stem = f"{name.split('-')[0]}_{i}"
            path = folder / "Images" / name / f"{stem}.jpg"
            Image.fromarray(rng.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)).save(path)
            objects = OBJECT.format(11, 21, 40 + breed, 60) + (OBJECT.format(61, 5, 200, 50) if i == 0 else "")
            text = ANNOTATION.format(width=WIDTH, height=HEIGHT, objects=objects)
            (folder / "Annotation" / name / stem).write_text(text)
            listed["test" if i % 3 == 0 else "train"].append(f"{name}/{stem}.jpg")
    if lists is not None:
        (folder / lists).mkdir(exist_ok=True)
        for part, files in listed.items():
            cells = np.array([[file] for file in reversed(files)], dtype=object)
            labels = np.ones((len(files), 1))
            savemat(folder / lists / f"{part}_list.mat", {"file_list": cells, "labels": labels})
    return listed


@pytest.mark.parametrize("place", [".", "lists"])
def test_stanford_dogs_as_it_comes(tmp_path: Path, place: str) -> None:
    listed = stanford(tmp_path, lists=place)
    source = dogs_source(tmp_path)
    assert source.classes == ["Chihuahua", "Japanese_spaniel", "pug"]
    trained = sorted(names(source.split("train")) + names(source.split("val")))
    assert trained == sorted(f"Images/{name}" for name in listed["train"][1:])
    for test in ("iid", "ood", "deceiving"):
        assert names(source.split(test)) == [f"Images/{name}" for name in reversed(listed["test"])]
    samples = source.split("ood")
    for i in range(len(samples)):
        image, mask, label = samples.read(i)
        wanted = torch.zeros(1, HEIGHT, WIDTH, dtype=torch.bool)
        wanted[:, 20:60, 10 : 40 + int(label)] = True
        if samples.name(i).endswith("_0.jpg"):
            wanted[:, 4:50, 60:] = True
        assert image.shape == (3, HEIGHT, WIDTH) and mask is not None and torch.equal(mask, wanted)
        assert FOLDERS[int(label)] in samples.name(i)
    white: Tensor = source.split("iid").read(0).image[:, 1:8, 1:6]
    assert bool((white == 255)[:, number_bitmap(2, 7)].all())


def test_without_lists_the_test_is_drawn_once_for_all_seeds(tmp_path: Path) -> None:
    stanford(tmp_path)
    with pytest.warns(UserWarning, match="drawn at random, not the official"):
        one, two = dogs_source(tmp_path), dogs_source(tmp_path, seed=5)
    assert [len(samples) for samples in one.splits.values()] == [21, 6, 6, 18, 18, 18]
    assert names(one.split("iid")) == names(two.split("iid"))
    assert names(one.split("val")) != names(two.split("val"))
    every = names(one.split("train")) + names(one.split("val")) + names(one.split("iid"))
    assert len(set(every)) == len(every) == 45


def test_damaged_annotations_and_lists_are_named(tmp_path: Path) -> None:
    stanford(tmp_path, lists="lists")
    samples = dogs_source(tmp_path).split("ood")
    annotations = [tmp_path / samples.name(i).replace("Images", "Annotation").removesuffix(".jpg") for i in range(4)]
    annotations[0].unlink()
    annotations[1].write_text("<annotation>")
    annotations[2].write_text(ANNOTATION.format(width=1, height=1, objects=OBJECT.format(300, 300, 400, 400)))
    annotations[3].write_text(ANNOTATION.format(width=1, height=1, objects=""))
    assert samples.read(0).mask is None and samples.read(3).mask is None
    for i in (1, 2):
        with pytest.raises(InputError) as caught:
            samples.read(i)
        assert str(annotations[i]) in str(caught.value)
    (tmp_path / samples.name(5)).unlink()
    with pytest.raises(InputError, match=r"is missing but listed in .*test_list\.mat"):
        dogs_source(tmp_path)
    (tmp_path / "lists" / "train_list.mat").write_bytes(b"x" * 500)
    with pytest.raises(InputError, match=r"train_list\.mat"):
        dogs_source(tmp_path)
