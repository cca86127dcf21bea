"""What each kind of operation does with relevance, and the tables that name a rule for every group of kinds.

Every map is `R = x * G`, where G is the derivative of the score with a few operations corrected (LRP-Flex). A rule takes
a `Step`, a node of the graph with what arrived at it, and sends on G, or relevance R itself where it is written in R. A
group without a rule in a table keeps its derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fasterisnet.errors import InputError, RuleError
from fasterisnet.lrp.kernels import Attenuate, ChannelScale, Quotient, SumShares, wide
from fasterisnet.lrp.kinds import BATCH_NORMS, GROUPS, descend, edges, kind, shape, source
from fasterisnet.lrp.layers import CLASSES, Unit, biased, layer, norm, operand, through, unit
from fasterisnet.lrp.recognise import activation, masks_itself, shares, unscaled
from fasterisnet.lrp.record import Recorder
from fasterisnet.lrp.walk import Step, edge_of

# What a stabiliser of zero becomes, so that 0/0 is 0.
SMALLEST = 1e-12
Rule = Callable[[Step], None]


@dataclass(frozen=True)
class RuleTable:
    """A set of rules, one for each group of operations, and the stabiliser they share.

    in_R: its rules send relevance, not G. needs_values: they read what autograd does not keep. loud: relevance that
    passes an operation without a rule is announced.
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
        at.activation = activation(at.node, at.walk.active) if recognised else None
        if at.walk.box is not None and first_layer(at):
            at.treated("zB")
            return
        group = group if at.activation is None else "activation"
        rule = self.rules.get(group or "")
        if group is None and self.loud and not is_linear_here(at):
            at.warn()
        elif self.loud:
            announce(at, self.in_R)
        at.treated("no rule" if group is None and self.loud else "ordinary derivative" if rule is None else group or "")
        (rule or Step.pass_on)(at)


def is_linear_here(at: Step) -> bool:
    """A sum among other reductions; of a mean and a variance computed together, relevance passes the mean alone."""
    if at.kind == "ScatterReduce":
        return at.saved("reduce") in ("sum", "mean")
    return at.kind in ("VarMean", "StdMean") and all(set(by) == {1} for by in at.flow.values())


def announce(at: Step, in_R: bool) -> None:
    """Operations with a rule that are met in a form it does not cover."""
    if at.activation is None and at.note is not None and masks_itself(at.node, at.note, at.active):
        at.warn("chooses by the values of its own operand, like an activation, but is none that is known.")
    elif (at.kind == "Lerp" and at.is_active(2)) or (at.kind.startswith("GridSampler") and at.is_active(1)):
        at.warn("has weights computed from the images; its ordinary derivative was used.")
    elif GROUPS.get(at.kind) == "norm" and any(at.active[1:]):
        at.warn("has a scale or shift computed from the images, which gets no relevance.")
    elif in_R and not at.is_score:
        weight = at.saved("weight") if at.kind == "Lerp" else 0
        signed = at.saved("interpolation_mode") == 2 or (isinstance(weight, int | float) and not 0 <= weight <= 1)
        if signed or at.kind in ("Addcmul", "Addcdiv") or at.saved("accumulate") or GROUPS.get(at.kind) == "bilinear":
            at.warn("is a sum of positive and negative parts that z+ cannot tell apart; its derivative was used.")


_MAY_BE_ACTIVATIONS = frozenset({"activation", "product", "move", "sum", "slices"})


# --- LRP-epsilon ---------------------------------------------------------------------------------------------------


def linear_ordinary(at: Step) -> None:
    """`G_x = W^T G_y`. A weight computed from the images is a factor of a product."""
    found = layer(at.node, at.walk.active)
    if found is None:
        product_half(at)
    else:
        at.send_G(found.edge, found.transpose(at.G, found.weight))


def norm_constant(at: Step) -> None:
    """`G_x = G_y * gamma/sqrt(var + eps)`, statistics constant; layer norms also pass on the subtraction of means."""
    found = norm(at.node)
    at.send_G(0, ChannelScale.apply(at.G, found.scale) if found.centred is None else found.centred(at.G * found.scale))


def activation_epsilon(at: Step) -> None:
    """ReLU: `G_x = G_y * y/(y + eps)`. Others: `G_x = G_y * f(x)/(x + eps*sign(x))`."""
    found = at.activation
    if found is None:  # a maximum of two activations: the winner takes all
        at.pass_on()
        return
    if not found.rectifies:
        at.send_G(found.edge, Quotient.apply(at.G, found.y, found.x, at.eps, True))
        return
    scale, edge = None, found.edge
    below = source(edge)
    if below[0] is not None and kind(below[0]) in BATCH_NORMS and not at.walk.wants(edge, below):
        before = norm(below[0])  # computed as: the batch norm in front of the ReLU in the same step
        scale, edge = (before.scale, edges(below[0])[0]) if before.centred is None else (None, edge)
    at.send_G(edge, Attenuate.apply(at.G, found.y, scale, at.eps))


def product_half(at: Step) -> None:
    """`y = a b`: half of the ordinary product to each; all to the signal where the other is a gate or a normaliser."""
    found = shares(at)
    if at.note is not None and at.note.result is not None:
        at.pass_on()
        return
    for form, by in at.flow.items():
        if form == "R" and at.kind != "Glu":
            for position, share in found:
                at.send_R(position, by[0] * (share / sum(s for _, s in found)))
            continue
        derivative = _product_derivative(at, by, form)
        for position, share in found:
            t = derivative[position]
            if t is not None:
                at.send(position, form, t if share == 1 else t * share)


def _product_derivative(at: Step, by: dict[int, Tensor], form: str) -> Sequence[Tensor | None]:
    """Only for the operands that ask for it: for a weight it would be a sum over everything."""
    G = by[0]
    if at.kind == "Mul" and sum(at.active) == 1 and not G.is_complex():
        other = at.saved("other" if at.active[0] else "self")
        return [G * other if on else None for on in at.active]
    if at.kind == "Glu":
        signal, gate = at.saved("self").chunk(2, at.saved("dim"))
        to_signal = G if form == "R" else G * gate.sigmoid()
        return [torch.cat((to_signal, torch.zeros_like(signal)), at.saved("dim"))]
    return at.ordinary(by)


def attention_half(at: Step, share: float = 0.5) -> None:
    """`softmax(q k^T) v` in its steps: half to each factor of both products."""
    q, k, v, scale, p = _attention(at)
    G = at.G
    from_p = G @ v.mT * share
    from_scores = p * (from_p - (from_p * p).sum(-1, keepdim=True))
    at.send_G(0, from_scores @ k * (scale * share))
    at.send_G(1, _ungrouped(from_scores.mT @ q * (scale * share), at, 1))
    at.send_G(2, _ungrouped(p.mT @ G * share, at, 2))
    if len(at.active) > 3 and at.active[3]:
        at.send_G(3, from_scores)


def _attention(at: Step) -> tuple[Tensor, Tensor, Tensor, float, Tensor]:
    """q, k, v, the scale and the weights; a row without anything to attend to has none."""
    q, k, v = (at.saved(name) for name in ("query", "key", "value"))
    groups = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
    if groups > 1:
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    scale = at.saved("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    scores = q @ k.mT * scale
    mask = at.saved("attn_mask") if at.saved("attn_mask") is not None else at.saved("attn_bias")
    if at.saved("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return q, k, v, scale, torch.ops.aten._safe_softmax(scores, -1)


def _ungrouped(t: Tensor, at: Step, position: int) -> Tensor:
    """Heads that share a key and a value: their sum."""
    size = shape(at.edge(position))
    return t if not size or tuple(t.shape) == size else t.unflatten(-3, (size[-3], -1)).sum(-3)


def replayed(at: Step) -> None:
    """An operation in place through a view, which autograd hides: it is run again beside, and walked through."""
    found = at.note
    if found is None or found.replay is None:
        if found is None and not _is_copy(at):
            at.warn("changes a part of a tensor in place; its ordinary derivative was used.")
        at.pass_on()
        return
    tensors = [(i, t) for i, t in enumerate(t for t in found.operands if isinstance(t, Tensor)) if t.requires_grad]
    with torch.enable_grad(), Recorder() as recorder:
        inner = found.operands[0].view_as(found.operands[0])
        result = found.replay(inner, *found.operands[1:])
    ends = [edge_of(inner if i == 0 else t) for i, t in tensors]
    for form, by in at.flow.items():
        flat, places = by[0].reshape(-1), found.places(by[0].device)
        at.send(0, form, flat.index_fill(0, places, 0).view_as(by[0]))
        walk = at.walk.beside(at, ends)
        arrived = walk.run(edge_of(result), flat[places].view(result.shape), form)
        for (position, _), end in zip(tensors, ends, strict=True):
            for changed, t in arrived.get(end, {}).items():
                part = t if position > 0 else torch.zeros_like(flat).scatter(0, places, t.reshape(-1)).view_as(by[0])
                at.send(position, changed, part)
    recorder.forget()


def _is_copy(at: Step) -> bool:
    """Whether a part was overwritten with another tensor: nothing of the old values is left there."""
    if len(at.active) != 2:
        return False
    with torch.no_grad():
        like = at.node._input_metadata[0]
        old, new = at.node(torch.ones(tuple(like.shape), dtype=like.dtype, device=like.device))
    kept = old is None or bool(((old == 0) | (old == 1)).all())
    return kept and (new is None or bool((new == 1).all() and (old is None or (old == 0).sum() == new.numel())))


# --- LRP-z+ --------------------------------------------------------------------------------------------------------


def linear_zplus(at: Step) -> None:
    """`z = W+ x+ + W- x- + b+`, `s = R_y/(z + eps)`, `R_x = x (W+^T s)` where x >= 0 and `x (W-^T s)` where x < 0."""
    found = layer(at.node, at.walk.active)
    signals = [i for i, _ in shares(at)]
    if found is None and len(signals) == 1 and sum(at.active) == 2:  # a gate is as good as a weight
        found = CLASSES[at.kind](at.node, signals[0])
    if found is not None:
        _zplus(at, Unit(found, found.weight, found.bias))
    elif sum(at.active) == 2 and not (len(at.active) > 2 and at.active[0]):
        _product_zplus(at)
    else:
        at.warn("is a product with an offset, all computed from the images; z+ has no rule for that.")
        at.flow = {"G": {0: at.relevance(lambda: torch.ones(()))}}
        product_half(at)


def _zplus(at: Step, unit: Unit, output: Callable[[], Tensor] | None = None) -> None:
    """z+ of a layer that may have a bias and a batch norm behind it: their biases are constants."""
    x, layer = unit.x, unit.layer
    first, second = (x, None) if bool((x >= 0).all()) else (x.clamp(min=0), x.clamp(max=0))
    plus, minus = _two_sided(at, unit, first, second, output or unit.output)
    at.share(layer.edge, plus if minus is None else torch.where(x >= 0, plus, minus), x)


def _two_sided(
    at: Step, unit: Unit, first: Tensor, second: Tensor | None, output: Callable[[], Tensor] | None
) -> tuple[Tensor, Tensor | None]:
    """`W+^T s` and `W-^T s` for `z = W+ x1 + W- x2 + b+`; without output, all that came is taken for relevance."""
    layer, weight = unit.layer, unit.weight
    plus = weight.clamp(min=0)
    shift = None if unit.bias is None else unit.bias.detach().clamp(min=0)
    paired = second is not None and layer.can_pair
    if second is None:
        z = layer.forward(first, plus)
    elif paired:
        plus = layer.side_by_side((plus, weight.clamp(max=0)))
        z = layer.forward(torch.cat((first, second), layer.side), plus)
    else:
        z = layer.forward(first, plus) + layer.forward(second, weight.clamp(max=0))
    z = z if shift is None else z + shift
    s = at.over(z, output, unit.path)
    back = layer.transpose(s, plus)
    if paired:
        return back.tensor_split(2, layer.side)
    return back, None if second is None else layer.transpose(s, weight.clamp(max=0))


def norm_zplus(at: Step) -> None:
    """Behind a layer one with it; elsewhere a diagonal layer: `R_x = (scale x)+ / ((scale x)+ + shift+ + eps) R_y`."""
    found = norm(at.node)
    before = unit(at.edge(0), at.walk.active)
    fused = None if before is None else before.behind(found)
    if fused is not None:
        if at.walk.wants(at.edge(0), source(at.edge(0))):
            raise RuleError(_one_unit(at, fused))
        _zplus(at, fused, found.output)
        return
    scale, x = found.full_scale, found.x
    s = at.over((scale * x).clamp(min=0) + found.shift().clamp(min=0), found.output)
    at.share(0, s * torch.where(x >= 0, scale.clamp(min=0), scale.clamp(max=0)), x)


def _one_unit(at: Step, unit: Unit) -> str:
    return (
        f"Layer '{at.walk.place(unit.layer.node)}' is one unit with the batch norm or activation behind it under these "
        "rules, so it has no relevance of its own; name that module instead."
    )


def sum_zplus(at: Step) -> None:
    """`R_1 = a1+/(a1+ + a2+ + eps) R_y`, likewise R_2; a constant takes part in z and gets nothing."""
    if at.is_score or (sum(at.active) == 1 and at.note is not None and any(_is_nothing(v) for v in at.note.operands[:2])):
        at.pass_on()
        return
    layer_with_bias = biased(at.node, at.walk.active)
    if layer_with_bias is not None:
        _zplus(at, layer_with_bias)
        return
    values = [_wide(operand(at.node, i)) for i in range(2)]
    alpha = float(at.saved("alpha") or 1)
    signs = {"Add": (1.0, alpha), "Sub": (1.0, -alpha), "Rsub": (-alpha, 1.0)}[at.kind]
    parts = [v if sign == 1 else v * sign for v, sign in zip(values, signs, strict=True)]
    if all(at.active) and len(at.active) == 2 and set(at.flow) == {"R"} and parts[0].shape == parts[1].shape:
        for position, R in enumerate(SumShares.apply(at.arrived("R"), *parts, at.eps)):
            at.send_R(position, R)
        return
    parts = [p if at.is_active(i) else _constant(p, at.flow) for i, p in enumerate(parts)]
    s = at.over(parts[0].clamp(min=0) + parts[1].clamp(min=0), lambda: parts[0] + parts[1])
    for position in range(2):
        if at.is_active(position):
            at.share(position, s * (parts[position] > 0) * signs[position], values[position])


def _wide(value: Tensor | float) -> Tensor | float:
    return wide(value) if isinstance(value, Tensor) else value


def _is_nothing(value: object) -> bool:
    return isinstance(value, int | float) and value == 0


def _constant(value: Tensor | float, flow: dict[str, dict[int, Tensor]]) -> Tensor:
    like = next(iter(flow.values()))[0]
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).detach()


def pool_zplus(at: Step) -> None:
    """A layer with weights A >= 0: `s = R_y/(A x+ + eps)`, `R_x = x+ (A^T s)`."""
    if at.is_score:
        at.pass_on()
        return
    known = None if at.note is None else at.note.tensors
    xs = [wide(known[i] if known else operand(at.node, i, "self")) if on else None for i, on in enumerate(at.active)]
    positive = [None if x is None else x.clamp(min=0) for x in xs]
    s = at.over(at.forward(positive), lambda: at.forward(xs))
    for position, back in enumerate(at.ordinary({0: s})):
        if back is not None and at.active[position]:
            at.share(position, back * (xs[position] > 0), xs[position])


def activation_zplus(at: Step) -> None:
    """ReLU passes relevance on. Others: `R_x = x/(x + eps*sign(x)) R_y`."""
    found = at.activation
    if found is None:
        at.pass_on()
    elif found.rectifies:
        at.send_R(found.edge, at.relevance(lambda: found.y))
    else:
        if at.arrived("R") is not None:
            at.send_R(found.edge, Quotient.apply(at.arrived("R"), found.x, found.x, at.eps, True))
        if "start" in at.flow:
            R = Quotient.apply(at.G * found.x, found.y, found.x, at.eps, True)
            at.send_R(found.edge, R)


def softmax_zplus(at: Step) -> None:
    """Relevance of a weight is that of its score."""
    for form, by in at.flow.items():
        at.send(0, form, by[0] if form == "R" else at.ordinary(by)[0])


def attention_zplus(at: Step) -> None:
    """Two products, and the softmax between them, in their steps."""
    q, k, v, scale, p = _attention(at)
    R_p, R_v = _positive_products(torch.matmul, p, v, at.relevance(lambda: p @ v), at)
    R_q, R_k = _positive_products(torch.matmul, q, k.mT, R_p, at)
    at.send_R(0, R_q)
    at.send_R(1, _ungrouped(R_k.mT, at, 1))
    at.send_R(2, _ungrouped(R_v, at, 2))


def _product_zplus(at: Step) -> None:
    """Half to each factor, by the positive products: `z = a+ b+ + a- b-`."""
    positions = [i for i, on in enumerate(at.active) if on]
    found = CLASSES[at.kind](at.node, positions[0])
    R = at.relevance(lambda: found.forward(found.x, found.weight))
    # Factors before any number they were multiplied with: the stabiliser does not see how attention was scaled.
    a, b = (unscaled(t, at.edge(i), at.walk.active)[0] for t, i in zip((found.x, found.weight), positions, strict=True))
    for position, share in zip(positions, _positive_products(found.forward, a, b, R, at), strict=True):
        at.send_R(position, share)


def _positive_products(
    f: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, R: Tensor, at: Step
) -> tuple[Tensor, Tensor]:
    """Relevance of a and b in a product f: `s = R/(2 (z + eps))`, each positive product sends s times itself."""
    with torch.enable_grad():
        a, b = (t if t.requires_grad and at.walk.create_graph else t.detach().requires_grad_() for t in (a, b))
        parts = [(t.clamp(min=0), t.clamp(max=0)) for t in (a, b)]
        (a_plus, a_minus), (b_plus, b_minus) = parts
        z = f(a_plus, b_plus) + f(a_minus, b_minus)
        s = 0.5 * Quotient.apply(R, None, z, at.eps, False)
        found = torch.autograd.grad(z, (a_plus, a_minus, b_plus, b_minus), s, create_graph=at.walk.create_graph)
        return a_plus * found[0] + a_minus * found[1], b_plus * found[2] + b_minus * found[3]


def signed_zplus(at: Step) -> None:
    """Bicubic resizing: `z = A+ x+ + A- x-`, A being a product of a matrix for rows and one for columns."""
    if not at.kind.startswith("UpsampleBicubic2D") or set(at.flow) != {"R"}:
        at.warn("has weights of both signs, of which z+ cannot tell the positive part; its derivative was used.")
        at.pass_on()
        return
    x = operand(at.node, 0)
    rows, columns = _resizing(at, x)
    halves = [(rows.clamp(min=0), columns.clamp(min=0)), (rows.clamp(max=0), columns.clamp(max=0))]
    halves += [(rows.clamp(min=0), columns.clamp(max=0)), (rows.clamp(max=0), columns.clamp(min=0))]
    inputs = [x.clamp(min=0)] * 2 + [x.clamp(max=0)] * 2
    z = sum(r @ t @ c.mT for (r, c), t in zip(halves, inputs, strict=True))
    s = Quotient.apply(at.arrived("R"), None, z, at.eps, False)
    at.send_R(0, sum(t * (r.mT @ s @ c) for (r, c), t in zip(halves, inputs, strict=True)))


def _resizing(at: Step, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a resizing does to rows and to columns, seen on images that change along one of them only."""
    resize = getattr(torch.ops.aten, "_upsample_bicubic2d_aa" if at.kind.endswith("Aa") else "upsample_bicubic2d")
    settings = (at.saved("output_size"), at.saved("align_corners"), at.saved("scales_h"), at.saved("scales_w"))
    height, width = x.shape[-2:]
    eyes = [torch.eye(n, dtype=x.dtype, device=x.device) for n in (height, width)]
    by_row = resize(eyes[0].view(1, height, height, 1).expand(-1, -1, -1, width).contiguous(), *settings)
    by_column = resize(eyes[1].view(1, width, 1, width).expand(-1, -1, height, -1).contiguous(), *settings)
    return by_row[0, :, :, 0].mT, by_column[0, :, 0].mT


# --- LRP-zB, first layer -------------------------------------------------------------------------------------------


def first_layer(at: Step) -> bool:
    """`R_x = x (W^T s) - l (W+^T s) - h (W-^T s)`, `s = R_y/(z + eps)`, `z = W x + b - l W+ 1 - h W- 1 - b-`.

    Computed as: z+ with x - l for the positive and x - h for the negative weights. An activation behind the layer
    passes relevance on unchanged, so y is its output. False if this is no first layer.
    """
    found = at.activation
    if found is None and GROUPS.get(at.kind) not in ("linear", "norm", "sum"):
        return False
    edge = (at.node, 0) if found is None else found.edge
    path, (node, _) = descend(edge)
    behind = norm(node) if node is not None and kind(node) in BATCH_NORMS and at.walk.active(node)[0] else None
    made = unit(edge if behind is None else edges(node)[0], at.walk.active)
    made = made if made is None or behind is None else made.behind(behind)
    if made is None or not at.walk.first(made.layer.edge):
        return False
    inside = [(made.layer.node, 0), *([] if found is None else [found.edge, (node, 0)])]
    if at.walk.wants(*[e for e in inside if e[0] is not at.node]):
        raise RuleError(_one_unit(at, made))
    if found is not None:
        at.flow = {"R": {0: at.relevance(lambda: found.y)}}
        made.path = made.path if behind is None else [*path, *made.path]
    elif behind is not None:
        at.flow = {"R": {0: at.relevance(behind.output)}}
    else:
        at.flow = {form: {0: through(made.path, by[0])} for form, by in at.flow.items()}
        at.flow, made.path = {"R": {0: at.relevance(made.output)}}, []
    x = made.x if at.walk.keep_root else made.x.detach()
    low, high = at.walk.bounds(made.layer.edge, x)
    plus, minus = _two_sided(at, made, x - low, x - high, None)
    assert minus is not None
    at.send(made.layer.edge, "B", (x - low) * plus + (x - high) * minus)
    return True


# --- LRP-gamma -----------------------------------------------------------------------------------------------------


def linear_gamma(gamma: float) -> Rule:
    """`G_x = (W + gamma W+)^T (R_y/z)`, z with the same weights: favours positive contributions."""

    def of(at: Step, unit: Unit) -> None:
        weight = unit.weight + gamma * unit.weight.clamp(min=0)
        z = unit.layer.forward(unit.x, weight)
        if unit.bias is not None:
            z = z + unit.bias + gamma * unit.bias.clamp(min=0)
        start, G = at.arrived("start"), at.arrived("G")
        s = None if G is None else Quotient.apply(through(unit.path, G), unit.output(), z, at.eps, True)
        if start is not None:
            s = through(unit.path, start) if s is None else s + through(unit.path, start)
        assert s is not None
        at.send_G(unit.layer.edge, unit.layer.transpose(s, weight))

    def rule(at: Step) -> None:
        if at.kind in ("Add", "Sub", "Rsub"):
            found = biased(at.node, at.walk.active)
        else:
            plain = layer(at.node, at.walk.active)
            found = None if plain is None else Unit(plain, plain.weight, plain.bias)
        if found is not None:
            of(at, found)
        else:
            (at.pass_on if at.kind in ("Add", "Sub", "Rsub") else lambda: product_half(at))()

    return rule


def activation_pass(at: Step) -> None:
    """ReLU: `G_x = G_y` where y > 0, relevance unchanged. Others as epsilon."""
    found = at.activation
    if found is None or not found.rectifies:
        activation_epsilon(at)
    else:
        at.send_G(found.edge, torch.ops.aten.threshold_backward(at.G, found.y, 0))


# --- tables --------------------------------------------------------------------------------------------------------

_EPSILON: dict[str, Rule] = {
    "linear": linear_ordinary, "bilinear": product_half, "norm": norm_constant, "activation": activation_epsilon,
    "product": product_half, "attention": attention_half, "slices": replayed,
}  # fmt: skip
_ZPLUS: dict[str, Rule] = {
    "linear": linear_zplus, "bilinear": product_half, "norm": norm_zplus, "activation": activation_zplus,
    "product": product_half, "attention": attention_zplus, "sum": sum_zplus, "pool": pool_zplus,
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
    return RuleTable("gamma", epsilon, {**_EPSILON, "linear": layers, "sum": layers, "activation": activation_pass})


def gradient_table(epsilon: float = 0.0) -> RuleTable:
    """No rule at all: Gradient*Input. Layers and attention only skip what nobody asks for."""

    def linear(at: Step) -> None:
        (linear_ordinary if layer(at.node, at.walk.active) is not None else Step.pass_on)(at)

    rules: dict[str, Rule] = {"linear": linear, "attention": lambda at: attention_half(at, 1.0), "slices": replayed}
    return RuleTable("gradient", epsilon, rules, needs_values=False, loud=False)


def among_others(table: RuleTable) -> RuleTable:
    """The table in terms of G, so that it can stand beside others in one pass."""
    if not table.in_R:
        return table
    kept = {name: table.rules[name] for name in ("linear", "norm", "sum", "pool")}
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
    return {"default": table("epsilon", epsilon)} | {k: among_others(table(v, epsilon)) for k, v in rule.items()}
