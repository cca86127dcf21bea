"""Checksums of nested values, as a saved state has them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor


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
