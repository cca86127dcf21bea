"""What is handed over with an exported network: how to feed it, what it is good for, and a program that does it."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fasterisnet.cli import main
from fasterisnet.data.reader import Reader
from fasterisnet.models import build_model
from fasterisnet.runs.card import Card
from fasterisnet.runs.config import Config
from fasterisnet.runs.folder import Run
from fasterisnet.runs.inputs import preparation_of

CLASSES = ["cat", "dog | wolf", "owl"]
TESTS = {"test": {"samples": 9, "accuracy": 0.875, "macro_f1": 0.5, "macro_auc": 0.75, "background_mass": 0.125}}
BLOCKED = """
import builtins, runpy, sys
real = builtins.__import__
def checked(name, *rest):
    assert name.split(".")[0] not in ("torch", "torchvision", "fasterisnet"), name
    return real(name, *rest)
builtins.__import__ = checked
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def made_run(folder: Path, **options: object) -> Run:
    """A run folder as a training leaves it, without the training."""
    run = Run(folder)
    config = Config(data="drawn", method="selective", model="small", size=20, out=str(folder), **options)  # pyright: ignore[reportArgumentType]
    run.create(config)
    torch.manual_seed(0)
    model = build_model("small", len(CLASSES))
    with torch.no_grad():
        list(model.parameters())[-2].mul_(4000)  # answers that differ
    prepare = preparation_of(config).to_dict()
    run.save_weights(model.state_dict(), Card("small", CLASSES, False, prepare, "selective", config.zb, 3, 0.5))
    run.write_json("report.json", {"epoch": 3, "training_samples": 1234, "skipped_images": [], "tests": TESTS})
    return run


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    generator = np.random.default_rng(0)
    found = []
    for i, size in enumerate([(31, 50), (50, 31), (20, 20)]):
        small = Image.fromarray(generator.integers(0, 255, (5, 5, 3), dtype=np.uint8))
        found.append(tmp_path / f"{i}.png")
        small.resize(size, Image.Resampling.BICUBIC).save(found[-1])
    Image.fromarray(generator.integers(0, 255, (12, 9), dtype=np.uint8)).save(tmp_path / "grey.png")
    return [*found, tmp_path / "grey.png"]


def answers(run: Run, pictures: list[Path]) -> list[dict[str, float]]:
    model, card = run.load_model()
    with torch.no_grad():
        chances = [model(card.prepare(Reader().image(p))[0].unsqueeze(0)).softmax(1)[0] for p in pictures]
    return [dict(zip(CLASSES, c.tolist(), strict=True)) for c in chances]


@pytest.mark.parametrize(
    "options", [{}, {"fit": "pad", "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.3], "equalise": True}]
)
def test_the_program_beside_it_answers_as_the_run(
    options: dict[str, object], pictures: list[Path], tmp_path: Path
) -> None:
    run = made_run(tmp_path / "run", **options)
    out = tmp_path / "out" / "net.onnx"
    assert main(["export", str(run.folder), "--out", str(out)]) == 0
    command = [sys.executable, "-c", BLOCKED, str(out.with_name("predict.py")), str(out), *map(str, pictures)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    wanted = answers(run, pictures)
    assert max(max(w.values()) for w in wanted) - min(max(w.values()) for w in wanted) > 0.01
    for line, path, answer in zip(done.stdout.splitlines(), pictures, wanted, strict=True):
        found = {text.rpartition("=")[0]: float(text.rpartition("=")[2]) for text in parts(line, path)}
        assert found == pytest.approx(answer, abs=0.01)
        assert list(found) == sorted(answer, key=lambda name: -answer[name])


def parts(line: str, path: Path) -> list[str]:
    """name=chance, of which a name may have spaces."""
    return [part.strip() for part in re.findall(r".+?=\d\.\d{4}", line.removeprefix(str(path)))]


def test_the_card_repeats_the_verdict_on_these_weights_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path / "run")
    other = {"name": "run", "weights_sha256": "0", "sentence": "Of another.", "reasons": []}
    mine = {"name": "x", "weights_sha256": run.checksum(), "sentence": "Of this one.", "reasons": []}
    audit = {"sentence": "Of another.", "reasons": [], "data": "d", "split": "test", "images": 7}
    place = tmp_path / "audit.json"
    command = ["export", str(run.folder), "--format", "pt2", "--out", str(tmp_path / "a.pt2"), "--audit", str(place)]
    place.write_text(json.dumps({**audit, "models": [other, mine]}))
    assert main(command) == 0 and "Of this one. (Audit of `x`" in (tmp_path / "MODEL_CARD.md").read_text()
    place.write_text(json.dumps({**audit, "models": [other]}))
    assert main(command) == 2 and "not about these weights" in capsys.readouterr().err
    (run.folder / "audit.json").write_text(place.read_text())
    assert main(command[:-2]) == 0 and "was not audited" in (tmp_path / "MODEL_CARD.md").read_text()


def test_the_files_say_how_to_feed_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path / "run", fit="pad", mean=[0.5, 0.5, 0.5], std=[0.25, 0.25, 0.25])
    audit = {"sentence": "This classifier ignores the background.", "reasons": ["Answers stay."], "data": "d"}
    audit |= {"split": "test", "images": 77, "models": [{"name": "run"}]}
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "audit.json").write_text(json.dumps(audit))
    out = tmp_path / "out" / "net.pt2"
    command = ["export", str(run.folder), "--format", "pt2", "--out", str(out), "--audit", str(tmp_path / "audit")]
    assert main(command) == 0
    assert capsys.readouterr().out.split() == [str(out), str(out.with_name("MODEL_CARD.md"))]
    extra = {"metadata.json": ""}
    torch.export.load(out, extra_files=extra)
    about = {key: json.loads(value) for key, value in json.loads(extra["metadata.json"]).items()}
    weights = hashlib.sha256((run.folder / "best.safetensors").read_bytes()).hexdigest()
    assert about.items() >= {
        "classes": CLASSES, "size": 20, "channels": 3, "fit": "pad", "mean": [0.5] * 3, "std": [0.25] * 3,
        "multi_label": False, "method": "selective", "epoch": 3, "weights_sha256": weights,
    }.items()  # fmt: skip
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    for text in (
        "cat, dog \\| wolf, owl", "padded", "| test | 9 | 0.875 | 0.500 | 0.750 | 0.125 |", "1,234", "Answers stay.",
        "ignores the background", "77 images", weights, hashlib.sha256(out.read_bytes()).hexdigest(),
    ):  # fmt: skip
        assert text in card, text
    assert main(command) == 0  # again, over its own
    (tmp_path / "out" / "MODEL_CARD.md").write_text("# mine")
    assert main(command) == 2
    assert "MODEL_CARD.md is there" in capsys.readouterr().err
    assert main([*command[:-1], str(tmp_path)]) == 2
