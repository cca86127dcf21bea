"""Looking inside calls: the tensors among their arguments, and the bodies of torch's Python functions."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tensors(*items: Any) -> Iterator[Tensor]:
    """All tensors among the items and in the tuples, lists and dicts among them."""
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, tuple | list):
            yield from tensors(*item)
        elif isinstance(item, dict):
            yield from tensors(*item.values())


_STUBS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_OPENED: dict[Any, Callable[..., Any] | None] = {}


def opened(func: types.FunctionType) -> Callable[..., Any] | None:
    """A Python function of torch that runs its body instead of offering itself to the mode; None if it has no body.

    So only primitive operations have to be known: `F.multi_head_attention_forward` becomes linear, bmm, softmax, ...
    """
    if func not in _OPENED:
        body = None
        if func.__module__.startswith("torch.") and any(name in func.__code__.co_names for name in _STUBS):
            names = dict(func.__globals__)
            names.update({name: lambda *_: False for name in _STUBS})
            body = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
            body.__kwdefaults__ = func.__kwdefaults__
        _OPENED[func] = body
    return _OPENED[func]
