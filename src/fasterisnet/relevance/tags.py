"""What a trace knows of the tensors and operations it has seen."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fasterisnet.errors import RuleError, RuleWarning
from fasterisnet.relevance.operations import Operation, State

Path = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Tag:
    """What the trace knows of a tensor that depends on the network input.

    gate: a sigmoid, a softmax or a normaliser, constant in products. operation: the linear operation or batch norm
    whose output it is; origin: the same, rearranged or not. path: how the network input was padded or reshaped into
    it. captured: the named layer whose output it is.
    """

    version: int
    gate: bool = False
    non_negative: bool = False
    operation: Operation | None = None
    origin: Operation | None = None
    path: Path | None = None
    captured: str = ""


PASSIVE = Tag(-1)


@dataclass
class Met:
    """An operation the network used: how it is treated, how often it was met, where first."""

    name: str
    treatment: str
    count: int = 0
    module: str = ""


@dataclass
class Capture:
    """The output of a named module: its value and the place in the graph where its G can be read."""

    value: Tensor | None = None
    edge: Any = None
    operation: Operation | None = None
    fused: bool = False
    runs: int = 0


@dataclass
class Unruled:
    """Operations without a rule that relevance has been seen to pass."""

    strict: bool
    warned: set[tuple[str, str]] = field(default_factory=set)

    def report(self, name: str, module: str, *, out_of_sight: bool = False) -> None:
        """Warns once, or raises. `out_of_sight`: a custom Function, noticed only where its result is used."""
        place = f"{'used ' if out_of_sight else ''}in module '{module or '(the model itself)'}'"
        message = (
            f"Operation '{name}' {place} has no relevance rule: its ordinary derivative was used. "
            "fasterisnet.check(model, images) shows what that does to the maps."
        )
        if self.strict:
            raise RuleError(message)
        if (name, module) not in self.warned:
            self.warned.add((name, module))
            warnings.warn(message, RuleWarning, stacklevel=2)


def reporter(
    state: State, unruled: Unruled, name: str, module: str, *, out_of_sight: bool = False
) -> Callable[[Tensor], None]:
    """A tensor hook that reports when relevance, not an ordinary gradient, passes."""

    def hook(grad: Tensor | None) -> None:
        if grad is not None and state.table is not None and state.table.name != "gradient":
            unruled.report(name, module, out_of_sight=out_of_sight)

    return hook
