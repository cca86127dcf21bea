"""LRP-z+, written in relevance R."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fasterisnet.lrp.activations import is_in_parts
from fasterisnet.lrp.epsilon import product_half
from fasterisnet.lrp.gates import OFFSET_FIRST, shares, unscaled
from fasterisnet.lrp.kernels import ChannelShares, Quotient, SumShares, wide
from fasterisnet.lrp.kinds import BATCH_NORMS, LINEAR, PERMUTING, SUMS, Edge, kind, shape, signs, source
from fasterisnet.lrp.layers import CLASSES, layer, norm, operand, through
from fasterisnet.lrp.parts import adds_nothing, asked_inside, is_written_out, number_of, of_parts, one_unit, whole_unit
from fasterisnet.lrp.pools import mean_zplus
from fasterisnet.lrp.step import Step
from fasterisnet.lrp.units import Chain, Unit, chain, unit

SHUT = -50.0  # so much is added to what shall not be heard; Swin Transformers add -100


def linear_zplus(at: Step) -> None:
    """`z = W+ x+ + W- x- + b+`, `s = R_y/(z + eps)`, `R_x = x (W+^T s)` where x >= 0 and `x (W-^T s)` where x < 0.

    Paper: lrp-z+_equation.
    """
    found = layer(at.node, at.walk.active)
    signals = [i for i, _ in shares(at)]
    if found is None and len(signals) == 1 and sum(at.active) == 2:  # a gate is as good as a weight
        found = CLASSES[at.kind](at.node, signals[0])
    if found is not None:
        _zplus(at, Unit(found, found.weight, found.bias))
    elif sum(at.active) == 2 and not at.is_active(0 if at.kind in OFFSET_FIRST else 2):
        _product_zplus(at)
    else:
        at.warn("is a product with an offset, all computed from the images; z+ has no rule for that.")
        at.flow = {"G": {0: at.relevance(lambda: torch.ones(()))}}
        product_half(at)


def _zplus(at: Step, unit: Unit) -> None:
    """z+ of a layer that may have a bias and a batch norm behind it: their biases are constants."""
    one_unit(at, unit.layer.node, unit.inside)
    x, layer = unit.x, unit.layer
    rectified = kind(source(layer.edge)[0]) == "Relu"  # seen without looking at the values
    first, second = (x, None) if rectified or bool((x >= 0).all()) else by_sign(x)
    plus, minus = two_sided(at, unit, first, second, lambda: output_of(at, unit))
    if second is None or minus is None:
        at.share(layer.edge, lambda: x * plus, lambda: plus)
    else:
        at.share(
            layer.edge, lambda: torch.addcmul(first * plus, second, minus), lambda: torch.where(x >= 0, plus, minus)
        )


def by_sign(t: Tensor) -> tuple[Tensor, Tensor]:
    """The positive and the negative part, by ReLUs: the derivative of a clamp takes ten times as long."""
    return t.relu(), -(-t).relu()


def output_of(at: Step, unit: Unit) -> Tensor:
    """What a unit computes; a batch norm in training mode as it is, its statistics not constant."""
    return through(unit.path, norm(at.node).output()) if at.kind in BATCH_NORMS else unit.output()


def two_sided(
    at: Step, unit: Unit, first: Tensor, second: Tensor | None, output: Callable[[], Tensor] | None
) -> tuple[Tensor, Tensor | None]:
    """`W+^T s` and `W-^T s` for `z = W+ x1 + W- x2 + b+`; without output, all that came is taken for relevance."""
    layer, weight = unit.layer, unit.weight
    plus, negative = (weight.relu(), None) if second is None else by_sign(weight)
    shift = layer.nothing_added(first) if unit.bias is None else unit.bias.detach().clamp(min=0)
    shift = shift + at.eps  # so that the layer stabilises z
    paired = layer.can_pair
    if second is None or negative is None:
        z = layer.forward(first, plus, shift)
    elif paired:
        plus = layer.side_by_side((plus, negative))
        z = layer.forward(torch.cat((first, second), layer.side), plus, shift)
    else:
        z = layer.forward(first, plus, shift) + layer.forward(second, negative)
    s = at.over(z, output, unit.path, stabilised=True)
    back = layer.transpose(s, plus)
    if negative is None:
        return back, None
    if paired:
        first_half, second_half = back.chunk(2, layer.side)
        return first_half, second_half
    return back, layer.transpose(s, negative)


def norm_zplus(at: Step) -> None:
    """Behind a layer one with it; elsewhere a diagonal layer: `R_x = (scale x)+ / ((scale x)+ + shift+ + eps) R_y`."""
    if of_constants(at):
        return
    found = norm(at.node)
    shift = found.shift().detach() if found.centred is None else found.shift()
    _diagonal(at, Chain(at.edge(0), found.x, found.full_scale, shift))


def of_constants(at: Step) -> bool:
    """Constants that scale and shift: behind a layer one with it, elsewhere one step. False if it is neither."""
    layer = whole_unit(at)
    if layer is not None:
        _zplus(at, layer)
        return True
    steps = chain((at.node, 0), at.walk.active)
    if steps is None or (len(steps.inside) == 1 and at.kind in SUMS) or asked_inside(at, steps.inside):
        return False
    _diagonal(at, steps)
    return True


def _diagonal(at: Step, found: Chain) -> None:
    """A layer with one weight a number."""
    if set(at.flow) == {"P"} and kind(at.node) in BATCH_NORMS and not (found.path or found.shift.requires_grad):
        G, y = at.flow["P"][0], at.walk.positive[at.node]
        if found.scale is not None and found.shift.numel() == found.scale.numel() == y.shape[1]:
            scale, shift = (t.reshape(-1).to(y.dtype) for t in (found.scale, found.shift))
            at.send_R(found.edge, ChannelShares.apply(G, y, found.x, scale, shift, at.eps))
            return
    at.settle()
    if set(at.flow) == {"R"}:
        a = found.scaled(found.x)
        R = through(found.path, at.flow["R"][0])
        at.send_R(found.edge, SumShares.apply(R, None, a, found.shift.expand_as(a), at.eps, False)[0])
        return
    x, scale = found.x, torch.ones_like(found.x) if found.scale is None else found.scale
    a = (scale * x).relu()
    s = at.over(a + found.shift.relu(), found.output, found.path)
    at.share(found.edge, lambda: s * a, lambda: s * torch.where(x >= 0, *by_sign(scale)))


def sum_zplus(at: Step) -> None:
    """`R_1 = a1+/(a1+ + a2+ + eps) R_y`, likewise R_2; a constant takes part in z and gets nothing."""
    if adds_nothing(at):
        at.ends_start = False
        product_half(at)
        return
    if sum(at.active) == 1 and of_constants(at):
        return
    values = [_as_tensor(operand(at.node, i), at, constant=not at.is_active(i)) for i in range(2)]
    each = signs(at.node)
    parts = [v if sign == 1 else v * sign for v, sign in zip(values, each, strict=True)]
    if sum(at.active) == 1:
        below = at.edge(at.active.index(True))
        if of_parts(at, below) or is_written_out(at, below):
            at.warn("adds a constant to parts of layers; z+ takes it for a step of its own.")
    elif is_in_parts(at.node, at.walk.active):
        at.warn("adds functions of the same values, like an activation in parts; z+ takes them for two things.")
    if all(at.active) and len(at.active) == 2 and set(at.flow) <= {"R", "P"} and parts[0].shape == parts[1].shape:
        for position, R in enumerate(SumShares.apply(at.arrived("R"), at.arrived("P"), *parts, at.eps)):
            at.send_R(position, R)
        return
    at.settle()
    positive = [part.relu() for part in parts]
    s = at.over(positive[0] + positive[1], lambda: parts[0] + parts[1])
    for position in range(2):
        if at.is_active(position):
            G = s * (parts[position] > 0) * each[position]
            added = parts[1 - position]
            if all(at.active) or not _is_mask(added):
                at.share(position, partial(torch.mul, s, positive[position]), lambda G=G: G)
            elif at.table.in_R:  # where nothing is added, relevance passes
                R = at.relevance(lambda: parts[0] + parts[1])
                at.send_R(position, torch.where(added == 0, R, values[position] * G))
            else:
                at.send_G(position, torch.where(added == 0, at.G * each[position], G))


def _is_mask(added: Tensor) -> bool:
    """Whether something is added that shuts numbers out, as masks of attention do, and is zero elsewhere."""
    zero = added == 0
    return not bool(zero.all()) and bool((zero | (added <= SHUT)).all())


def _as_tensor(value: Tensor | float, at: Step, constant: bool) -> Tensor:
    like = next(iter(at.flow.values()))[0]
    t = wide(value) if isinstance(value, Tensor) else torch.as_tensor(value, dtype=like.dtype, device=like.device)
    return t.detach() if constant else t


def activation_zplus(at: Step) -> None:
    """ReLU passes relevance on. Others: `R_x = x/(x + eps*sign(x)) R_y`."""
    found = at.activation
    at.settle()
    if found is None:
        at.pass_on()
    elif found.rectifies and set(at.flow) <= {"G", "R"} and _divides_first(at, found.edge, found.y):
        at.walk.positive[found.edge[0]] = found.y
        at.send(found.edge, "P", at.arrived("G"))
        at.send_R(found.edge, at.arrived("R"))
    elif found.rectifies or found.mirrored:
        at.send_R(found.edge, at.relevance(lambda: found.y))
    else:
        start = at.flow.pop("start", None)
        if at.flow:
            R = at.relevance(lambda: found.y)
            at.send_R(found.edge, Quotient.apply(R, found.x, found.x, at.eps, True))
        if start is not None:
            at.send_R(found.edge, Quotient.apply(start[0] * found.x, found.y, found.x, at.eps, True))


def _divides_first(at: Step, edge: Edge, y: Tensor) -> bool:
    """Whether what is behind a ReLU divides relevance by its own z at once, so that nobody needs it before."""
    if edge[0] is None or edge[1] != 0:
        return False
    adds = kind(edge[0]) in SUMS and sum(at.walk.active(edge[0])) == 2
    divides = adds or (kind(edge[0]) in LINEAR | BATCH_NORMS and at.arrived("R") is None)
    return divides and not at.walk.wants(edge) and shape(edge) == tuple(y.shape)


def product_zplus(at: Step) -> None:
    """Half to each of two factors; a constant behind a layer, another constant or a sum is one with it."""
    at_sum = at.active.index(True)
    scale = number_of(at)
    apart = sum(at.active) == 1 and (math.isnan(scale) or (scale != 0 and unit((at.node, 0), at.walk.active) is None))
    if apart and of_constants(at):
        return
    if not mean_zplus(at, at_sum):
        product_half(at)


def _product_zplus(at: Step) -> None:
    """Half to each factor, by the positive products: `z = a+ b+ + a- b-`, `s = R/(2 (z + eps))`."""
    positions = [i for i, on in enumerate(at.active) if on]
    found = CLASSES[at.kind](at.node, positions[0])
    product = found.forward(found.x, found.weight)
    offset = 0 if found.bias is None else found.bias.detach()
    R = at.relevance(lambda: product + offset)
    if found.bias is not None:  # a sum of the product and a constant
        R = Quotient.apply(
            R, product.clamp(min=0), product.clamp(min=0) + found.bias.detach().clamp(min=0), at.eps, False
        )
    # Factors without the size of what they were multiplied with: the stabiliser does not see how attention was scaled.
    alpha = at.saved("alpha") or 1
    pair = (found.x, found.weight if alpha == 1 else found.weight / abs(alpha))
    numbers = [unscaled(at.edge(i), at.walk.active, PERMUTING)[0] for i in positions]
    factors = [t / abs(number) for t, number in zip(pair, numbers, strict=True)]

    def z(a_plus: Tensor, a_minus: Tensor, b_plus: Tensor, b_minus: Tensor) -> Tensor:
        return found.forward(a_plus, b_plus) + found.forward(a_minus, b_minus)

    for position, share in zip(positions, _by_parts(z, factors, 0.5 * R, at), strict=True):
        at.send_R(position, share)


def _by_parts(z: Callable[..., Tensor], xs: Sequence[Tensor], R: Tensor, at: Step) -> list[Tensor]:
    """z of the positive and the negative part of every x: `s = R/(z + eps)`, to each part itself times `dz s`."""
    with torch.enable_grad():
        xs = [x if x.requires_grad and at.walk.create_graph else x.detach().requires_grad_() for x in xs]
        parts = [part for x in xs for part in by_sign(x)]
        total = z(*parts)
        s = Quotient.apply(R, None, total, at.eps, False)
        back = torch.autograd.grad(total, parts, s, create_graph=at.walk.create_graph)
        sent = [part * t for part, t in zip(parts, back, strict=True)]
        return [plus + minus for plus, minus in zip(sent[::2], sent[1::2], strict=True)]


def signed_zplus(at: Step) -> None:
    """Bicubic resizing: `z = A+ x+ + A- x-`, A being a product of a matrix for rows and one for columns."""
    if not at.kind.startswith("UpsampleBicubic2D") or set(at.flow) != {"R"}:
        at.warn("has weights of both signs, of which z+ cannot tell the positive part; its derivative was used.")
        at.pass_on()
        return
    x = operand(at.node, 0)
    (r_plus, r_minus), (c_plus, c_minus) = map(by_sign, _resizing(at, x))

    def z(plus: Tensor, minus: Tensor) -> Tensor:
        positive = r_plus @ plus @ c_plus.mT + r_minus @ plus @ c_minus.mT
        return positive + r_plus @ minus @ c_minus.mT + r_minus @ minus @ c_plus.mT

    at.send_R(0, _by_parts(z, [x], at.flow["R"][0], at)[0])


def _resizing(at: Step, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a resizing does to rows and to columns, seen on images that change along one of them only."""
    resize = getattr(torch.ops.aten, "_upsample_bicubic2d_aa" if at.kind.endswith("Aa") else "upsample_bicubic2d")
    settings = (at.saved("output_size"), at.saved("align_corners"), at.saved("scales_h"), at.saved("scales_w"))
    height, width = x.shape[-2:]
    rows, columns = (torch.eye(n, dtype=x.dtype, device=x.device) for n in (height, width))
    by_row = resize(rows.view(1, height, height, 1).expand(-1, -1, -1, width).contiguous(), *settings)
    by_column = resize(columns.view(1, width, 1, width).expand(-1, -1, height, -1).contiguous(), *settings)
    return by_row[0, :, :, 0].mT, by_column[0, :, 0].mT
