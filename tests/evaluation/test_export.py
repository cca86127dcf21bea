"""Exported files run without this package and give the model's logits."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fasterisnet as fi
from fasterisnet.errors import FasterISNetError, InputError
from fasterisnet.evaluation import export_model
from fasterisnet.models import build_model

RUNNER = """
import sys
import numpy as np

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "fasterisnet":
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocked())
try:
    import fasterisnet
    raise SystemExit("not blocked")
except ImportError:
    pass

def run(path, images):
    if path.endswith(".onnx"):
        import onnxruntime
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return session.run(["logits"], {"images": images})[0]
    import torch
    with torch.no_grad():
        return torch.export.load(path).module()(torch.from_numpy(images)).numpy()

for path in sys.argv[1:]:
    given = np.load(path + ".npz")
    np.savez(path + ".found.npz", **{name: run(path, images) for name, images in given.items()})
assert "fasterisnet" not in sys.modules
"""
CASES = {"small": (28, 1), "resnet18": (64, 3)}
FORMATS = ["onnx", "pt2"]


def trained(name: str) -> nn.Module:
    """A few steps as an ISNet, so that weights and statistics are not those of a fresh net."""
    size, channels = CASES[name]
    torch.manual_seed(0)
    model = build_model(name, 5, channels=channels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    masks = torch.zeros(4, 1, size, size)
    masks[..., 5:15, 5:15] = 1
    for _ in range(2):
        images = torch.rand(4, channels, size, size)
        parts = fi.Selective(0.5, ranges=(0.1, 5.0)).loss(model, images, torch.tensor([0, 1, 2, 3]), masks)
        optimizer.zero_grad()
        parts.total.backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, dict[str, np.ndarray]]]:
    """Every file with the logits it should give for batches of one and five, all run by one other process."""
    folder = tmp_path_factory.mktemp("exported")
    found = {}
    for name, (size, channels) in CASES.items():
        model = trained(name)
        batches = {f"b{n}": torch.rand(n, channels, size, size) for n in (1, 5)}
        for format in FORMATS:
            path = folder / f"{name}.{format}"
            example = torch.rand(1 if format == "onnx" else 3, channels, size, size)
            export_model(model, path, format, example=example)  # pyright: ignore[reportArgumentType]
            np.savez(f"{path}.npz", **{key: value.numpy() for key, value in batches.items()})  # pyright: ignore[reportArgumentType]
            with torch.no_grad():
                found[name, format] = path, {key: model.eval()(value).numpy() for key, value in batches.items()}
    paths = [str(path) for path, _ in found.values()]
    subprocess.run([sys.executable, "-c", RUNNER, *paths], check=True, cwd=folder)
    return found


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_runs_without_this_package(exported: dict[Any, Any], name: str, format: str) -> None:
    path, wanted = exported[name, format]
    found = np.load(f"{path}.found.npz")
    for key, logits in wanted.items():
        assert found[key].shape == logits.shape
        np.testing.assert_allclose(found[key], logits, rtol=1e-4, atol=1e-5 * np.abs(logits).max())
    assert np.abs(wanted["b5"][0] - wanted["b5"][1]).max() > 1e-6


@pytest.mark.parametrize("format", FORMATS)
def test_no_paths_of_this_machine_in_the_file(exported: dict[Any, Any], format: str) -> None:
    """Exporters like to write down the source lines of every operation."""
    path, _ = exported["small", format]
    files = {"": path.read_bytes()}
    if format == "pt2":
        with zipfile.ZipFile(path) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
    for name, content in files.items():
        for trace in (os.path.dirname(torch.__file__), os.path.dirname(fi.__file__), str(path.parent)):
            assert trace.encode() not in content, name


@pytest.mark.parametrize("format", FORMATS)
def test_one_file_and_nothing_beside_it(exported: dict[Any, Any], format: str) -> None:
    path, _ = exported["resnet18", format]
    assert path.stat().st_size > 40_000_000
    assert not [name for name in os.listdir(path.parent) if name.startswith(".") or name.endswith(".data")]


def test_the_model_stays_as_it_is(tmp_path: Path) -> None:
    model = build_model("small", 3).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    export_model(model, tmp_path / "new" / "m.pt2", "pt2", example=torch.rand(2, 3, 16, 16, requires_grad=True))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert os.listdir(tmp_path / "new") == ["m.pt2"]


class Falsified(nn.Module):
    def __init__(self, model: nn.Module, share: float, from_size: int) -> None:
        super().__init__()
        self.model, self.share, self.from_size = model, share, from_size

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * (1 + self.share if len(x) >= self.from_size else 1)


@pytest.mark.parametrize("from_size", [1, 3], ids=["always", "only the other size of batch"])
def test_a_file_that_differs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_size: int) -> None:
    path = tmp_path / "m.pt2"
    path.write_text("the old file")
    load = torch.export.load

    class Loaded:
        def __init__(self, file: Path) -> None:
            self.program = load(file)

        def module(self) -> nn.Module:
            return Falsified(self.program.module(), 1e-3, from_size)

    monkeypatch.setattr(torch.export, "load", Loaded)
    model = build_model("small", 3)
    with pytest.raises(FasterISNetError, match=r"m\.pt2 was not written: for \d images its logits differ.*1\.0e-03"):
        export_model(model, path, "pt2", example=torch.rand(2, 3, 16, 16))
    assert path.read_text() == "the old file" and os.listdir(tmp_path) == ["m.pt2"]


def test_what_onnx_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxruntime" else object())
    with pytest.raises(InputError, match=r"needs onnxruntime: pip install .*\[export\]"):
        export_model(build_model("small", 3), tmp_path / "m.onnx", "onnx", example=torch.rand(2, 3, 16, 16))


@pytest.mark.parametrize(
    ("format", "example", "message"),
    [("tflite", torch.rand(1, 3, 8, 8), "'onnx' or 'pt2'"), ("pt2", torch.rand(0, 3, 8, 8), "not empty")],
)
def test_refusals(tmp_path: Path, format: Any, example: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        export_model(build_model("small", 3), tmp_path / "m", format, example=example)
    assert os.listdir(tmp_path) == []
