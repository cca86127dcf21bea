"""Layers as the rules see them, read from autograd's nodes: `y = W x + b`, and norms as `y = scale*x + shift`."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fasterisnet.errors import RuleError
from fasterisnet.lrp.kernels import ConvolutionInputGradient, ConvolutionSettings, along_channels, wide
from fasterisnet.lrp.kinds import (
    BATCH_NORMS,
    NORMS,
    SUMS,
    Edge,
    Node,
    descend,
    edges,
    kind,
    shape,
    source,
    spoken,
)
from fasterisnet.lrp.record import note

Active = Callable[[Node], list[bool]]
CENTRING = NORMS - BATCH_NORMS  # their means are computed from the images


def operand(node: Node, position: int, saved: str = "") -> Any:
    """An operand's value: what autograd saved, the parameter it is, or what was noted in the forward pass."""
    value = getattr(node, f"_saved_{saved}", None) if saved else None
    if value is not None:
        return value
    below = edges(node)[position][0] if position < len(edges(node)) else None
    if hasattr(below, "variable"):
        return below.variable  # type: ignore[union-attr]
    found = note(node)
    if found is None or position >= len(found.operands):
        raise RuleError(
            f"This rule reads the operands of '{spoken(kind(node))}', which autograd did not keep. Use "
            "fasterisnet.explain, or run the forward pass inside `with fasterisnet.recording():`."
        )
    return found.operands[position]


class Layer:
    """`y = W x + b` as a matrix product, `x @ W` or `W @ x`; `x_at` is x's place among the node's operands."""

    # For each kind `b + u @ v`: the places of u and v, and autograd's names for them.
    PRODUCTS = {
        "Addmm": (1, 2, "mat1", "mat2"), "Baddbmm": (1, 2, "batch1", "batch2"), "Mm": (0, 1, "self", "mat2"),
        "Bmm": (0, 1, "self", "mat2"), "Mv": (0, 1, "self", "vec"), "Addmv": (1, 2, "mat", "vec"),
    }  # fmt: skip
    side = channels = -1  # the dimensions of x that W sums over, and of y that it makes

    def __init__(self, node: Node, x_at: int) -> None:
        self.node, self.x_at = node, x_at
        self.edge: Edge = edges(node)[x_at]
        self._read()

    def _read(self) -> None:
        u, v, *names = self.PRODUCTS[kind(self.node)]
        self.on_the_left = self.x_at == u
        mine, other = (names, (u, v)) if self.on_the_left else (names[::-1], (v, u))
        self.name = mine[0]
        alpha = getattr(self.node, "_saved_alpha", 1)
        weight = operand(self.node, other[1], mine[1])
        self.weight: Tensor = weight if alpha == 1 else weight * alpha
        self.has_bias = u == 1 and self.node._saved_beta != 0
        self.can_pair = self.on_the_left and self.weight.ndim > 1
        self.per_channel = not self.on_the_left or self.weight.ndim > 1
        self.channels = -1 if self.on_the_left or kind(self.node).endswith("mv") or kind(self.node) == "Mv" else -2

    @property
    def x(self) -> Tensor:
        return operand(self.node, self.x_at, self.name)

    @property
    def bias(self) -> Tensor | None:
        return operand(self.node, 0) * self.node._saved_beta if self.has_bias else None

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.to(x.dtype) if self.on_the_left else weight.to(x.dtype) @ x

    def transpose(self, G: Tensor, weight: Tensor) -> Tensor:
        weight = weight.to(G.dtype)
        if weight.ndim == 1:
            return G.unsqueeze(-1) * weight
        return G @ weight.mT if self.on_the_left else weight.mT @ G

    def scaled(self, weight: Tensor, scale: Tensor) -> Tensor:
        """W with every output channel multiplied by its number."""
        return weight * (scale if self.on_the_left else scale.unsqueeze(-1))

    def side_by_side(self, weights: tuple[Tensor, Tensor]) -> Tensor:
        """W1 and W2 as one matrix for x1 and x2 put side by side."""
        return torch.cat(weights, -2)


class Convolution(Layer):
    """Convolution or transposed convolution of any dimension."""

    side = channels = 1

    def _read(self) -> None:
        node = self.node
        self.settings = ConvolutionSettings(
            node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed,
            node._saved_output_padding, node._saved_groups,
        )  # fmt: skip
        self.name = "input"
        self.weight = node._saved_weight
        self.has_bias = tuple(node._saved_bias_sym_sizes_opt or (0,)) != (0,)
        self.can_pair = self.settings.groups == 1 and not self.settings.transposed
        self.per_channel = True

    @property
    def bias(self) -> Tensor | None:
        return along_channels(operand(self.node, 2), self.weight) if self.has_bias else None

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.aten.convolution(x, weight.to(x.dtype), None, *self.settings)

    def transpose(self, G: Tensor, weight: Tensor) -> Tensor:
        weight, x = weight.to(G.dtype), self.x.detach().to(G.dtype)
        if not self.settings.transposed and x.shape[1] != weight.shape[1] * self.settings.groups:
            x = torch.cat((x, x), 1)
        return ConvolutionInputGradient.apply(G, weight, x, self.settings)

    def scaled(self, weight: Tensor, scale: Tensor) -> Tensor:
        if not self.settings.transposed:
            return weight * scale.view(-1, *[1] * (weight.ndim - 1))
        grouped = weight.unflatten(0, (self.settings.groups, -1))
        scale = scale.expand(weight.shape[1] * len(grouped))
        return (grouped * scale.view(len(grouped), 1, -1, *[1] * (weight.ndim - 2))).flatten(0, 1)

    def side_by_side(self, weights: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(weights, 1)


CLASSES = {"Convolution": Convolution, **dict.fromkeys(Layer.PRODUCTS, Layer)}


def factors(node: Node) -> tuple[int, int]:
    """The places of the two factors of a linear node."""
    return Layer.PRODUCTS[kind(node)][:2] if kind(node) in Layer.PRODUCTS else (0, 1)


def layer(node: Node, active: Active) -> Layer | None:
    """The node as a layer, if its input depends on the images and its weight and bias do not."""
    on = [i for i, a in enumerate(active(node)) if a]
    first, second = factors(node)
    matrices = (first, second) if kind(node) in Layer.PRODUCTS else (first,)
    if len(on) != 1 or on[0] not in matrices or node._input_metadata[0].dtype.is_complex:
        return None
    return CLASSES[kind(node)](node, on[0])


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

    def each_channel(self, t: Tensor) -> Tensor | None:
        """One number a channel, if t has no more than that."""
        if not self.layer.per_channel:
            return None
        rows = t.movedim(self.layer.channels, 0).reshape(t.shape[self.layer.channels], -1)
        return rows[:, 0] if rows.shape[1] == 1 or torch.equal(rows[:, :1].expand_as(rows), rows) else None

    def behind(self, scale: Tensor | None, shift: Tensor | None, size: Sequence[int]) -> Unit | None:
        """This unit with `scale y + shift` behind it, both of the size of y or broadcast to it."""
        scale, shift = (None if t is None else self._before(t, size) for t in (scale, shift))
        weight, bias = self.weight, self.bias
        if scale is not None:
            each = self.each_channel(scale)
            if each is None:
                return None
            weight, bias = self.layer.scaled(weight, each), None if bias is None else bias * scale
        scaled = self.scaled or scale is not None
        if shift is not None and bias is not None and self.each_channel(shift) is None:
            return None  # a sum with what is no bias, such as an embedding of positions
        doubtful = not scaled and (self.doubtful or (self.layer.has_bias and shift is not None))
        bias = bias if shift is None else shift if bias is None else bias + shift
        return replace(self, weight=weight, bias=bias, scaled=scaled, doubtful=doubtful)

    def _before(self, t: Tensor, size: Sequence[int]) -> Tensor:
        """A constant that meets y after its rearrangements, as it would be before them."""
        t = t.view(*[1] * (len(size) - t.ndim), *t.shape)
        return through(self.path, t.expand(tuple(size)).contiguous()) if self.path else t


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
    step = None if at is None or below is None else _constants(node, at, below.weight)
    if at is None or below is None or step is None:
        return None
    found = below.behind(*step, shape((node, 0)))
    return found and replace(found, path=[*path, *found.path], inside=[(node, number), edges(node)[at], *found.inside])


@dataclass
class Chain:
    """Steps of constants one behind the other, as one: `y = scale x + shift`. inside: the edges in between."""

    edge: Edge
    x: Tensor
    scale: Tensor | None
    shift: Tensor
    inside: list[Edge] = field(default_factory=list)

    def scaled(self, t: Tensor) -> Tensor:
        return t if self.scale is None else t * self.scale

    def output(self) -> Tensor:
        return self.scaled(self.x) + self.shift

    def behind(self, scale: Tensor | None, shift: Tensor | None, at: Edge) -> Chain:
        """This chain with `scale y + shift` behind it. A shift of constants gets no gradient, one of means does."""
        total = self.shift if scale is None else self.shift * scale
        total = total if self.shift.requires_grad else total.detach()
        factor = self.scale if scale is None else self.scaled(scale)
        return replace(self, scale=factor, shift=total if shift is None else total + shift, inside=[at, *self.inside])


def chain(edge: Edge, active: Active) -> Chain | None:
    """The steps that end at an edge, norms among them, down to the first that adds something; None if none does."""
    node, number = source(edge)
    at = None if node is None else scaled_at(node, active)
    if node is None or at is None:
        return None
    below = chain(edges(node)[at], active) if unit(edges(node)[at], active) is None else None
    if kind(node) in CENTRING or (kind(node) in NORMS and below is None):
        found = norm(node)
        shift = found.shift().detach() if found.centred is None else found.shift()
        return Chain(edges(node)[0], found.x, found.full_scale, shift, [(node, number)])
    like = node._input_metadata[0]
    step = _constants(node, at, wide(torch.empty((), dtype=like.dtype, device=like.device)))
    if step is None:
        return None
    scale, shift = step[0], None if step[1] is None else step[1].detach()
    if below is not None:
        return below.behind(scale, shift, (node, number))
    return None if shift is None else Chain(edges(node)[at], wide(operand(node, at)), scale, shift, [(node, number)])


def scaled_at(node: Node, active: Active) -> int | None:
    """Which operand a step scales or shifts by constants, element by element; None if it is another step."""
    on, what = active(node), kind(node)
    known = what in NORMS or what in SUMS or what in ("Mul", "Div", "Neg", "Addcmul", "Addcdiv")
    if not known or sum(on) != 1 or shape(edges(node)[on.index(True)]) != shape((node, 0)):
        return None
    return on.index(True) if what not in NORMS or on[0] else None


def _constants(node: Node, at: int, like: Tensor) -> tuple[Tensor | None, Tensor | None] | None:
    """A step `scale x + shift` of constants; None if it is none."""
    what, scale, shift = kind(node), None, None
    if what in BATCH_NORMS:
        found = norm(node)
        return (found.full_scale, found.shift()) if found.centred is None else None
    if what in SUMS:
        alpha = getattr(node, "_saved_alpha", 1)
        signs = {"Add": (1, alpha), "Sub": (1, -alpha), "Rsub": (-alpha, 1)}[what]
        scale, shift = signs[at], operand(node, 1 - at) * signs[1 - at]
    elif what == "Neg":
        scale = -1
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
        other = node._saved_other if at == 0 else node._saved_self
        scale = other if what == "Mul" else 1 / other
    else:
        return None
    scale = None if isinstance(scale, int | float) and scale == 1 else scale
    as_tensors = (
        None if t is None else torch.as_tensor(t, dtype=like.dtype, device=like.device) for t in (scale, shift)
    )
    return next(as_tensors), next(as_tensors)


def through(path: Sequence[Node], t: Tensor) -> Tensor:
    """What rearranging nodes make of something that arrives at the first of them."""
    for node in path:
        moved = node(t)
        t = moved if isinstance(moved, Tensor) else moved[-1]
    return t


@dataclass
class Norm:
    """`y = scale * x + shift`; `centred` subtracts means as part of the operation. Batch norm: one number a channel."""

    x: Tensor
    scale: Tensor
    shift: Callable[[], Tensor]
    output: Callable[[], Tensor]
    centred: Callable[[Tensor], Tensor] | None = None

    @property
    def full_scale(self) -> Tensor:
        return along_channels(self.scale, self.x) if self.centred is None else self.scale


def norm(node: Node) -> Norm:
    """The norm a node is."""
    x, weight = wide(node._saved_input), node._saved_weight
    if kind(node) == "NativeLayerNorm":
        dims = len(node._saved_normalized_shape)
        return _centred(node, x, (*x.shape[: x.ndim - dims], -1), weight, lambda: operand(node, 2, "bias"))
    if kind(node) == "NativeGroupNorm" or _is_instance_norm(node):
        channels, groups = getattr(node, "_saved_C", x.shape[1]), getattr(node, "_saved_group", x.shape[1])
        samples = getattr(node, "_saved_N", len(x))

        def fitted(vector: Tensor | None) -> Tensor | None:
            rows = (samples, channels, x.numel() // (samples * channels))
            return None if vector is None else vector.view(1, -1, 1).expand(rows).reshape(x.shape)

        return _centred(node, x, (samples, groups, -1), fitted(weight), lambda: fitted(operand(node, 2)))
    training, eps = node._saved_training, node._saved_eps
    mean, var = (None, None) if training else (node._saved_running_mean, node._saved_running_var)
    inverse = node._saved_result2.detach() if var is None else torch.rsqrt(var + eps)
    scale = inverse.to(x.dtype) if weight is None else weight * inverse

    def shift() -> Tensor:
        beta, centre = operand(node, 2), node._saved_result1.detach() if mean is None else mean
        return along_channels((0 if beta is None else beta) - centre * scale, x)

    return Norm(x, scale, shift, lambda: F.batch_norm(x, mean, var, weight, operand(node, 2), training, 0.0, eps))


def _is_instance_norm(node: Node) -> bool:
    """torch spells instance norm as the batch norm of one sample that has all channels of all samples."""
    below = edges(node)[0][0]
    if kind(node) not in BATCH_NORMS or not node._saved_training or kind(below) != "View":
        return False
    inner, outer = node._saved_input.shape, shape(edges(below)[0])
    return inner[0] == 1 and outer[0] * outer[1] == inner[1]


def _centred(node: Node, x: Tensor, grouping: tuple[int, ...], gamma: Tensor | None, beta: Callable[[], Any]) -> Norm:
    """The normaliser is constant for the relevance that passes, yet part of the graph: gradients stay exact."""

    def mean_of(t: Tensor) -> Tensor:
        grouped = t.reshape(grouping)
        return grouped.mean(-1, keepdim=True).expand_as(grouped).reshape(x.shape)

    mean = mean_of(x)
    variance = mean_of((x - mean).square())
    saved = node._saved_result2.detach().reshape(-1).to(x.dtype)
    spread = saved.view(-1, 1).expand(-1, x.numel() // saved.numel()).reshape(x.shape)
    inverse = torch.rsqrt(variance + (spread**-2 - variance.detach()))  # the norm's own epsilon, found from its result
    scale = inverse if gamma is None else inverse * gamma

    def shift() -> Tensor:
        added = beta()
        return -mean * scale if added is None else added.detach() - mean * scale

    return Norm(x, scale, shift, lambda: x * scale + shift(), lambda t: t - mean_of(t))
