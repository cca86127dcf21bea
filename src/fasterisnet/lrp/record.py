"""Notes taken during a forward pass of the few values that autograd does not keep.

Autograd keeps what derivatives need. Some rules need a little more: the operands of a sum and of a mean (z+), x of a
tanh, the constant that is added, whether `x * mask` is a ReLU. Notes are taken below autograd, where every spelling has
become one of torch's own operations, and are left at the node that the operation has in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fasterisnet.lrp.kinds import GROUPS, LINEAR, NORMS, POOLING, SIGNED, SUMS, Edge, Node, kind
from fasterisnet.lrp.masks import MASKED, Masks, one_number, operands

# Kinds that autograd remembers only the result of, and kinds whose operands z+ and gamma read.
RESULT_ONLY = frozenset({"Threshold", "Tanh", "Sigmoid", "Elu", "LeakyRelu", "Celu", "RreluWithNoise"})
READ_BY_ZPLUS = SUMS | POOLING | SIGNED | LINEAR | NORMS | {"Addcmul", "Addcdiv"}
# Operations in place whose old value a rule may ask for, the second line only for z+; and those that only move numbers.
OLD_VALUES = frozenset("tanh sigmoid elu leaky_relu celu rrelu_with_noise".split())
OF_SUMS = frozenset("add sub index_add scatter_add lerp addcmul".split())
MOVES = frozenset("copy fill zero masked_fill index_put _index_put_impl scatter index_copy index_fill".split())

SEEN = "fasterisnet: looked for masks"


@dataclass
class Note:
    """Operands of one operation in their order.

    selected: the tensor whose own values made the mask it is laid under, and its edge. bounds: it is only clamped by
    that, to these. masks: what its masks were made of. result: of an operation that no rule knows. For one in place
    through a view: `replay`, the same out of place (None if it only moves numbers), and `view`, where it lies.
    """

    operands: list[Any] = field(default_factory=list)
    selected: Tensor | None = None
    edge: Edge | None = None
    bounds: tuple[float, float] | None = None
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


def was_seen(node: Node) -> bool:
    """Whether the forward pass was recorded, of a step that may lay a mask over something."""
    return SEEN in node.metadata or note(node) is not None


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
        self._pending: tuple[Any, bool, tuple[Any, ...], dict[str, Any], Any] | None = None
        self._held: dict[int, list[tuple[Note, int]]] = {}
        self._histories: dict[int, tuple[Tensor, Any]] = {}
        self._masks = Masks(self._histories)

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._settle()
        for memory in (self._masks, self._held, self._histories):
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
        self._pending = func, in_place, before, kwargs or {}, args[0] if in_place else result
        return result

    def _settle(self) -> None:
        """Notes the last operation, whose node exists by now."""
        if self._pending is None:
            return
        (func, in_place, args, kwargs, result), self._pending = self._pending, None
        name = func.overloadpacket.__name__.removesuffix("_")
        out = next((t for t in result if isinstance(t, Tensor)), None) if isinstance(result, tuple | list) else result
        if not isinstance(out, Tensor):
            return
        if not out.requires_grad:
            self._masks.note_signs(func, name, args, kwargs, out)
            return
        if name == "index":
            self._masks.note_picked(args, out)
        through_view = in_place and out._is_view()
        node: Node = out._base.grad_fn if through_view else out.grad_fn  # type: ignore[union-attr]
        if node is None:
            return
        what = kind(node)
        found = Note(operands(args), result=None if GROUPS.get(what, "bilinear") != "bilinear" else out.detach())
        if through_view and what == "CopySlices":
            base = out._base
            assert base is not None
            offset = out.storage_offset() - base.storage_offset()
            found.view = (out.shape, out.stride(), offset, base.shape, base.stride())
            if name not in MOVES:
                found.replay = getattr(getattr(torch.ops.aten, name, None), func._overloadname, None)
            elif name in MASKED:
                self._masks.note_selected(found, func, args, kwargs)
                if found.bounds == (0, math.inf):
                    found.operands, found.replay, found.selected = [args[0]], torch.ops.aten.relu.default, None
        elif name in MASKED:
            node.metadata[SEEN] = True
            self._masks.note_selected(found, func, args, kwargs)
            found.masks = [origin for t in found.operands for origin in self._masks.origins(t)]
        if not self.values and what in SUMS and not found.view:
            found.operands = [one_number(a) for a in found.operands[:2]]  # costs nothing, and tells where a gate lives
        if found.view or found.masks or self._wanted(what, found):
            self._keep(node, found)

    def _wanted(self, what: str, found: Note) -> bool:
        if what in SUMS:
            return self.values or any(a is not None for a in found.operands)
        bilinear = GROUPS.get(what, "bilinear") == "bilinear"
        return what in RESULT_ONLY or (self.values and (what in READ_BY_ZPLUS or bilinear))

    def _keep(self, node: Node, found: Note) -> None:
        node.metadata["fasterisnet"] = found
        self.notes.append(found)
        for position, operand in enumerate(found.operands):
            if isinstance(operand, Tensor) and operand.layout is torch.strided:
                self._held.setdefault(operand.untyped_storage()._cdata, []).append((found, position))

    # --- values that are about to be overwritten -------------------------------------------------------------------

    def _old_value(self, name: str, args: tuple[Any, ...]) -> Tensor:
        """What an operation in place changes, as it was, where a rule may ask for it."""
        t = args[0]
        asked = name in OLD_VALUES or (self.values and name in OF_SUMS) or (t._is_view() and name not in MOVES)
        asked = asked or (name in MASKED and any(self._masks.origins(a) for a in operands(args)))
        asked = asked or (self.values and "".join(word.capitalize() for word in name.split("_")) not in GROUPS)
        follows = any(isinstance(a, Tensor) and a.requires_grad for a in operands(args))
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
            self._histories[id(copy)] = copy, (t.grad_fn, t.output_nr)
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
