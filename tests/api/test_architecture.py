"""docs/architecture.md is true: the order of imports is the tested one, and what it points at is there."""

from __future__ import annotations

import re

from api.source_imports import PACKAGE
from api.test_import_directions import ORDER

TEXT = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_order_is_the_tested_one() -> None:
    (block,) = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    shown = [set() if line.startswith("fasterisnet:") else set(line.split(", ")) for line in block.splitlines()]
    assert shown == [parts - {""} for parts in ORDER]


def test_what_it_points_at_is_there() -> None:
    found = re.findall(r"`((?:\w+/)?\w+\.py)`: ((?:`\w+`(?:, )?)+)", TEXT)
    assert len(found) >= 15
    for file, names in found:
        source = (PACKAGE / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^\s*(?:def|class) {name}\b", source, re.MULTILINE), f"{file} has no {name}"


def test_files_and_folders_exist() -> None:
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?|\w+\.py)`", TEXT)) - {"tests/api/test_import_directions.py"}
    assert [name for name in sorted(named) if not (PACKAGE / name).exists()] == []
