"""Imports go one way, and the engine and the losses need torch and nothing else."""

from __future__ import annotations

from api.source_imports import PACKAGE, foreign, own

# From low to high; a part may import those on lines above its own. docs/architecture.md shows the same.
ORDER = [
    {"errors", "extras", "files", "memory"},
    {"backgrounds", "losses", "lrp", "targets"},
    {"data", "models"},
    {"methods"},
    {"evaluation"},
    {"runs"},
    {"audit"},
    {"training"},
    {"benchmark"},
    {"adapters", "app", "demo", "tune"},
    {""},  # the package itself: the public names
    {"cli"},
    {"__main__"},
]
LEVELS = {part: level for level, parts in enumerate(ORDER) for part in parts}
# Beside each other, one way.
BESIDE = {("files", "errors"), ("targets", "lrp")}
TORCH_ONLY = {"backgrounds", "errors", "extras", "files", "memory", "lrp", "losses", "targets"}


def test_every_part_has_a_place() -> None:
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert (parts - {"__init__"}) == set(LEVELS) - {""}


def test_imports_go_down() -> None:
    wrong = [
        f"{found.file} imports {found.name}"
        for found, part in own()
        if part != found.part and (found.part, part) not in BESIDE and LEVELS[part] >= LEVELS[found.part]
    ]
    assert wrong == []


def test_the_core_needs_torch_only() -> None:
    wrong = [f"{found.file} imports {name}" for found, name in foreign() if found.part in TORCH_ONLY]
    assert [line for line in wrong if not line.endswith(" imports torch")] == []
