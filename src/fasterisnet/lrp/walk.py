"""A relevance pass: a walk over autograd's own graph, from the score back to the images.

The network has run as it is. Every node that leads to the images is visited once; where a table has a rule for what it
computes, the rule is applied, elsewhere the node itself is called, which is its derivative, differentiable again. Rules
exist only here: the ordinary backward pass knows nothing of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from fasterisnet.errors import InputError, RuleError, RuleWarning
from fasterisnet.lrp.kernels import Quotient, stabilised, wide
from fasterisnet.lrp.kinds import GROUPS, MOVING, SAME, Edge, Node, edges, kind, shape, source, spoken
from fasterisnet.lrp.layers import through
from fasterisnet.lrp.record import note

if TYPE_CHECKING:
    from fasterisnet.lrp.recognise import Activation
    from fasterisnet.lrp.rules import RuleTable

# What arrives at a node, by form: "G" with R = y*G; "R", relevance itself; "start", G that has met no layer yet;
# "B", relevance that zB has sent to what lies in front of the first layer. Each by the number of the node's output.
Flow = dict[str, dict[int, Tensor]]
# What may lie there: every number of the result is affine in one of the images'.
AFFINE = frozenset({"Add", "Sub", "Rsub", "Mul", "Div", "Neg"})
UNWALKABLE = {
    "Function CheckpointFunction": "The model uses gradient checkpointing of the reentrant kind, which hides its "
    "operations. Use checkpoint(..., use_reentrant=False), or switch it off (timm: set_grad_checkpointing(False)).",
    "Function CompiledFunction": "The forward pass was compiled, which hides its operations: run the model without "
    "torch.compile, or use fasterisnet.explain.",
}
# Groups that make relevance of what comes from the score; others only put the score together.
LAYERS = frozenset({"linear", "bilinear", "norm", "activation", "sum", "pool", "signed", "attention"})


def edge_of(t: Tensor) -> Edge:
    """The place of a tensor in the graph."""
    edge = get_gradient_edge(t)
    return edge.node, edge.output_nr


@dataclass
class Met:
    """A kind of operation relevance passed: how it was treated, how often, where first."""

    name: str
    treatment: str
    count: int = 0
    module: str = ""


@dataclass
class Log:
    """What walks met, and what they have warned of."""

    strict: bool = False
    met: dict[tuple[str, str], Met] = field(default_factory=dict)
    warned: set[tuple[str, str]] = field(default_factory=set)

    def note(self, name: str, treatment: str, place: Callable[[], str]) -> None:
        """One more."""
        if (name, treatment) not in self.met:
            self.met[name, treatment] = Met(name, treatment, module=place())
        self.met[name, treatment].count += 1

    def announce(self, name: str, module: str, why: str) -> None:
        """Once for each operation and module; an error if strict."""
        message = (
            f"Operation '{name}' in module '{module or '(the model itself)'}' {why} "
            "fasterisnet.check(model, images) shows what that does to the maps."
        )
        if self.strict:
            raise RuleError(message)
        if (name, module) not in self.warned:
            self.warned.add((name, module))
            warnings.warn(message, RuleWarning, stacklevel=2)


class Walk:
    """One relevance pass, from a score to `ends`, of which the first is the images.

    place: the module a node was made in. table_at: the table for a node, where modules have different ones. box: (low,
    high, images) for zB. keep_root: maps are differentiated for the images too. scores: the walk begins at a score, not
    at the logits. behind: which operands of nodes behind the ends depend on the images.
    """

    def __init__(
        self,
        table: RuleTable,
        ends: Sequence[Edge],
        *,
        log: Log | None = None,
        place: Callable[[Node], str] = lambda node: "",
        table_at: Callable[[Node], RuleTable] | None = None,
        box: tuple[Tensor, Tensor, Tensor] | None = None,
        create_graph: bool = False,
        keep_root: bool = True,
        scores: bool = False,
        behind: Callable[[Node], list[bool]] | None = None,
    ) -> None:
        self.table_at = table_at or (lambda node: table)
        self.ends, self.root = list(ends), ends[0]
        self.log, self.place, self.box = log or Log(), place, box
        self.create_graph, self.keep_root, self.scores = create_graph, keep_root, scores
        self._behind, self.is_beside = behind, behind is not None
        self.reached: set[Node] = set()
        self.affine: set[Node] = set()
        self._waiting: dict[Node, Flow] = {}
        self._active: dict[Node, list[bool]] = {}

    def run(self, start: Edge, G: Tensor, form: str = "start") -> dict[Edge, dict[str, Tensor]]:
        """Sends G from `start`; returns what arrived at each end, by form."""
        order = self._order(start[0])
        if start[0] not in self.reached:
            raise InputError(
                "The score does not depend on the inputs in a differentiable way: were they detached, or replaced by "
                "a copy, or did they not require a gradient before the forward pass?"
            )
        self.put(start, form, wide(G))
        found: dict[Edge, dict[str, Tensor]] = {}
        with torch.set_grad_enabled(self.create_graph), torch.autocast(G.device.type, enabled=False):
            for node in order:
                flow = self._waiting.pop(node, None)
                if flow is None:
                    continue
                for end in self.ends:
                    if end[0] is node:
                        found[end] = {form: by[end[1]] for form, by in flow.items() if end[1] in by}
                if node in self.affine and set(flow) != {"B"}:
                    raise RuleError(self._no_first_layer(node))
                if any(self.active(node)):
                    Step(self, node, flow).take()
        return found

    def _order(self, start: Node) -> list[Node]:
        """The nodes that lead from `start` to the ends, each before those it sends to."""
        self.reached = {end[0] for end in self.ends}
        finished: list[Node] = []
        seen: set[Node] = set()
        stack: list[tuple[Node, bool]] = [(start, False)]
        while stack:
            node, done = stack.pop()
            if not done and node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(n, False) for n, _ in edges(node) if n is not None and n not in seen]
            elif done and (node in self.reached or any(self.active(node))):
                self.reached.add(node)
                finished.append(node)
                if self.box is not None and self._is_affine(node):
                    self.affine.add(node)
        return finished[::-1]

    def active(self, node: Node) -> list[bool]:
        """Which of a node's operands depend on the images."""
        if node not in self._active:
            self._active[node] = [n in self.reached for n, _ in edges(node)]
        return self._active[node]

    def behind(self, node: Node) -> list[bool]:
        """The same, of nodes behind the ends of this walk too."""
        mine = self.active(node)
        return mine if any(mine) or self._behind is None else self._behind(node)

    def put(self, edge: Edge, form: str, t: Tensor) -> None:
        """Adds to what waits at an edge."""
        by = self._waiting.setdefault(edge[0], {}).setdefault(form, {})
        by[edge[1]] = by[edge[1]] + t if edge[1] in by else t

    def beside(
        self, at: Step, ends: dict[int, Edge], result: Tensor, t: Tensor, form: str
    ) -> Iterator[tuple[int, tuple[str, Tensor]]]:
        """Walks through something that was run again in place of a node: what arrives at which end, in which form."""
        place = self.place(at.node)
        walk = Walk(
            at.table, list(ends.values()), log=self.log, place=lambda _: place, create_graph=self.create_graph,
            behind=self.behind,
        )  # fmt: skip
        found = walk.run(edge_of(result), t, form)
        for position, end in ends.items():
            for changed in found.get(end, {}).items():
                yield position, changed

    def wants(self, *asked: Edge) -> bool:
        """Whether the relevance at one of these edges was asked for."""
        return any(edge[0] is end[0] and edge[1] == end[1] for edge in asked for end in self.ends[1:])

    # --- what lies in front of the first layer ---------------------------------------------------------------------

    def _is_affine(self, node: Node) -> bool:
        what, below = kind(node), [n for (n, _), on in zip(edges(node), self.active(node), strict=True) if on]
        one = (
            len(below) == 1 and (what in MOVING or what in AFFINE) and not (what == "Div" and not self.active(node)[0])
        )
        joined = what in ("Cat", "Stack", "CopySlices") and len(below) > 0
        return node is self.root[0] or ((one or joined) and all(n in self.affine for n in below))

    def bounds(self, edge: Edge, x: Tensor) -> tuple[Tensor, Tensor]:
        """The box where the first layer reads it: `x + A(l - images)`, A found from its derivative `A^T u`."""
        assert self.box is not None
        low, high, images = self.box
        if source(edge)[0] is self.root[0]:
            return low.to(x.dtype), high.to(x.dtype)
        from fasterisnet.lrp.rules import gradient_table

        with torch.enable_grad():
            u = torch.zeros_like(x).requires_grad_()
            flow = sum(Walk(gradient_table(), [self.root], create_graph=True).run(edge, u)[self.root].values())
            assert isinstance(flow, Tensor)
            at_low, at_high = (
                torch.autograd.grad(flow, u, (bound - images).to(flow.dtype), retain_graph=True)[0] + x.detach()
                for bound in (low, high)
            )
        return torch.minimum(at_low, at_high), torch.maximum(at_low, at_high)

    def _no_first_layer(self, node: Node) -> str:
        readers = [n for n in self._active if n not in self.affine and any(m in self.affine for m, _ in edges(n))]
        readers = [n for n in readers if kind(n) not in MOVING and GROUPS.get(kind(n)) != "linear"] or readers or [node]
        return (
            "zB (box=...) needs a linear or convolution layer that takes the network input; here the input goes into "
            f"'{spoken(kind(readers[0]))}' in module '{self.place(readers[0]) or '(the model itself)'}'. "
            "Pass box=None, or do that step before the model."
        )


class Step:
    """One node of a walk with what arrived at it; a rule reads from here and sends on from here."""

    def __init__(self, walk: Walk, node: Node, flow: Flow) -> None:
        self.walk, self.node, self.flow = walk, node, flow
        self.kind, self.active = kind(node), walk.active(node)
        self.note = None if isinstance(node, BackwardCFunction) else note(node)
        self.table = walk.table_at(node)
        self.eps = self.table.stabiliser
        self.activation: Activation | None = None
        self.ends_start = GROUPS.get(self.kind) in LAYERS and not self.is_score

    def take(self) -> None:
        """Applies the rule of the table; in front of the first layer zB's relevance goes on as it is."""
        group = GROUPS.get(self.kind)
        if self.is_score and group != "linear":
            self.pass_on()
        elif self.node not in self.walk.affine:
            self.table.apply(self, group)
        elif self.kind in AFFINE:
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
        R, G = self.arrived("R"), self.G
        if G is None:
            assert R is not None
            return R
        return y() * G if R is None else R + y() * G

    def over(self, z: Tensor, y: Callable[[], Tensor] | None, path: Sequence[Node] = ()) -> Tensor:
        """`s = R_y/(z + eps)`. What comes from the score itself starts here, with `R = z * G` (paper: LRP-z+_begin)."""
        total = None
        for form, by in self.flow.items():
            t = through(path, by[0] * y() if form == "G" and y is not None else by[0])
            s = Quotient.apply(t, z if form == "start" else None, z, self.eps, False)
            total = s if total is None else total + s
        assert total is not None
        return total

    @property
    def is_score(self) -> bool:
        """Whether this node only puts the score together: one number a sample, no layer met yet."""
        return self.walk.scores and set(self.flow) == {"start"} and len(self.node._input_metadata[0].shape) <= 1

    # --- the node --------------------------------------------------------------------------------------------------

    def is_active(self, position: int) -> bool:
        return position < len(self.active) and self.active[position]

    def saved(self, name: str) -> Any:
        """What autograd saved under a name; it knows no negative dimensions."""
        value = getattr(self.node, f"_saved_{name}", None)
        return value - 2**64 if type(value) is int and value >= 2**63 else value

    def edge(self, position: int) -> Edge:
        return edges(self.node)[position]

    def ordinary(self, by: dict[int, Tensor]) -> Sequence[Tensor | None]:
        """The node's derivative of what arrived at its outputs."""
        metadata = self.node._input_metadata
        if self.kind == "Identity":
            return [by.get(i) for i in range(len(metadata))]
        if self.kind in SAME and 0 in by and by[0].device == metadata[0].device:
            return [by[0]]
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

    def share(self, to: int | Edge, G: Tensor, x: Tensor) -> None:
        """Sends G, or `R = x * G` where the table speaks of relevance."""
        self.send(to, *(("R", x * G) if self.table.in_R else ("G", G)))

    def pass_on(self) -> None:
        """The ordinary derivative. As relevance: of what moves, where to; of a stranger `R_x = x J^T (R_y/y)`."""
        for form, by in self.flow.items():
            y = self.note.result if form == "R" and self.note is not None and set(by) == {0} else None
            y = None if y is None or y.is_complex() else y
            arrived = by if y is None else {0: by[0] / stabilised(y, self.eps)}
            for position, t in enumerate(self.ordinary(arrived)):
                if t is not None and self.active[position]:
                    values = self.note.tensors if y is not None and self.note is not None else []
                    x = values[position] if position < len(values) else None
                    self.send(position, form, t if x is None or x.shape != t.shape else t * x)

    def warn(self, why: str = "has no relevance rule: its ordinary derivative was used.") -> None:
        self.walk.log.announce(spoken(self.kind), self.walk.place(self.node), why)

    def treated(self, how: str) -> None:
        """For the record."""
        self.walk.log.note(spoken(self.kind), how, lambda: self.walk.place(self.node))
