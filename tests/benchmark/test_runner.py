"""An experiment that is stopped goes on, one that is finished is not repeated, and its table comes from its files."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file

from commands import environment
from fasterisnet.benchmark import pictures, tables
from fasterisnet.benchmark.recipe import Recipe
from fasterisnet.benchmark.results import finished
from fasterisnet.benchmark.tables import DRAWS, command_of
from fasterisnet.cli import main
from fasterisnet.data.drawn import drawn_source
from fasterisnet.errors import UsageError
from fasterisnet.evaluation.posterior import posterior
from fasterisnet.runs import report
from fasterisnet.training import loop

RECIPE = """
data: drawn
seeds: [0]
tests: [iid, ood, deceiving]
common:
  {model: small, size: 16, epochs: 2, batch: 10, workers: 0, ranges: [0.5, 5], tensorboard: false, watch: [iid, ood],
   audit: 9}
rows:
  standard: {method: standard}
  reference: {method: standard, data_options: {bias: none}}
  stochastic: {method: stochastic, checkpoint_every: 2, ranges: null, calibration_epochs: 0, calibration_batches: 2}
paper:
  standard: [1.0, 0.654, 0.124]
"""


class Place:
    """A recipe, and where its runs and results go."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.results = folder / "results"
        recipe = folder / "recipe.yaml"
        recipe.write_text(RECIPE)
        self.options = ["--recipe", str(recipe), "--runs", str(folder / "runs"), "--results", str(self.results)]

    def run(self, *more: str) -> int:
        return main(["benchmark", "mnist", *self.options, *more])

    @staticmethod
    def like(other: Place, folder: Path) -> Place:
        """With its runs and results, as if they had been made here."""
        shutil.copytree(other.results.parent, folder)
        for path in (folder / "results").glob("*.json"):
            path.write_text(path.read_text().replace(str(other.results.parent), str(folder)))
        return Place(folder)

    def tests(self) -> dict[str, Any]:
        return {path.stem: json.loads(path.read_text())["tests"] for path in sorted(self.results.glob("*.json"))}


@pytest.fixture(autouse=True, scope="module")
def few_and_no_pictures() -> Iterator[None]:
    """Sixty to learn from, and none of single runs, which take longer than the training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "picture", lambda *_: None)
        patch.setitem(drawn_source.__kwdefaults__, "per_class", 20)
        patch.setitem(drawn_source.__kwdefaults__, "size", 16)
        yield


@pytest.fixture(autouse=True)
def no_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the results are drawn for `whole` and for the test that looks at them."""
    if request.function is not test_the_pictures_come_from_the_results:
        for place, name in (
            (tables, "accuracy_panels"),
            (tables, "loss_panels"),
            (tables, "curve_of_f"),
            (pictures, "heatmap_figure"),
        ):
            monkeypatch.setattr(place, name, lambda *_, **__: None)
        for place in (tables, pictures):
            monkeypatch.setattr(place, "save_figure", lambda _, path, **__: path.touch())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """All rows, finished; not to be changed."""
    place = Place(tmp_path_factory.mktemp("benchmark") / "whole")
    assert place.run() == 0
    return place


@pytest.fixture
def place(whole: Place, tmp_path: Path) -> Place:
    """A copy to be changed."""
    return Place.like(whole, tmp_path / "a")


def test_stopped_twice_it_ends_the_same(
    tmp_path: Path, whole: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = Place(tmp_path / "cut")
    update = loop.Training._update
    for limit in (10, 9):
        count = 0

        def stopped(training: Any, limit: int = limit) -> None:
            nonlocal count
            count += 1
            if count > limit:
                raise KeyboardInterrupt
            update(training)

        monkeypatch.setattr(loop.Training, "_update", stopped)
        assert cut.run() == 130
    monkeypatch.setattr(loop.Training, "_update", update)
    assert cut.run() == 0
    assert cut.tests() == whole.tests() and len(whole.tests()) == 3
    capsys.readouterr()


def test_finished_rows_are_not_repeated(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("fasterisnet.benchmark.runner.train", forbidden)
    assert place.run("--methods", "standard") == 0
    assert "standard-seed0 is finished (drawn); from scratch: --runs NEW" in capsys.readouterr().out
    assert place.run("--report") == 0


def test_the_table_has_means_gaps_and_the_paper(
    tmp_path: Path, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in place.results.glob("*-seed0.*"):
        path.unlink() if not path.name.startswith("standard") else None
    assert place.run("--methods", "standard", "--seeds", "0", "1") == 0
    first, second = (place.tests()[f"standard-seed{seed}"] for seed in (0, 1))
    table = (place.results / "table.md").read_text()
    assert table.strip() in capsys.readouterr().out
    line = next(line for line in table.splitlines() if line.startswith("| standard"))
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    mean = (first["deceiving"]["accuracy"] + second["deceiving"]["accuracy"]) / 2
    assert cells[1] == "0, 1" and cells[2].isdigit() and cells[3] == "2"
    assert cells[6].startswith(f"{mean:.3f} ±") and cells[6].endswith("[0.124]")
    gaps = [
        max(t[k]["accuracy"] for k in t) - min(t[k]["accuracy"] for k in t)
        for t in (only_tests(first), only_tests(second))
    ]
    assert cells[7] == f"{100 * max(gaps):.2f}"
    mass = (first["deceiving"]["background_mass"] + second["deceiving"]["background_mass"]) / 2
    assert cells[8] == f"{100 * mass:.2f}%"
    assert "`fasterisnet benchmark mnist --methods standard --seeds 0 1 --recipe " in line
    details = [line.split(" | ") for line in (place.results / "details.md").read_text().splitlines()[4:]]
    assert [(words[1], words[2]) for words in details] == [(s, t) for s in "01" for t in ("iid", "ood", "deceiving")]
    known = posterior(first["ood"]["confusion"], draws=DRAWS)
    assert details[1][5] == f"{known.macro['f1'].mean:.3f} [{known.macro['f1'].low:.3f}, {known.macro['f1'].high:.3f}]"
    audited = json.loads((tmp_path / "a" / "runs" / "standard-seed1" / "audit" / "audit.json").read_text())
    changed = audited["models"][0]["causal"]["tests"]["mixed_other"]["changed"]
    last = (place.results / "causal.md").read_text().splitlines()[-1]
    assert last.startswith(f"| standard | 1 | {audited['split']} | {audited['images']} | {audited['verdict']} |")
    assert f"{changed['mean']:.3f} [{changed['low']:.3f}, {changed['high']:.3f}]" in last


def test_what_must_not_be_shown_is_an_outline(tmp_path: Path) -> None:
    place = Place(tmp_path / "a")
    (tmp_path / "a" / "recipe.yaml").write_text(RECIPE + "outlines: true\n")
    assert place.run("--methods", "standard", "--set", "audit=0", "--set", "epochs=1") == 0
    maps = load_file(place.results / "standard-seed0.safetensors")
    assert bool((maps["images"] == 1).all()) and 0 < maps["masks"].float().mean() < 1 and bool(maps["maps"].any())


def test_the_pictures_come_from_the_results(tmp_path: Path, place: Place) -> None:
    shutil.rmtree(tmp_path / "a" / "runs")
    before = {path.name: path.read_bytes() for path in place.results.glob("*.png")}
    assert sorted(before) == ["accuracy.png", "f.png", "heatmaps.png", "losses.png"]
    for name in before:
        (place.results / name).unlink()
    assert place.run("--report") == 0
    assert {path.name: path.read_bytes() for path in place.results.glob("*.png")} == before
    maps = load_file(place.results / "stochastic-seed0.safetensors")
    assert maps["images"].shape[0] == maps["maps"].shape[0] == maps["masks"].shape[0] > 1
    assert bool(maps["maps"].abs().sum((1, 2)).gt(0).all())
    (place.results / "stochastic-seed0.safetensors").write_bytes(b"no tensors")
    assert place.run("--report") == 1


def test_results_of_the_same_data_elsewhere_count(
    tmp_path: Path, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    file = place.results / "standard-seed0.json"
    recipe = Recipe.read("mnist", str(tmp_path / "a" / "recipe.yaml"))
    content = json.loads(file.read_text())
    content["config"]["data"] = "drawn:here?limit=3"
    file.write_text(json.dumps(content))
    changes: dict[str, Any] = {"data": "drawn:there?limit=3"}
    assert finished(file, recipe.config("standard", 0, None, tmp_path, changes))
    for other in ("drawn:there", "drawn", "mnist:here?limit=3"):
        with pytest.raises(UsageError, match="was made with data"):
            finished(file, recipe.config("standard", 0, None, tmp_path, {"data": other}))
    del content["config"]["calibration_batches"]  # it did not exist when the run was made
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="calibration_batches = 0, not 5"):
        finished(file, recipe.config("standard", 0, None, tmp_path, {**changes, "calibration_batches": 5}))
    capsys.readouterr()


@pytest.mark.parametrize("content", ["{}", "[1]", "{", "null"])
def test_files_that_are_no_results(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = Place(tmp_path / "a")
    place.results.mkdir()
    (place.results / "standard-seed0.json").write_text(content)
    assert place.run("--report") == 1 and place.run("--methods", "standard") == 1
    assert "is not a result" in capsys.readouterr().err


def only_tests(result: dict[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in ("iid", "ood", "deceiving")}


def test_other_options_are_not_mixed_into_a_begun_run(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.run("--methods", "standard", "--set", "epochs=3") == 2
    assert "was made with epochs = 2, not 3" in capsys.readouterr().err
    (place.results / "standard-seed0.json").unlink()
    assert place.run("--methods", "standard", "--set", "epochs=3") == 2
    assert "was begun with epochs = 2, not 3" in capsys.readouterr().err


def test_other_options_are_refused_before_anything_is_trained(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place.results / "reference-seed0.json").unlink()
    monkeypatch.setattr("fasterisnet.benchmark.runner.train", lambda *_, **__: pytest.fail("trained"))
    assert place.run("--methods", "reference", "standard", "--set", "epochs=3") == 2
    assert place.run("--methods", "standard", "--seeds", "1", "--set", "epochs=3") == 2  # it would share a row
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all("was made with epochs = 2, not 3" in line for line in errors)
    content = json.loads((place.results / "standard-seed0.json").read_text())
    content["config"] |= {"seed": 1, "lr": 0.5}
    (place.results / "standard-seed1.json").write_text(json.dumps(content))
    assert place.run("--report") == 1
    assert "is no second seed of its row: the first was made with lr" in capsys.readouterr().err


def test_a_result_is_the_last_thing_a_row_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path / "a")
    with monkeypatch.context() as patched:
        patched.setattr("fasterisnet.benchmark.runner.save_maps", Mock(side_effect=KeyboardInterrupt))
        assert place.run("--methods", "standard") == 130
    assert not list(place.results.glob("*.json"))
    assert place.run("--methods", "standard") == 0
    assert sorted(path.suffix for path in place.results.glob("standard*")) == [".json", ".safetensors"]


def test_a_report_of_an_older_version_is_made_again(tmp_path: Path, place: Place) -> None:
    result, report = place.results / "standard-seed0.json", tmp_path / "a" / "runs" / "standard-seed0" / "report.json"
    before = json.loads(result.read_text())
    result.unlink()
    old = json.loads(report.read_text())
    del old["training_samples"]
    report.write_text(json.dumps(old))
    assert place.run("--methods", "standard") == 0
    after = json.loads(result.read_text())
    assert {**after, "inference_times_standard": 0} == {**before, "inference_times_standard": 0}  # made of times


def test_maps_of_other_samples_are_not_drawn_over_these(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.run("--report") == 0
    assert "is without" not in capsys.readouterr().out
    file = place.results / "reference-seed0.safetensors"
    save_file({**load_file(file), "images": load_file(file)["images"].flip(0).contiguous()}, file)
    assert place.run("--report") == 0
    assert "heatmaps.png is without reference" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rows one after the other: the second is begun by processes that are already there."""
    place = Place(tmp_path / "a")
    fewer = "audit: 0, data_options: {per_class: 20, size: 16}}"
    (tmp_path / "a" / "recipe.yaml").write_text(RECIPE.replace("audit: 9}", fewer))
    more = ["--methods", "standard", "stochastic"]
    more += [word for option in ("devices=2", "accelerator=cpu", "epochs=1") for word in ("--set", option)]
    command = [sys.executable, "-m", "fasterisnet", "benchmark", "mnist", *place.options, *more]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(place.tests()) == ["standard-seed0", "stochastic-seed0"]
    assert done.stdout.count("| stochastic | 0 |") == 1
    assert place.run(*more) == 0 and capsys.readouterr().out.count("is finished") == 2


def test_options_of_data_are_joined_and_those_given_win(tmp_path: Path) -> None:
    Place(tmp_path / "a")
    recipe = Recipe.read("mnist", str(tmp_path / "a" / "recipe.yaml"))
    for row, data, joined in (
        ("reference", "a b", "drawn:a b?bias=none"),
        ("reference", "DIR?limit=5", "drawn:DIR?bias=none&limit=5"),
        ("reference", "DIR?bias=train", "drawn:DIR?bias=train"),
        ("standard", "DIR?limit=5", "drawn:DIR?limit=5"),
        ("standard", None, "drawn"),
    ):
        assert recipe.config(row, 0, data, tmp_path, {}).data == joined


def test_commands_can_be_pasted(tmp_path: Path) -> None:
    place = Place(tmp_path / "a b")
    assert place.run("--methods", "standard", "--set", "watch=[iid]") == 0
    command = json.loads((place.results / "standard-seed0.json").read_text())["command"]
    assert shlex.split(command)[3:] == [
        "--methods",
        "standard",
        "--seeds",
        "0",
        *place.options[:2],
        "--set",
        "watch=[iid]",
    ]
    assert command_of("fasterisnet benchmark mnist --seeds 0 --data '/a b/c?limit=5'", ["0", "3"]) == (
        "fasterisnet benchmark mnist --seeds 0 3 --data 'DIR?limit=5'"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has to hold keys"),
        ("data: drawn", "has no 'seeds'"),
        (RECIPE.replace("paper", "papers"), "unknown key 'papers'; did you mean 'paper'"),
        (RECIPE.replace("epochs: 2", "epoch: 2"), "common: 'epoch' is not an option here; did you mean 'epochs'"),
        (RECIPE.replace("method: standard}", "method: standard, seed: 3}"), "standard: 'seed' is not an option here"),
    ],
)
def test_mistakes_in_recipes(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(content)
    with pytest.raises(UsageError, match=message):
        Recipe.read("mnist", str(tmp_path / "recipe.yaml"))


@pytest.mark.parametrize("file", [None, "paper"])
@pytest.mark.parametrize("name", ["mnist", "dogs", "xray"])
def test_the_recipes_of_the_package_are_valid(name: str, file: str | None, tmp_path: Path) -> None:
    recipe = Recipe.read(name, file)
    assert recipe.name == (f"{name}-paper" if file else name)
    for row in recipe.rows:
        config = recipe.config(row, 1, "DIR", tmp_path, {})
        assert config.data.startswith(f"{name}:DIR") and config.seed == 1
    for row, numbers in recipe.paper.items():
        assert len(numbers) == len(recipe.tests), row


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "epochz=3"], "did you mean 'epochs'"),
        (["--set", "epochs"], "KEY=VALUE"),
        (["--set", "lr=["], "cannot be read"),
        (["--methods", "stocastic"], "did you mean 'stochastic'"),
        (["--recipe", "nowhere.yaml"], "cannot be read"),
        (["--set", "seed=5"], "use --seeds"),
        (["--set", "out=here"], "use --runs"),
        (["--set", "data=drawn"], "use --data"),
    ],
)
def test_mistakes(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "mnist", *options]) == 2
    assert message in capsys.readouterr().err
