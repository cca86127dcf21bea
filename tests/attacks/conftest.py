"""A small folder of pictures, and a run that was stopped after its first epoch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fasterisnet import cli
from fasterisnet.data.drawn import drawn_source
from fasterisnet.training import loop
from sketches import sketches

__all__ = ["sketches"]
OPTIONS = [
    "--method", "standard", "--model", "small", "--epochs", "2", "--size", "16", "--batch", "6", "--workers", "0",
    "--accelerator", "cpu", "--tensorboard", "false",
    "--audit", "0",
]  # fmt: skip
PER_EPOCH = 3  # updates


def main(arguments: list[str]) -> int:
    return cli.main(arguments)


def train(data: str | Path, out: str | Path, *more: str) -> int:
    return main(["train", "--data", str(data), "--out", str(out), *OPTIONS, *more])


def copied(run: Path, tmp_path: Path) -> Path:
    """A copy of a run folder to play with."""
    return Path(shutil.copytree(run, tmp_path / "run"))


def draw(base: Path) -> Path:
    """DIR/<split>/<class>/n.png with masks: train, val and test."""
    source = drawn_source(per_class=6, size=16)
    for split, name in (("train", "train"), ("val", "val"), ("ood", "test")):
        samples = source.split(split)
        for i in range(len(samples)):
            image, mask, label = samples.read(i)
            assert isinstance(label, int) and mask is not None
            pixels = image.permute(1, 2, 0).numpy(), mask[0].numpy().astype(np.uint8) * 255
            for top, values in zip(("", "masks"), pixels, strict=True):
                path = base / top / name / source.classes[label] / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(values).save(path)
    return base


def stopping(after: int) -> Any:
    """Ctrl-C after so many updates."""
    patch, count = pytest.MonkeyPatch(), 0
    update = loop.Training._update

    def stopped(training: Any) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise KeyboardInterrupt
        update(training)

    patch.setattr(loop.Training, "_update", stopped)
    return patch


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("attacked") / "pictures")


@pytest.fixture(scope="session")
def stopped(pictures: Path) -> Path:
    """After the first epoch, in the second."""
    out = pictures.with_name("stopped")
    patch = stopping(PER_EPOCH + 1)
    assert train(pictures, out) == 130
    patch.undo()
    return out


@pytest.fixture(scope="session")
def finished(pictures: Path) -> Path:
    out = pictures.with_name("finished")
    assert train(pictures, out) == 0
    return out
