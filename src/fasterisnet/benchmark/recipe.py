"""Recipes: which rows an experiment has, and the options of each."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from fasterisnet.data.sources import parts_of
from fasterisnet.errors import UsageError
from fasterisnet.files import read_file
from fasterisnet.methods import METHODS
from fasterisnet.runs.config import Config
from fasterisnet.runs.spelling import nearest

OPTIONS = ["preset", *(option.name for option in fields(Config))]
PAPER = "paper"  # the recipe of the paper, where the one of a name is another
OWN = {"data": "--data", "seed": "--seeds", "out": "--runs"}  # options that an experiment gives its runs itself


@dataclass(frozen=True)
class Recipe:
    """An experiment: what its rows share, the rows, the splits that test them and what the paper has for each.

    outlines: pictures of the data must not be shown, only the outlines of their masks. quick: what a look at all of
    the rows changes, with `common` and `rows` of its own.
    """

    name: str
    data: str
    seeds: list[int]
    tests: list[str]
    common: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    paper: dict[str, list[float | None]]
    metric: str = "accuracy"
    outlines: bool = False
    quick: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str, file: str | None = None) -> Recipe:
        """The recipe that comes with the package, the one with the paper's settings ("paper"), or a file."""
        own = {None: f"{name}.yaml", PAPER: f"{name}-paper.yaml"}
        source = resources.files("fasterisnet.benchmark") / "recipes" / own[file] if file in own else Path(str(file))
        what = f"The recipe {file or name}"
        try:
            content = yaml.safe_load(read_file(Path(str(source)), pipes=True).decode("utf-8"))
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            raise UsageError(f"{what} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise UsageError(f"{what} has to hold keys and values.")
        content = {"common": {}, "paper": {}, **content}
        known = [key.name for key in fields(cls) if key.name != "name"]
        for key in content:
            if key not in known:
                raise UsageError(f"{what} has an unknown key '{key}'{nearest(str(key), known)}")
        for key in known:
            if key not in (*content, "metric", "outlines", "quick"):
                raise UsageError(f"{what} has no '{key}'.")
        for row, options in {"common": content["common"], **content["rows"]}.items():
            for option in options:
                if option not in (*OPTIONS, "data_options") or option in OWN:
                    raise UsageError(f"{what}, {row}: '{option}' is not an option here{nearest(option, OPTIONS)}")
        return cls(name=f"{name}-paper" if file == PAPER else name, **content)

    def with_all_methods(self) -> Recipe:
        """With a row, of the method's name, for every method that no row trains."""
        trained = {options.get("method") for options in self.rows.values()}
        return replace(self, rows={**self.rows, **{n: {"method": n} for n in METHODS if n not in trained}})

    def quickly(self) -> Recipe:
        """For a look at all rows: what `quick` says comes on top of a row's options."""
        if not self.quick:
            raise UsageError(f"The recipe {self.name} does not say what --quick means; it needs a key 'quick'.")
        common, rows = self.quick.get("common", {}), self.quick.get("rows", {})
        merged = {row: _merged(self.common, options, common, rows.get(row, {})) for row, options in self.rows.items()}
        return replace(self, name=f"{self.name}-quick", common={}, rows=merged, seeds=self.seeds[:1])

    def config(self, row: str, seed: int, data: str | None, out: Path, changes: dict[str, Any]) -> Config:
        """The options of one run. `data` is a folder, with options of its own behind a '?' if need be; they win."""
        if row not in self.rows:
            raise UsageError(f"There is no row '{row}'{nearest(row, list(self.rows))}")
        options = _merged(self.common, self.rows[row])
        if options.get("teacher") in self.rows:
            options["teacher"] = str(out.parent / f"{options['teacher']}-seed{seed}")
        folder, given = parts_of(data) if data else ("", {})
        query = urlencode({**options.pop("data_options", {}), **given})
        place = f"{self.data}:{folder}" if folder else self.data
        options["data"] = place + ("?" + query if query else "")
        return Config.of({**options, "seed": seed, "out": str(out), **changes})


def _merged(*layers: dict[str, Any]) -> dict[str, Any]:
    """Options of which later ones win; those of the data are put together."""
    options: dict[str, Any] = {}
    for layer in layers:
        data = {**options.get("data_options", {}), **layer.get("data_options", {})}
        options = {**options, **layer} | ({"data_options": data} if data else {})
    return options


def change(text: str) -> tuple[str, Any]:
    """An option of all rows and its value, from `KEY=VALUE`."""
    key, separator, value = text.partition("=")
    if not separator:
        raise UsageError(f"--set {text}: give KEY=VALUE.")
    if key not in OPTIONS:
        raise UsageError(f"--set {text}: there is no option '{key}'{nearest(key, OPTIONS)}")
    if key in OWN:
        raise UsageError(f"--set {text}: every run has its own {key}; use {OWN[key]}.")
    try:
        return key, yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"--set {text}: the value cannot be read: {error}") from error
