"""What a traced operation remembers so that relevance can be sent from its output to its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fasterisnet.errors import RuleError
from fasterisnet.relevance.functions import ConvolutionInputGradient, ConvolutionSettings

if TYPE_CHECKING:
    from fasterisnet.relevance.rules import RuleTable

# A rule's answer for one operation: G for some of its sources, and G for the ordinary derivative to go on with.
NATIVE = None
Share = tuple[Tensor | None, Tensor]


@dataclass
class State:
    """Shared by all operations of a trace: the rules of the relevance pass that is under way, if one is."""

    table: RuleTable | None = None
    box: tuple[Tensor, Tensor] | None = None

    @property
    def active(self) -> bool:
        return self.table is not None


class Operation:
    """One call the network made. `kind` picks its rule; `sources` are the activations relevance may be sent to."""

    kind = "?"

    def __init__(self, state: State, name: str, *sources: Tensor) -> None:
        self.state = state
        self.name = name
        self.sources: tuple[Tensor, ...] = sources
        self.y: Tensor | None = None
        self._version = 0
        self.is_output = False
        self.fused_into = ""

    def keep(self, y: Tensor) -> None:
        """Remembers the output, for rules that need `R_y = y * G_y`."""
        self.y, self._version = y, y._version

    def value(self) -> Tensor:
        """The output, computed again if the network has overwritten it since."""
        if self.y is None or self.y._version != self._version:
            return self.recompute()
        return self.y

    def recompute(self) -> Tensor:
        raise RuleError(f"The output of '{self.name}' was overwritten in place; explain a model without that step.")

    @property
    def unit(self) -> tuple[Linear | None, Norm | None]:
        """The linear operation, and the batch norm behind it, that this operation is fused with."""
        return None, None

    def propagate(self, G: Tensor, y: Tensor | None = None) -> tuple[Tensor | None, list[Tensor | None]]:
        """Applies the rule of the pass under way. Returns G for the ordinary derivative and for every source."""
        table = self.state.table
        assert table is not None
        native: Tensor | None = None
        grads: list[Tensor | None] = [None] * len(self.sources)
        for source, grad in table.apply(self, G, y):
            if source is NATIVE:
                native = grad
            else:
                position = next(i for i, s in enumerate(self.sources) if s is source)
                before = grads[position]
                grads[position] = grad if before is None else before + grad
        return native, grads

    def replace(self, old: Tensor, new: Tensor) -> None:
        """`old` is about to be overwritten in place; `new` keeps its value."""
        self.sources = tuple(new if s is old else s for s in self.sources)
        for key, item in vars(self).items():
            if item is old and key != "y":
                setattr(self, key, new)

    def forget(self) -> None:
        """Drops every tensor: no relevance pass follows. (A tensor, its history and its operation form a cycle.)"""
        for key, item in list(vars(self).items()):
            if isinstance(item, Tensor | Operation) or key in ("sources", "function", "path"):
                setattr(self, key, None if key != "sources" else ())


class Linear(Operation):
    """`y = W x + b` for some layout of W: knows its transpose, and how to scale its output channels."""

    kind = "linear"

    def __init__(self, state: State, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(state, name, x)
        self.x: Tensor = x
        self.weight: Tensor = weight
        self.bias = bias
        self.non_negative = False
        self.path: Callable[[Tensor], Tensor] | None = None
        self.ends_here = False

    @property
    def first(self) -> bool:
        """Whether x is the network input, perhaps padded or reshaped (`path` says how)."""
        return self.path is not None

    @property
    def unit(self) -> tuple[Linear | None, Norm | None]:
        return self, None

    @property
    def x_value(self) -> Tensor:
        """x as a number: where x is the images, nobody asks for their gradient."""
        return self.x.detach() if self.ends_here else self.x

    @property
    def can_pair(self) -> bool:
        """Whether `W1 x1 + W2 x2` is one operation on x1 and x2, and on W1 and W2, put side by side."""
        return type(self) is Linear

    def paired(self, first: Tensor, second: Tensor, weights: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x1 and x2 side by side, W1 and W2 side by side."""
        return torch.cat((first, second), -1), torch.cat(weights, 1)

    def parted(self, G: Tensor) -> tuple[Tensor, Tensor]:
        """What belongs to x1 and what to x2."""
        first, second = G.chunk(2, -1 if type(self) is Linear else 1)
        return first, second

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def transpose(self, G: Tensor, weight: Tensor) -> Tensor:
        return G @ weight.to(G.dtype)

    def scaled(self, scale: Tensor) -> Tensor:
        """The weight with every output channel multiplied by its number."""
        return self.weight * scale.view(-1, *[1] * (self.weight.ndim - 1))

    def recompute(self) -> Tensor:
        return self.forward(self.x, self.weight, self.bias)


class Convolution(Linear):
    """Convolution or transposed convolution of any dimension."""

    def __init__(
        self,
        state: State,
        name: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: ConvolutionSettings,
    ) -> None:
        super().__init__(state, name, x, weight, bias)
        self.settings = settings

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        bias = None if bias is None else bias.to(x.dtype)
        return torch.ops.aten.convolution(x, weight.to(x.dtype), bias, *self.settings)

    def transpose(self, G: Tensor, weight: Tensor) -> Tensor:
        weight = weight.to(G.dtype)
        x = self.x.detach().to(G.dtype)
        if not self.settings.transposed and x.shape[1] != weight.shape[1] * self.settings.groups:
            x = torch.cat((x, x), 1)
        return ConvolutionInputGradient.apply(G, weight, x, self.settings)

    @property
    def can_pair(self) -> bool:
        return self.settings.groups == 1 and not self.settings.transposed

    def paired(self, first: Tensor, second: Tensor, weights: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.cat((first, second), 1), torch.cat(weights, 1)

    def scaled(self, scale: Tensor) -> Tensor:
        if not self.settings.transposed:
            return super().scaled(scale)
        groups = self.settings.groups
        grouped = self.weight.unflatten(0, (groups, -1))
        return (grouped * scale.view(groups, 1, -1, *[1] * (self.weight.ndim - 2))).flatten(0, 1)


class Product(Linear):
    """`x @ W` or, with `left`, `W @ x`, W being computed from parameters only."""

    def __init__(self, state: State, name: str, x: Tensor, weight: Tensor, left: bool) -> None:
        super().__init__(state, name, x, weight, None)
        self.left = left

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = weight.to(x.dtype)
        return weight @ x if self.left else x @ weight

    def transpose(self, G: Tensor, weight: Tensor) -> Tensor:
        weight = weight.to(G.dtype)
        if weight.ndim == 1:
            return G.unsqueeze(-2 if self.left else -1) * (weight.unsqueeze(-1) if self.left else weight)
        if self.left and self.x.ndim == 1:
            return (weight * G.unsqueeze(-1)).sum_to_size(*weight.shape[:-2], 1, weight.shape[-1]).flatten()
        if not self.left and self.x.ndim == 1:
            return (weight * G.unsqueeze(-2)).sum(-1).sum_to_size(self.x.shape)
        out = weight.mT @ G if self.left else G @ weight.mT
        return out.sum_to_size(self.x.shape)


class Contraction(Linear):
    """`einsum(equation, x, W)` or, with `left`, `einsum(equation, W, x)`."""

    def __init__(self, state: State, name: str, x: Tensor, weight: Tensor, equation: str, left: bool) -> None:
        super().__init__(state, name, x, weight, None)
        inputs, self.out = equation.split("->")
        first, second = inputs.split(",")
        self.indices, self.weight_indices = (second, first) if left else (first, second)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.einsum(f"{self.indices},{self.weight_indices}->{self.out}", x, weight.to(x.dtype))

    def transpose(self, G: Tensor, weight: Tensor) -> Tensor:
        if any(i not in self.out + self.weight_indices for i in self.indices):
            G, out = self._with_summed_indices(G)
        else:
            out = self.out
        return torch.einsum(f"{out},{self.weight_indices}->{self.indices}", G, weight.to(G.dtype))

    def _with_summed_indices(self, G: Tensor) -> tuple[Tensor, str]:
        """G repeated along the indices that only x has, which the contraction sums over."""
        lost = [i for i in self.indices if i not in self.out + self.weight_indices]
        sizes = [self.x.shape[self.indices.index(i)] for i in lost]
        return G.reshape(*G.shape, *[1] * len(lost)).expand(*G.shape, *sizes), self.out + "".join(lost)


class Norm(Operation):
    """A normalisation, seen as `y = scale * x + shift` with its statistics constant.

    `centred` lists the dimensions whose mean is subtracted as part of the operation (layer norm); batch norm has none.
    """

    kind = "norm"

    def __init__(
        self,
        state: State,
        name: str,
        x: Tensor,
        scale: Tensor,
        shift: Tensor | None,
        recompute: Callable[[], Tensor],
        *,
        linear: Linear | None = None,
        centred: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        sources = (x,) if linear is None else (x, linear.x)
        super().__init__(state, name, *sources)
        self.x: Tensor = x
        self.scale: Tensor = scale
        self.shift = shift
        self.linear = linear
        self.per_channel = centred is None
        self.centred = centred
        self.function = recompute

    @property
    def unit(self) -> tuple[Linear | None, Norm | None]:
        return self.linear, self

    def recompute(self) -> Tensor:
        return self.function()

    @property
    def full_scale(self) -> Tensor:
        """The scale, shaped to be multiplied with x."""
        return along_channels(self.scale, self.x) if self.per_channel else self.scale

    @property
    def full_shift(self) -> Tensor | float:
        if self.shift is None:
            return 0.0
        return along_channels(self.shift, self.x) if self.per_channel else self.shift


class Activation(Operation):
    """`y = f(x)`, element by element. `rectifier`: f is ReLU."""

    kind = "activation"

    def __init__(
        self,
        state: State,
        name: str,
        x: Tensor,
        before: Operation | None,
        function: Callable[[Tensor], Tensor] | None,
    ) -> None:
        linear, norm = (None, None) if before is None else before.unit
        sources = [x] if function is not None else []
        for operation in (norm, linear):
            if operation is not None and not any(operation.x is s for s in sources):
                sources.append(operation.x)
        super().__init__(state, name, *sources)
        self.x = x if function is not None else None
        self.linear, self.norm = linear, norm
        self.function = function
        self.keep_norm_apart = False

    @property
    def rectifier(self) -> bool:
        return self.function is None

    @property
    def unit(self) -> tuple[Linear | None, Norm | None]:
        return self.linear, self.norm

    def recompute(self) -> Tensor:
        assert self.function is not None and self.x is not None
        return self.function(self.x)


class Sum(Operation):
    """`y = a + b`; b may be a constant."""

    kind = "sum"

    def __init__(self, state: State, name: str, a: Tensor, b: Tensor | float, b_is_source: bool) -> None:
        super().__init__(state, name, *((a, b) if b_is_source and isinstance(b, Tensor) else (a,)))
        self.a: Tensor = a
        self.b: Tensor | float = b
        self.b_is_source = b_is_source

    def recompute(self) -> Tensor:
        return self.a + self.b


class Pool(Operation):
    """A linear operation without parameters whose weights are never negative: mean, average pooling, upsampling."""

    kind = "pool"

    def __init__(self, state: State, name: str, x: Tensor, function: Callable[[Tensor], Tensor], signed: bool) -> None:
        super().__init__(state, name)
        self.x: Tensor = x
        self.function: Callable[[Tensor], Tensor] = function
        self.signed = signed

    def recompute(self) -> Tensor:
        return self.function(self.x)


class Matmul(Operation):
    """`a @ b`, both activations."""

    kind = "matmul"

    def __init__(self, state: State, name: str, a: Tensor, b: Tensor, weights: Tensor | None) -> None:
        super().__init__(state, name, a, b)
        self.a: Tensor = a
        self.b: Tensor = b
        self.weights = weights

    def recompute(self) -> Tensor:
        return self.a @ self.b


class Operand(Operation):
    """One factor of a product: takes half of the relevance ("half"), none ("constant"), or what x >= 0 lets pass."""

    def __init__(self, state: State, name: str, kind: str, x: Tensor | None = None) -> None:
        super().__init__(state, name)
        self.kind = kind
        self.x = x


def along_channels(vector: Tensor, like: Tensor) -> Tensor:
    """A vector with one number a channel, shaped to be multiplied with `like`."""
    return vector.view(-1, *[1] * (like.ndim - 2))
