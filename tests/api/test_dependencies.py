"""What pyproject.toml declares is what the package imports, and the other way round."""

from __future__ import annotations

import re
import tomllib

from api.source_imports import PACKAGE, foreign

NAMES = {"PIL": "pillow", "cv2": "opencv-python-headless", "yaml": "pyyaml"}
# Needed without an import that could be seen.
BY_OTHERS = {
    "onnx": "torch.onnx.export writes with it",
    "onnxscript": "torch.onnx.export translates with it",
    "tensorboard": "lightning's logger writes with it",
    "timm": "models by name: imported by its name",
}
# The parts that need one of the smaller extras, which the message of an ImportError names.
EXTRAS = {
    "app": {"app"}, "boxes": {"data/boxes"}, "coco": {"data/boxes"}, "medical": {"data/medical"},
    "export": {"audit/subjects", "evaluation/export"},
}  # fmt: skip

PROJECT = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def named(requirements: list[str]) -> set[str]:
    return {re.split(r"[\s\[<>=!~;]", text)[0] for text in requirements}


def distribution(module: str) -> str:
    return NAMES.get(module, module.replace("_", "-"))


DECLARED = {extra: named(packages) for extra, packages in PROJECT["optional-dependencies"].items()}
USED = {"": named(PROJECT["dependencies"])} | {e: p for e, p in DECLARED.items() if e not in ("test", "docs")}


def test_what_is_imported_is_declared() -> None:
    declared = set().union(*USED.values())
    assert sorted({f"{name} in {found.file}" for found, name in foreign() if distribution(name) not in declared}) == []


def test_what_is_declared_is_imported() -> None:
    imported = {distribution(name) for _, name in foreign()}
    assert set().union(*USED.values()) - imported - set(BY_OTHERS) == set()
    assert set(BY_OTHERS) <= set().union(*USED.values())


def test_small_extras_are_needed_where_they_are_said_to_be() -> None:
    for extra, files in EXTRAS.items():
        assert {found.file for found, name in foreign() if distribution(name) in DECLARED[extra]} == files, extra


def test_every_declared_package_is_locked() -> None:
    lock = (PACKAGE.parents[1] / "requirements" / "lock.txt").read_text(encoding="utf-8")
    locked = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE))
    assert set().union(*DECLARED.values(), *USED.values()) - locked == set()
    assert "://" not in lock  # where packages come from is the user's business
