"""The results in the repository: the page about them says what the result files say, and recipes are those used."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fasterisnet.benchmark.recipe import Recipe
from fasterisnet.benchmark.results import finished, read_results
from fasterisnet.benchmark.tables import table, write_tables

ROOT = Path(__file__).parents[2]


def published(experiment: str) -> list[Path]:
    """Result files of the repository; those of runs of one's own are not in it."""
    command = ["git", "ls-files", f"results/{experiment}/*-seed*.json"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines()]


# Folders of results, whose recipe they were made with and on which data.
FOLDERS = {
    "mnist": ("mnist", "DIR"),
    "dogs": ("dogs", "DIR"),
    "xray": ("xray", "DIR"),
    "xray-mixed": ("xray", "DIR?split=mixed"),
}
EXPERIMENTS = [name for name in FOLDERS if published(name)]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_page_has_the_table_of_the_result_files(name: str, tmp_path: Path) -> None:
    for path in published(name):
        shutil.copy(path, tmp_path)
    recipe = Recipe.read(FOLDERS[name][0])
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert table(recipe, read_results(tmp_path, list(recipe.rows))) in page


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_one_command_makes_tables_and_figures_again_byte_for_byte(name: str, tmp_path: Path) -> None:
    folder = ROOT / "results" / name
    for path in published(name):
        shutil.copy(path, tmp_path)
        shutil.copy(path.with_suffix(".safetensors"), tmp_path)
    write_tables(Recipe.read(FOLDERS[name][0]), tmp_path)
    made = [path for path in tmp_path.iterdir() if "-seed" not in path.name]
    assert {"table.md", "details.md", "heatmaps.png"} <= {path.name for path in made}
    assert [path.name for path in made if path.read_bytes() != (folder / path.name).read_bytes()] == []


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_results_were_made_with_the_recipe(name: str, tmp_path: Path) -> None:
    own, data = FOLDERS[name]
    recipe = Recipe.read(own)
    for path in published(name):
        row, seed = path.stem.rsplit("-seed", 1)
        assert finished(path, recipe.config(row, int(seed), data, tmp_path, {}))
