"""Names become code only on the word of the user, whatever a file says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

from attacks.conftest import OPTIONS, copied, main, train
from commands import environment
from fasterisnet.models import build_model

EVIL = """
from pathlib import Path
from torch import nn
Path({mark!r}).touch()
def build(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16 * 16 * 3, num_classes))
"""
NAMES = ["evil_net:build", "timm:resnet18.evil_net:build", "timm:evil_net:build"]


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that leaves a mark when it is imported, in the working directory."""
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    (place / "evil_net.py").write_text(EVIL.format(mark=str(tmp_path / "mark")))
    (place / "timm:evil_net.py").write_text(EVIL.format(mark=str(tmp_path / "mark")))
    monkeypatch.delitem(sys.modules, "evil_net", raising=False)
    yield tmp_path / "mark"  # pyright: ignore[reportReturnType]
    sys.modules.pop("evil_net", None)


def disguise(run: Path, model: str, *, config: bool = False, card: bool = False) -> None:
    """Another model into config.yaml, or into the card in the weights."""
    if config:
        options = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump({**options, "model": model}))
    if card:
        path = run / "best.safetensors"
        with safe_open(path, "pt") as file:
            values = json.loads(file.metadata()["card"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        save_file(tensors, path, {"card": json.dumps({**values, "model": model})})
        (run / "best.json").unlink()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["card", "config", "both"])
def test_a_run_chooses_no_code(
    name: str, place: str, mark: Path, tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(finished, tmp_path)
    (run / "report.json").unlink()
    disguise(run, name, config=place != "card", card=place != "config")
    image = next(finished.with_name("pictures").rglob("*.png"))
    for command in (
        ["train", "--resume", str(run)],
        ["evaluate", str(run), "--workers", "0"],
        ["explain", str(run), str(image), "--out", str(tmp_path / "out")],
        ["export", str(run), "--format", "pt2", "--out", str(tmp_path / "x.pt2")],
    ):
        assert main(command) in (1, 2), command
        assert "Traceback" not in capsys.readouterr().err
    assert not mark.exists()


def test_a_card_that_differs_from_its_run_is_refused(
    tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(finished, tmp_path)
    disguise(run, "resnet18", card=True)
    assert main(["evaluate", str(run), "--workers", "0"]) == 1
    assert "says that its model is resnet18, config.yaml says small" in capsys.readouterr().err


def test_a_file_of_options_chooses_no_code(
    mark: Path, tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "given.yaml").write_text("model: evil_net:build\n")
    without = [word for word in OPTIONS if word not in ("--model", "small")]
    command = ["train", "--data", str(pictures), "--out", str(tmp_path / "run"), *without]
    assert main([*command, "--config", str(tmp_path / "given.yaml")]) == 2
    assert "--trust" in capsys.readouterr().err and not mark.exists() and not (tmp_path / "run").exists()
    assert main([*command, "--config", str(tmp_path / "given.yaml"), "--trust"]) == 0
    assert mark.exists()


def test_who_writes_the_name_into_the_command_means_it(mark: Path, tmp_path: Path, pictures: Path) -> None:
    assert train(pictures, tmp_path / "run", "--model", "evil_net:build") == 0
    assert mark.exists()
    shutil.rmtree(tmp_path / "run")


def test_a_recipe_chooses_no_code(mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = {"data": "drawn", "seeds": [0], "tests": ["iid"], "rows": {"a": {"method": "standard"}}}
    recipe["common"] = {"model": "evil_net:build", "size": 16, "epochs": 1, "workers": 0}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    places = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert main(["benchmark", "mnist", "--recipe", str(tmp_path / "recipe.yaml"), *places]) == 2
    assert "--trust" in capsys.readouterr().err and not mark.exists()


def test_the_library_asks_too(mark: Path) -> None:
    for name in NAMES:
        with pytest.raises(ValueError, match="--trust"):
            build_model(name, 2)
    assert not mark.exists()


@pytest.mark.slow
def test_the_working_directory_is_no_place_for_packages(pictures: Path, tmp_path: Path) -> None:
    """Data that brings a torch.py of its own; loader workers are started there."""
    place = tmp_path / "downloaded"
    place.mkdir()
    for name in ("torch", "numpy", "yaml", "multiprocessing"):
        (place / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    script = tmp_path / "script.py"
    lines = ["import sys", "from fasterisnet.cli import main", "if __name__ == '__main__':", "    sys.exit(main())"]
    script.write_text("\n".join(lines))
    command = [sys.executable, str(script), "train", "--data", str(pictures), "--out", str(tmp_path / "run"), *OPTIONS]
    command += ["--workers", "1", "--epochs", "1"]
    done = subprocess.run(command, cwd=place, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "mark").exists()
