"""Masks made of a tensor's own values: `x * (x > 0)` is a ReLU, which below autograd is a comparison and a product."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fasterisnet.lrp.kinds import Edge, Node, edges, kind, source
from fasterisnet.lrp.same import same

if TYPE_CHECKING:
    from fasterisnet.lrp.record import Note

MASKED = frozenset("mul where masked_fill index_put _index_put_impl masked_scatter".split())
# Steps that leave every number where, or as, it is; and those after which what was detached is still told by its signs.
UNCHANGED = frozenset("_to_copy clone alias detach lift_fresh".split())
REARRANGED = frozenset(
    "view _unsafe_view _reshape_alias permute transpose t squeeze unsqueeze slice select flip".split()
)
OF_VALUES = UNCHANGED | {"abs", "neg"}
SIGNS = frozenset({"heaviside", "sign"})
SIMPLE: dict[str, Callable[[Tensor], Tensor]] = {"Abs": torch.abs, "Neg": torch.neg, "Sign": torch.sign}
# What masks are tried on: one that makes these what a ReLU makes them is a ReLU.
TRIED = torch.logspace(-30, 30, 4001, dtype=torch.float64, device="cpu")
TRIED = torch.cat([-TRIED.flip(0), TRIED.new_zeros(1), TRIED])


@dataclass
class Signs:
    """What is known of a mask, or of a detached tensor that may become one.

    origins: what it was made of, element by element. own: of one of them without comparing it to another. tried: what
    it is where that one is `TRIED`; None if that depends on more. places: its elements' numbers among the origin's.
    """

    tensor: Tensor
    origins: list[Edge]
    tried: Tensor | None
    is_mask: bool = False
    own: bool = True
    places: Tensor | None = None


class Masks:
    """What a forward pass has made of comparisons so far. histories: copies, and the edges of what they copy."""

    def __init__(self, histories: dict[int, tuple[Tensor, Any]]) -> None:
        self._histories = histories
        self._signs: dict[int, Signs] = {}
        self._picked: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # what a mask picked: that, of what, the mask

    def clear(self) -> None:
        self._signs.clear()
        self._picked.clear()

    def origins(self, value: Any) -> list[Edge]:
        """What a mask was made of; nothing, if it is none."""
        return self._signs[id(value)].origins if id(value) in self._signs else []

    def edge_of(self, t: Tensor) -> Edge | None:
        """A tensor's place in the graph, if it has one."""
        return self._histories[id(t)][1] if id(t) in self._histories else t.grad_fn and (t.grad_fn, t.output_nr)

    def note_picked(self, args: tuple[Any, ...], out: Tensor) -> None:
        """`x[mask]`, which may be put back where it was."""
        if len(args[1]) == 1 and id(args[1][0]) in self._signs:
            self._picked[id(out)] = out, args[0], args[1][0]

    def note_signs(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        """`x > 0` remembers x, and so does what is made of it element by element."""
        found = self._signs_after(func, name, args, kwargs, out)
        if found is not None:
            self._signs[id(out)] = found
        else:
            self._signs.pop(id(out), None)  # it may have been changed in place

    def _signs_after(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], out: Tensor) -> Signs | None:
        """What is known of the result of a step."""
        tensors = [t for t in operands(args) if isinstance(t, Tensor)]
        made_of = [signs for t in tensors if (signs := self._signs_of(t)) is not None]
        moved = name in REARRANGED and len(made_of) == 1
        if not made_of or not (moved or name in UNCHANGED or torch.Tag.pointwise in func.tags):
            return None
        origins: list[Edge] = []
        for origin in (o for signs in made_of for o in signs.origins):
            origins += [] if any(same(origin, o) for o in origins) else [origin]
        of_masks, one = all(signs.is_mask for signs in made_of), len(origins) == 1
        is_mask = of_masks or not out.is_floating_point() or name in SIGNS
        if not is_mask and (not one or not (moved or name in OF_VALUES)):
            return None
        found = Signs(out, origins, made_of[0].tried, is_mask)
        found.own = all(signs.own for signs in made_of) and (of_masks or one)
        found.places = made_of[0].places
        if moved:
            size = made_of[0].tensor.shape
            before = torch.arange(math.prod(size), device="cpu").view(size) if found.places is None else found.places
            found.places = func(before, *args[1:])
        elif any(signs.places is not None for signs in made_of[1:]):
            return None
        elif name not in UNCHANGED or (is_mask and not of_masks):
            found.tried = self._try(func, args, kwargs, origins) if one else None
        if found.tried is not None:
            found.tried = found.tried.to(torch.float64 if out.is_floating_point() else out.dtype)
        return found

    def _signs_of(self, t: Tensor) -> Signs | None:
        """What is remembered of a mask; an activation is made of itself, or of what simple steps made it of."""
        edge, tried = self.edge_of(t), TRIED
        if id(t) in self._signs or edge is None:
            return self._signs.get(id(t))
        edge, steps = source(edge), []
        while (step := _simple(edge[0])) is not None:
            edge = source(edges(edge[0])[step[0]])
            steps.append(step[1])
        for function in reversed(steps):
            tried = function(tried)
        return Signs(t, [edge], tried)

    def _try(self, func: Any, args: Any, kwargs: dict[str, Any], origins: list[Edge]) -> Tensor | None:
        """What an operation makes of its operands where their origins, which are one tensor, are `TRIED`."""

        def tried(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [tried(v) for v in value]
            if not isinstance(value, Tensor):
                return value
            signs = self._signs_of(value)
            if signs is None and (number := one_number(value)) is not None:
                dtype = torch.float64 if value.is_floating_point() else value.dtype
                return torch.tensor(number, dtype=dtype, device="cpu")
            if signs is None or signs.tried is None or not any(same(signs.origins[0], o) for o in origins):
                raise LookupError
            return signs.tried.clone()

        try:
            found = func(*tried(args), **{k: v for k, v in kwargs.items() if k in ("dtype", "alpha")})
        except (LookupError, RuntimeError, TypeError):
            return None
        return found if isinstance(found, Tensor) and found.shape == TRIED.shape else None

    def note_selected(self, found: Note, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The operand that is multiplied with, or filled where, a mask made of its own values says so."""
        flat = [t for t in operands(args) if isinstance(t, Tensor)]
        base, mask, picked = (*flat, *[None] * 3)[:3]
        if id(picked) in self._picked:
            _, whole, first = self._picked[id(picked)]
            if first is mask or self._alike(first, mask):  # z[m] = y[m]
                func, args, kwargs, flat = torch.ops.aten.where.self, (mask, whole, base), {}, [mask, whole, base]
                found.operands = list(args)
        masks = [self._signs[id(t)] for t in flat if id(t) in self._signs]
        for t in flat if any(m.is_mask and m.own for m in masks) else []:
            signs = None if id(t) in self._signs else self._signs_of(t)
            of = [] if signs is None else [o for m in masks for o in m.origins if same(signs.origins[0], o, m.places)]
            if signs is None or not of:
                continue
            found.selected, found.edge = t, self.edge_of(t)
            y = self._try(func, args, kwargs, [*signs.origins, *of])
            if y is not None and signs.tried is not None:
                found.bounds = _bounds(signs.tried, y)
            return

    def _alike(self, first: Tensor, second: Tensor | None) -> bool:
        """Whether two masks were made alike of one tensor."""
        a, b = (self._signs.get(id(t)) for t in (first, second))
        if a is None or b is None or a.tried is None or b.tried is None or not same(a.origins[0], b.origins[0]):
            return False
        return a.places is None and b.places is None and torch.equal(a.tried, b.tried)


def operands(args: tuple[Any, ...]) -> list[Any]:
    """The tensors and numbers of a call, lists of tensors opened."""
    found: list[Any] = []
    for arg in args:
        found += [a for a in arg if isinstance(a, Tensor)] if isinstance(arg, list | tuple) else [arg]
    return found


def one_number(value: Any) -> float | None:
    """A constant whose numbers are all the same, as that number."""
    if not isinstance(value, Tensor):
        return value
    if value.requires_grad or value.is_complex() or value.numel() == 0:
        return None
    first = value.reshape(-1)[0]
    return first.item() if bool((value == first).all()) else None


def _simple(node: Node) -> tuple[int, Callable[[Tensor], Tensor]] | None:
    """Which operand a step takes the size or the sign of, or a multiple, as a function of it."""
    if kind(node) in SIMPLE:
        return 0, SIMPLE[kind(node)]
    at = next((i for i, (below, _) in enumerate(edges(node)) if below is not None), 0)
    constant = (node._saved_other if at == 0 else node._saved_self) if kind(node) == "Mul" else None
    number = one_number(constant) if constant is not None else None
    return None if number is None or edges(node)[1 - at][0] is not None else (at, lambda tried: tried * number)


def _bounds(x: Tensor, y: Tensor) -> tuple[float, float] | None:
    """Between which numbers y is x clamped, tried on all numbers that there are; None if it is another function."""
    low, high = float(y.min()), float(y.max())
    if not torch.equal(y, x.clamp(low, high)):
        return None
    return low if low > x.min() else -math.inf, high if high < x.max() else math.inf
