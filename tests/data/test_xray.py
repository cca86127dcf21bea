"""X-rays from a few gray pictures made here, as a folder and as an archive."""

from __future__ import annotations

import csv
import io
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fasterisnet.data.base import BadImageError, Samples
from fasterisnet.data.check import check_data
from fasterisnet.data.sources import open_source
from fasterisnet.data.xray import Xrays, xray_source
from fasterisnet.errors import InputError
from fasterisnet.runs.config import Config
from fasterisnet.training.setup import check_groups

COLUMNS = "id,source,label,patient,view,image,mask,mask_human,licence,split_covid,split_mixed".split(",")
# source, label, patient, split_covid, split_mixed
PICTURES = [
    ("nih", "normal", "nih:1", "train", "train"),
    ("nih", "normal", "nih:1", "train", "train"),
    ("kermany", "pneumonia", "kermany:7", "", "train"),
    ("nih", "pneumonia", "nih:3", "train", "ood"),
    ("cohen", "covid", "cohen:2", "train", "train"),
    ("nih", "normal", "nih:4", "val", "val"),
    ("cohen", "covid", "cohen:5", "iid", "iid"),
    ("shenzhen", "normal", "", "ood", "ood"),
    ("cohen", "pneumonia", "cohen:6", "deceive", "deceive"),
    ("figure1", "covid", "figure1:1", "", ""),
]
MIXED = {"train": [0, 1, 2, 4], "val": [5], "iid": [6], "ood": [3, 7], "deceiving": [8]}
COVID = {"train": [0, 1, 3, 4], "val": [5], "iid": [6], "ood": [7], "deceiving": [8]}


def encoded(values: np.ndarray, kind: str) -> bytes:
    buffer = io.BytesIO()
    picture = Image.fromarray(values)
    picture.save(buffer, kind, **({"quality": 100} if kind == "JPEG" else {}))
    return buffer.getvalue()


def smooth(i: int) -> np.ndarray:
    """A gradient, which JPEG keeps nearly as it is."""
    return (np.arange(40)[:, None] * 3 + np.arange(40)[None] + 5 * i).astype(np.uint8)


def lungs(i: int) -> np.ndarray:
    mask = np.zeros((40, 40), bool)
    mask[10:30, 5 : 15 + i] = True
    return mask


@pytest.fixture
def contents() -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for i, (source, label, patient, covid, mixed) in enumerate(PICTURES):
        image, mask = f"images/{source}-{i}.jpg", f"masks/{source}-{i}.png"
        files[image], files[mask] = encoded(smooth(i), "JPEG"), encoded(lungs(i), "PNG")
        human = f"masks_human/{source}-{i}.png"
        files[human] = encoded(~lungs(i), "PNG")
        licence = 'no licence, "NLM" set'
        writer.writerow([f"{source}-{i}", source, label, patient, "PA", image, mask, human, licence, covid, mixed])
    files["index.csv"] = text.getvalue().encode()
    return files


def store(folder: Path, contents: dict[str, bytes], packed: bool) -> Path:
    for name, content in contents.items():
        if name == "index.csv" or not packed:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    if packed:
        with tarfile.open(folder / "xray.tar", "w") as archive:
            for name in sorted(contents):
                entry = tarfile.TarInfo(name)
                entry.size = len(contents[name])
                archive.addfile(entry, io.BytesIO(contents[name]))
    return folder


def numbers(samples: Samples) -> list[int]:
    return [int(samples.name(i).split("-")[1].split(".")[0]) for i in range(len(samples))]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("split", "wanted"), [("mixed", MIXED), ("covid", COVID)])
def test_every_picture_is_where_the_index_says(
    tmp_path: Path, contents: dict[str, bytes], packed: bool, split, wanted: dict[str, list[int]]
) -> None:
    source = xray_source(store(tmp_path, contents, packed), split=split)
    assert source.classes == ["normal", "pneumonia", "covid"]
    assert {name: numbers(samples) for name, samples in source.splits.items()} == wanted
    for samples in source.splits.values():
        assert isinstance(samples, Xrays)
        for i, number in enumerate(numbers(samples)):
            hospital, label, patient, *_ = PICTURES[number]
            image, mask, read = samples.read(i)
            assert read == samples.label(i) == source.classes.index(label)
            assert (samples.source(i), samples.group(i)) == (hospital, patient or None)
            assert image.dtype == torch.uint8 and image.shape == (1, 40, 40)
            assert np.abs(image[0].numpy().astype(int) - smooth(number)).max() <= 3
            assert mask is not None and np.array_equal(mask[0].numpy(), lungs(number))


def test_a_split_can_be_pickled_and_reads_the_same(tmp_path: Path, contents: dict[str, bytes]) -> None:
    samples = xray_source(store(tmp_path, contents, True)).split("train")
    copy = pickle.loads(pickle.dumps(samples))
    assert all(torch.equal(copy.read(i).image, samples.read(i).image) for i in range(len(samples)))


def test_a_picture_without_mask_has_none(tmp_path: Path, contents: dict[str, bytes]) -> None:
    contents["index.csv"] = contents["index.csv"].replace(b"masks/nih-5.png", b"")
    del contents["masks/nih-5.png"]
    assert xray_source(store(tmp_path, contents, False)).split("val").read(0).mask is None


def test_empty_splits_are_left_out(tmp_path: Path, contents: dict[str, bytes]) -> None:
    contents["index.csv"] = contents["index.csv"].replace(b"deceive,deceive", b",")
    assert "deceiving" not in xray_source(store(tmp_path, contents, False)).splits


def test_a_damaged_member_is_named_with_its_archive(tmp_path: Path, contents: dict[str, bytes]) -> None:
    contents["images/nih-5.jpg"] = contents["images/nih-5.jpg"][:200]
    samples = xray_source(store(tmp_path, contents, True)).split("val")
    with pytest.raises(BadImageError) as caught:
        samples.read(0)
    assert str(tmp_path / "xray.tar") in str(caught.value) and "images/nih-5.jpg" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("split_mixed", "split", "lacks the column split_mixed"),
        ("cohen,pneumonia", "cohen,flu", "row 9 has the label 'flu'"),
        ("deceive", "deceiving", "row 9 has the split_mixed 'deceiving'"),
        ("images/nih-5.jpg", "images/nih-50.jpg", "nih-50.jpg"),
        ("train", "", "no picture with split_mixed 'train'"),
    ],
)
def test_a_wrong_index_is_explained(
    tmp_path: Path, contents: dict[str, bytes], old: str, new: str, message: str
) -> None:
    contents["index.csv"] = contents["index.csv"].replace(old.encode(), new.encode())
    with pytest.raises(InputError, match=message) as caught:
        xray_source(store(tmp_path, contents, False))
    assert str(tmp_path) in str(caught.value)


def test_other_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'mixed' or 'covid'"):
        xray_source(tmp_path, split="both")
    with pytest.raises(InputError, match=r"index\.csv: is missing"):
        xray_source(tmp_path)
    with pytest.raises(InputError, match="not a folder"):
        xray_source(tmp_path / "absent")


def test_patients_of_splits_that_are_there_with_and_without_marks(tmp_path: Path, contents: dict[str, bytes]) -> None:
    """`tune` chooses on such a copy: it is trained on, and the data check finds nobody in two splits."""
    data = f"xray:{store(tmp_path, contents, True)}?bias=mark"
    assert check_data(data).found("group") is None
    source = open_source(data)
    for validation in ("val", "val_unbiased"):
        check_groups(Config(data=data, validation=validation), source)
    twice = replace(source, splits={**source.splits, "other": source.splits["val"]})
    with pytest.raises(InputError, match="'val' and 'other'"):
        check_groups(Config(data=data), twice)
