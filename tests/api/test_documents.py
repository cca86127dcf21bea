"""What README shows runs, and so do the examples."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import fasterisnet
from api.test_import_directions import LEVELS
from fasterisnet.cli import parser
from fasterisnet.cli.options import given_options
from fasterisnet.runs.config import Config

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py") if path.stem != "bars")
# No dependencies of this package, not even to test it.
NEEDS = {"huggingface_trainer.py": ["transformers", "accelerate"], "monai_volumes.py": ["monai"]}


DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def accuracies(printed: str) -> tuple[float, float]:
    found = dict(re.findall(r"^(i\.i\.d\.|deceiving): ([\d.]+)$", printed, re.MULTILINE))
    return float(found["i.i.d."]), float(found["deceiving"])


def test_python_of_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One block after the other, as a reader would; the network is a smaller one."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    code = "\n".join(blocks)
    for shown, quick in (("resnet50", "shufflenet_v2_x0_5"), ("224, 224", "32, 32")):
        assert shown in code
        code = code.replace(shown, quick)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    images, labels, masks = torch.rand(4, 3, 32, 32), torch.tensor([7, 7, 2, 0]), torch.ones(4, 1, 32, 32)
    namespace = {"loader": [(images, labels)], "labels": labels, "masks": masks}
    exec(compile(code, "README.md", "exec"), namespace)
    assert namespace["maps"].shape == (4, 3, 32, 32) and "OK" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.png", "where.png"]


def test_objects_that_documents_name_are_there() -> None:
    """`fi.NAME`, `fasterisnet.NAME`, `package.module.NAME`: in words as in code."""
    parts = "|".join(part for part in LEVELS if part)
    named = rf"`(?:(?:fi|fasterisnet)\.|(?=(?:{parts})\.))([a-zA-Z_]+(?:\.[a-zA-Z_]+)*)[`(]"
    found = {(path.name, name) for path in DOCUMENTS for name in re.findall(named, path.read_text(encoding="utf-8"))}
    files = (".py", ".md", ".json", ".html", ".yaml", ".png", ".csv")
    wrong = [at for at in sorted(found) if not at[1].endswith(files) and not at[1].isupper() and not _is_there(at[1])]
    assert len(found) > 30 and wrong == []


def _is_there(name: str) -> bool:
    """Whether the package has an object of this name; a module before a function that is called like it."""
    at: Any = fasterisnet
    for word in name.split("."):
        try:
            at = importlib.import_module(f"{at.__name__}.{word}")
        except (ImportError, AttributeError):
            at = getattr(at, word, None)
    return at is not None


def commands() -> list[tuple[str, list[str]]]:
    """What documents tell people to type: their name, and the words of each command."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^(?:\$ )?(fasterisnet .*)$|`(fasterisnet [^`]+ --[^`]+)`", text, re.MULTILINE):
            command = "".join(line)
            if not re.search(r"\$[A-Z]|\.\.\.|\||SETTINGS", command):
                found.append((path.name, shlex.split(command, comments=True)[1:]))
    return found


def test_commands_in_documents_are_commands() -> None:
    """Every option that is shown exists, and those of a run may have the value that is shown."""
    found = commands()
    assert len(found) > 30
    for name, words in found:
        options, unknown = parser().parse_known_args(words)
        assert unknown == [], (name, words)
        if "NAME" not in words:
            Config.read(None, {"data": "DIR", **given_options(options)})


def test_readme_names_every_example() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in EXAMPLES if f"examples/{name}" not in text] == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends, and with a classifier that the pixel does not deceive."""
    for package in NEEDS.get(name, []):
        pytest.importorskip(package, reason=f"to run this example: pip install {' '.join(NEEDS[name])}")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert min(accuracies(capsys.readouterr().out)) >= 0.9


def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells, top to bottom: the first network is deceived, the second is not, and looks elsewhere."""
    cells = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text(encoding="utf-8"))["cells"]
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "first_steps.ipynb", "exec"), namespace)
    printed = capsys.readouterr().out
    plain, isnet = (float(text) for text in re.findall(r"deceiving: ([\d.]+)", printed))
    assert plain < 0.5 and isnet > 0.9
    standard, ours = (int(text) for text in re.findall(r"(\d+)% of the relevance", printed))
    assert standard > 60 and ours < 40
    assert all(not cell.get("outputs") for cell in cells), "a notebook is kept without what it printed"


def test_without_the_method_the_pixel_deceives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the examples would show nothing: their data with their network, trained plainly."""
    code = (ROOT / "examples" / "plain_loop.py").read_text(encoding="utf-8")
    plain = re.sub(r"method = .*\nmethod\.ranges = .*\n", "method = fi.Standard()\n", code)
    assert plain != code
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    exec(compile(plain, "plain_loop.py", "exec"), {})
    iid, deceiving = accuracies(capsys.readouterr().out)
    assert iid >= 0.95 and deceiving < 0.7
