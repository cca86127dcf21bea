"""docs/equations.md is true: every label of the paper stands in the docstring of the object the table names."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "equations.md"
ROWS = [
    (label, path)
    for labels, path in re.findall(r"^\| (`.+?`) \|.*\| `(fasterisnet\.[\w.]+)` \|$", PAGE.read_text("utf-8"), re.M)
    for label in re.findall(r"`([^`]+)`", labels)
]


def named(path: str) -> Any:
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            found = getattr(found, name)
        return found
    raise AssertionError(path)


def test_the_table_is_read() -> None:
    assert len(ROWS) > 18


@pytest.mark.parametrize(("label", "path"), ROWS)
def test_labels_stand_where_the_equation_is(label: str, path: str) -> None:
    assert label in (named(path).__doc__ or "")
