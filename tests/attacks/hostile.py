"""Hostile and damaged files, made by code. Whatever reads files of others is run against them (`test_readers.py`)."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Make = Callable[[Path], None]
DEEP = 200_000
BOMB = 2**29  # bytes that a few unpack to


class Harm:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"card": Harm(path.with_name("harmed"))}))


def _laughs(path: Path) -> None:
    """Ten levels of ten: 10**10 words if anybody spells them out."""
    lines = ['a0: &a0 ["ha", "ha", "ha", "ha", "ha", "ha", "ha", "ha", "ha", "ha"]']
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    path.write_text("\n".join([*lines, "data: *a9", "seeds: *a9", "rows: *a9"]))


# What may lie where any file is expected.
ANY_FILE: dict[str, Make] = {
    "absent": lambda path: None,
    "empty": lambda path: path.write_bytes(b"") and None,
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "endless": _zeros,
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 9) and None,
    "deep json": lambda path: path.write_text("[" * DEEP) and None,
    "deep objects": lambda path: path.write_text('{"a":' * DEEP) and None,
    "deep yaml": lambda path: path.write_text("a: " + "{a: " * 3000) and None,
    "laughs": _laughs,
    "tag": lambda path: path.write_text("!!python/object/apply:os.mkdir [harmed]") and None,
    "long number": lambda path: path.write_text("epochs: " + "9" * 5000) and None,
    "a list": lambda path: path.write_text("[1, 2]") and None,
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00data") and None,
    "pickle": _pickled,
}


def gzip_bomb(path: Path) -> None:
    """An idx file of a few digits, by its header, and half a gigabyte behind it."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(struct.pack(">4I", 0x0803, 10, 28, 28))
        for _ in range(BOMB // 2**24):
            file.write(bytes(2**24))


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {name: value for name, value in state.items() if name != key}


def _with(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, **changes}


def _progress(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, "progress": {**state["progress"], **changes}}


# Of a sound state something that could have been saved, but not by a run of these options.
STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no model": _without("model"),
    "no sums": _without("sums"),
    "model is a list": _with(model=[1, 2]),
    "optimizer is empty": _with(optimizer={}),
    "momentum of another shape": lambda state: {
        **state,
        "optimizer": {
            **state["optimizer"],
            "state": {key: {"momentum_buffer": torch.zeros(7)} for key in state["optimizer"]["state"]},
        },
    },
    "short sums": _with(sums=torch.zeros(2)),
    "progress is a text": _with(progress="far"),
    "absurd batch": _progress(batch=10**9),
    "absurd epoch": _progress(epoch=10**9),
    "negative epoch": _progress(epoch=-1),
    "a half epoch": _progress(epoch=0.5),
    "finished too early": _progress(finished=True),
    "rows are gone": _progress(rows=[]),
    "unknown progress": _progress(speed=3),
    "a list": lambda state: [state],
}

CARD: dict[str, Any] = {
    "model": "small", "classes": ["a", "b"], "multi_label": False, "method": "standard", "zb": True, "epoch": 1,
    "validation_loss": 0.5, "preparation": {"size": 16, "channels": 3, "mean": [], "std": [], "fit": "stretch"},
}  # fmt: skip


def _card(**changes: Any) -> str:
    return json.dumps({**CARD, **changes})


CARDS: dict[str, str | None] = {
    "none": None,
    "no json": "{",
    "deep": "[" * DEEP,
    "a list": "[]",
    "a key too many": _card(speed=3),
    "a key too few": json.dumps({k: v for k, v in CARD.items() if k != "zb"}),
    "model is a number": _card(model=3),
    "classes are a text": _card(classes="ab"),
    "no classes": _card(classes=[]),
    "classes twice": _card(classes=["a", "a"]),
    "classes are numbers": _card(classes=[1, 2]),
    "multi_label is a text": _card(multi_label="no"),
    "epoch is a text": _card(epoch="1"),
    "loss is a list": _card(validation_loss=[0.5]),
    "loss is not finite": _card(validation_loss=float("inf")),
    "preparation is a list": _card(preparation=[16]),
    "size is a text": _card(preparation={"size": "16"}),
    "size is enormous": _card(preparation={"size": 10**9}),
    "mean is a text": _card(preparation={"size": 16, "mean": ["x", "x", "x"], "std": [1, 1, 1]}),
    "std is zero": _card(preparation={"size": 16, "mean": [0, 0, 0], "std": [0, 0, 0]}),
    "fit is unknown": _card(preparation={"size": 16, "fit": "bend"}),
}


def weights(path: Path, card: str | None, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """A safetensors file with any text as its card."""
    save_file(tensors or {"w": torch.zeros(2)}, path, {"card": card} if card is not None else {"other": "x"})


SPLITS = ("x/../../../victim", "/tmp/victim", "..", ".hidden", "a\\b", "a\nb", "a\x1b[2Jb", "s" * 300)
