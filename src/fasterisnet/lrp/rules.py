"""What each kind of operation does with relevance, and the tables that name a rule for every group of kinds.

Every map is `R = x * G`, where G is the derivative of the score with a few operations corrected (LRP-Flex). A rule
takes a `Step`, a node of the graph with what arrived at it, and sends on G, or relevance R itself where it is written
in R. A group without a rule in a table keeps its derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fasterisnet.errors import InputError
from fasterisnet.lrp.activations import activation, is_in_parts, masks_itself
from fasterisnet.lrp.epsilon import (
    activation_epsilon,
    attention_in_steps,
    linear_ordinary,
    norm_constant,
    product_half,
    replayed,
)
from fasterisnet.lrp.kernels import Quotient, wide
from fasterisnet.lrp.kinds import GROUPS, PERMUTING, SUMS, WINNING, edges, kind, only_moves, source
from fasterisnet.lrp.layers import layer, through
from fasterisnet.lrp.parts import adds_layer, adds_nothing, announce_parts, number_of, of_parts, one_unit, whole_unit
from fasterisnet.lrp.pools import WITH_MEAN, pool_zplus
from fasterisnet.lrp.softmax import softmax_by_hand, softmax_zplus
from fasterisnet.lrp.step import Step
from fasterisnet.lrp.units import Unit, is_line, scaled_at
from fasterisnet.lrp.zb import first_layer
from fasterisnet.lrp.zplus import (
    activation_zplus,
    linear_zplus,
    norm_zplus,
    output_of,
    product_zplus,
    signed_zplus,
    sum_zplus,
)

# What a stabiliser of zero becomes, so that 0/0 is 0.
SMALLEST = 1e-12
Rule = Callable[[Step], None]


@dataclass(frozen=True)
class RuleTable:
    """A set of rules, one for each group of operations, and the stabiliser they share.

    in_R: its rules send relevance, not G. needs_values: they read what autograd does not keep. loud: relevance that
    passes an operation without a rule is announced. `explain` and its like take one as `rule`.

    Example:
        >>> from fasterisnet.lrp import rules
        >>> maps = explain(model, images, rule=rules.table("zplus", epsilon=0.1))
    """

    name: str
    epsilon: float
    rules: Mapping[str, Rule] = field(repr=False)
    in_R: bool = False
    needs_values: bool = True
    loud: bool = True

    def __post_init__(self) -> None:
        if not (isinstance(self.epsilon, int | float) and 0 <= self.epsilon < math.inf):
            raise InputError(f"epsilon is {self.epsilon!r}; the stabiliser must be zero or a positive number.")

    @property
    def stabiliser(self) -> float:
        return max(self.epsilon, SMALLEST)

    def apply(self, at: Step, group: str | None) -> None:
        """The rule for this node; a first layer inside a box takes zB, whatever the table says."""
        recognised = group in _MAY_BE_ACTIVATIONS and (self.loud or at.walk.box is not None)
        halves = "sum" not in self.rules or at.walk.box is not None  # elsewhere a sum of two halves is announced
        found = activation(at.node, at.walk.active, at.walk.wants, halves) if recognised else None
        at.activation = None if found is None else found._replace(x=wide(found.x), y=wide(found.y))
        if at.walk.box is not None and first_layer(at):
            at.treated("zB")
            return
        if group is None and self.loud and softmax_by_hand(at):
            at.treated("softmax")
            return
        if at.activation is not None:
            group = "activation"
        elif is_line(at.node, at.walk.active):
            group = "sum"
        elif only_moves(at.node):
            group = "move"
        elif is_linear_here(at):
            group = "pool"
        rule = self.rules.get(group or "")
        if group is None and self.loud:
            at.warn()
        elif self.loud:
            announce(at, self)
        at.treated("no rule" if group is None and self.loud else "ordinary derivative" if rule is None else group or "")
        (rule or Step.pass_on)(at)


def is_linear_here(at: Step) -> bool:
    """A sum among other reductions; of a mean and a variance computed together, relevance passes the mean alone."""
    if at.kind == "ScatterReduce":
        return at.saved("reduce") in ("sum", "mean")
    return at.kind in WITH_MEAN and all(set(by) == {1} for by in at.flow.values())


def announce(at: Step, table: RuleTable) -> None:
    """Operations with a rule that are met in a form it does not cover."""
    if at.activation is None and at.kind in SUMS | {"Sum", "Mean"}:
        announce_parts(at)
    known = ("linear", "product", "sum", "signed") if table.needs_values else ("linear",)
    complex_layer = GROUPS.get(at.kind) in known and at.node._input_metadata[0].dtype.is_complex
    if at.activation is None and at.note is not None and masks_itself(at.node, at.note, at.walk.active):
        at.warn("chooses by the values of its own operand, like an activation, but is none that is known.")
    elif at.kind in WINNING and joins_constants(at):
        at.warn(
            "takes the largest or smallest of activations and constants, like an activation, but is none that is known."
        )
    elif (at.kind == "Lerp" and at.is_active(2) and not is_line(at.node, at.walk.active)) or (
        at.kind.startswith("GridSampler") and at.is_active(1)
    ):
        at.warn("has weights computed from the images; its ordinary derivative was used.")
    elif GROUPS.get(at.kind) == "norm" and any(at.active[1:]):
        at.warn("has a scale or shift computed from the images, which gets no relevance.")
    elif table.needs_values and (complex_layer or (GROUPS.get(at.kind) == "bilinear" and not all(at.active))):
        at.warn("is a layer that z+ and gamma do not know; its derivative was used.")
    elif table.needs_values and not table.in_R and adds_layer(at):
        at.warn("adds a layer and its scale at once; gamma takes its derivative.")
    elif table.in_R:
        weight = {"Lerp": at.saved("weight"), "IndexAdd": at.saved("alpha")}.get(at.kind, 0)
        upper = 1 if at.kind == "Lerp" else math.inf
        signed = at.saved("interpolation_mode") == 2 or (isinstance(weight, int | float) and not 0 <= weight <= upper)
        in_parts = at.kind in ("Addcmul", "Addcdiv") and scaled_at(at.node, at.walk.active) is None
        if signed or in_parts or at.saved("accumulate") or GROUPS.get(at.kind) == "bilinear":
            at.warn("is a sum of positive and negative parts that z+ cannot tell apart; its derivative was used.")


def joins_constants(at: Step) -> bool:
    """Whether something was stacked on constants of its size."""
    below = source(at.edge(0), PERMUTING)[0]
    return below is not None and kind(below) == "Stack" and 0 < sum(at.walk.active(below)) < len(edges(below))


_MAY_BE_ACTIVATIONS = frozenset({"activation", "product", "move", "sum", "slices"})


# --- LRP-gamma -----------------------------------------------------------------------------------------------------


def linear_gamma(gamma: float) -> Rule:
    """`G_x = (W + gamma W+)^T (R_y/z)`, z with the same weights: favours positive contributions."""

    def of(at: Step, unit: Unit) -> None:
        one_unit(at, unit.layer.node, unit.inside)
        weight = unit.weight + gamma * unit.weight.clamp(min=0)
        z = unit.layer.forward(unit.x, weight)
        if unit.bias is not None:
            z = z + unit.bias + gamma * unit.bias.clamp(min=0)
        start, G = at.arrived("start"), at.arrived("G")
        s = None if G is None else Quotient.apply(through(unit.path, G), output_of(at, unit), z, at.eps, True)
        if start is not None:
            s = through(unit.path, start) if s is None else s + through(unit.path, start)
        assert s is not None
        at.send_G(unit.layer.edge, unit.layer.transpose(s, weight))

    def rule(at: Step) -> None:
        number = adds_nothing(at) or (GROUPS[at.kind] == "product" and not math.isnan(number_of(at)))
        found = None if number else whole_unit(at)
        if found is not None:
            of(at, found)
        elif GROUPS[at.kind] == "norm":
            norm_constant(at)
        else:
            nothing = adds_nothing(at)
            at.ends_start = at.ends_start and not nothing
            constant = at.kind in SUMS and sum(at.active) == 1 and not nothing
            if constant and of_parts(at, at.edge(at.active.index(True))):
                at.warn("adds a constant to parts of layers; gamma takes it for a step of its own.")
            elif at.kind in SUMS and sum(at.active) == 2 and is_in_parts(at.node, at.walk.active):
                at.warn("adds functions of the same values, like an activation in parts; gamma takes each for itself.")
            (at.pass_on if at.kind in SUMS else lambda: product_half(at))()

    return rule


def activation_pass(at: Step) -> None:
    """ReLU: `G_x = G_y` where y > 0, relevance unchanged; likewise `min(x, 0)`. Others as epsilon."""
    found = at.activation
    if found is None or not (found.rectifies or found.mirrored):
        activation_epsilon(at)
    else:
        at.send_G(found.edge, torch.ops.aten.threshold_backward(at.G, -found.y if found.mirrored else found.y, 0))


# --- tables --------------------------------------------------------------------------------------------------------

_EPSILON: dict[str, Rule] = {
    "linear": linear_ordinary, "bilinear": product_half, "norm": norm_constant, "activation": activation_epsilon,
    "product": product_half, "attention": attention_in_steps, "slices": replayed,
}  # fmt: skip
_ZPLUS: dict[str, Rule] = {
    "linear": linear_zplus, "bilinear": product_half, "norm": norm_zplus, "activation": activation_zplus,
    "product": product_zplus, "attention": attention_in_steps, "sum": sum_zplus, "pool": pool_zplus,
    "softmax": softmax_zplus, "signed": signed_zplus, "slices": replayed,
}  # fmt: skip


def epsilon_table(epsilon: float = 0.01) -> RuleTable:
    """LRP-epsilon, the table of LRP-Flex."""
    return RuleTable("epsilon", epsilon, _EPSILON, needs_values=False)


def zplus_table(epsilon: float = 0.01) -> RuleTable:
    """LRP-z+: positive contributions only."""
    return RuleTable("zplus", epsilon, _ZPLUS, in_R=True)


def gamma_table(epsilon: float = 0.01, gamma: float = 0.25) -> RuleTable:
    """LRP-gamma on layers, relevance unchanged by ReLU, epsilon elsewhere."""
    layers = linear_gamma(gamma)
    own: dict[str, Rule] = {
        **dict.fromkeys(("linear", "norm", "product", "sum"), layers),
        "activation": activation_pass,
    }
    return RuleTable("gamma", epsilon, _EPSILON | own)


def gradient_table(epsilon: float = 0.0) -> RuleTable:
    """No rule at all: Gradient*Input. Layers only skip what nobody asks for, attention can be differentiated twice."""

    def linear(at: Step) -> None:
        (linear_ordinary if layer(at.node, at.walk.active) is not None else Step.pass_on)(at)

    rules: dict[str, Rule] = {"linear": linear, "attention": attention_in_steps, "slices": replayed}
    return RuleTable("gradient", epsilon, rules, needs_values=False, loud=False)


def among_others(table: RuleTable) -> RuleTable:
    """The table in terms of G, so that it can stand beside others in one pass."""
    if not table.in_R:
        return table
    kept = {name: table.rules[name] for name in ("linear", "norm", "product", "sum", "pool")}
    return replace(table, rules={**_EPSILON, **kept, "activation": activation_pass}, in_R=False)


# A rule's name, a table, or {module name or type: rule} with a "default".
Rules = str | RuleTable | Mapping[Any, str | RuleTable]
TABLES: dict[str, Callable[[float], RuleTable]] = {
    "epsilon": epsilon_table, "zplus": zplus_table, "gamma": gamma_table, "gradient": gradient_table,
}  # fmt: skip


def table(rule: str | RuleTable, epsilon: float = 0.01) -> RuleTable:
    """The rule table of that name, or the table itself."""
    if isinstance(rule, RuleTable):
        return rule
    if not isinstance(rule, str) or rule not in TABLES:
        raise InputError(f"There is no rule {rule!r}; choose one of {', '.join(TABLES)} or pass a RuleTable.")
    return TABLES[rule](epsilon)


def tables(rule: Rules, epsilon: float = 0.01) -> RuleTable | dict[Any, RuleTable]:
    """The table, or for a dict of modules the table of each, in terms of G so that they can meet in one pass."""
    if not isinstance(rule, Mapping):
        return table(rule, epsilon)
    default = rule.get(torch.nn.Module, "epsilon")  # every module is one
    found = {k: table(v, epsilon) for k, v in {"default": default, **rule}.items()}
    alone = all(t == found["default"] for t in found.values())
    return found if alone else {k: among_others(t) for k, t in found.items()}
