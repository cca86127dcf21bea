"""The run folder: what a training leaves on disk, and how it is read again without trusting it.

config.yaml         every option of the run
data.json           how many samples each split had when the run began, and how many of them a usable mask
calibration.json    C1 and C2
metrics.csv         one row an epoch
best.safetensors    the weights of the best epoch, a plain state_dict; best.json says what they are of
best-until-N.*      of a run in stages: the same of the stage that ended with epoch N
state.pt            everything needed to go on (tensors and plain values only)
report.md, .json    the tests, after the last epoch
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fasterisnet.errors import InputError, UsageError
from fasterisnet.files import read_json, write_bytes, write_text
from fasterisnet.methods import METHODS, Method
from fasterisnet.models import build_model
from fasterisnet.runs.card import Card
from fasterisnet.runs.config import Config
from fasterisnet.runs.fingerprint import absolute, digest
from fasterisnet.runs.inputs import preparation_of

Row = dict[str, float | int]


class Run:
    """A run folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, name: str) -> Path:
        """A file of the run."""
        return self.folder / name

    @property
    def config(self) -> Config:
        """The options of the run."""
        path = self.path("config.yaml")
        if not path.is_file():
            raise UsageError(f"{self.folder} is not a run folder: it has no config.yaml.")
        return Config.read(path, {}, stored=True)

    def create(self, config: Config) -> None:
        """Begin a run."""
        write_text(self.path("config.yaml"), replace(config, data=absolute(config.data)).write())

    # --- weights ---------------------------------------------------------------------------------------------------

    def save_weights(self, state: dict[str, Tensor], card: Card, name: str = "best") -> None:
        """Weights as safetensors, with their card inside and, for people, beside them."""
        described = json.dumps(card.to_dict(), indent=2)
        copies = {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in state.items()}
        content = save(copies, {"card": described})
        beside = {**card.to_dict(), **self._checksums(name, hashlib.sha256(content).hexdigest())}
        write_text(self.path(f"{name}.json"), json.dumps(beside, indent=2))
        write_bytes(self.path(f"{name}.safetensors"), content)

    def _checksums(self, name: str, new: str) -> dict[str, str]:
        """Of the weights that are about to be written and of those before them: a kill may leave either."""
        known = self._beside(name)
        before = known.get("sha256_before" if known.get("sha256") == new else "sha256")
        return {"sha256": new} | ({"sha256_before": before} if isinstance(before, str) else {})

    def _beside(self, name: str) -> dict[str, Any]:
        """What stands beside the weights; nothing if it cannot be read, as in runs that were copied in parts."""
        try:
            found = read_json(self.path(f"{name}.json"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def load_weights(self, name: str = "best") -> tuple[dict[str, Tensor], Card]:
        """Weights and their card."""
        path = self.path(f"{name}.safetensors")
        if not path.is_file():
            raise UsageError(f"{self.folder} has no {path.name}; has an epoch been finished? `train --resume` goes on.")
        try:
            self._check_bytes(name)
            with safe_open(path, "pt") as file:
                card = Card.read((file.metadata() or {})["card"])
                return {key: file.get_tensor(key) for key in file.keys()}, card  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{path} is damaged or was not written by this program ({error}); restore a copy, or train again."
            ) from error

    def _check_bytes(self, name: str) -> None:
        """Weights with a checksum beside them have to have it."""
        known = self._beside(name)
        if "sha256" in known and self.checksum(name) not in (known["sha256"], known.get("sha256_before")):
            raise ValueError(f"its bytes have changed since it was written: {name}.json has another checksum")

    def checksum(self, name: str = "best") -> str:
        """SHA-256 of weights: what tells them from those of other runs and epochs."""
        with self.path(f"{name}.safetensors").open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def load_model(self, name: str = "best", *, trust: bool = False) -> tuple[nn.Module, Card]:
        """The trained network, a plain module in eval mode, and its card. trust: the user's word, for code it names."""
        state, card = self.load_weights(name)
        self._check_card(card, name)
        size, channels = card.prepare.size, card.prepare.channels
        model = build_model(card.model, len(card.classes), channels=channels, size=size, trust=trust)
        model = METHODS.get(card.method, Method).network(model, channels, size, **card.shape)
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise InputError(f"{self.path(name)}.safetensors does not fit the model '{card.model}': {error}") from error
        return model.eval(), card

    def _check_card(self, card: Card, name: str) -> None:
        """Weights say themselves what they are of; in a run folder that has to be what the run trains."""
        if not self.path("config.yaml").exists():
            return
        config = self.config
        wanted = {
            "model": config.model, "method": config.method, "zb": config.zb, "preparation": preparation_of(config),
        }  # fmt: skip
        found = {"model": card.model, "method": card.method, "zb": card.zb, "preparation": card.prepare}
        for key, value in wanted.items():
            if found[key] != value:
                raise InputError(
                    f"{self.path(name)}.safetensors says that its {key} is {found[key]}, config.yaml says {value}: "
                    "they are not of one run, and it is not used."
                )

    # --- training state --------------------------------------------------------------------------------------------

    def save_state(self, state: dict[str, Any]) -> None:
        """Everything needed to go on."""
        buffer = io.BytesIO()
        torch.save({**state, "checksum": digest(state)}, buffer)
        write_bytes(self.path("state.pt"), buffer.getbuffer())

    def load_state(self) -> dict[str, Any] | None:
        """What `save_state` wrote, None if nothing was saved yet. Files that could run code are refused."""
        path = self.path("state.pt")
        if not path.exists():
            return None
        if not path.is_file():
            raise InputError(f"{path} is not a file; restore it from a copy, or train again.")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for damaged and for refused files
            if "weights_only" in str(error).lower() or "unsupported" in str(error).lower():
                raise InputError(
                    f"{path} holds more than tensors and plain values, so it is not loaded: it could run code."
                ) from None
            raise InputError(
                f"{path} is damaged or cut off ({type(error).__name__}); restore it from a copy, or train again."
            ) from error
        if not isinstance(state, dict) or not isinstance(state.get("progress"), dict):
            raise InputError(f"{path} is not the state of a training run.")
        checksum = state.pop("checksum", None)
        if checksum is not None and checksum != digest(state):
            raise InputError(f"{path} is damaged: its checksum is wrong; restore it from a copy, or train again.")
        state["checked"] = checksum is not None
        return state

    # --- tables ----------------------------------------------------------------------------------------------------

    def write_metrics(self, rows: list[Row]) -> None:
        """metrics.csv, one row an epoch."""
        if not rows:
            return
        stream = io.StringIO()
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: repr(value) for key, value in row.items()} for row in rows)
        write_text(self.path("metrics.csv"), stream.getvalue())

    @property
    def rows(self) -> list[dict[str, str]]:
        """metrics.csv as it was written."""
        with self.path("metrics.csv").open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    @property
    def report(self) -> dict[str, Any] | None:
        """The tests, None if they are still to be made or lack something that a report has today."""
        try:
            content = read_json(self.path("report.json"))
            return content if content.keys() >= {"epoch", "training_samples", "tests"} else None
        except (OSError, ValueError, AttributeError):
            return None

    def write_json(self, name: str, content: Any) -> None:
        """A JSON file."""
        write_text(self.path(name), json.dumps(content, indent=2) + "\n")
