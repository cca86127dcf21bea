"""What a run was begun with, in few bytes: whoever resumes it is told what has changed since.

Of every sample: its name, what it is labelled as, and what its files are (size, beginning and end: a picture that was
edited or encoded anew differs in one of them, and a copy of the data elsewhere does not).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import singledispatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasterisnet.data.base import Samples, Source, Subset
from fasterisnet.data.biased import MarkedPictures
from fasterisnet.data.dogs import Dogs
from fasterisnet.data.files import Files
from fasterisnet.data.folder import FolderSamples
from fasterisnet.data.planted import Planted
from fasterisnet.data.sources import KINDS, parts_of
from fasterisnet.data.xray import Xrays
from fasterisnet.runs.config import Config

END = 4096  # bytes of a file that are looked at on either side
SIZE = 8  # bytes of a hash
# Where and how fast a run computes, and how often it is saved, is nobody's business but the user's.
FREE = (
    "data", "out", "workers", "loader_timeout", "tensorboard", "accelerator", "devices", "nodes", "explained",
    "audit", "checkpoint_every", "checkpoint_minutes",
)  # fmt: skip
State = dict[str, Any]


def absolute(data: str) -> str:
    """A text that names data, so that it means the same in another working directory."""
    address, _ = parts_of(data)
    query = data[len(address) :]
    name, colon, place = address.partition(":")
    if name not in KINDS:
        return os.path.abspath(os.path.expanduser(address)) + query
    return f"{name}:{os.path.abspath(os.path.expanduser(place))}{query}" if colon and place else data


def options_of(config: Config) -> dict[str, Any]:
    """The options that decide what a run computes."""
    found = {option.name: getattr(config, option.name) for option in fields(config) if option.name not in FREE}
    return {**found, "options of data": dict(sorted(parts_of(config.data)[1].items()))}


def data_of(source: Source, data: str, threads: int) -> State:
    """A fingerprint of all splits; a tensor has a row of three hashes for each sample."""
    root = os.path.abspath(os.path.expanduser(parts_of(data)[0]))
    with ThreadPoolExecutor(max(threads, 1)) as pool:
        rows = {name: _rows(samples, root, pool.map) for name, samples in source.splits.items()}
    return {"classes": list(source.classes), "multi_label": source.multi_label, "splits": rows}


def epochs_of(state: State, config: Config) -> int:
    """How many epochs a run was to have when its state was saved."""
    return int(state.get("options", {}).get("epochs", config.epochs))


def why_not(
    state: State, config: Config, data: State, source: Source, folder: str, *, data_changed_ok: bool
) -> str | None:
    """Why a run must not go on from its state with these options and this data; None if it may."""
    try:
        before, now = epochs_of(state, config), config.epochs
        if before > now or (before < now and not state["progress"]["finished"]):
            return (
                f"{folder} was begun with epochs = {before}, not {now}; epochs can be added, not taken away, and "
                "to a run that has ended."
            )
        options = changed_options(state.get("options", {}), {**options_of(config), "epochs": before})
        if options is not None and "options" in state:
            return f"{folder} was begun with {options}; put config.yaml back, or train into another --out."
        if "data" not in state:
            return None
        classes = changed_classes(state["data"], data)
        if classes is not None:
            return f"{folder} cannot go on: {classes}."
        changes = None if data_changed_ok else changed_data(state["data"], data, source)
    except (KeyError, TypeError, AttributeError) as error:
        return f"{folder}/state.pt does not say what its data was ({error}); restore a copy, or train again."
    if changes is None:
        return None
    return (
        f"The data of {folder} has changed: {changes}. Put it back; or say --data-changed-ok to go on with other data "
        "than it was begun with."
    )


def changed_options(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The first option that has another value, as `key = value, not value`; younger options had no effect."""
    defaults = options_of(Config.of({"data": "any", "preset": "paper"}))
    for key, value in now.items():
        old = before.get(key, defaults.get(key))
        if old != value:
            return f"{key} = {old!r}, not {value!r}"
    return None


def changed_classes(before: State, now: State) -> str | None:
    """Labels are numbers in a network: with other classes they would mean something else."""
    if before["classes"] == now["classes"] and before["multi_label"] == now["multi_label"]:
        return None
    return f"the classes were {', '.join(before['classes'])}; now they are {', '.join(now['classes'])}"


def changed_data(before: State, now: State, source: Source) -> str | None:
    """What was added, removed, labelled anew or edited, with an example."""
    old, new = before["splits"], now["splits"]
    gone = [name for name in old if name not in new]
    if gone:
        return f"the split '{gone[0]}' is gone"
    for name, rows in new.items():
        if name not in old:
            return f"the split '{name}' is new"
        if not torch.equal(rows, old[name]):
            return f"in the split '{name}' {_changes(old[name], rows, source.splits[name])}"
    return None


def _changes(old: Tensor, new: Tensor, samples: Samples) -> str:
    earlier = {_name(row): row for row in old}
    names = [_name(row) for row in new]
    removed = len(earlier.keys() - set(names))
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        if name not in earlier:
            found.setdefault("added", []).append(i)
        elif not torch.equal(earlier[name][SIZE : 2 * SIZE], new[i][SIZE : 2 * SIZE]):
            found.setdefault("labelled anew", []).append(i)
        elif not torch.equal(earlier[name], new[i]):
            found.setdefault("edited", []).append(i)
    texts = [f"{len(which)} {what} ({samples.name(which[0])})" for what, which in found.items()]
    return ", ".join([*texts, *([f"{removed} removed"] if removed else [])]) or "the samples are in another order"


def _name(row: Tensor) -> bytes:
    return bytes(row[:SIZE].tolist())


def _rows(samples: Samples, root: str, spread: Callable[..., Iterable[bytes]]) -> Tensor:
    def row(i: int) -> bytes:
        labelled = repr((samples.label(i), samples.group(i)))
        return _hash(name_of(samples, i, root)) + _hash(labelled.encode(errors="replace")) + content_of(samples, i)

    joined = b"".join(spread(row, range(len(samples))))
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).view(-1, 3 * SIZE) if joined else torch.empty(0)


def name_of(samples: Samples, index: int, root: str) -> bytes:
    """Of files, where they are in the folder of the data, wherever that lies."""
    if isinstance(samples, Subset):
        return name_of(samples.samples, samples.chosen[index], root)
    if isinstance(samples, FolderSamples):
        return os.fsencode(os.path.relpath(os.path.abspath(samples.records[index].image), root))
    return samples.name(index).encode(errors="replace")


@singledispatch
def content_of(samples: Samples, index: int) -> bytes:
    """What a sample is made of; nothing is known of samples of an unknown kind."""
    return _hash(b"")


@content_of.register
def _of_subset(samples: Subset, index: int) -> bytes:
    return content_of(samples.samples, samples.chosen[index])


@content_of.register
def _of_planted(samples: Planted, index: int) -> bytes:
    return _hash(content_of(samples.samples, samples.chosen[index]) + samples.bias.encode())


@content_of.register
def _of_pictures(samples: MarkedPictures, index: int) -> bytes:
    pixels = samples.images[index].numpy().tobytes() + samples.masks[index].numpy().tobytes()
    return _hash(pixels + samples.bias.encode())


@content_of.register
def _of_folder(samples: FolderSamples, index: int) -> bytes:
    record = samples.records[index]
    masks = _ends(record.mask) if record.mask is not None else repr(record.boxes).encode()
    return _hash(_ends(record.image) + masks)


@content_of.register
def _of_xrays(samples: Xrays, index: int) -> bytes:
    picture = samples.pictures[index]
    return _hash(
        _ends_of(samples.files, picture.image) + (_ends_of(samples.files, picture.mask) if picture.mask else b"")
    )


@content_of.register
def _of_dogs(samples: Dogs, index: int) -> bytes:
    dog = samples.dogs[index]
    return _hash(_ends_of(samples.files, dog.image) + _ends_of(samples.files, dog.mask) + samples.bias.encode())


def _ends_of(files: Files, name: str) -> bytes:
    member = files.members.get(name)
    if member is None:
        return _ends(files.folder / name)
    return _ends(member.archive, member.start, member.size)


def _ends(path: str | Path, start: int = 0, size: int | None = None) -> bytes:
    """Size, beginning and end of a file; what is no file, or cannot be read, has none."""
    try:
        if not os.path.isfile(path):
            return b"none"
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size if size is None else size
            file.seek(start)
            content = file.read(min(size, END))
            file.seek(start + max(size - END, 0))
            return b"%d " % size + content + file.read(min(size, END))
    except (OSError, ValueError):
        return b"unreadable"


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=SIZE).digest()


def digest(value: Any) -> str:
    """SHA-256 over every number, text and tensor in dicts, lists and tuples."""
    found = hashlib.sha256()
    _add(found, value)
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, dict):
        found.update(f"dict {len(value)};".encode())
        for key, inner in value.items():
            _add(found, key)
            _add(found, inner)
    elif isinstance(value, list | tuple):
        found.update(f"list {len(value)};".encode())
        for inner in value:
            _add(found, inner)
    elif isinstance(value, Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)};".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    else:
        found.update(f"{type(value).__name__} {value!r};".encode("utf-8", "surrogatepass"))
