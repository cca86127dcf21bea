"""`explain`: heatmaps of any classifier, which can be trained through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fasterisnet.errors import InputError
from fasterisnet.lrp import rules
from fasterisnet.lrp.targets import AllLogits, Classes, Target, resolve
from fasterisnet.lrp.trace import Rules, Trace


@overload
def explain(
    model: nn.Module, images: Tensor, target: Target | Classes | None = None, *, rule: Rules = ...,
    epsilon: float = ..., box: tuple[Any, Any] | None = ..., layers: None = None, create_graph: bool = ...,
    strict: bool = ...,
) -> Tensor: ...  # fmt: skip


@overload
def explain(
    model: nn.Module, images: Tensor, target: Target | Classes | None = None, *, rule: Rules = ...,
    epsilon: float = ..., box: tuple[Any, Any] | None = ..., layers: Sequence[str | nn.Module],
    create_graph: bool = ..., strict: bool = ...,
) -> dict[str, Tensor]: ...  # fmt: skip


def explain(
    model: nn.Module,
    images: Tensor,
    target: Target | Classes | None = None,
    *,
    rule: Rules = "epsilon",
    epsilon: float = 0.01,
    box: tuple[Any, Any] | None = None,
    layers: Sequence[str | nn.Module] | None = None,
    create_graph: bool = False,
    strict: bool = False,
) -> Tensor | dict[str, Tensor]:
    """Relevance of every input value for `target`, shaped like `images`.

    target: None (each sample's highest logit), a class, one class a sample, or a target such as `Joint()`; with
    `AllLogits()` the maps are (sample, class, ...). rule: "epsilon", "zplus", "gamma", "gradient" or a `RuleTable`.
    box: the (low, high) the images live in, numbers or one a channel, for zB on the first layer. layers: names of
    modules; the answer is then a dict with "input" and the relevance at each module's output. create_graph: the maps
    can be trained through; otherwise the model, its statistics and the random state are left as they were.
    strict: an operation without a rule is an error instead of a warning.

    Example:
        >>> maps = explain(model, images, target=1, box=(0, 1))
        >>> maps.shape == images.shape
        True
    """
    check_inputs(model, images)
    table = rules.tables(rule, epsilon)
    wanted = resolve(target)
    with torch.inference_mode(False), nullcontext() if create_graph else observing(model):
        images = images.clone() if images.is_inference() else images
        trace = Trace(model, images, [table], box=box, layers=layers or (), strict=strict)
        with trace.open():
            maps = relevance_maps(trace, table, wanted, create_graph=create_graph)
    return maps if layers is not None else maps["input"]


def relevance_maps(
    trace: Trace, table: Rules, target: Target, *, create_graph: bool, use_box: bool = True
) -> dict[str, Tensor]:
    """The maps of one target over an open trace; `AllLogits` stacks one map a class."""
    with torch.enable_grad():
        scores = target(trace.logits)
        columns = scores.unbind(1) if isinstance(target, AllLogits) else ()
    if columns:
        passes = [trace.relevance(table, score, use_box=use_box, create_graph=create_graph) for score in columns]
        return {name: torch.stack([maps[name] for maps in passes], 1) for name in passes[0]}
    if not isinstance(scores, Tensor) or not scores.requires_grad:
        raise InputError(
            f"The target returned {scores!r:.60}, which is no differentiable function of the logits; "
            "it has to return a tensor computed from them, one number per sample."
        )
    if scores.shape != trace.logits.shape[:1]:
        raise InputError(
            f"The target returned shape {tuple(scores.shape)} for {trace.logits.shape[0]} samples; "
            "it has to return one number per sample."
        )
    return trace.relevance(table, scores, use_box=use_box, create_graph=create_graph)


def check_inputs(model: Any, images: Any) -> None:
    """Refuses what cannot be explained, saying why."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, {model!r:.60}; it has to be a torch.nn.Module.")
    if not isinstance(images, Tensor):
        raise InputError(f"images is a {type(images).__name__}; it has to be a tensor (batch, channels, ...).")
    if not images.is_floating_point():
        raise InputError(f"images are {images.dtype}; convert them to floating point, e.g. images.float() / 255.")
    if images.ndim < 2 or images.numel() == 0:
        raise InputError(f"images have shape {tuple(images.shape)}; they have to be (batch, channels, ...), not empty.")
    if not bool(torch.isfinite(images).all()):
        sample = int((~torch.isfinite(images)).flatten(1).any(1).nonzero()[0])
        raise InputError(f"images contain NaN or infinite values, first in sample {sample}.")


@contextmanager
def observing(model: nn.Module) -> Iterator[None]:
    """Leaves buffers (running statistics) and random states as they were, whatever the forward pass does to them."""
    if any(is_lazy(t) for t in [*model.parameters(), *model.buffers()]):
        raise InputError("The model has lazy modules that never ran: run one forward pass, model(images), first.")
    plain = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    owners = [(module, dict(module._buffers)) for module in plain]
    saved = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng({p.device for p in model.parameters() if p.is_cuda}):
        try:
            yield
        finally:
            for module, buffers in owners:
                for name, buffer in buffers.items():
                    if module._buffers.get(name) is not buffer:
                        module._buffers[name] = buffer
            for buffer, before in saved:  # .data: graphs that wait for their backward do not take it for a change
                if buffer.shape == before.shape:
                    buffer.data.copy_(before)
                else:
                    buffer.data = before
