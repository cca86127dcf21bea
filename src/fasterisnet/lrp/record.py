"""Notes taken during a forward pass of the few values that autograd does not keep.

Autograd keeps what derivatives need. Some rules need a little more: the operands of a sum and of a mean (z+), x of a
tanh, the constant that is added, whether `x * mask` is a ReLU. Notes are taken below autograd, where every spelling has
become one of torch's own operations, and are left at the node that the operation has in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fasterisnet.lrp.kinds import GROUPS, LINEAR, NORMS, POOLING, SIGNED, SUMS, Edge, Node, edges, kind

# Kinds that autograd remembers only the result of, and kinds whose operands z+ and gamma read.
RESULT_ONLY = frozenset({"Threshold", "Tanh", "Sigmoid", "Elu", "LeakyRelu", "Celu", "RreluWithNoise"})
READ_BY_ZPLUS = SUMS | POOLING | SIGNED | LINEAR | NORMS | {"Addcmul", "Addcdiv"}
# Operations in place whose old value a rule may ask for, the second line only for z+; and those that only move numbers.
OLD_VALUES = frozenset("tanh sigmoid elu leaky_relu celu rrelu_with_noise".split())
OF_SUMS = frozenset("add sub index_add scatter_add lerp addcmul".split())
MOVES = frozenset("copy fill zero masked_fill index_put _index_put_impl scatter index_copy index_fill".split())

COMPARISONS = frozenset("gt ge lt le heaviside".split())
MASKED = frozenset("mul where masked_fill index_put _index_put_impl".split())
STILL_A_MASK = frozenset("_to_copy bitwise_not logical_not clone rsub alias detach".split())


@dataclass
class Note:
    """Operands of one operation in their order.

    selected: the tensor whose own signs said where it is set to zero. masks: what its masks were made of. result: of an
    operation that no rule knows. For one in place through a view: `replay`, the same out of place (None if it only
    moves numbers), and `view`, where the view lies in its base.
    """

    operands: list[Any] = field(default_factory=list)
    selected: Tensor | None = None
    masks: list[Edge] = field(default_factory=list)
    result: Tensor | None = None
    replay: Any = None
    view: tuple[Any, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """The operands that have a derivative."""
        return [t for t in self.operands if isinstance(t, Tensor) and t.is_floating_point()]

    def places(self, device: torch.device) -> Tensor:
        """The numbers that the view's elements have in its base."""
        view_size, view_stride, offset, size, stride = self.view
        numbers = torch.empty_strided(size, stride, dtype=torch.long, device=device)
        numbers.copy_(torch.arange(numbers.numel(), device=device).view(size))
        return numbers.as_strided(view_size, view_stride, offset).reshape(-1)


def note(node: Node) -> Note | None:
    """What was noted of a node, if the forward pass was recorded."""
    return node.metadata.get("fasterisnet")


class Recorder(TorchDispatchMode):
    """Takes notes while entered. `values`: also of what only z+ and gamma read, at the price of some memory."""

    def __init__(self, values: bool = True) -> None:
        super().__init__()
        self.values = values
        self.notes: list[Note] = []
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        self._pending: tuple[Any, bool, tuple[Any, ...], Any] | None = None
        self._signs: dict[int, tuple[Tensor, Any]] = {}
        self._held: dict[int, list[tuple[Note, int]]] = {}
        self._histories: dict[int, tuple[Tensor, Any]] = {}

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._settle()
        for memory in (self._signs, self._held, self._histories):
            memory.clear()

    def forget(self) -> None:
        """Drops what was noted: no relevance pass follows."""
        for item in self.notes:
            item.operands, item.selected, item.result = [], None, None
        self.notes.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._settle()
        name = func.overloadpacket.__name__
        in_place = func._schema.is_mutable and name.endswith("_") and bool(args) and isinstance(args[0], Tensor)
        before = args
        if in_place:
            self._protect(args[0])
            before = (self._old_value(name.removesuffix("_"), args), *args[1:])
        result = func(*args, **(kwargs or {}))
        self._pending = func, in_place, before, args[0] if in_place else result
        return result

    def _settle(self) -> None:
        """Notes the last operation, whose node exists by now."""
        if self._pending is None:
            return
        (func, in_place, args, result), self._pending = self._pending, None
        name = func.overloadpacket.__name__.removesuffix("_")
        out = next((t for t in result if isinstance(t, Tensor)), None) if isinstance(result, tuple | list) else result
        if not isinstance(out, Tensor):
            return
        if not out.requires_grad:
            self._note_signs(name, args, out)
            return
        through_view = in_place and out._is_view()
        node = out._base.grad_fn if through_view else out.grad_fn  # type: ignore[union-attr]
        if node is None:
            return
        what = kind(node)
        found = Note(_operands(args), result=None if GROUPS.get(what, "bilinear") != "bilinear" else out.detach())
        if through_view and what == "CopySlices":
            base = out._base
            assert base is not None
            offset = out.storage_offset() - base.storage_offset()
            found.view = (out.shape, out.stride(), offset, base.shape, base.stride())
            if name not in MOVES:
                found.replay = getattr(getattr(torch.ops.aten, name, None), func._overloadname, None)
            elif name in MASKED and self._selected(args) is not None and torch.equal(out, args[0].clamp(min=0)):
                found.operands, found.replay = [args[0]], torch.ops.aten.relu.default
        elif name in MASKED and self._signs:
            found.selected = self._selected(args)
            found.masks = [self._signs[id(t)][1] for t in found.operands if id(t) in self._signs]
        if found.view or found.masks or self._wanted(what, args):
            self._keep(node, found)

    def _wanted(self, what: str, args: tuple[Any, ...]) -> bool:
        if what in RESULT_ONLY or (
            self.values and (what in READ_BY_ZPLUS or GROUPS.get(what, "bilinear") == "bilinear")
        ):
            return True
        # A constant that is added costs nothing to remember, and tells what range a gate lives in.
        return what in SUMS and any(not isinstance(a, Tensor) or (a.numel() == 1 and not a.requires_grad) for a in args)

    def _keep(self, node: Node, found: Note) -> None:
        node.metadata["fasterisnet"] = found
        self.notes.append(found)
        for position, operand in enumerate(found.operands):
            if isinstance(operand, Tensor) and operand.layout is torch.strided:
                self._held.setdefault(operand.untyped_storage()._cdata, []).append((found, position))

    # --- masks made of an activation's own signs -------------------------------------------------------------------

    def _note_signs(self, name: str, args: tuple[Any, ...], result: Tensor) -> None:
        """`x > 0` remembers x, and so does what is made of it."""
        if name in STILL_A_MASK:
            origin = self._signs.get(id(args[0]))
            if origin is None and name == "detach" and args[0].grad_fn is not None:
                origin = (args[0], _edge(args[0]))
            if origin is not None:
                self._signs[id(result)] = (result, origin[1])
        elif name in COMPARISONS:
            for t in args:
                if isinstance(t, Tensor) and t.grad_fn is not None:
                    self._signs[id(result)] = (result, _edge(t))
                elif isinstance(t, Tensor) and id(t) in self._signs:
                    self._signs[id(result)] = (result, self._signs[id(t)][1])

    def _selected(self, args: tuple[Any, ...]) -> Tensor | None:
        """The operand that is multiplied with, or filled where, a mask made of its own signs says so."""
        flat = [t for t in _operands(args) if isinstance(t, Tensor)]
        origins = [self._signs[id(t)][1] for t in flat if id(t) in self._signs]
        for t in flat:
            if t.grad_fn is not None and origins:
                edge = self._histories[id(t)][1] if id(t) in self._histories else _edge(t)
                if any(_alike(o, edge) for o in origins):
                    return t
        return None

    # --- values that are about to be overwritten -------------------------------------------------------------------

    def _old_value(self, name: str, args: tuple[Any, ...]) -> Tensor:
        """What an operation in place changes, as it was, where a rule may ask for it."""
        t = args[0]
        asked = name in OLD_VALUES or (self.values and name in OF_SUMS) or (t._is_view() and name not in MOVES)
        asked = asked or (name in MASKED and any(id(a) in self._signs for a in _operands(args)))
        follows = any(isinstance(a, Tensor) and a.requires_grad for a in _operands(args))
        return self._copy(t) if asked and follows else t

    def _protect(self, t: Tensor) -> None:
        """Notes that hold this memory get a copy before it changes."""
        held = self._held.pop(t.untyped_storage()._cdata, ()) if t.layout is torch.strided else ()
        for found, position in held:
            operand = found.operands[position]
            found.operands[position] = self._copy(operand)
            if found.selected is operand:
                found.selected = found.operands[position]

    def _copy(self, t: Tensor) -> Tensor:
        """A copy with t's history: made above autograd, where the caller of this operation stands."""
        with torch._C._ForceDispatchKeyGuard(*self._keys), torch.enable_grad():
            copy = t.clone()
        if t.requires_grad:
            self._histories[id(copy)] = (copy, _edge(t))
        return copy


@contextmanager
def recording() -> Iterator[None]:
    """A forward pass run inside can be explained by `relevance` with every rule, z+ included.

    Example:
        >>> with recording():
        ...     logits = model(images.requires_grad_())
        >>> maps = relevance(logits.amax(1), images, rule="zplus")
    """
    with Recorder():
        yield


def _operands(args: tuple[Any, ...]) -> list[Any]:
    """The tensors and numbers of a call, lists of tensors opened."""
    found: list[Any] = []
    for arg in args:
        found += [a for a in arg if isinstance(a, Tensor)] if isinstance(arg, list | tuple) else [arg]
    return found


def _edge(t: Tensor) -> Edge:
    return t.grad_fn, t.output_nr


def _alike(a: Edge, b: Edge) -> bool:
    """The same tensor, or the same function of the same tensor computed twice."""
    if a[0] is b[0] or a[0] is None or b[0] is None:
        return a[0] is b[0] and a[1] == b[1]
    twice = kind(a[0]) == kind(b[0]) and len(edges(a[0])) == len(edges(b[0])) == 1
    return twice and _alike(edges(a[0])[0], edges(b[0])[0])
