"""One node of a relevance pass: what rules read and where they send."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from fasterisnet.errors import RuleError
from fasterisnet.lrp.activations import may_be_masked
from fasterisnet.lrp.kernels import Quotient, Result, stabilised, wide
from fasterisnet.lrp.kinds import GROUPS, SAME, Edge, Node, edges, kind, only_moves, shape, signed, spoken
from fasterisnet.lrp.layers import through
from fasterisnet.lrp.record import Note, note

if TYPE_CHECKING:
    from fasterisnet.lrp.activations import Activation
    from fasterisnet.lrp.walk import Walk

# What arrives at a node, by form: "G" with R = y*G; "R", relevance itself; "start", G that has met no layer yet;
# "P", G behind a ReLU, with R = y+ * G; "B", relevance that zB has sent to what lies in front of the first layer. Each
# by the number of the node's output.
Flow = dict[str, dict[int, Tensor]]
# What may lie there: every number of the result is affine in one of the images'.
AFFINE = frozenset({"Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Addcmul", "Addcdiv", "Lerp"})
UNWALKABLE = {
    "Function CheckpointFunction": "The model uses gradient checkpointing of the reentrant kind, which hides its "
    "operations. Use checkpoint(..., use_reentrant=False), or switch it off (timm: set_grad_checkpointing(False)).",
    "Function CompiledFunction": "The forward pass was compiled, which hides its operations: run the model without "
    "torch.compile, or use fasterisnet.explain.",
}
# Groups that make relevance of what comes from the score; others only put the score together.
LAYERS = frozenset({"linear", "bilinear", "norm", "activation", "sum", "pool", "signed", "attention"})


def replays(found: Note | None) -> str:
    """The kind of operation that changed a tensor in place through a view; "" if numbers only moved."""
    return "" if found is None or found.replay is None else found.replay.overloadpacket.__name__.capitalize()


class Step:
    """One node of a walk with what arrived at it; a rule reads from here and sends on from here."""

    def __init__(self, walk: Walk, node: Node, flow: Flow) -> None:
        self.walk, self.node, self.flow = walk, node, flow
        self.kind, self.active = kind(node), walk.active(node)
        self.note = None if isinstance(node, BackwardCFunction) else note(node)
        self.table = walk.table_at(node)
        self.eps = self.table.stabiliser
        self.activation: Activation | None = None
        self.ends_start = GROUPS.get(self.kind) in LAYERS and not self.is_score and not self._only_moves()
        if GROUPS.get(self.kind) not in ("linear", "norm", "sum"):
            self.settle()

    def take(self) -> None:
        """Applies the rule of the table; in front of the first layer zB's relevance goes on as it is."""
        group = GROUPS.get(self.kind)
        alone = self.walk.scores and self.table.loud  # a forward pass that may not have been recorded
        if self.is_score and group != "linear":
            if alone and group in self.table.rules and self.walk.joins_outputs(self.node):
                self.warn(
                    "makes one number a sample of several layers' outputs: it is taken for a part of the score, with "
                    "its derivative. If it is a part of the network, let that return (batch, 1)."
                )
            self.pass_on()
        elif alone and set(self.flow) != {"start"} and may_be_masked(self.node, self.walk.active):
            self.warn(
                "may be an activation by a mask of its own signs; to see that, run the forward pass inside "
                "`with fasterisnet.recording():`. Its ordinary derivative was used."
            )
            self.table.apply(self, group)
        elif self.node not in self.walk.affine:
            self.table.apply(self, group)
        elif self.kind in AFFINE or replays(self.note) in AFFINE:
            self.send(self.active.index(True), "B", self.flow["B"][0])
        else:
            self.pass_on()

    # --- what arrived ----------------------------------------------------------------------------------------------

    def arrived(self, form: str) -> Tensor | None:
        """What came in a form, at the node's first output."""
        return self.flow.get(form, {}).get(0)

    @property
    def G(self) -> Any:
        """All that came as G."""
        start, G = self.arrived("start"), self.arrived("G")
        return G if start is None else start if G is None else start + G

    def relevance(self, y: Callable[[], Tensor]) -> Tensor:
        """All that came, as relevance: `R = y * G`."""
        self.settle()
        R, G = self.arrived("R"), self.G
        if G is None:
            assert R is not None
            return R
        return y() * G if R is None else torch.addcmul(R, y(), G)

    def settle(self) -> None:
        """What came from a ReLU becomes relevance: a rule that knows what it divides by does that in one step."""
        behind = self.flow.pop("P", None)
        if behind is not None:
            R, y = self.arrived("R"), self.walk.positive[self.node]
            self.flow["R"] = {0: y * behind[0] if R is None else torch.addcmul(R, y, behind[0])}

    def over(
        self, z: Tensor, y: Callable[[], Tensor] | None, path: Sequence[Node] = (), stabilised: bool = False
    ) -> Tensor:
        """`s = R_y/(z + eps)`, z and y behind `path`. What comes from the score starts here (paper: LRP-z+_begin).

        stabilised: z has its epsilon already.
        """
        total = None
        for form, by in self.flow.items():
            factor = None
            if form == "start":
                factor = z - self.eps if stabilised else z
            elif form == "P":
                factor = through(path, self.walk.positive[self.node])
            elif form == "G" and y is not None:
                factor = y()
            s = Quotient.apply(through(path, by[0]), factor, z, 0.0 if stabilised else self.eps, False)
            total = s if total is None else total + s
        assert total is not None
        return total

    def _only_moves(self) -> bool:
        """Whether numbers are only picked here: the larger of two, the sum of one."""
        return sum(self.active) == 2 if self.kind in ("Maximum", "Minimum", "Fmax", "Fmin") else only_moves(self.node)

    @property
    def is_score(self) -> bool:
        """Whether this node only puts the score together: one number a sample, no layer met yet."""
        return self.walk.scores and set(self.flow) == {"start"} and len(self.node._input_metadata[0].shape) <= 1

    # --- the node --------------------------------------------------------------------------------------------------

    def is_active(self, position: int) -> bool:
        return position < len(self.active) and self.active[position]

    def saved(self, name: str) -> Any:
        """What autograd saved under a name."""
        value = getattr(self.node, f"_saved_{name}", None)
        return signed(value) if type(value) is int else value

    def edge(self, position: int) -> Edge:
        return edges(self.node)[position]

    def ordinary(self, by: dict[int, Tensor]) -> Sequence[Tensor | None]:
        """The node's derivative of what arrived at its outputs."""
        metadata = self.node._input_metadata
        if self.kind == "Identity":
            return [by.get(i) for i in range(len(metadata))]
        if self.kind in SAME and 0 in by and by[0].device == metadata[0].device:
            return [by[0]]
        if self.kind == "Cat" and 0 in by and all(self.active) and self._joins_alike():
            dim = self.saved("dim")  # computed as: a split, whose derivative is one step, that of slices many
            return by[0].split([shape(edge)[dim] for edge in edges(self.node)], dim)
        if self.kind == "Hardsigmoid":  # torch cannot differentiate its own twice
            return [by[0] * ((self.saved("self") > -3) & (self.saved("self") < 3)) / 6]
        args = [by[i].to(m.dtype) if i in by else None for i, m in enumerate(metadata)]
        if isinstance(self.node, BackwardCFunction):
            if self.kind in UNWALKABLE:
                raise RuleError(UNWALKABLE[self.kind])
            zeros = (torch.zeros(tuple(m.shape), dtype=m.dtype, device=m.device) for m in metadata)
            result = self.node.apply(*[z if a is None else a for a, z in zip(args, zeros, strict=True)])
        else:
            try:
                result = self.node(*args)
            except NotImplementedError as error:
                raise RuleError(
                    f"'{spoken(self.kind)}' has no derivative that relevance could be sent through."
                ) from error
        return [None if t is None else wide(t) for t in (result if isinstance(result, tuple) else (result,))]

    def _joins_alike(self) -> bool:
        """Whether all operands have the dimensions and the type of the result; torch also joins others."""
        own, below = self.node._input_metadata[0], (n._input_metadata[i] for n, i in edges(self.node))
        return all(len(m.shape) == len(own.shape) and m.dtype == own.dtype for m in below)

    def forward(self, xs: Sequence[Tensor | None]) -> Tensor:
        """`A x` of a node that is linear, found from its derivative `A^T u`."""
        like = self.node._input_metadata[0]
        with torch.enable_grad():
            u = torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device, requires_grad=True)
            pairs = zip(self.ordinary({0: u}), xs, strict=False)
            sums = [(t * x.to(t.dtype)).sum() for t, x in pairs if t is not None and x is not None]
            return wide(torch.autograd.grad(torch.stack(sums).sum(), u, create_graph=self.walk.create_graph)[0])

    # --- sending on ------------------------------------------------------------------------------------------------

    def send(self, to: int | Edge, form: str, t: Tensor | None) -> None:
        """Sends to an operand of this node, or to any edge behind it; an operand that was broadcast gets the sum."""
        edge = self.edge(to) if isinstance(to, int) else to
        form = "G" if form == "start" and self.ends_start else form
        if t is not None and edge[0] in self.walk.reached:
            size = shape(edge)
            if t.is_complex() and not edge[0]._input_metadata[edge[1]].dtype.is_complex:
                t = t.real
            self.walk.put(edge, form, t if tuple(t.shape) == size else t.sum_to_size(size))

    def send_G(self, to: int | Edge, t: Tensor | None) -> None:
        self.send(to, "G", t)

    def send_R(self, to: int | Edge, t: Tensor | None) -> None:
        self.send(to, "R", t)

    def share(self, to: int | Edge, R: Callable[[], Tensor], G: Callable[[], Tensor]) -> None:
        """Sends relevance, or G where the table speaks of that. A ReLU has its x."""
        edge = self.edge(to) if isinstance(to, int) else to
        multiplies = self.table.in_R and (edge[0] is None or kind(edge[0]) != "Relu")
        self.send(to, *(("R", R()) if multiplies else ("G", G())))

    def pass_on(self, shares: Mapping[int, float] | None = None) -> None:
        """The ordinary derivative, or these `shares` of it by operand. As relevance: of what moves, where to; of a
        stranger `R_x = x J^T (R_y/y)`.
        """
        for form, by in self.flow.items():
            y = self.note.result if form == "R" and self.note is not None and set(by) == {0} else None
            y = None if y is None or y.is_complex() else y
            values = self.note.tensors if y is not None and self.note is not None else []
            if y is not None and self.walk.create_graph:
                y = Result.apply(y, lambda u: self.ordinary({0: u}), *values)
            arrived = by if y is None else {0: by[0] / stabilised(y, self.eps)}
            for position, t in enumerate(self.ordinary(arrived)):
                share = 1.0 if shares is None else shares.get(position, 0.0)
                if t is not None and share and self.active[position]:
                    x = values[position] if position < len(values) else None
                    self.send(position, form, share * (t if x is None or x.shape != t.shape else t * x))

    def warn(self, why: str = "has no relevance rule: its ordinary derivative was used.") -> None:
        """Once for each operation and module. Where the derivative is what is asked for, there is nothing to say."""
        if self.table.loud or self.walk.box is not None:
            self.walk.log.announce(spoken(self.kind), self.walk.place(self.node), why)

    def treated(self, how: str) -> None:
        """For the record."""
        self.walk.log.note(spoken(self.kind), how, lambda: self.walk.place(self.node))
