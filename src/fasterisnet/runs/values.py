"""Kinds of values an option can have: each takes what YAML made of a text and returns what the run uses.

Whatever it cannot be is a ValueError that says what it has to be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], Any]
MOST = 2**53  # of anything that is counted
AUTO = "auto"


def text(value: Any) -> str:
    """Any text."""
    if isinstance(value, bool | list | dict) or value is None:
        raise ValueError("a text")
    return str(value)


def one_of(*choices: str) -> Check:
    """One of a few words."""

    def check(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return value

    check.choices = choices  # pyright: ignore[reportFunctionMemberAccess]
    return check


def whole(least: int) -> Check:
    """A whole number."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise ValueError(f"a whole number, {least} or more")
        return value

    return check


def number(low: float = 0.0, high: float = float("inf")) -> Check:
    """A number in a range; YAML takes 1e-3 for a text."""

    def check(value: Any) -> float:
        try:
            found = float(value) if not isinstance(value, bool) else None
        except (TypeError, ValueError, OverflowError):
            found = None
        if found is None or not low <= found <= high or math.isinf(found):
            raise ValueError(
                f"a number from {low:g} to {high:g}" if high < float("inf") else f"a number from {low:g} on"
            )
        return found

    return check


def switch(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def numbers(value: Any) -> list[float]:
    """A list of numbers."""
    try:
        found = [float(v) for v in (value.split(",") if isinstance(value, str) else value)]
        if not all(map(math.isfinite, found)):
            raise ValueError
        return found
    except (TypeError, ValueError, OverflowError):
        raise ValueError("a list of numbers, like [0.485, 0.456, 0.406]") from None


def automatic(check: Check) -> Check:
    """The word auto, or what else an option can be."""

    def checked(value: Any) -> Any:
        try:
            return value if value == AUTO else check(value)
        except ValueError as error:
            raise ValueError(f"auto, or {error}") from None

    return checked


def weight(value: Any) -> float | list[float] | str | None:
    """P: a number, one for each epoch, auto, or nothing for the paper's."""
    if value is None or value == AUTO:
        return value
    try:
        found = numbers(value) if isinstance(value, list) else number(0, 1)(value)
        if isinstance(found, list) and not (found and all(0 <= v <= 1 for v in found)):
            raise ValueError
    except ValueError:
        raise ValueError("a number from 0 to 1, or a list with one for each epoch") from None
    return found


def depths(value: Any) -> bool | list[str]:
    """True, false or names of modules."""
    if isinstance(value, bool):
        return value
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return value
    raise ValueError("true, false or a list of module names")


def names(value: Any) -> list[str]:
    """A list of names."""
    found = value.split(",") if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(v, str) for v in found):
        raise ValueError("a list of names")
    return found


def ranges(value: Any) -> str | list[float] | None:
    """A file of an earlier calibration, a pair (C1, C2), or nothing for a calibration of this run's own."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 2 and 0 < number()(value[0]) <= number()(value[1]):
        return [float(v) for v in value]
    raise ValueError("a calibration.json, or a pair [C1, C2] with 0 < C1 <= C2")


def weights(value: Any) -> str | list[float] | None:
    """The word balanced, a weight for each class, or nothing."""
    if value is None or value == "balanced":
        return value
    try:
        found = numbers(value)
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise ValueError("balanced, or a list with a number above 0 for each class") from None
    return found


def labels(value: Any) -> list[int]:
    """Numbers of labels."""
    if value in (None, "", []):
        return []
    from fasterisnet.data.sources import read_foreground

    try:
        return list(read_foreground(value))
    except (TypeError, ValueError):
        raise ValueError("the numbers of labels, like 1,2") from None


def window(value: Any) -> str | list[float] | None:
    """Two numbers, auto or nothing."""
    if value is None:
        return None
    from fasterisnet.data.sources import read_window

    try:
        found = read_window(value)
    except (TypeError, ValueError):
        raise ValueError("low,high with low below high, or auto") from None
    return found if isinstance(found, str) else list(found)


def pretrained(value: Any) -> bool | str:
    """True, false, a run or a file."""
    if isinstance(value, bool | str):
        return value
    raise ValueError("true, false, a run folder, or a .safetensors or .pt file")


def unless_empty(check: Check) -> Check:
    """Something, or nothing for the method's own."""
    return lambda value: None if value is None else check(value)
