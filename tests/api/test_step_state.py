"""C1 and C2 travel with the state of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fasterisnet as fi
from fasterisnet.errors import InputError
from fasterisnet.methods import Range

RANGES = fi.Ranges({"input": Range((0.25, 0.5), (1.0, 2.0)), "layer": Range((1e-3, 2e-3), (0.5, 0.7))})


def step(method: fi.Standard | fi.Dual) -> fi.Step:
    return fi.Step(nn.Linear(3, 2), method)


@pytest.mark.parametrize("ranges", [RANGES, (0.3, 0.7)], ids=["calibrated", "a pair"])
def test_they_come_back(tmp_path: Path, ranges: fi.Ranges | tuple[float, float]) -> None:
    """From memory, from a file without pickled code, and from a file of tensors alone."""
    state = step(fi.Dual(ranges=ranges)).state_dict()
    torch.save(state, tmp_path / "state.pt")
    save_file(state, tmp_path / "state.safetensors")
    for found in (
        state,
        torch.load(tmp_path / "state.pt", weights_only=True),
        load_file(tmp_path / "state.safetensors"),
    ):
        fresh = step(fi.Dual())
        fresh.load_state_dict(found)
        assert fresh.method.ranges == ranges  # type: ignore[attr-defined]


def test_states_without_them_still_load() -> None:
    old = {f"model.{name}": value for name, value in nn.Linear(3, 2).state_dict().items()}
    for method in (fi.Standard(), fi.Dual(ranges=RANGES)):
        fresh = step(method)
        fresh.load_state_dict(old)
        assert torch.equal(fresh.model.weight, old["model.weight"])  # type: ignore[arg-type]
        assert getattr(method, "ranges", RANGES) == RANGES
    before = step(fi.Dual(ranges=RANGES))
    before.load_state_dict(step(fi.Dual()).state_dict())
    assert before.method.ranges == RANGES  # type: ignore[attr-defined]


def test_other_missing_keys_are_still_missed() -> None:
    with pytest.raises(RuntimeError, match=r"Missing key.*model\.bias"):
        step(fi.Dual()).load_state_dict({"model.weight": torch.zeros(2, 3)})


def test_inside_another_module() -> None:
    outer = nn.ModuleDict({"step": step(fi.Dual(ranges=RANGES))})
    fresh = nn.ModuleDict({"step": step(fi.Dual())})
    fresh.load_state_dict(outer.state_dict())
    assert fresh["step"].method.ranges == RANGES  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "bad", [torch.zeros(3), torch.tensor([1, 2, 3], dtype=torch.uint8), "text", torch.tensor(list(b"[1, 2, 3]"))]
)
def test_what_is_no_calibration_is_refused(bad: object) -> None:
    state = {**step(fi.Dual()).state_dict(), "_extra_state": bad}
    with pytest.raises(InputError, match="alibrate again"):
        step(fi.Dual()).load_state_dict(state)
