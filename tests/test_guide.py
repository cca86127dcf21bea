"""The guide: its site builds without a warning, and what it tells people to type works."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fasterisnet.cli import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copytree(ROOT / "results", tmp_path / "results")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site/reference/index.html").read_text(encoding="utf-8")
    assert "Stochastic" in page
    assert "fonts.googleapis" not in (tmp_path / "site/index.html").read_text(encoding="utf-8")


FEWER = {
    "[:120]": "[:30]",
    "< 80": "< 16",
    "< 100": "< 22",
    "--epochs 12": "--epochs 1 --workers 0",
    "100.png": "29.png",
}


def test_start_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tutorial from top to bottom, with fewer pictures and epochs."""
    monkeypatch.chdir(tmp_path)

    def quick(code: str) -> str:
        for text, less in FEWER.items():
            code = code.replace(text, less)
        return code

    for code in blocks("start.md", "python"):
        exec(compile(quick(code), "start.md", "exec"), {})
    for line in "".join(blocks("start.md", "console")).splitlines():
        words = quick(line).removeprefix("$ ").split()
        assert words[0] == "fasterisnet"
        assert main(words[1:]) == 0, line
    for made in ("runs/isnet/best.safetensors", "audit/audit.html", "pictures/29.png", "isnet.pt2"):
        assert (tmp_path / made).is_file()


@pytest.mark.parametrize("page", ["loops.md"])
def test_python_of_the_guide(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for code in blocks(page, "python"):
        exec(compile(code, page, "exec"), {})
