"""Runs a network once, catching its operations, so that relevance can be sent back through it.

    with Trace(model, images, [table]) as trace:
        maps = trace.relevance(table, score_of(trace.logits))

Nothing of the model is changed: operations are caught where they are called, by a `TorchFunctionMode`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fasterisnet.errors import FasterISNetError, InputError, RuleError
from fasterisnet.relevance.catalogue import GATES, ORDINARY, SIGNED, STRUCTURAL, WHOLE, base_name
from fasterisnet.relevance.functions import Alias, Assign, Rewire
from fasterisnet.relevance.linear import HANDLERS
from fasterisnet.relevance.opening import opened, tensors
from fasterisnet.relevance.operations import Linear, Operand, Operation, State
from fasterisnet.relevance.rules import RuleTable
from fasterisnet.relevance.tags import PASSIVE, Capture, Met, Path, Tag, Unruled, reporter


class Trace(TorchFunctionMode):
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
        super().__init__()
        self.model = model
        self.state = State()
        self.kinds = {kind for table in tables for kind in table.rules}
        self.values_needed = any(table.needs_values for table in tables)
        self.box = box
        self.operations: list[Operation] = []
        self.readers: dict[int, list[Operation]] = {}
        self.met: dict[tuple[str, str], Met] = {}
        self.unruled = Unruled(strict)
        if isinstance(layers, str):
            raise InputError(f"layers is the string '{layers}'; give a list of module names, ['{layers}'].")
        self.captures = {name: Capture() for name in layers}
        self.not_first = ""
        self.root_is_users = images.requires_grad
        self.root = images if self.root_is_users else images.detach().requires_grad_()
        self.entry = self.root
        self._opening: list[Callable[..., Any]] = []
        self._module_names: dict[int, str] | None = None
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

    # --- catching operations ---------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, in_place = base_name(getattr(func, "__name__", ""))
        in_place = in_place or kwargs.get("inplace") is True
        if name == "get":
            return self._attribute(func, args)
        handler = HANDLERS.get(name)
        python = isinstance(func, FunctionType)
        if handler is None or python:
            body = opened(func) if python and name not in STRUCTURAL | ORDINARY | WHOLE else None
            if body is not None and func not in self._opening:
                self._opening.append(func)
                try:
                    with self:
                        return body(*args, **kwargs)
                finally:
                    self._opening.pop()
            if handler is None:
                return self.ordinary(name, func, args, kwargs)
        return handler(self, name, in_place, func, args, kwargs)

    def _attribute(self, func: Any, args: tuple[Any, ...]) -> Any:
        result = func(*args)
        if isinstance(result, Tensor) and result.requires_grad and result is not args[0]:
            self.pass_tag(args[0], result, func)
        return result

    def ordinary(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operation that keeps its ordinary derivative, and says so where it should have had a rule."""
        operands = list(tensors(args, kwargs))
        active = [t for t in operands if self.tag(t) is not None]
        if operands and base_name(getattr(func, "__name__", ""))[1]:
            self.before_overwriting(operands[0])
        result = func(*args, **kwargs)
        results = [t for t in tensors(result) if t.requires_grad]
        if not results:
            return result
        if not active:
            for t in results:
                if t.grad_fn is not None:
                    t._fasterisnet = PASSIVE  # type: ignore[attr-defined]
            return result
        tags = [cast(Tag, self.tag(t)) for t in active]
        structural = name in STRUCTURAL
        self.note(name, "ordinary derivative" if structural or name in ORDINARY else "no rule")
        for t in results:
            if structural and len(operands) == 1 and t is not operands[0]:
                self.pass_tag(operands[0], t, _replay(func, args, kwargs) if args and args[0] is operands[0] else None)
                continue
            self.leave_root(name, *active)
            known = structural or name in ORDINARY
            self.mark(
                t,
                gate=name in GATES or (structural and all(tag.gate for tag in tags)),
                non_negative=name in GATES
                or (
                    known and name not in SIGNED and len(active) == len(operands) and all(g.non_negative for g in tags)
                ),
            )
            if not known:
                t.register_hook(reporter(self.state, self.unruled, name, self.module_name()))
        return result

    # --- what is known of tensors ----------------------------------------------------------------------------------

    def tag(self, t: Any) -> Tag | None:
        """The tag of a tensor that depends on the network input, None for parameters, constants and numbers."""
        if not isinstance(t, Tensor) or not t.requires_grad:
            return None
        tag = vars(t).get("_fasterisnet")
        if tag is PASSIVE or (tag is None and t.grad_fn is None):
            return None
        if tag is None:
            name = t.grad_fn.name()  # type: ignore[union-attr]
            self.note(name, "no rule")
            t.register_hook(reporter(self.state, self.unruled, name, self.module_name(), out_of_sight=True))
            return self.mark(t)
        if tag.version != t._version:
            return self.mark(t)
        return tag

    def mark(self, t: Tensor, **facts: Any) -> Tag:
        tag = Tag(t._version, **facts)
        t._fasterisnet = tag  # type: ignore[attr-defined]
        return tag

    def pass_tag(self, source: Any, result: Tensor, step: Path | None) -> None:
        """For results that are only a rearrangement of one tensor."""
        tag = self.tag(source)
        if tag is None:
            if result.grad_fn is not None:
                result._fasterisnet = PASSIVE  # type: ignore[attr-defined]
            return
        path = None
        if tag.path is not None:
            if step is None:
                self.leave_root("a rearrangement", source)
            else:
                path = _then(tag.path, step)
        self.mark(result, gate=tag.gate, non_negative=tag.non_negative, path=path, origin=tag.origin)

    def leave_root(self, name: str, *operands: Any) -> None:
        """Remembers that the network input went into something zB does not apply to."""
        if not self.not_first:
            for t in operands:
                tag = self.tag(t)
                if tag is not None and tag.path is not None:
                    self.not_first = f"'{name}' in module '{self.module_name() or '(the model itself)'}'"

    def note(self, name: str, treatment: str) -> None:
        met = self.met.get((name, treatment))
        if met is None:
            met = self.met[name, treatment] = Met(name, treatment, module=self.module_name())
        met.count += 1

    def module_name(self) -> str:
        """The innermost module of the model whose forward is running."""
        if self._module_names is None:
            self._module_names = {id(m): n for n, m in self.model.named_modules()}
        frame = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in self._module_names:
                return self._module_names[id(owner)]
            frame = frame.f_back
        return ""

    # --- helpers of the handlers -----------------------------------------------------------------------------------

    def rewire(self, op: Operation, y: Tensor, **facts: Any) -> Tensor:
        """Puts the operation's rule behind its output."""
        if y._is_view():
            y = y.clone()
        self.operations.append(op)
        for t in {id(t): t for t in vars(op).values() if isinstance(t, Tensor)}:
            self.readers.setdefault(t, []).append(op)
        y = cast(Tensor, Rewire.apply(op, y, *op.sources))
        if self.values_needed or self.box is not None:
            op.keep(y)
        self.mark(y, **facts)
        return y

    def operand(self, name: str, kind: str, x: Tensor) -> Tensor:
        """x as a factor of a product: see `Operand`."""
        operation = Operand(self.state, name, kind, x if kind == "positive" else None)
        self.operations.append(operation)
        tag = self.tag(x)
        alias = cast(Tensor, Alias.apply(operation, x))
        if tag is not None:
            self.mark(alias, gate=tag.gate, non_negative=tag.non_negative)
        return alias

    def before_overwriting(self, t: Tensor, *, keep: bool = False, keep_output: bool = True) -> Tensor:
        """An in-place operation is about to change t: saves what a rule or a captured layer still needs of it.

        Returns a tensor that keeps the old value: a copy where one was needed or asked for (`keep`), else t itself.
        """
        tag = vars(t).get("_fasterisnet")
        if not isinstance(tag, Tag) or tag is PASSIVE or tag.version != t._version:
            return t.clone() if keep else t
        maker = tag.operation if self.values_needed and keep_output else None
        held = maker is not None and maker.y is t
        readers = [op for op in self.readers.pop(id(t), ()) if op is not tag.operation]
        if not (keep or held or readers or tag.captured):
            return t
        copy = t.clone()
        self.mark(copy, gate=tag.gate, non_negative=tag.non_negative, operation=tag.operation)
        if tag.captured:
            self.captures[tag.captured].value = copy
        if held and maker is not None:
            maker.keep(copy)
        for reader in readers:
            reader.replace(t, copy)
        return copy

    def overwrite(self, t: Tensor, y: Tensor) -> Tensor:
        """Ends an in-place operation on t whose result is y."""
        tag = self.tag(y)
        cast(Tensor, Assign.apply(t, y))
        self.mark(t, gate=bool(tag and tag.gate), non_negative=bool(tag and tag.non_negative))
        return t

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


def _then(first: Path, second: Path) -> Path:
    return lambda t: second(first(t))


def _replay(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Path:
    rest = args[1:]
    return lambda t: func(t, *rest, **kwargs)


def _modes() -> list[Any]:
    return torch.overrides._get_current_function_mode_stack()
