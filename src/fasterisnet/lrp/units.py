"""What z+, zB and gamma take for one step: a layer with the constants behind it, and constants behind each other."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fasterisnet.lrp.gates import constant_of
from fasterisnet.lrp.kernels import wide
from fasterisnet.lrp.kinds import BATCH_NORMS, NORMS, SUMS, Edge, Node, descend, edges, kind, shape, signs
from fasterisnet.lrp.layers import CLASSES, Active, Layer, layer, norm, operand, through

AFFINE = NORMS | SUMS | {"Mul", "Div", "Neg", "Addcmul", "Addcdiv"}
CENTRING = NORMS - BATCH_NORMS  # their means are computed from the images


@dataclass
class Unit:
    """A layer and what is behind it of constants, a separate bias or a batch norm, as one: `y = weight x + bias`.

    path: rearrangements between the layer and where its relevance arrives. inside: the edges in between. doubtful: a
    constant was added to the layer's own bias; it is a part of a batch norm if a scale follows.
    """

    layer: Layer
    weight: Tensor
    bias: Tensor | None
    path: list[Node] = field(default_factory=list)
    inside: list[Edge] = field(default_factory=list)
    scaled: bool = False
    doubtful: bool = False

    def __post_init__(self) -> None:
        self.weight = wide(self.weight)

    @property
    def x(self) -> Tensor:
        return wide(self.layer.x)

    def output(self) -> Tensor:
        y = self.layer.forward(self.x, self.weight)
        return y if self.bias is None else y + self.bias

    def behind(self, scale: Tensor | None, shift: Tensor | None, size: Sequence[int]) -> Unit | None:
        """This unit with `scale y + shift` behind it, both of the size of y or broadcast to it."""
        scale, shift = (before(self.path, t, size) for t in (scale, shift))
        weight, bias = self.weight, self.bias
        if scale is not None:
            each = self.layer.each_channel(scale)
            if each is None:
                return None
            weight, bias = self.layer.scaled(weight, each), None if bias is None else bias * scale
        scaled = self.scaled or scale is not None
        if shift is not None and bias is not None and self.layer.each_channel(shift) is None:
            return None  # a sum with what is no bias, such as an embedding of positions
        doubtful = not scaled and (self.doubtful or (self.layer.has_bias and shift is not None))
        bias = bias if shift is None else shift if bias is None else bias + shift
        return replace(self, weight=weight, bias=bias, scaled=scaled, doubtful=doubtful)


def before(path: Sequence[Node], t: Tensor | None, size: Sequence[int]) -> Tensor | None:
    """A constant that meets y after its rearrangements, as it would be before them."""
    if t is None:
        return None
    t = t.view([1] * (len(size) - t.ndim) + list(t.shape))
    return through(path, t.expand(tuple(size)).contiguous()) if path else t


def unit(edge: Edge, active: Active, reads: Container[Node] | None = None) -> Unit | None:
    """The layer (which `reads` one of these) whose output an edge is, rearranged, scaled and shifted by constants."""
    found = _unit(edge, active, reads)
    return None if found is None or found.doubtful else found


def _unit(edge: Edge, active: Active, reads: Container[Node] | None) -> Unit | None:
    path, (node, number) = descend(edge)
    if node is None or not any(active(node)):
        return None
    if kind(node) in CLASSES:
        found = layer(node, active)
        if found is None or (reads is not None and found.edge[0] not in reads):
            return None
        return Unit(found, found.weight, found.bias, path, [(node, number)])
    at = scaled_at(node, active)
    below = None if at is None or kind(node) in CENTRING else _unit(edges(node)[at], active, reads)
    step = None if at is None or below is None else constants(node, at)
    if at is None or below is None or step is None:
        return None
    found = below.behind(*step, shape((node, 0)))
    return found and replace(found, path=[*path, *found.path], inside=[(node, number), edges(node)[at], *found.inside])


@dataclass
class Chain:
    """Steps of constants one behind the other, as one: `y = scale x + shift`.

    path: rearrangements between y and where its relevance arrives. inside: the edges in between.
    """

    edge: Edge
    x: Tensor
    scale: Tensor | None
    shift: Tensor
    path: list[Node] = field(default_factory=list)
    inside: list[Edge] = field(default_factory=list)

    def scaled(self, t: Tensor) -> Tensor:
        return t if self.scale is None else t * self.scale

    def output(self) -> Tensor:
        return self.scaled(self.x) + self.shift

    def behind(self, scale: Tensor | None, shift: Tensor | None, size: Sequence[int]) -> Chain:
        """This chain with `scale y + shift` behind it. A shift of constants gets no gradient, one of means does."""
        scale, shift = (before(self.path, t, size) for t in (scale, shift))
        total = self.shift if scale is None else self.shift * scale
        total = total if self.shift.requires_grad else total.detach()
        factor = self.scale if scale is None else self.scaled(scale)
        return replace(self, scale=factor, shift=total if shift is None else total + shift)


def chain(edge: Edge, active: Active) -> Chain | None:
    """The steps that end at an edge, norms among them, down to the first that adds something; None if none does."""
    path, (node, number) = descend(edge)
    at = None if node is None else scaled_at(node, active)
    if node is None or at is None:
        return None
    below = chain(edges(node)[at], active) if unit(edges(node)[at], active) is None else None
    own = norm(node) if kind(node) in NORMS else None
    if own is not None and (own.centred is not None or below is None):
        shift = own.shift().detach() if own.centred is None else own.shift()
        return Chain(edges(node)[0], own.x, own.full_scale, shift, path, [(node, number)])
    step = constants(node, at)
    if step is None:
        return None
    scale, shift = step[0], None if step[1] is None else step[1].detach()
    if below is not None:
        found, here = below.behind(scale, shift, shape((node, 0))), [(node, number), edges(node)[at]]
        return replace(found, path=[*path, *found.path], inside=[*here, *found.inside])
    if shift is None:
        return None
    return Chain(edges(node)[at], wide(operand(node, at)), scale, shift, path, [(node, number)])


def scaled_at(node: Node, active: Active) -> int | None:
    """Which operand a step scales or shifts by constants, element by element; None if it is another step."""
    on, what = active(node), kind(node)
    known = what in AFFINE or is_line(node, active)
    if not known or sum(on) != 1 or shape(edges(node)[on.index(True)]) != shape((node, 0)):
        return None
    return on.index(True) if what not in NORMS or on[0] else None


def is_line(node: Node, active: Active) -> bool:
    """`lerp(a, b, x)`, which is `(b - a) x + a`."""
    return kind(node) == "Lerp" and active(node)[2:] == [True] and not any(active(node)[:2])


def constants(node: Node, at: int) -> tuple[Tensor | None, Tensor | None] | None:
    """A step `scale x + shift` of constants; None if it is none."""
    what, scale, shift = kind(node), None, None
    like = node._input_metadata[0]
    like = wide(torch.empty((), dtype=like.dtype, device=like.device))
    if what in BATCH_NORMS:
        found = norm(node)
        return (found.full_scale, found.shift()) if found.centred is None else None
    if what in SUMS:
        scale, shift = signs(node)[at], operand(node, 1 - at) * signs(node)[1 - at]
    elif what == "Neg":
        scale = -1
    elif what == "Lerp":
        shift = operand(node, 0, "self")
        scale = operand(node, 1, "end") - shift
    elif what in ("Addcmul", "Addcdiv"):
        if (what, at) == ("Addcdiv", 2):
            return None
        others = [operand(node, i, f"tensor{i}") for i in (1, 2) if i != at]
        if what == "Addcdiv":
            others[-1] = 1 / others[-1]
        scale, shift = (1, node._saved_value * others[0] * others[1]) if at == 0 else (
            node._saved_value * others[0], operand(node, 0)
        )  # fmt: skip
    elif what == "Mul" or at == 0:
        other = constant_of(node, what, at)
        scale = other if what == "Mul" else 1 / other
    else:
        return None
    scale = None if isinstance(scale, int | float) and scale == 1 else scale

    def fitted(t: Tensor | float | None) -> Tensor | None:
        return None if t is None else torch.as_tensor(t, dtype=like.dtype, device=like.device)

    return fitted(scale), fitted(shift)
