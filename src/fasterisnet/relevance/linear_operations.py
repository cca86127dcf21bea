"""Linear operations: each knows its transpose, and how its output channels are scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fasterisnet.relevance.functions import ConvolutionInputGradient, ConvolutionSettings
from fasterisnet.relevance.operations import Operation, State
from fasterisnet.small_maps import Geometry, apply, unrolled

if TYPE_CHECKING:
    from fasterisnet.relevance.operations import Norm


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


class SmallConvolution(Linear):
    """A convolution of a map smaller than its kernel, as a matrix product; see `small_maps`."""

    def __init__(
        self, state: State, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> None:
        super().__init__(state, name, x, unrolled(weight, geometry), bias)
        self.geometry = geometry

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return apply(x, weight.to(x.dtype), bias, self.geometry)

    def transpose(self, G: Tensor, weight: Tensor) -> Tensor:
        flat = G.flatten(1) @ weight.to(G.dtype).flatten(0, 1).flatten(1)
        return flat.view(len(G), weight.shape[2], *self.geometry.sizes)

    @property
    def can_pair(self) -> bool:
        return True

    def paired(self, first: Tensor, second: Tensor, weights: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.cat((first, second), 1), torch.cat(weights, 2)


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
