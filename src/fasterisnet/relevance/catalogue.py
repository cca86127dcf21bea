"""The operations the engine knows by name, and how each is traced.

A handler is called instead of the operation, as `handler(trace, name, in_place, func, args, kwargs)`. Names are those
of torch's primitive functions without underscores: `add` stands for `+`, `+=`, `torch.add`, `Tensor.add_` and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fasterisnet.relevance.catching import Catcher

Handler = Callable[["Catcher", str, bool, Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[str, Handler] = {}

# Rearrangements: every number of the result is one of the operands' (or a constant).
STRUCTURAL = frozenset(
    """
    view reshape flatten unflatten ravel squeeze unsqueeze permute transpose swapaxes swapdims movedim moveaxis
    t adjoint contiguous clone positive expand expand_as view_as reshape_as broadcast_to broadcast_tensors repeat
    repeat_interleave tile getitem select narrow chunk split split_with_sizes tensor_split unbind unfold im2col
    index_select gather take take_along_dim masked_select diagonal tril triu roll flip rot90 sort msort topk
    pad constant_pad_nd cat concat stack hstack vstack dstack where masked_fill masked_scatter setitem copy index_copy
    index_put scatter zero fill dropout dropout1d dropout2d dropout3d feature_dropout
    pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle
    to type type_as float double half bfloat16 cpu cuda as_strided requires_grad
    """.split()
)

# Operations whose ordinary derivative is their rule.
ORDINARY = frozenset(
    """
    max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d amax amin max min maximum minimum fmax fmin
    softmax log_softmax neg negative col2im grid_sampler upsample_bicubic2d
    """.split()
)

# Python functions of torch that are handled as they are, not by their bodies.
WHOLE = frozenset({"softsign", "tanhshrink"})

# Python functions that are not opened.
CLOSED = STRUCTURAL | ORDINARY | WHOLE

# Results between 0 and 1: constants when they multiply a signal.
GATES = frozenset({"softmax", "sigmoid", "hardsigmoid"})

# Operations with an ordinary derivative that may turn non-negative numbers into negative ones.
SIGNED = frozenset({"neg", "negative", "log_softmax", "grid_sampler", "upsample_bicubic2d"})

_ALIASES = {
    "iadd": "add", "radd": "add", "isub": "sub", "subtract": "sub", "imul": "mul", "rmul": "mul", "multiply": "mul",
    "itruediv": "div", "truediv": "div", "divide": "div", "true_divide": "div", "rtruediv": "rdiv", "clip": "clamp",
    "special_softmax": "softmax", "special_log_softmax": "log_softmax", "special_expit": "sigmoid", "expit": "sigmoid",
    "concatenate": "cat",
}  # fmt: skip


def base_name(name: str) -> tuple[str, bool]:
    """`__iadd__` -> ("add", True), `relu_` -> ("relu", True), `__get__` -> ("get", False)."""
    plain = name.strip("_")
    in_place = (name.endswith("_") and not name.startswith("__")) or plain in (
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "setitem",
    )
    return _ALIASES.get(plain, plain), in_place


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Enters a handler under these names."""

    def enter(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return enter


def bind(names: str, args: tuple[Any, ...], kwargs: dict[str, Any], **defaults: Any) -> list[Any]:
    """The arguments of a call in the order of `names`, with their defaults."""
    values = dict(zip(names.split(), args, strict=False)) | kwargs
    return [values[n] if n in values else defaults.get(n) for n in names.split()]
