"""C1 and C2 of every supervised depth, as a run keeps them."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fasterisnet.errors import InputError
from fasterisnet.files import read_json, write_text
from fasterisnet.losses.calibration import VANISHED, RunningMoments, range_from_moments

FORMAT = 1


class Range(NamedTuple):
    """C1 and C2 of every map at one depth; goes straight into `heatmap_loss(heatmaps, masks, *range)`."""

    c1: tuple[float, ...]
    c2: tuple[float, ...]


@dataclass(frozen=True)
class Ranges:
    """The calibration of a run: a `Range` for every supervised depth, by name. `calibrate` makes it.

    Example:
        >>> ranges.save("calibration.json")
        >>> method.ranges = Ranges.load("calibration.json")
    """

    depths: Mapping[str, Range]

    def __post_init__(self) -> None:
        if not self.depths:
            raise InputError("A calibration needs C1 and C2 for at least one depth, but it has none.")
        for name, (c1, c2) in self.depths.items():
            if not c1 or len(c1) != len(c2):
                raise InputError(
                    f"Depth {name!r} must have one C1 and one C2 per map, but has {len(c1)} and {len(c2)}."
                )
            if not all(VANISHED <= low <= high < math.inf for low, high in zip(c1, c2, strict=True)):
                raise InputError(
                    f"Depth {name!r} must have finite C1 and C2 with {VANISHED} <= C1 <= C2, but has {c1} and {c2}."
                )

    @classmethod
    def from_moments(cls, moments: Mapping[str, RunningMoments]) -> Self:
        """Turn what was measured at each depth into its range."""
        ranges = {depth: range_from_moments(measured, depth) for depth, measured in moments.items()}
        return cls({d: Range(*(tuple(bound.reshape(-1).tolist()) for bound in pair)) for d, pair in ranges.items()})

    def content(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"format": FORMAT, "depths": {name: {"c1": c1, "c2": c2} for name, (c1, c2) in self.depths.items()}}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON; a reader sees the old file or the whole new one, never a part."""
        write_text(path, json.dumps(self.content(), indent=2, allow_nan=False))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote and refuse anything else."""
        try:
            return cls(_depths(read_json(path)))
        except FileNotFoundError as error:
            raise InputError(f"There is no calibration at {path}. Calibrate first, or correct the path.") from error
        except (OSError, ValueError, OverflowError) as error:
            raise InputError(
                f"{path} is not a calibration written by this version: {error} Calibrate again."
            ) from error


def encoded(ranges: Ranges | tuple[float, float] | None) -> Tensor:
    """C1 and C2 as bytes of JSON in a tensor; an empty one for none."""
    content = None if ranges is None else ranges.content() if isinstance(ranges, Ranges) else list(ranges)
    text = "" if content is None else json.dumps(content, allow_nan=False)
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def decoded(state: Tensor) -> Ranges | tuple[float, float] | None:
    """Back from `encoded`."""
    if not isinstance(state, Tensor) or state.dtype != torch.uint8:
        raise InputError("The state of the step holds no C1 and C2 as this version writes them; calibrate again.")
    if state.numel() == 0:
        return None
    try:
        content = json.loads(bytes(state.flatten().tolist()))
        if _numbers(content) and len(content) == 2:
            return float(content[0]), float(content[1])
        return Ranges(_depths(content))
    except (ValueError, OverflowError) as error:
        raise InputError(f"The state of the step holds no readable C1 and C2: {error} Calibrate again.") from error


def _depths(content: Any) -> dict[str, Range]:
    """Check the content of a calibration file and return its depths."""
    if not isinstance(content, dict) or content.keys() != {"format", "depths"} or content["format"] != FORMAT:
        raise InputError(f'It must hold exactly "format": {FORMAT} and "depths".')
    if not isinstance(content["depths"], dict):
        raise InputError('"depths" must map the name of each depth to its "c1" and "c2".')
    depths: dict[str, Range] = {}
    for name, bounds in content["depths"].items():
        if not isinstance(bounds, dict) or bounds.keys() != {"c1", "c2"} or not all(map(_numbers, bounds.values())):
            raise InputError(f'Depth {name!r} must hold exactly "c1" and "c2", each a list of numbers.')
        depths[name] = Range(*(tuple(float(value) for value in bounds[key]) for key in ("c1", "c2")))
    return depths


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) for value in values)
