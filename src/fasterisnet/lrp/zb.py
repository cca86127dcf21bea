"""LRP-zB, for the first layer of a network whose inputs lie in a box."""

from __future__ import annotations

from fasterisnet.lrp.kinds import BATCH_NORMS, GROUPS
from fasterisnet.lrp.layers import norm, through
from fasterisnet.lrp.parts import one_unit, warn_of_parts
from fasterisnet.lrp.step import Step
from fasterisnet.lrp.units import unit
from fasterisnet.lrp.zplus import two_sided


def first_layer(at: Step) -> bool:
    """`R_x = x (W^T s) - l (W+^T s) - h (W-^T s)`, `s = R_y/(z + eps)`, `z = W x + b - l W+ 1 - h W- 1 - b-`.

    Computed as: z+ with x - l for the positive and x - h for the negative weights. An activation behind the layer
    passes relevance on unchanged, so y is its output. False if this is no first layer. Paper: cited as LRPZb.
    """
    found = at.activation
    if found is None and GROUPS.get(at.kind) not in ("linear", "norm", "sum", "product"):
        return False
    at.settle()
    made = unit((at.node, 0) if found is None else found.edge, at.walk.active, reads=at.walk.affine)
    if made is None:
        warn_of_parts(at, (at.node, 0) if found is None else found.edge, below=at.walk.affine)
        return False
    one_unit(at, made.layer.node, made.inside if found is None else [*made.inside, found.edge])
    if found is not None:
        at.flow = {"R": {0: at.relevance(lambda: found.y)}}
    elif at.kind in BATCH_NORMS:
        at.flow = {"R": {0: at.relevance(norm(at.node).output)}}
    else:
        at.flow = {form: {0: through(made.path, by[0])} for form, by in at.flow.items()}
        at.flow, made.path = {"R": {0: at.relevance(made.output)}}, []
    x = made.x if at.walk.keep_root else made.x.detach()
    low, high = at.walk.bounds(made.layer.edge, x)
    plus, minus = two_sided(at, made, x - low, x - high, None)
    assert minus is not None
    at.send(made.layer.edge, "B", (x - low) * plus + (x - high) * minus)
    return True
