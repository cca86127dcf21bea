"""What each kind of operation does with relevance, and the tables that name a rule for every kind.

A rule takes an operation and `G` at its output (`R_y = y * G_y`) and returns pairs (where to, G there). The target is
one of the operation's sources, or NATIVE: the ordinary derivative goes on from there. A kind without a rule keeps its
ordinary derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fasterisnet.errors import InputError
from fasterisnet.relevance.functions import Attenuate, ChannelScale, Quotient, SumShares
from fasterisnet.relevance.linear_operations import Linear
from fasterisnet.relevance.operations import NATIVE, Activation, Norm, Operation, Share

# What a stabiliser of zero becomes, so that 0/0 is 0.
SMALLEST = 1e-12
Rule = Callable[[Any, Tensor, Tensor | None, float], list[Share]]


@dataclass(frozen=True)
class RuleTable:
    """A set of rules, one for each kind of operation, and the stabiliser they share.

    `needs_values`: some rule reads `op.value()`, so operations have to remember their outputs.
    """

    name: str
    epsilon: float
    rules: Mapping[str, Rule] = field(repr=False)
    needs_values: bool = True

    def __post_init__(self) -> None:
        if not (isinstance(self.epsilon, int | float) and 0 <= self.epsilon < math.inf):
            raise InputError(f"epsilon is {self.epsilon!r}; the stabiliser must be zero or a positive number.")

    def apply(self, operation: Operation, G: Tensor, y: Tensor | None) -> list[Share]:
        """The rule for this operation; a first layer inside a box takes zB, whatever the table says."""
        box = operation.state.box
        linear, norm = operation.unit
        epsilon = max(self.epsilon, SMALLEST)
        if box is not None and linear is not None and linear.first:
            return first_layer(operation, linear, norm, G, y, box, epsilon)
        rule = self.rules.get(operation.kind)
        return [(NATIVE, G)] if rule is None else rule(operation, G, y, epsilon)


# --- epsilon: the corrected gradient of LRP-Flex -------------------------------------------------------------------


def linear_ordinary(op: Linear, G: Tensor, _y: Tensor | None, _epsilon: float) -> list[Share]:
    """`G_x = W^T G_y`."""
    return [(op.x, op.transpose(G, op.weight))]


def norm_affine(op: Norm, G: Tensor, _y: Tensor | None, _epsilon: float) -> list[Share]:
    """`G_x = G_y * gamma/sqrt(var)`; layer norms also pass on the subtraction of their mean."""
    if op.per_channel:
        return [(op.x, ChannelScale.apply(G, op.scale))]
    assert op.centred is not None
    return [(op.x, op.centred(G * op.scale))]


def activation_epsilon(op: Activation, G: Tensor, y: Tensor | None, epsilon: float) -> list[Share]:
    """ReLU: `G_x = G_y * y/(y + eps)`. Others: `G_y * f(x)/(x + eps*sign(x))`."""
    if not op.rectifier:
        return [(op.x, Quotient.apply(G, op.value(), op.x, epsilon, True))]
    if op.norm is not None and op.norm.per_channel and not op.keep_norm_apart:
        return [(op.norm.x, Attenuate.apply(G, y, op.norm.scale, epsilon))]
    return [(NATIVE, Attenuate.apply(G, y, None, epsilon))]


def operand_half(_op: Operation, G: Tensor, _y: Tensor | None, _epsilon: float) -> list[Share]:
    """A factor of a product of activations takes half of the ordinary derivative."""
    return [(NATIVE, G * 0.5)]


def operand_constant(_op: Operation, _G: Tensor, _y: Tensor | None, _epsilon: float) -> list[Share]:
    """A gate or a normaliser takes nothing."""
    return []


# --- z+ ------------------------------------------------------------------------------------------------------------


def linear_zplus(op: Linear, G: Tensor, _y: Tensor | None, epsilon: float) -> list[Share]:
    """`z = W+ x+ + W- x- + b+`, `G_x = W+^T s` where x >= 0 and `W-^T s` where x < 0, `s = R_y/(z + eps)`."""
    return _unit_zplus(op, None, G, None if op.is_output else op.value(), epsilon)


def norm_zplus(op: Norm, G: Tensor, _y: Tensor | None, epsilon: float) -> list[Share]:
    """Behind a linear operation: one with it. Elsewhere: a diagonal linear layer of its own."""
    y = None if op.is_output else op.value()
    if op.linear is not None:
        return _unit_zplus(op.linear, op, G, y, epsilon)
    return _diagonal_zplus(op, G, y, epsilon)


def activation_zplus(op: Activation, G: Tensor, y: Tensor | None, epsilon: float) -> list[Share]:
    """Relevance passes unchanged, so what is fused in front of a ReLU starts from `R = y * G`."""
    if not op.rectifier:
        return activation_epsilon(op, G, y, epsilon)
    assert y is not None
    if op.linear is not None:
        return _unit_zplus(op.linear, op.norm, G, y, epsilon)
    if op.norm is not None:
        return _diagonal_zplus(op.norm, G, y, epsilon)
    return activation_ordinary(op, G, y, epsilon)


def sum_zplus(op: Any, G: Tensor, _y: Tensor | None, epsilon: float) -> list[Share]:
    """`R_1 = a1+/(a1+ + a2+ + eps) R_y`; a constant summand takes part in z and gets nothing."""
    a, b = op.a, op.b
    if op.b_is_source and a.shape == b.shape and not op.is_output:
        for_a, for_b = SumShares.apply(G, op.value(), a, b, epsilon)
        return [(a, for_a), (b, for_b)]
    constant = b.detach() if isinstance(b, Tensor) and not op.b_is_source else b
    z = a.clamp(min=0) + (constant.clamp(min=0) if isinstance(constant, Tensor) else max(constant, 0))
    s = _start(G, None if op.is_output else op.value(), z, epsilon)
    shares: list[Share] = [(a, (s * (a > 0)).sum_to_size(a.shape))]
    if op.b_is_source:
        shares.append((b, (s * (b > 0)).sum_to_size(b.shape)))
    return shares


def pool_zplus(op: Any, G: Tensor, _y: Tensor | None, epsilon: float) -> list[Share]:
    """A linear layer with non-negative weights: `s = R_y/(P x+ + eps)`; the derivative of P does the rest."""
    z = op.function(op.x.clamp(min=0)) if op.signed else op.value()
    return [(NATIVE, _start(G, None if op.is_output else op.value(), z, epsilon))]


def operand_positive(op: Any, G: Tensor, _y: Tensor | None, _epsilon: float) -> list[Share]:
    """The input of a pool, where it is not negative."""
    return [(NATIVE, G * (op.x >= 0))]


def matmul_zplus(op: Any, G: Tensor, _y: Tensor | None, epsilon: float) -> list[Share]:
    """Attention weights are weights: the signal takes all. Two signals: half to each, positive products only."""
    a, b = op.a, op.b
    a_plus, b_plus = a.clamp(min=0), b.clamp(min=0)
    if op.weights is not None:
        s = Quotient.apply(G, op.value(), a_plus @ b_plus, epsilon, False)
        if op.weights is a:
            return [(b, (a_plus.mT @ s).sum_to_size(b.shape) * (b >= 0))]
        return [(a, (s @ b_plus.mT).sum_to_size(a.shape) * (a >= 0))]
    a_minus, b_minus = a.clamp(max=0), b.clamp(max=0)
    s = 0.5 * Quotient.apply(G, op.value(), a_plus @ b_plus + a_minus @ b_minus, epsilon, False)
    for_a = torch.where(a >= 0, (s @ b_plus.mT).sum_to_size(a.shape), (s @ b_minus.mT).sum_to_size(a.shape))
    for_b = torch.where(b >= 0, (a_plus.mT @ s).sum_to_size(b.shape), (a_minus.mT @ s).sum_to_size(b.shape))
    return [(a, for_a), (b, for_b)]


def _unit_zplus(linear: Linear, norm: Norm | None, G: Tensor, y: Tensor | None, epsilon: float) -> list[Share]:
    x = linear.x_value
    weight, shift = _fused(linear, norm)
    if linear.non_negative:
        plus = weight.clamp(min=0)
        s = _start(G, y, linear.forward(x, plus, shift), epsilon)
        return [(linear.x, linear.transpose(s, plus))]
    plus, minus = _two_sided(linear, weight, shift, x.clamp(min=0), x.clamp(max=0), G, y, epsilon)
    return [(linear.x, torch.where(x >= 0, plus, minus))]


def _two_sided(
    linear: Linear, weight: Tensor, shift: Tensor | None, first: Tensor, second: Tensor, G: Tensor, y: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`W+^T s` and `W-^T s` for `z = W+ x1 + W- x2 + b+`."""
    plus, minus = weight.clamp(min=0), weight.clamp(max=0)
    if linear.can_pair:
        pair, weights = linear.paired(first, second, (plus, minus))
        return linear.parted(linear.transpose(_start(G, y, linear.forward(pair, weights, shift), epsilon), weights))
    s = _start(G, y, linear.forward(first, plus, shift) + linear.forward(second, minus), epsilon)
    return linear.transpose(s, plus), linear.transpose(s, minus)


def _diagonal_zplus(norm: Norm, G: Tensor, y: Tensor | None, epsilon: float) -> list[Share]:
    x, scale, shift = norm.x, norm.full_scale, norm.full_shift
    shift_plus = shift.clamp(min=0) if isinstance(shift, Tensor) else shift
    s = _start(G, y, (scale * x).clamp(min=0) + shift_plus, epsilon)
    return [(x, s * torch.where(x >= 0, scale.clamp(min=0), scale.clamp(max=0)))]


def _start(G: Tensor, y: Tensor | None, z: Tensor, epsilon: float) -> Tensor:
    """`s = R_y/(z + eps)`. The operation that made the logits (y is None) starts from its own z: `R = z * G`."""
    return Quotient.apply(G, z if y is None else y, z, epsilon, False)


def _fused(linear: Linear, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
    """Weight and positive part of the (constant) bias of a linear operation with the batch norm behind it."""
    bias = None if linear.bias is None else linear.bias.detach()
    if norm is None:
        return linear.weight, None if bias is None else bias.clamp(min=0)
    shift = norm.shift if norm.shift is not None else torch.zeros_like(norm.scale)
    if bias is not None:
        shift = shift + bias * norm.scale
    return linear.scaled(norm.scale), shift.detach().clamp(min=0)


# --- zB, first layer -----------------------------------------------------------------------------------------------


def first_layer(
    op: Operation,
    linear: Linear,
    norm: Norm | None,
    G: Tensor,
    y: Tensor | None,
    box: tuple[Tensor, Tensor],
    epsilon: float,
) -> list[Share]:
    """`R_x = x*(W^T s) - l*(W+^T s) - h*(W-^T s)`: z+ with x - l for the positive and x - h for the negative part.

    Returns relevance, not G. An activation behind the layer passes relevance on unchanged: y is its output.
    """
    assert linear.path is not None
    low, high = (linear.path(bound) for bound in box)
    above, below = linear.x_value - low, linear.x_value - high
    weight, shift = _fused(linear, norm)
    plus, minus = _two_sided(linear, weight, shift, above, below, G, op.value() if y is None else y, epsilon)
    return [(linear.x, above * plus + below * minus)]


# --- gamma and the plain gradient ----------------------------------------------------------------------------------


def linear_gamma(gamma: float) -> Rule:
    """`G_x = (W + gamma W+)^T (R_y/z)`, z with the same weights: favours positive contributions of positive inputs."""

    def rule(op: Linear, G: Tensor, _y: Tensor | None, epsilon: float) -> list[Share]:
        weight = op.weight + gamma * op.weight.clamp(min=0)
        bias = None if op.bias is None else op.bias + gamma * op.bias.clamp(min=0)
        z = op.forward(op.x, weight, bias)
        s = G if op.is_output else Quotient.apply(G, op.value(), z, epsilon, True)
        return [(op.x, op.transpose(s, weight))]

    return rule


def activation_ordinary(op: Activation, G: Tensor, y: Tensor | None, _epsilon: float) -> list[Share]:
    """The derivative itself; for ReLU 1 where the unit is on."""
    return [(NATIVE, torch.ops.aten.threshold_backward(G, y, 0) if op.rectifier else G)]


def activation_pass(op: Activation, G: Tensor, y: Tensor | None, epsilon: float) -> list[Share]:
    """Relevance passes unchanged."""
    return (activation_ordinary if op.rectifier else activation_epsilon)(op, G, y, epsilon)


PRODUCTS: dict[str, Rule] = {"half": operand_half, "constant": operand_constant}


def epsilon_table(epsilon: float = 0.01) -> RuleTable:
    """LRP-epsilon, the table of LRP-Flex."""
    rules = {"linear": linear_ordinary, "norm": norm_affine, "activation": activation_epsilon, **PRODUCTS}
    return RuleTable("epsilon", epsilon, rules, needs_values=False)


def zplus_table(epsilon: float = 0.01) -> RuleTable:
    """LRP-z+: positive contributions only."""
    rules: dict[str, Rule] = {
        "linear": linear_zplus,
        "norm": norm_zplus,
        "activation": activation_zplus,
        "sum": sum_zplus,
        "pool": pool_zplus,
        "positive": operand_positive,
        "matmul": matmul_zplus,
        **PRODUCTS,
    }
    return RuleTable("zplus", epsilon, rules)


def gamma_table(epsilon: float = 0.01, gamma: float = 0.25) -> RuleTable:
    """LRP-gamma on linear operations, relevance unchanged by ReLU, epsilon elsewhere."""
    rules = {"linear": linear_gamma(gamma), "norm": norm_affine, "activation": activation_pass, **PRODUCTS}
    return RuleTable("gamma", epsilon, rules)


def gradient_table(epsilon: float = 0.0) -> RuleTable:
    """No rule at all: Gradient*Input."""
    rules: dict[str, Rule] = {"linear": linear_ordinary, "activation": activation_ordinary}
    return RuleTable("gradient", epsilon, rules, needs_values=False)


TABLES: dict[str, Callable[[float], RuleTable]] = {
    "epsilon": epsilon_table,
    "zplus": zplus_table,
    "gamma": gamma_table,
    "gradient": gradient_table,
}


def table(rule: str | RuleTable, epsilon: float = 0.01) -> RuleTable:
    """The rule table of that name, or the table itself."""
    if isinstance(rule, RuleTable):
        return rule
    if not isinstance(rule, str) or rule not in TABLES:
        raise InputError(f"There is no rule {rule!r}; choose one of {', '.join(TABLES)} or pass a RuleTable.")
    return TABLES[rule](epsilon)
