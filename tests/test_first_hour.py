"""What a new user meets in the first hour: options, data and networks that are not what they are taken for are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from torch import nn

import fasterisnet as fi
from data.test_medical import dicom
from fasterisnet.app import DECISION, Viewer, build
from fasterisnet.cli import main
from fasterisnet.data.check import check_data
from fasterisnet.errors import InputError
from fasterisnet.runs.card import Card
from fasterisnet.runs.config import Config
from fasterisnet.runs.explain import explain_files
from fasterisnet.runs.inputs import preparation_of

QUICK = [
    "--model", "small", "--size", "16", "--epochs", "1", "--workers", "0", "--accelerator", "cpu", "--tensorboard",
    "false", "--audit", "0", "--explained", "1",
]  # fmt: skip
RNG = np.random.default_rng(0)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [["--zb"], ["--decay", "0.9"], ["--heatmap-weight", "0.9"], ["--penalty", "2"]],
)
def test_options_of_other_methods_are_refused_where_they_are_written(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The paper's values too, which a file of options may hold for a method that has no use for them."""
    command = ["train", "--data", "drawn", "--method", "standard", "--out", str(tmp_path / "run"), *QUICK]
    assert main([*command, *words]) == 2
    assert f"{words[0][2:].replace('-', '_')} is " in (said := capsys.readouterr().err) and "no such option" in said
    file = tmp_path / "paper.yaml"
    file.write_text(Config.of({"data": "drawn", "preset": "paper"}).write())
    assert Config.read(file, {"method": "standard"}).zb


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--learning-rte", "--lr"),
        ("--learning_rate", "--lr"),
        ("--output-dir", "--out"),
        ("--batchsize", "--batch"),
        ("--gpu", "--accelerator gpu"),
        ("--lr_schedule", "--schedule"),
    ],
)
def test_what_others_call_an_option_may_be_misspelt(
    word: str, meant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the command line and in a file."""
    with pytest.raises(SystemExit):
        main(["train", word, "3"])
    assert capsys.readouterr().err.endswith(f"did you mean '{meant}'?\n")
    file = tmp_path / "run.yaml"
    file.write_text(f"data: drawn\n{word[2:]}: 3\n")
    with pytest.raises(InputError, match=f"did you mean '{meant[2:]}'"):
        Config.read(file, {})


# --- data -------------------------------------------------------------------------------------------------------------


def volumes(root: Path, labels: tuple[int, ...] = (1,)) -> Path:
    """Two NIfTI volumes of four slices a class, in Hounsfield units, with masks."""
    for split in ("train", "val"):
        for name in ("a", "b"):
            values, mask = RNG.integers(-1000, 400, (12, 12, 4)).astype(np.int16), np.zeros((12, 12, 4), np.uint8)
            mask[3:8, 3:8] = RNG.choice(labels, (5, 5, 4))
            for top, content in (("", values), ("masks", mask)):
                path = root / top / split / name / f"{split}{name}.nii.gz"
                path.parent.mkdir(parents=True, exist_ok=True)
                nibabel.save(nibabel.Nifti1Image(content, np.eye(4)), path)
    return root


def test_the_check_names_the_option_that_helps(tmp_path: Path) -> None:
    """A window that is missing is no damage, a slice has a number, and the labels are those of the masks."""
    report = check_data(volumes(tmp_path, (8, 12)), workers=1)
    rows = {row.problem: row for row in report.rows}
    assert rows.keys() == {"unknown black and white", "mask is a label map"} and report.fatal
    assert "--window auto" in rows["unknown black and white"].advice
    assert any("slice 2" in text and "--foreground 8,12)" in text for text in rows["mask is a label map"].examples)
    assert not check_data(tmp_path, workers=1, window="auto", foreground="8,12").rows


def test_masks_may_be_dicom_of_any_name(tmp_path: Path) -> None:
    """As images may: with a suffix or without one, whatever the other has."""
    square = np.zeros((12, 12), np.uint8)
    square[3:8, 3:8] = 1
    for i, (image, mask) in enumerate((("IM1", "IM1"), ("IM2.dcm", "IM2"), ("1.2.840.7", "1.2.840.7"))):
        for split in ("train", "val"):
            for name in ("a", "b"):
                dicom(tmp_path / split / name / image, RNG.integers(0, 4096, (12, 12)), 12, PatientID=f"{i}{split}")
                dicom(tmp_path / "masks" / split / name / mask, square, 8)
    report = check_data(tmp_path, workers=1)
    assert not report.rows and report.masks == {"train": 6, "val": 6}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pretrained": True},
        {"pretrained": True, "channels": 1},
        {"pretrained": True, "mean": [0.5, 0.4, 0.3], "std": [0.1, 0.2, 0.5]},
        {"mean": [0.0, 0.5, 1.0], "std": [1.0, 0.5, 0.25]},
        {"channels": 1, "mean": [0.2], "std": [0.3]},
        {"pretrained": "w.pt"},
    ],
    ids=str,
)
def test_the_box_of_zb_is_where_the_images_are(options: dict[str, Any]) -> None:
    """Black and white pictures touch it on both sides, whatever is said of the normalisation."""
    prepare = preparation_of(Config(data="D", size=4, zb=True, **options))
    black, white = (prepare(torch.full((3, 4, 4), value, dtype=torch.uint8))[0] for value in (0, 255))
    assert prepare.box is not None
    for edge, image in zip(prepare.box, (black, white), strict=True):
        wanted = torch.as_tensor(edge, dtype=image.dtype).expand(len(image))[:, None, None]
        rounding = 5e-4 if prepare.channels == 1 else 1e-6  # the weights of the colours in gray add up to 0.9999
        torch.testing.assert_close(image, wanted.expand_as(image), rtol=rounding, atol=rounding)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("first") / "run"
    command = ["train", "--data", "drawn?size=16&per_class=4", "--method", "standard", "--out", str(out)]
    assert main([*command, *QUICK]) == 0
    return out


def test_explain_finds_what_training_finds(run: Path, tmp_path: Path) -> None:
    """DICOM under any name, and every slice of a volume with its slice of the mask."""
    root = volumes(tmp_path / "data")
    for name in ("IM0001", "IM0002.dcm", "1.2.840.7"):
        dicom(root / "scans" / name, RNG.integers(0, 4096, (12, 12)), 12)
    (root / "scans" / "README").write_text("no picture")
    made = explain_files([run], [root / "scans"], tmp_path / "scans")
    assert sorted(path.name for path in made) == ["1.2.840.7.png", "IM0001.png", "IM0002.png"]
    made = explain_files([run], [root / "val/a"], tmp_path / "slices", masks=root / "masks/val/a", window="auto")
    assert [path.name for path in made] == [f"vala-slice{i}.png" for i in range(4)]
    assert len({path.read_bytes() for path in made}) == 4


# --- a loop of one's own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [fi.Standard(), fi.Stochastic(ranges=(1.0, 10.0)), fi.RRR(), fi.GAIN()])
def test_a_softmax_at_the_end_is_noticed(method: Any) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    images, labels, masks = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 1, 0]), torch.rand(4, 1, 8, 8) > 0.5
    with pytest.raises(InputError, match="ends with a softmax"):
        method.loss(nn.Sequential(net, nn.Softmax(1)), images, labels, masks)
    assert method.loss(net, images, labels, masks).total > 0


def test_a_calibration_with_a_softmax_is_refused() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 2), nn.Softmax(1))
    with pytest.raises(InputError, match="ends with a softmax"):
        fi.calibrate(fi.Stochastic(), net, [(torch.rand(4, 3, 4, 4), torch.tensor([0, 1, 1, 0]))])


def test_logits_that_sum_to_one_by_chance_are_not_refused_later() -> None:
    method, labels = fi.Standard(), torch.tensor([1])
    assert method.classify(torch.tensor([[-1.0, 2.0]]), labels) > 0
    assert method.classify(torch.tensor([[0.25, 0.75]]), labels) > 0


@pytest.mark.parametrize("ranges", [{"input": (1.0, 10.0)}, (3.0, 1.0), 4])
def test_ranges_given_later_are_checked_too(ranges: Any) -> None:
    method = fi.Stochastic()
    method.ranges = ranges
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    with pytest.raises(InputError, match="a pair"):
        method.loss(net, torch.rand(2, 3, 4, 4), torch.tensor([0, 1]), torch.rand(2, 1, 4, 4) > 0.5)


# --- the app ----------------------------------------------------------------------------------------------------------


def test_a_class_that_one_network_does_not_know(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others answer all the same, and the page reports to nobody."""
    first = Viewer.open(run)
    other = Viewer.open(run)
    other.name, other.card = "other", Card(**{**vars(other.card), "classes": ["x", "y", "z"]})
    page = build([first, other])
    assert page.analytics_enabled is False
    shown = next(iter(page.fns.values())).fn
    image = RNG.integers(0, 255, (16, 16, 3), dtype=np.uint8)
    words, picture, chances, excuse, *nothing = shown(image, "disc", "epsilon", None, None)
    assert words.startswith("run: disc") and picture is not None and "disc" in chances
    assert "knows no class 'disc'" in excuse and nothing == [None, None]
    assert "other: " in shown(image, DECISION, "epsilon", None, None)[3]
