"""Catching the operations of a network where they are called, and putting their rules behind their results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, cast

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fasterisnet.relevance.catalogue import CLOSED, GATES, ORDINARY, SIGNED, STRUCTURAL, base_name
from fasterisnet.relevance.functions import Alias, Assign, Rewire
from fasterisnet.relevance.linear import HANDLERS
from fasterisnet.relevance.opening import opened, tensors
from fasterisnet.relevance.operations import Operand, Operation, State
from fasterisnet.relevance.rules import RuleTable
from fasterisnet.relevance.tags import PASSIVE, Capture, Met, Path, Tag, Unruled, reporter


class Catcher(TorchFunctionMode):
    """While entered, every torch function called in this thread passes here; handlers trace those that have a rule."""

    def __init__(self, model: nn.Module, images: Tensor, tables: Sequence[RuleTable], box: Any, strict: bool) -> None:
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
        self.captures: dict[str, Capture] = {}
        self.not_first = ""
        self.root_is_users = images.requires_grad
        self.root = images if self.root_is_users else images.detach().requires_grad_()
        self.entry = self.root
        self._opening: list[Callable[..., Any]] = []
        self._module_names: dict[int, str] | None = None

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
            body = opened(func) if python and name not in CLOSED else None
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
        linear = op.unit[0]
        if self.values_needed or (self.box is not None and linear is not None and linear.first):
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


def _then(first: Path, second: Path) -> Path:
    return lambda t: second(first(t))


def _replay(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Path:
    rest = args[1:]
    return lambda t: func(t, *rest, **kwargs)
