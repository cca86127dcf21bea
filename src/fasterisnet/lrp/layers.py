"""Layers as the rules see them, read from autograd's nodes: `y = W x + b`, and norms as `y = scale*x + shift`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fasterisnet.errors import RuleError
from fasterisnet.lrp.kernels import ConvolutionInputGradient, ConvolutionSettings, along_channels, wide
from fasterisnet.lrp.kinds import BATCH_NORMS, RESHAPING, Edge, Node, edges, kind, shape, source, spoken
from fasterisnet.lrp.record import note

Active = Callable[[Node], list[bool]]


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
    side = -1  # the dimension of x that W sums over

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

    @property
    def x(self) -> Tensor:
        return operand(self.node, self.x_at, self.name)

    @property
    def bias(self) -> Tensor | None:
        return operand(self.node, 0) * self.node._saved_beta if self.has_bias else None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = x @ weight.to(x.dtype) if self.on_the_left else weight.to(x.dtype) @ x
        return y if bias is None else y + bias

    def transpose(self, G: Tensor, weight: Tensor) -> Tensor:
        weight = weight.to(G.dtype)
        if weight.ndim == 1:
            return G.unsqueeze(-1) * weight
        return G @ weight.mT if self.on_the_left else weight.mT @ G

    def nothing_added(self, x: Tensor) -> Tensor:
        """A bias of zeros."""
        return x.new_zeros(())

    def each_channel(self, t: Tensor) -> Tensor | None:
        """A constant of the size of y as W takes it; None if it is not the same wherever W is."""
        if t.ndim == 1:  # a vector is multiplied
            return None if self.on_the_left else t.unsqueeze(-1)
        rows = t.narrow(-2 if self.on_the_left else -1, 0, 1)
        return rows if t.shape == rows.shape or torch.equal(rows.expand_as(t), t) else None

    def scaled(self, weight: Tensor, scale: Tensor) -> Tensor:
        """W with every output channel multiplied by its number."""
        return weight * scale

    def side_by_side(self, weights: tuple[Tensor, Tensor]) -> Tensor:
        """W1 and W2 as one matrix for x1 and x2 put side by side."""
        return torch.cat(weights, -2)


class Convolution(Layer):
    """Convolution or transposed convolution of any dimension."""

    side = 1

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

    @property
    def bias(self) -> Tensor | None:
        return along_channels(operand(self.node, 2), self.weight) if self.has_bias else None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        numbers = self.nothing_added(x).shape  # the kernel adds one number a channel for nothing
        fits = bias is not None and bias.numel() == numbers[0] and bias.shape[-len(numbers) :] == numbers
        own = bias.flatten().to(x.dtype) if bias is not None and fits else None
        y = torch.ops.aten.convolution(x, weight.to(x.dtype), own, *self.settings)
        return y if bias is None or own is not None else y + bias

    def nothing_added(self, x: Tensor) -> Tensor:
        return x.new_zeros((self.node._input_metadata[0].shape[1], *[1] * (x.ndim - 2)))

    def transpose(self, G: Tensor, weight: Tensor) -> Tensor:
        weight, x = weight.to(G.dtype), self.x.detach().to(G.dtype)
        if not self.settings.transposed and x.shape[1] != weight.shape[1] * self.settings.groups:
            x = torch.cat((x, x), 1)
        return ConvolutionInputGradient.apply(G, weight, x, self.settings)

    def each_channel(self, t: Tensor) -> Tensor | None:
        rows = t.movedim(1, 0).reshape(t.shape[1], -1)
        return rows[:, 0] if rows.shape[1] == 1 or torch.equal(rows[:, :1].expand_as(rows), rows) else None

    def scaled(self, weight: Tensor, scale: Tensor) -> Tensor:
        if not self.settings.transposed:
            return weight * scale.view(-1, *[1] * (weight.ndim - 1))
        grouped = weight.unflatten(0, (self.settings.groups, -1))
        scale = scale.expand(weight.shape[1] * len(grouped))
        return (grouped * scale.view(len(grouped), 1, -1, *[1] * (weight.ndim - 2))).flatten(0, 1)

    def side_by_side(self, weights: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(weights, 1)


CLASSES = {"Convolution": Convolution, **dict.fromkeys(Layer.PRODUCTS, Layer)}


def layer(node: Node, active: Active) -> Layer | None:
    """The node as a layer, if its input depends on the images and its weight and bias do not."""
    on = [i for i, a in enumerate(active(node)) if a]
    inputs = Layer.PRODUCTS[kind(node)][:2] if kind(node) in Layer.PRODUCTS else (0,)
    if len(on) != 1 or on[0] not in inputs or node._input_metadata[0].dtype.is_complex:
        return None
    return CLASSES[kind(node)](node, on[0])


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
    weight = None if weight is None else wide(weight)
    if kind(node) == "NativeLayerNorm":
        dims = len(node._saved_normalized_shape)
        return _centred(node, x, (*x.shape[: x.ndim - dims], -1), weight, lambda: operand(node, 2, "bias"))
    if kind(node) == "NativeGroupNorm" or (kind(node) in BATCH_NORMS and _is_instance_norm(node)):
        channels, groups = getattr(node, "_saved_C", x.shape[1]), getattr(node, "_saved_group", x.shape[1])
        samples = getattr(node, "_saved_N", len(x))

        def fitted(vector: Tensor | None) -> Tensor | None:
            rows = (samples, channels, x.numel() // (samples * channels))
            return None if vector is None else vector.view(1, -1, 1).expand(rows).reshape(x.shape)

        return _centred(node, x, (samples, groups, -1), fitted(weight), lambda: fitted(operand(node, 2)))
    training, eps = getattr(node, "_saved_training", False), node._saved_eps
    mean, var = (None, None) if training else (wide(node._saved_running_mean), wide(node._saved_running_var))
    inverse = node._saved_result2.detach() if var is None else torch.rsqrt(var + eps)
    scale = inverse.to(x.dtype) if weight is None else weight * inverse

    def bias() -> Tensor | None:
        return None if (given := operand(node, 2)) is None else wide(given)

    def shift() -> Tensor:
        beta, centre = bias(), wide(node._saved_result1.detach()) if mean is None else mean
        return along_channels((0 if beta is None else beta) - centre * scale, x)

    return Norm(x, scale, shift, lambda: F.batch_norm(x, mean, var, weight, bias(), training, 0.0, eps))


def _is_instance_norm(node: Node) -> bool:
    """torch spells instance norm as the batch norm of one sample that has all channels, or groups, of all samples.

    Of one sample alone the two are told apart by numbers for the channels that were not repeated for the samples.
    """
    below = source(edges(node)[0])[0]
    if not getattr(node, "_saved_training", False) or below is None or kind(below) not in RESHAPING:
        return False
    inner, outer = node._saved_input.shape, shape(edges(below)[0])
    if inner[0] != 1 or inner[1] % outer[0] or isinstance(node._saved_weight, torch.nn.Parameter):
        return False
    moved = source(edges(below)[0])[0]
    if outer[0] > 1 and moved is not None and kind(moved) in ("Permute", "Transpose"):
        samples = through([moved], torch.arange(outer[0]).view(-1, *[1] * (len(outer) - 1)).expand(outer)).flatten(1)
        if not torch.equal(samples[:, :1].expand_as(samples), samples):
            return False  # the channels of all samples side by side
    repeated = outer[0] > 1 and outer[0] * outer[1] == inner[1]
    return inner == outer or repeated or getattr(node, "_saved_running_mean", None) is None


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
