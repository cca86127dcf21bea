"""Opening data by a text: which source it becomes, with which options, and what is said when it is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fasterisnet.data import open_source, sources
from fasterisnet.data.base import Source
from fasterisnet.errors import InputError


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """What the benchmarks were opened with; nothing is read."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def recorder(name: str):
        def record(*arguments: Any, **options: Any) -> Source:
            calls.append((name, arguments, options))
            return Source([name], {})

        return record

    for name, kind in sources.KINDS.items():
        monkeypatch.setitem(sources.KINDS, name, replace(kind, open=recorder(name)))
    return calls


@pytest.mark.parametrize(
    ("spec", "options", "name", "folder", "wanted"),
    [
        ("mnist", {}, "mnist", None, {"seed": 0}),
        ("mnist", {"seed": 4, "limit": None}, "mnist", None, {"seed": 4}),
        ("mnist?limit=500", {}, "mnist", None, {"limit": 500, "seed": 0}),
        ("mnist:{}", {}, "mnist", "{}", {"seed": 0}),
        ("mnist:{}?limit=100&bias=none", {}, "mnist", "{}", {"limit": 100, "training_bias": False, "seed": 0}),
        ("mnist:{}?limit=100", {"limit": 20}, "mnist", "{}", {"limit": 20, "seed": 0}),
        ("dogs:{}?bias=train", {"seed": 2}, "dogs", "{}", {"training_bias": True, "seed": 2}),
        ("dogs:{}", {"training_bias": False}, "dogs", "{}", {"training_bias": False, "seed": 0}),
        ("xray:{}", {"seed": 3}, "xray", "{}", {}),
        ("xray:{}?split=covid", {}, "xray", "{}", {"split": "covid"}),
        (
            "drawn?classes=4&size=48",
            {"per_class": 5},
            "drawn",
            None,
            {"classes": 4, "size": 48, "per_class": 5, "seed": 0},
        ),
    ],
)
def test_a_name_opens_its_benchmark(
    opened: list[Any], tmp_path: Path, spec: str, options: dict[str, Any], name: str, folder: str | None,
    wanted: dict[str, Any],
) -> None:  # fmt: skip
    source = open_source(spec.format(tmp_path), **options)
    assert source.classes == [name]
    assert opened == [(name, () if folder is None else (tmp_path,), wanted)]


def test_the_drawn_pictures_come_through() -> None:
    source = open_source("drawn?classes=2&per_class=4&size=20&bias=none", seed=1)
    assert len(source.classes) == 2 and len(source.split("train")) == 8
    image, mask, _ = source.split("train").read(0)
    assert image.shape == (3, 20, 20) and mask is not None
    biased = open_source("drawn", classes=2, per_class=4, size=20, seed=1).split("train").read(0).image
    image[:, :2, :2] = 255
    assert torch.equal(image, biased)


def folder_data(folder: Path) -> Path:
    for split in ("train", "val"):
        for label, level in (("dark", 20), ("light", 200)):
            for kind, value in ((".", level), ("masks", 255)):
                path = folder / kind / split / label / "one.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.full((8, 9), value, np.uint8)).save(path)
    return folder


def test_folders_and_tables_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder called mnist is the data set by its bare name, and itself when written with a separator."""
    folder_data(tmp_path / "mnist")
    table = tmp_path / "list.CSV"
    table.write_text("image,mask,split,label\nmnist/train/dark/one.png,mnist/masks/train/dark/one.png,train,dark\n"
                     "mnist/train/light/one.png,,train,light\n")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for spec in (f"{tmp_path}/mnist", "./mnist", tmp_path / "mnist", "mnist/"):
        source = open_source(spec)
        assert source.classes == ["dark", "light"] and list(source.splits) == ["train", "val"]
        reading = source.split("val").read(1)
        assert int(reading.image.min()) == 200 and reading.label == 1
    listed = open_source("list.CSV", seed=3)
    assert listed.classes == ["dark", "light"] and listed.split("train").read(1).mask is None
    assert open_source("mnist?limit=100").classes == [str(c) for c in range(10)]


def test_a_question_mark_in_a_path_is_no_option(tmp_path: Path) -> None:
    folder = folder_data(tmp_path / "which one?limit=3")
    assert open_source(str(folder)).classes == ["dark", "light"]
    assert open_source(f"{folder}?refine_boxes=false").classes == ["dark", "light"]


def test_options_of_own_data_reach_it(tmp_path: Path) -> None:
    folder = folder_data(tmp_path / "data")
    assert open_source(folder, classes=["light", "dark", "other"]).classes == ["light", "dark", "other"]
    assert open_source(f"{folder}?classes=light,dark").classes == ["light", "dark"]


@pytest.mark.parametrize(
    ("spec", "messages"),
    [
        ("mnst", ["'mnst'", "Did you mean 'mnist'", "dogs:DIR", "xray:DIR", "FILE.csv", "drawn"]),
        ("dog:somewhere", ["Did you mean 'dogs'"]),
        ("no/such/folder", ["no/such/folder", "mnist:DIR"]),
        ("", ["neither a known data set"]),
        ("dogs", ["dogs:DIR"]),
        ("dogs:", ["dogs:DIR"]),
        ("mnist:", ["mnist:DIR"]),
        ("mnist:no/such/folder", ["no/such/folder", "no such folder"]),
        ("drawn:folder", ["needs none"]),
        ("mnist?limt=3", ["'limt'", "did you mean 'limit'"]),
        ("mnist?colour=red", ["'colour'", "limit, bias"]),
        ("mnist?limit=many", ["'many'", "whole number"]),
        ("mnist?limit=0", ["'0'", "whole number above 0"]),
        ("mnist?limit=", ["whole number"]),
        ("mnist?limit", ["no list of options"]),
        ("mnist?bias=some", ["'some'", "train or none"]),
        ("xray:.?spilt=covid", ["did you mean 'split'"]),
        ("xray:.?split=both", ["mixed or covid"]),
        ("xray:.?limit=3", ["'limit'"]),
        (".?refine=yes", ["did you mean 'refine_boxes'"]),
        (".?refine_boxes=perhaps", ["true or false"]),
    ],
)
def test_what_is_wrong_is_said(spec: str, messages: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        open_source(spec)
    for message in messages:
        assert message in str(caught.value)


def test_other_files_and_options_by_keyword_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InputError, match=r"notes\.txt: is neither a folder nor a \.csv"):
        open_source(tmp_path / "notes.txt")
    with pytest.raises(InputError, match="did you mean 'per_class'"):
        open_source("drawn", per_clas=3)
