"""With PyTorch alone the library works and the command says what it lacks, with a command that would install it."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from fasterisnet import extras

BARE = """
import sys
from importlib.machinery import PathFinder
ALLOWED = set(sys.stdlib_module_names) | set('''
    torch torchgen functorch fasterisnet typing_extensions sympy mpmath networkx jinja2 markupsafe fsspec filelock
    setuptools pkg_resources _distutils_hack nvidia triton optree cuda
'''.split())

class Only(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        there = name.partition(".")[0] in ALLOWED or name.startswith("_sysconfigdata")
        return super().find_spec(name, path, target) if there else None

sys.meta_path = [Only if finder is PathFinder else finder for finder in sys.meta_path]
import fasterisnet as fi
from fasterisnet.cli import main

def code(*arguments):
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code

assert code("--help") == 0
assert code("train", "--help") == 0
assert code("--version") == 0
assert code("train", "--learning-rate", "1") == 2
assert code("train", "--data", "x") == 1
assert code("evaluate", "x") == 1

import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2)).eval()
maps = fi.explain(net, torch.rand(2, 3, 8, 8), rule="zplus")
assert maps.shape == (2, 3, 8, 8) and bool(maps.isfinite().all())
labels, masks = torch.tensor([0, 1]), torch.ones(2, 1, 8, 8)
fi.Stochastic(0.5, ranges=(0.1, 10.0)).loss(net, torch.rand(2, 3, 8, 8), labels, masks).total.backward()
assert "numpy" not in sys.modules
"""


def test_without_extras() -> None:
    done = subprocess.run([sys.executable, "-W", "default", "-c", BARE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Failed to initialize NumPy" not in done.stderr
    assert "--resume RUN" in done.stdout and "fasterisnet 0." in done.stdout
    advice = [line for line in done.stderr.splitlines() if "No module named" in line]
    root = Path(__file__).resolve().parents[1]
    assert len(advice) == 2 and all(f"pip install '{root}[train]'" in line for line in advice)


class Installed:
    """From a wheel, or from a folder."""

    requires = ["torch>=2.6", 'onnx; extra == "export"', 'rich>=1 ; extra == "train"', "pyyaml; extra == 'train'"]

    def __init__(self, url: str | None) -> None:
        self.url = url

    def read_text(self, _: str) -> str | None:
        return None if self.url is None else f'{{"url": "{self.url}", "dir_info": {{}}}}'


@pytest.mark.parametrize(("url", "found"), [(None, None), ("file:///nowhere", None), ("file://{folder}", "{folder}")])
def test_the_advice_fits_where_the_package_came_from(
    url: str | None, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "source"
    (folder / "src" / "fasterisnet").mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    there = Installed(url and url.format(folder=folder))
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site" / "fasterisnet" / "extras.py"))
    monkeypatch.setattr(metadata, "distribution", lambda _: there)
    monkeypatch.setattr(metadata, "requires", lambda _: there.requires)
    wanted: Any = "pip install 'rich>=1' pyyaml" if found is None else f"pip install '{folder}[train]'"
    assert extras.install("train") == extras.install_module("yaml") == wanted
    assert extras.install_module("onnx.helper").endswith("onnx" if found is None else "[export]'")
