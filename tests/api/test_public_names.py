"""The public surface: what there is, and that each says what it takes and returns, with an example."""

from __future__ import annotations

import doctest
import inspect
import io
from pathlib import Path
from typing import Any

import captum.attr
import pytest
import torch

import fasterisnet as fi
from fasterisnet import targets
from fasterisnet.methods import Method, Range

MODULES = {"targets"}
EXCEPTIONS = {"FasterISNetError", "RuleWarning"}


def test_names_are_sorted_and_there() -> None:
    names = fi.__all__
    assert names == sorted(set(names), key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert all(hasattr(fi, name) for name in names)
    public = {name for name, value in vars(fi).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(names) - MODULES


def test_targets_are_sorted_and_there() -> None:
    assert targets.__all__ == sorted(targets.__all__)
    assert all(inspect.getdoc(getattr(targets, name)) for name in targets.__all__)


def documented(name: str) -> str:
    """The docstring; for a method with that of its family, which says what all of them take."""
    public = getattr(fi, name)
    assert public.__doc__, name
    family = [kind for kind in public.__mro__ if issubclass(kind, Method)] if inspect.isclass(public) else []
    return "\n\n".join(inspect.cleandoc(kind.__doc__ or "") for kind in family or [public])


@pytest.mark.filterwarnings("ignore:Attempting to normalize:UserWarning")
@pytest.mark.parametrize("name", sorted(set(fi.__all__) - MODULES - EXCEPTIONS))
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every public object shows how it is called, and that is how it works."""
    examples = doctest.DocTestParser().get_doctest(documented(name), world(), name, None, None)
    assert examples.examples, f"{name} has no example"
    monkeypatch.chdir(tmp_path)
    found = io.StringIO()
    result = doctest.DocTestRunner(verbose=False).run(examples, out=found.write)
    assert result.failed == 0, found.getvalue()


def world() -> dict[str, Any]:
    """What examples take for granted."""
    torch.manual_seed(0)
    model = fi.create_model("small", num_classes=3)
    images, labels, masks = torch.rand(4, 3, 16, 16), torch.tensor([0, 1, 2, 0]), torch.ones(4, 1, 16, 16)
    ranges = fi.Ranges({"input": Range((0.1,), (1.0,))})
    method = fi.Stochastic(ranges=ranges)
    loader = [(images, labels, masks)]
    given = {
        "model": model, "images": images, "labels": labels, "masks": masks, "ranges": ranges, "method": method,
        "loader": loader, "captum": captum,
    }  # fmt: skip
    return given | {name: getattr(fi, name) for name in fi.__all__}


@pytest.mark.parametrize("name", sorted(EXCEPTIONS))
def test_exceptions_say_what_they_are(name: str) -> None:
    assert len(inspect.cleandoc(getattr(fi, name).__doc__)) > 20
