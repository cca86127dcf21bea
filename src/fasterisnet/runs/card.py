"""What weights are of: written inside and beside them, and read again without trusting it."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from fasterisnet.data.preparation import Preparation
from fasterisnet.errors import InputError

LARGEST = 2**14  # pixels on a side that a card may ask for


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
    shape: dict[str, Any] = field(default_factory=dict)  # of the method: what its network is

    @property
    def prepare(self) -> Preparation:
        """How images become input of this network."""
        return Preparation.from_dict(self.preparation)

    @property
    def box(self) -> tuple[Any, Any] | None:
        """For zB, if the network was trained with it."""
        return self.prepare.box if self.zb else None

    def to_dict(self) -> dict[str, Any]:
        """What is written; an empty shape is not, so that files of methods without one stay as they always were."""
        return {key: value for key, value in asdict(self).items() if key != "shape" or value}

    @classmethod
    def read(cls, text: str) -> Card:
        """A card as `save_weights` wrote it; anything else is a ValueError."""
        try:
            values = json.loads(text)
        except RecursionError:
            raise ValueError("its card is nested too deeply") from None
        known = {value.name for value in fields(cls)}
        needed = {value.name for value in fields(cls) if value.default is value.default_factory is MISSING}
        if not isinstance(values, dict) or not needed <= values.keys() <= known:
            raise ValueError(f"its card has to hold {', '.join(sorted(needed))}")
        card = cls(**values)
        wrong = [name for name, right in card._checks().items() if not right]
        if wrong:
            raise ValueError(f"'{wrong[0]}' of its card is {repr(values[wrong[0]])[:60]}")
        return card

    def _checks(self) -> dict[str, bool]:
        loss = self.validation_loss
        return {
            "model": isinstance(self.model, str),
            "classes": isinstance(self.classes, list) and all(isinstance(c, str) for c in self.classes)
            and 0 < len(set(self.classes)) == len(self.classes),
            "multi_label": isinstance(self.multi_label, bool),
            "preparation": isinstance(self.preparation, dict) and self._is_prepared(),
            "method": isinstance(self.method, str),
            "zb": isinstance(self.zb, bool),
            "epoch": type(self.epoch) is int and self.epoch >= 0,
            "shape": isinstance(self.shape, dict)
            and all(isinstance(v, str | int | float) for v in self.shape.values()),
            "validation_loss": loss is None or (type(loss) in (int, float) and math.isfinite(loss)),
        }  # fmt: skip

    def _is_prepared(self) -> bool:
        try:
            found = self.prepare
        except (InputError, TypeError, ValueError):
            return False
        whole = type(found.size) is int and type(found.channels) is int and found.size <= LARGEST
        numbers = all(type(v) in (int, float) and math.isfinite(v) for v in (*found.mean, *found.std))
        return whole and numbers and isinstance(found.equalise, bool)
