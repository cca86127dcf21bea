"""The run folder: what a training leaves on disk, and how it is read again without trusting it.

config.yaml         every option of the run
data.json           how many samples each split had when the run began, and how many of them a usable mask
calibration.json    C1 and C2
metrics.csv         one row an epoch
best.safetensors    the weights of the best epoch, a plain state_dict; best.json says what they are of
state.pt            everything needed to go on (tensors and plain values only)
report.md, .json    the tests, after the last epoch
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fasterisnet.data.preparing import Preparation
from fasterisnet.errors import InputError, UsageError
from fasterisnet.models import build_model
from fasterisnet.training.config import Config
from fasterisnet.writing import replacing, write_text

Row = dict[str, float | int]


@dataclass(frozen=True)
class Card:
    """What weights are of: enough to use them without the run's configuration."""

    model: str
    classes: list[str]
    multi_label: bool
    preparation: dict[str, Any]
    method: str
    zb: bool
    epoch: int
    validation_loss: float | None

    @property
    def prepare(self) -> Preparation:
        """How images become input of this network."""
        return Preparation.from_dict(self.preparation)

    @property
    def box(self) -> tuple[Any, Any] | None:
        """For zB, if the network was trained with it."""
        return self.prepare.box if self.zb else None


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
        return Config.read(path, {})

    def check_new(self) -> None:
        """A folder that holds a run is left alone."""
        if self.path("config.yaml").exists():
            raise UsageError(
                f"{self.folder} holds a run: go on with `--resume {self.folder}`, remove it, or choose another --out."
            )

    def create(self, config: Config) -> None:
        """Begin a run."""
        write_text(self.path("config.yaml"), config.write())

    # --- weights ---------------------------------------------------------------------------------------------------

    def save_weights(self, state: dict[str, Tensor], card: Card, name: str = "best") -> None:
        """Weights as safetensors, with their card inside and, for people, beside them."""
        described = json.dumps(asdict(card), indent=2)
        copies = {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in state.items()}
        with replacing(self.path(f"{name}.safetensors")) as temporary:
            save_file(copies, temporary, {"card": described})
        write_text(self.path(f"{name}.json"), described)

    def load_weights(self, name: str = "best") -> tuple[dict[str, Tensor], Card]:
        """Weights and their card."""
        path = self.path(f"{name}.safetensors")
        if not path.is_file():
            raise UsageError(f"{self.folder} has no {path.name}; has an epoch been finished? `train --resume` goes on.")
        try:
            with safe_open(path, "pt") as file:
                card = Card(**json.loads((file.metadata() or {})["card"]))
                return {key: file.get_tensor(key) for key in file.keys()}, card  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{path} is damaged or was not written by this program ({error}); restore a copy, or train again."
            ) from error

    def load_model(self, name: str = "best", *, trust: bool = False) -> tuple[nn.Module, Card]:
        """The trained network, a plain module in eval mode, and its card."""
        state, card = self.load_weights(name)
        self.check_trust(card.model, trust)
        model = build_model(card.model, len(card.classes), channels=card.prepare.channels)
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise InputError(f"{self.path(name)}.safetensors does not fit the model '{card.model}': {error}") from error
        return model.eval(), card

    def check_trust(self, model: str, trust: bool) -> None:
        """A run that names code to import is followed only by those who said so."""
        if names_code(model) and not trust:
            raise UsageError(
                f"{self.folder} names its model as '{model}', code that would be imported and called; "
                "if the run is yours, say --trust."
            )

    # --- training state --------------------------------------------------------------------------------------------

    def save_state(self, state: dict[str, Any]) -> None:
        """Everything needed to go on."""
        with replacing(self.path("state.pt")) as temporary:
            torch.save(state, temporary)

    def load_state(self) -> dict[str, Any] | None:
        """What `save_state` wrote, None if nothing was saved yet. Files that could run code are refused."""
        path = self.path("state.pt")
        if not path.exists():
            return None
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
        if not isinstance(state, dict) or "progress" not in state:
            raise InputError(f"{path} is not the state of a training run.")
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
    def report(self) -> dict[str, Any] | None:
        """The tests, None if they are still to be made or lack something that a report has today."""
        try:
            content = json.loads(self.path("report.json").read_text(encoding="utf-8"))
            return content if content.keys() >= {"epoch", "training_samples", "tests"} else None
        except (OSError, ValueError, AttributeError):
            return None

    def write_json(self, name: str, content: Any) -> None:
        """A JSON file."""
        write_text(self.path(name), json.dumps(content, indent=2) + "\n")


def names_code(model: str) -> bool:
    """Whether a model is named as `package.module:function`."""
    return ":" in model and not model.startswith(("torchvision:", "timm:"))
