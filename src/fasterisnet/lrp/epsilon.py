"""LRP-epsilon: the derivative of the score with a few operations corrected, `R = x * G` (LRP-Flex)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fasterisnet.lrp.gates import shares
from fasterisnet.lrp.kernels import Attenuate, Quotient, wide
from fasterisnet.lrp.kinds import BATCH_NORMS, Edge, Node, edges, kind, shape, source, spoken
from fasterisnet.lrp.layers import layer, norm
from fasterisnet.lrp.record import Recorder, note
from fasterisnet.lrp.step import Step
from fasterisnet.lrp.walk import edge_of


def linear_ordinary(at: Step) -> None:
    """`G_x = W^T G_y` (paper: FCBackG). A weight computed from the images is a factor of a product."""
    found = layer(at.node, at.walk.active)
    if found is None:
        product_half(at)
    else:
        at.send_G(found.edge, found.transpose(at.G, found.weight))


def norm_constant(at: Step) -> None:
    """`G_x = G_y * gamma/sqrt(var + eps)`, statistics constant; layer norms also pass on the subtraction of means."""
    found = norm(at.node)
    below = None if found.centred is not None else _layer_behind(at, at.edge(0))
    if below is not None:
        below(at.G, found.scale)
        return
    scaled = at.G * found.full_scale
    at.send_G(0, scaled if found.centred is None else found.centred(scaled))


def _layer_behind(at: Step, edge: Edge) -> Callable[[Tensor, Tensor], None] | None:
    """Sends `scale * G` through the convolution that a batch norm stands behind, if one does.

    Computed as: `(scale W)^T G`, where there are fewer weights than numbers in G.
    """
    node = edge[0]
    if node is None or kind(node) != "Convolution" or node not in at.walk.reached or at.walk.wants(edge):
        return None
    found, table = layer(node, at.walk.active), at.walk.table_at(node)
    if found is None or table is not at.table or table.rules["linear"] is not linear_ordinary:
        return None
    if found.edge[0] in at.walk.affine or found.weight.numel() > math.prod(shape(edge)):
        return None  # the first layer in a box, or nothing to be won

    def send(G: Tensor, scale: Tensor) -> None:
        at.walk.log.note(spoken(kind(node)), "linear", lambda: at.walk.place(node))
        at.send_G(found.edge, found.transpose(G, found.scaled(wide(found.weight), scale)))

    return send


def activation_epsilon(at: Step) -> None:
    """ReLU: `G_x = G_y * y/(y + eps)`. Others: `G_x = G_y * f(x)/(x + eps*sign(x))`.

    Paper: reluBackG and AS, the attenuated step.
    """
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
    send = None if scale is None else _layer_behind(at, edge)
    if send is not None and scale is not None:
        send(Attenuate.apply(at.G, found.y, None, at.eps), scale)
    else:
        at.send_G(edge, Attenuate.apply(at.G, found.y, scale, at.eps))


def product_half(at: Step) -> None:
    """`y = a b`: half of the ordinary product to each; all to the signal where the other is a gate or a normaliser."""
    found = shares(at)
    if at.note is not None and at.note.result is not None:
        at.pass_on(dict(found))
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


def attention_in_steps(at: Step) -> None:
    """`softmax(q k^T) v` of a fused kernel: run again in its steps, and walked through."""
    masks = [at.saved(name) for name in ("attn_mask", "attn_bias") if at.saved(name) is not None]
    with torch.enable_grad(), Recorder() as recorder:
        given = [t.view_as(t) for t in (*map(at.saved, ("query", "key", "value")), *masks)]
        q, k, v = (wide(t) for t in given[:3])
        groups = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
        if groups > 1:
            k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
        scale = at.saved("scale")
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else float(scale))
        mask = given[3] if masks else None
        if mask is not None and mask.is_floating_point() and bool(((mask == 0) | (mask == -math.inf)).all()):
            mask = mask == 0  # true and false, as torch hands them to its kernels
        if at.saved("is_causal"):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        result = torch.ops.aten._safe_softmax(scores, -1) @ v  # safe: a row may have nothing to attend to
    ends = {i: edge_of(t) for i, t in enumerate(given) if at.is_active(i)}
    for form, by in at.flow.items():
        for position, arrived in at.walk.beside(at, ends, result, by[0], form):
            at.send(position, *arrived)
    recorder.forget()


def replayed(at: Step) -> None:
    """An operation in place through a view, which autograd hides: it is run again beside, and walked through."""
    found = at.note
    if found is None or found.replay is None:
        if found is None and not _is_copy(at):
            at.warn("changes a part of a tensor in place; its ordinary derivative was used.")
        at.pass_on()
        return
    with torch.enable_grad(), Recorder() as recorder:
        inner = found.operands[0].view_as(found.operands[0])
        inner = inner.detach() if _is_blank(at.node) else inner
        result = found.replay(inner, *found.operands[1:])
    tensors = [inner, *[t for t in found.operands[1:] if isinstance(t, Tensor)]]
    ends = {i: edge_of(t) for i, t in enumerate(tensors) if t.requires_grad and at.is_active(i)}
    for form, by in at.flow.items():
        flat, places = by[0].reshape(-1), found.places(by[0].device)
        at.send(0, form, flat.index_fill(0, places, 0).view_as(by[0]))
        for position, (changed, t) in at.walk.beside(at, ends, result, flat[places].view(result.shape), form):
            part = t if position > 0 else torch.zeros_like(flat).scatter(0, places, t.reshape(-1)).view_as(by[0])
            at.send(position, changed, part)
    recorder.forget()


def _is_blank(node: Node) -> bool:
    """Whether nothing of the images had been written to its places; told for all that was written to that tensor."""
    if "blank" not in node.metadata:
        writers, below = [], node
        while below is not None and kind(below) == "CopySlices" and note(below) is not None:
            writers.append(below)
            below = edges(below)[0][0]
        written = torch.full(node._input_metadata[0].shape, below is not None, device="cpu").view(-1)
        for writer in reversed(writers):
            places = writer.metadata["fasterisnet"].places(written.device)
            writer.metadata["blank"] = not bool(written[places].any())
            written[places] = True
    return node.metadata["blank"]


def _is_copy(at: Step) -> bool:
    """Whether a part was overwritten with another tensor: nothing of the old values is left there."""
    if len(at.active) != 2:
        return False
    with torch.no_grad():
        like = at.node._input_metadata[0]
        old, new = at.node(torch.ones(tuple(like.shape), dtype=like.dtype, device=like.device))
    kept = old is None or bool(((old == 0) | (old == 1)).all())
    return kept and (new is None or bool((new == 1).all() and (old is None or (old == 0).sum() == new.numel())))
