"""A look at every method: rows from the recipe and the registry, changed as the recipe's `quick` says, with costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fasterisnet.benchmark.recipe import Recipe
from fasterisnet.benchmark.tables import table
from fasterisnet.cli import main
from fasterisnet.errors import UsageError
from fasterisnet.methods import METHODS

RECIPE = """
data: drawn
seeds: [0, 1]
tests: [iid, ood]
common: {preset: paper, model: resnet18, size: 16, epochs: 50, workers: 0, tensorboard: false, audit: 0}
rows:
  standard: {method: standard, data_options: {bias: none}}
  unet: {method: unet-classifier, segmentation_epochs: 20}
paper: {standard: [1.0, 0.5]}
quick:
  common: {model: small, epochs: 1, batch: 12, explained: 4, data_options: {per_class: 4, size: 16}}
  rows:
    unet: {epochs: 2, segmentation_epochs: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_every_registered_method_has_a_row(recipe: Path) -> None:
    found = Recipe.read("any", str(recipe)).with_all_methods()
    assert {options["method"] for options in found.rows.values()} == set(METHODS)
    assert list(found.rows)[:2] == ["standard", "unet"] and "unet-classifier" not in found.rows
    ours = Recipe.read("mnist").with_all_methods()
    assert {options["method"] for options in ours.rows.values()} == set(METHODS)
    assert {"ag-sononet", "vit"} <= set(ours.rows)


def test_quick_comes_on_top_of_rows(recipe: Path) -> None:
    found = Recipe.read("any", str(recipe)).quickly()
    configs = {row: found.config(row, 0, None, Path("runs") / row, {}) for row in found.rows}
    assert {c.model for c in configs.values()} == {"small"} and found.name == "any-quick" and found.seeds == [0]
    assert [c.epochs for c in configs.values()] == [1, 2] and configs["unet"].segmentation_epochs == 1
    assert configs["standard"].data == "drawn?bias=none&per_class=4&size=16"
    assert configs["unet"].data == "drawn?per_class=4&size=16"


@pytest.mark.parametrize("name", ["mnist"])
def test_our_quick_rows_are_options_of_their_methods(name: str) -> None:
    recipe = Recipe.read(name).with_all_methods().quickly()
    for row in recipe.rows:
        config = recipe.config(row, 0, None, Path("runs") / row, {})
        assert config.model in ("small", "multitask_unet_small", "ag_sononet_small", "vit_tiny_patch16_224"), row


def test_a_recipe_without_quick_says_so() -> None:
    with pytest.raises(UsageError, match="does not say what --quick means"):
        Recipe.read("dogs").quickly()


def test_costs_stand_beside_the_accuracy(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fasterisnet.runs.report.picture", lambda *_: None)
    place = ["--recipe", str(recipe), "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert main(["benchmark", "mnist", "--quick", "--methods", "standard", "unet", *place]) == 0
    shown = capsys.readouterr().out
    results = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json")}
    standard, unet = results["standard-seed0"], results["unet-seed0"]
    assert "--quick" in unet["command"] and unet["parameters"] > standard["parameters"] > 0
    wanted = ("| row", "| standard", "| unet")
    head, mine, other = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith(wanted)
    )  # fmt: skip
    first = head.index("step, × standard")
    assert (mine[first], mine[first + 2]) == ("1.00", "1.00")
    assert mine[first + 1] == f"{standard['inference_times_standard']:.2f}" and float(mine[first + 1]) > 0
    assert other[first + 2] == f"{unet['parameters'] / standard['parameters']:.2f}"
    old = {"standard": [{k: v for k, v in standard.items() if k not in ("parameters", "inference_times_standard")}]}
    assert "× standard" not in table(Recipe.read("any", str(recipe)), old), "results of older versions"
