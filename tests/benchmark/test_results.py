"""The results in the repository: the tables and the page about them say what the result files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasterisnet.benchmark.runner import Recipe, finished
from fasterisnet.benchmark.tables import read_results, table

ROOT = Path(__file__).parents[2]
EXPERIMENTS = [name for name in ("mnist", "dogs", "xray") if list((ROOT / "results" / name).glob("*-seed*.json"))]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_table_is_the_one_of_the_result_files(name: str) -> None:
    folder, recipe = ROOT / "results" / name, Recipe.read(name)
    made = table(recipe, read_results(folder, list(recipe.rows)))
    assert (folder / "table.md").read_text(encoding="utf-8") == made + "\n"
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert made in page


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_results_were_made_with_the_recipe(name: str, tmp_path: Path) -> None:
    recipe = Recipe.read(name)
    for path in (ROOT / "results" / name).glob("*-seed*.json"):
        row, seed = path.stem.rsplit("-seed", 1)
        assert finished(path, recipe.config(row, int(seed), "DIR", tmp_path, {}))
