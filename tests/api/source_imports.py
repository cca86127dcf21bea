"""What the files of the package import, read from their text."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "src" / "fasterisnet"


class Import(NamedTuple):
    """Where, in which part of the package, and of what: a name with dots."""

    file: str
    part: str
    name: str


def part_of(parts: tuple[str, ...]) -> str:
    """The package, or the module at the root, that a file or a name belongs to; the root itself is ''."""
    return "" if not parts or parts[0] == "__init__" else parts[0]


@cache
def imports() -> list[Import]:
    """All of them, also those inside functions; `pages` are texts that are written for others."""
    return [
        found for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "pages" for found in _imports_of(path)
    ]


def _imports_of(path: Path) -> Iterator[Import]:
    place = path.relative_to(PACKAGE).with_suffix("")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place}: imports are absolute here"
            whole = node.module == PACKAGE.name
            names = [f"{node.module}.{alias.name}" for alias in node.names] if whole else [str(node.module)]
        for name in names:
            yield Import(place.as_posix(), part_of(place.parts), name)


def own() -> Iterator[tuple[Import, str]]:
    """Imports of the package's own parts, and the part that is meant; a name of the root's own is ''."""
    for found in imports():
        first, _, rest = found.name.partition(".")
        if first == PACKAGE.name:
            part = rest.split(".")[0]
            known = (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()
            yield found, part if part and known else ""


def foreign() -> Iterator[tuple[Import, str]]:
    """Imports of others' packages, and the name of the package."""
    for found in imports():
        first = found.name.split(".")[0]
        if first not in sys.stdlib_module_names and first != PACKAGE.name:
            yield found, first
