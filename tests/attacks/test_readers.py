"""Every reader of files that somebody else may have written, against every hostile file: an error of ours, soon."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks.hostile import ANY_FILE, CARDS, SPLITS, STATES, gzip_bomb, weights
from fasterisnet.benchmark.pictures import heatmap_grid
from fasterisnet.benchmark.recipe import Recipe
from fasterisnet.benchmark.results import read_result
from fasterisnet.data.boxes import read_coco, read_voc
from fasterisnet.data.files import Files
from fasterisnet.data.folder import open_folder
from fasterisnet.data.mnist import mnist_source
from fasterisnet.data.reader import Reader, read_image, read_mask
from fasterisnet.errors import FasterISNetError, InputError
from fasterisnet.models import build_model
from fasterisnet.runs.config import Config
from fasterisnet.runs.folder import Run

READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "options": ("run.yaml", lambda path: Config.read(path, {})),
    "run": ("config.yaml", lambda path: Run(path.parent).config),
    "state": ("state.pt", lambda path: Run(path.parent).load_state() or _nothing(path)),
    "weights": ("best.safetensors", lambda path: Run(path.parent).load_model()),
    "pretrained": ("w.safetensors", lambda path: build_model("small", 2, pretrained=str(path))),
    "pickled": ("w.pt", lambda path: build_model("small", 2, pretrained=str(path))),
    "report": ("report.json", lambda path: Run(path.parent).report or _nothing(path)),
    "recipe": ("recipe.yaml", lambda path: Recipe.read("mnist", str(path))),
    "result": ("a-seed0.json", read_result),
    "maps": ("maps.safetensors", lambda path: heatmap_grid({"a": path}, path.with_name("x.png")) or _nothing(path)),
    "image": ("x.png", read_image),
    "mask": ("x.png", read_mask),
    "DICOM": ("x.dcm", Reader(window="auto").image),
    "NIfTI": ("x.nii", Reader(window="auto").image),
    "packed NIfTI": ("x.nii.gz", Reader(window="auto").image),
    "labels": ("x.nii", Reader((1,)).mask),
    "any name": ("x", read_image),
    "outlines": ("x.json", read_coco),
    "boxes": ("x.xml", read_voc),
    "file of a benchmark": ("x.jpg", lambda path: Files(path.parent).image(path.name)),
    "manifest": ("manifest.csv", open_folder),
}


def _nothing(path: Path) -> None:
    raise InputError(f"{path}: nothing was read")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hostile", ANY_FILE)
@pytest.mark.parametrize("reader", READERS)
def test_a_hostile_file_is_an_error(reader: str, hostile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name, read = READERS[reader]
    ANY_FILE[hostile](tmp_path / name)
    with pytest.raises(FasterISNetError) as raised:
        read(tmp_path / name)
    assert len(str(raised.value)) < 3000
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("kind", CARDS)
def test_damaged_cards(kind: str, tmp_path: Path) -> None:
    weights(tmp_path / "best.safetensors", CARDS[kind])
    with pytest.raises(InputError, match=r"best.safetensors is damaged"):
        Run(tmp_path).load_model()


@pytest.mark.parametrize("kind", STATES)
def test_damaged_states(kind: str, tmp_path: Path, stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saved without a checksum, as by an older version: what is wrong has to show by itself."""
    from attacks.conftest import copied, main

    run = copied(stopped, tmp_path)
    state = torch.load(run / "state.pt", weights_only=True)
    state.pop("checksum", None)
    torch.save(STATES[kind](state), run / "state.pt")
    assert main(["train", "--resume", str(run)]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and "state.pt" in errors[0]


@pytest.mark.parametrize("name", ["state.pt", "best.safetensors"])
@pytest.mark.parametrize("where", [0.4, 0.6, 0.8])
def test_a_flipped_byte_is_noticed(
    name: str, where: float, tmp_path: Path, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from attacks.conftest import copied, main

    run = copied(stopped, tmp_path)
    content = bytearray((run / name).read_bytes())
    content[int(where * len(content))] ^= 0x10
    (run / name).write_bytes(content)
    command = ["train", "--resume"] if name == "state.pt" else ["evaluate", "--workers", "0"]
    assert main([*command, str(run)]) == 1
    assert f"{name} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("split", SPLITS)
def test_names_of_splits_are_no_paths(split: str, tmp_path: Path) -> None:
    row = f'a.png,train,x\na.png,"{split}",x\n'
    (tmp_path / "manifest.csv").write_text(f"image,split,label\n{row}")
    with pytest.raises(InputError, match=r"manifest.csv, line \d: has the split"):
        open_folder(tmp_path)


def test_a_packed_file_that_unpacks_to_half_a_gigabyte(tmp_path: Path) -> None:
    gzip_bomb(tmp_path / "train-images-idx3-ubyte.gz")
    with gzip.open(tmp_path / "train-labels-idx1-ubyte.gz", "wb") as file:
        file.write(struct.pack(">2I", 0x0801, 10) + bytes(10))
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="not the idx file"):
        mnist_source(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
