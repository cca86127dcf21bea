"""Runs a network once, catching its operations, so that relevance can be sent back through it.

    trace = Trace(model, images, [table])
    with trace.open():
        maps = trace.relevance(table, score_of(trace.logits))

Nothing of the model is changed: operations are caught where they are called, by a `TorchFunctionMode`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from fasterisnet.errors import FasterISNetError, InputError, RuleError
from fasterisnet.relevance.catching import Catcher
from fasterisnet.relevance.linear_operations import Linear
from fasterisnet.relevance.rules import RuleTable
from fasterisnet.relevance.tags import Capture


class Trace(Catcher):
    """One forward pass of a network, open for any number of relevance passes; close it when they are done.

    tables: the rules that will be asked for. box: zB will be asked for. layers: modules whose relevance is wanted.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        tables: Sequence[RuleTable],
        *,
        box: tuple[Any, Any] | None = None,
        layers: Iterable[str] = (),
        strict: bool = False,
    ) -> None:
        super().__init__(model, images, tables, box, strict)
        if isinstance(layers, str):
            raise InputError(f"layers is the string '{layers}'; give a list of module names, ['{layers}'].")
        self.captures = {name: Capture() for name in layers}
        self.logits = self._run()

    # --- the forward pass ------------------------------------------------------------------------------------------

    def _run(self) -> Tensor:
        handles = self._capture_layers()
        try:
            with torch.enable_grad(), _no_checkpointing():
                self.entry = self.root.clone()  # what the model gets, and may overwrite
                self.mark(self.entry, non_negative=self._starts_non_negative(), path=_same)
                with self:
                    output = self.model(self.entry)
        except BaseException:
            self.close()
            raise
        finally:
            for handle in handles:
                handle.remove()
        try:
            logits = self._checked_logits(output)
        except FasterISNetError:
            self.close()
            raise
        tag = self.tag(logits)
        if tag is not None and tag.origin is not None:
            tag.origin.is_output = True
        return logits

    def _starts_non_negative(self) -> bool:
        return self.values_needed and bool((self.root.detach() >= 0).all())

    def _checked_logits(self, output: Any) -> Tensor:
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            raise InputError(
                f"The model returned {type(output).__name__}; it has to return a tensor (batch, classes) or an object "
                "with such a tensor as .logits. Wrap the model so that it does."
            )
        if logits.ndim != 2 or logits.shape[0] != self.root.shape[0] or logits.shape[1] == 0:
            raise InputError(
                f"The model returned a tensor of shape {tuple(logits.shape)} for {self.root.shape[0]} images; "
                "it has to be (batch, classes)."
            )
        if self.tag(logits) is None:
            raise InputError("The model's output does not depend on its input in a differentiable way (detached?).")
        return logits

    def _capture_layers(self) -> list[Any]:
        modules = dict(self.model.named_modules())
        for name in self.captures:
            if not isinstance(name, str):
                raise InputError(f"layers holds {name!r}; it has to be a list of module names.")
            if name not in modules:
                close = [m for m in modules if m.endswith(name.split(".")[-1])][:3]
                hint = f" Did you mean {' or '.join(close)}?" if close else " model.named_modules() lists the names."
                raise InputError(f"layers names '{name}', which is not a module of the model.{hint}")
        return [modules[name].register_forward_hook(self._capture(name)) for name in self.captures]

    def _capture(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if self not in _modes():
                return
            capture = self.captures[name]
            capture.runs += 1
            if capture.runs > 1:
                raise InputError(f"Layer '{name}' ran more than once in a forward pass; name a module that runs once.")
            if not isinstance(output, Tensor) or not output.requires_grad:
                raise InputError(f"Layer '{name}' does not return a tensor that depends on the network input.")
            capture.value = output
            capture.edge = torch.autograd.graph.get_gradient_edge(output)
            tag = self.tag(output)
            if tag is not None:
                tag.captured = name
                capture.operation = tag.operation

        return hook

    # --- relevance passes ------------------------------------------------------------------------------------------

    def relevance(
        self, table: RuleTable, score: Tensor, *, use_box: bool = True, create_graph: bool = False
    ) -> dict[str, Tensor]:
        """Relevance of `score` (summed over the batch) at the input and at every captured layer."""
        box = self._bounds() if use_box and self.box is not None else None
        names = list(self.captures)
        for name in names:
            capture = self.captures[name]
            if capture.edge is None:
                raise InputError(f"Layer '{name}' was not run by the model's forward; name a module that is.")
            self._check_apart(name, capture, table, box is not None)
        targets = [self.root, *[self.captures[n].edge for n in names]]
        try:
            self.state.table, self.state.box = table, box
            with torch.enable_grad(), torch.autocast(self.root.device.type, enabled=False):
                grads = torch.autograd.grad(
                    score.sum(), targets, create_graph=create_graph, retain_graph=True, allow_unused=True
                )
        finally:
            self.state.table = self.state.box = None
        with torch.set_grad_enabled(create_graph):
            root = self.root if self.root_is_users else self.root.detach()
            maps = {"input": _relevance_of(grads[0], root, direct=box is not None)}
            for name, grad in zip(names, grads[1:], strict=True):
                maps[name] = _relevance_of(grad, cast(Tensor, self.captures[name].value))
        return maps if create_graph else {name: m.detach() for name, m in maps.items()}

    def _bounds(self) -> tuple[Tensor, Tensor]:
        assert self.box is not None
        if self.not_first or not any(isinstance(op, Linear) and op.first for op in self.operations):
            raise RuleError(
                "zB (box=...) needs a linear or convolution layer that takes the network input; here the input goes "
                f"into {self.not_first or 'no such layer'}. Pass box=None, or do that step before the model."
            )
        if not isinstance(self.box, tuple | list) or len(self.box) != 2:
            raise InputError(f"box is {self.box!r}; it has to be a pair (low, high).")
        low, high = (_bound(value, self.root) for value in self.box)
        if not bool((low <= high).all()):
            raise InputError("box=(low, high): low is above high, or not a number.")
        return low, high

    def _check_apart(self, name: str, capture: Capture, table: RuleTable, boxed: bool) -> None:
        operation = capture.operation
        if operation is None or not operation.fused_into:
            return
        linear = operation.unit[0]
        fuses = "positive" in table.rules or (boxed and linear is not None and linear.first)
        if fuses:
            raise RuleError(
                f"Layer '{name}' is one unit with the {operation.fused_into} behind it under these rules, so it has no "
                "relevance of its own; name that module instead."
            )

    def close(self) -> None:
        """Drops what only relevance passes need. What was returned stays differentiable."""
        for operation in self.operations:
            operation.forget()
        self.operations.clear()
        self.readers.clear()
        for capture in self.captures.values():
            capture.value = capture.edge = capture.operation = None

    @contextmanager
    def open(self) -> Iterator[Trace]:
        try:
            yield self
        finally:
            self.close()


def _relevance_of(grad: Tensor | None, value: Tensor, *, direct: bool = False) -> Tensor:
    if grad is None:
        return torch.zeros_like(value)
    return grad if direct else grad * value


def _bound(value: Any, images: Tensor) -> Tensor:
    """A number, or one number a channel, as a tensor shaped like one image."""
    try:
        bound = torch.as_tensor(value, dtype=images.dtype, device=images.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"box holds {value!r}; it takes numbers, or one number a channel.") from error
    if bound.ndim == 1:
        if bound.numel() not in (1, images.shape[1]):
            raise InputError(f"box has {bound.numel()} numbers for images of {images.shape[1]} channels.")
        bound = bound.view(-1, *[1] * (images.ndim - 2))
    try:
        return bound.expand_as(images)
    except RuntimeError as error:
        raise InputError(f"box of shape {tuple(bound.shape)} does not fit images of {tuple(images.shape)}.") from error


@contextmanager
def _no_checkpointing() -> Iterator[None]:
    """Checkpointed parts run again during the backward pass, where their operations would not be caught."""
    message = "checkpointing"
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(message):
            yield
    except RuntimeError as error:
        if str(error).startswith(message):
            raise RuleError(
                "The model uses gradient checkpointing, which runs operations again where they cannot be caught. "
                "Switch it off (timm: set_grad_checkpointing(False); DenseNet: memory_efficient=False)."
            ) from error
        raise


def _same(t: Tensor) -> Tensor:
    return t


def _modes() -> list[Any]:
    return torch.overrides._get_current_function_mode_stack()
