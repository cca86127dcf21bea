"""Result files: one for every finished run. Runs with different options never stand under one name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasterisnet.errors import InputError, UsageError
from fasterisnet.files import read_json
from fasterisnet.runs.config import Config

KEYS = ("command", "machine", "config", "training_samples", "training_seconds", "tests", "epochs")
Results = dict[str, list[dict[str, Any]]]


def read_result(path: Path) -> dict[str, Any]:
    """A result file, if it is one."""
    try:
        content = read_json(path)
        missing = [key for key in KEYS if key not in content]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} is not a result of a benchmark: {error}") from error
    if missing:
        raise InputError(f"{path} is not a result of this version of the benchmark: it has no {', '.join(missing)}.")
    return content


def read_results(folder: Path, known: list[str]) -> Results:
    """Finished runs by row, in the order of the recipe."""
    found: Results = {}
    for path in sorted(folder.glob("*-seed*.json")):
        runs = found.setdefault(_row(path), [])
        runs.append(read_result(path))
        unlike = difference(runs[0]["config"], runs[-1]["config"], "seed")
        if unlike:
            raise InputError(f"{path} is no second seed of its row: the first was made with {unlike}.")
    return {row: found[row] for row in [*known, *(row for row in found if row not in known)] if row in found}


def finished(result: Path, config: Config) -> bool:
    """Whether a run has its result; it is refused where results of its row were made with other options."""
    for other in sorted(result.parent.glob(f"{_row(result)}-seed*.json")):
        unlike = difference(read_result(other)["config"], vars(config), "seed")
        if unlike:
            raise UsageError(f"{other} was made with {unlike}; remove it, or take other --results.")
    return result.exists()


def difference(made: Mapping[str, Any], wanted: Mapping[str, Any], *aside: str) -> str | None:
    """The first option that differs, as `key = value, not value`, apart from the run folder and those set aside.

    Options that are younger than a run had no effect on it. The same data may lie in another folder.
    """
    defaults = vars(Config.of({"data": "any", "preset": "paper"}))
    made, wanted = (json.loads(json.dumps({**defaults, **options})) for options in (made, wanted))
    for key, value in wanted.items():
        before = made[key]
        same = before == value or (key == "data" and _placeless(before) == _placeless(value))
        if not same and key not in ("out", *aside):
            return f"{key} = {before}, not {value}"
    return None


def _row(result: Path) -> str:
    return result.stem.rsplit("-seed", 1)[0]


def _placeless(data: str) -> tuple[str, bool, str]:
    """Data by name and settings, wherever its folder is."""
    place, _, query = data.partition("?")
    name, separator, _ = place.partition(":")
    return name, bool(separator), query
