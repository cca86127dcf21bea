"""Files of a run that were damaged, or made to do harm."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from fasterisnet.data.preparation import Preparation
from fasterisnet.errors import InputError, UsageError
from fasterisnet.models import build_model
from fasterisnet.runs.card import Card
from fasterisnet.runs.folder import Run


class Harm:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def card(model: str = "small") -> Card:
    return Card(model, ["a", "b"], False, Preparation(16).to_dict(), "stochastic", True, 3, 0.5)


def saved(tmp_path: Path) -> tuple[Run, nn.Module]:
    run, model = Run(tmp_path), build_model("small", 2)
    run.save_weights(model.state_dict(), card())
    return run, model


def test_weights_come_back_bit_for_bit(tmp_path: Path) -> None:
    run, model = saved(tmp_path)
    loaded, found = run.load_model()
    assert found == card() and not loaded.training
    assert found.prepare == Preparation(16) and found.box == (0.0, 1.0)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())
    assert json.loads((tmp_path / "best.json").read_text())["classes"] == ["a", "b"]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_cut_off_weights_say_so(tmp_path: Path, share: float) -> None:
    run, _ = saved(tmp_path)
    path = tmp_path / "best.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(InputError, match=r"best.safetensors is damaged"):
        run.load_model()


def test_pickled_weights_are_not_unpickled(tmp_path: Path) -> None:
    run, harmed = Run(tmp_path), tmp_path / "harmed"
    (tmp_path / "best.safetensors").write_bytes(pickle.dumps({"x": Harm(harmed)}))
    with pytest.raises(InputError, match="damaged or was not written"):
        run.load_model()
    assert not harmed.exists()


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_state_that_would_run_code_is_refused(tmp_path: Path, how: str) -> None:
    run, harmed = Run(tmp_path), tmp_path / "harmed"
    state = {"progress": {}, "model": Harm(harmed)}
    if how == "torch":
        torch.save(state, tmp_path / "state.pt")
    else:
        (tmp_path / "state.pt").write_bytes(pickle.dumps(state))
    with pytest.raises(InputError, match=r"state.pt"):
        run.load_state()
    assert not harmed.exists()


def test_a_state_that_holds_code_is_called_by_its_name(tmp_path: Path) -> None:
    torch.save({"progress": {}, "model": Harm(tmp_path / "harmed")}, tmp_path / "state.pt")
    with pytest.raises(InputError, match="could run code"):
        Run(tmp_path).load_state()


def test_a_cut_off_state_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save_state({"progress": {"epoch": 1}, "model": {"w": torch.rand(1000)}})
    assert run.load_state() is not None
    content = (tmp_path / "state.pt").read_bytes()
    (tmp_path / "state.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="damaged or cut off"):
        run.load_state()


def test_a_run_does_not_choose_code_to_import(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save_weights(build_model("small", 2).state_dict(), card("os:getpid"))
    with pytest.raises(UsageError, match="--trust"):
        run.load_model()


def test_weights_of_another_network_are_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save_weights(build_model("small", 3).state_dict(), card())
    with pytest.raises(InputError, match="does not fit the model 'small'"):
        run.load_model()


def test_tied_weights_can_be_saved(tmp_path: Path) -> None:
    run, shared = Run(tmp_path), torch.rand(3, 3)
    run.save_weights({"a": shared, "b": shared}, card())
    state, _ = run.load_weights()
    assert torch.equal(state["a"], shared) and torch.equal(state["b"], shared)


def test_weights_can_be_read_by_whoever_can_read_other_files(tmp_path: Path) -> None:
    run, _ = saved(tmp_path)
    (tmp_path / "ordinary").touch()
    assert run.path("best.safetensors").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_nothing_is_left_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.save_state({"progress": {"epoch": 1}})
    before = (tmp_path / "state.pt").read_bytes()

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        run.save_state({"progress": {"epoch": 2}})
    assert (tmp_path / "state.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]
