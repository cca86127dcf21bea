"""A relevance pass: a walk over autograd's own graph, from the score back to the images.

The network has run as it is. Every node that leads to the images is visited once; where a table has a rule for what it
computes, the rule is applied, elsewhere the node itself is called, which is its derivative, differentiable again. Rules
exist only here: the ordinary backward pass knows nothing of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fasterisnet.errors import InputError, RuleError, RuleWarning
from fasterisnet.lrp.kernels import wide
from fasterisnet.lrp.kinds import GROUPS, MOVING, Edge, Node, edges, kind, shape, source, spoken
from fasterisnet.lrp.record import note
from fasterisnet.lrp.step import AFFINE, Flow, Step, replays

if TYPE_CHECKING:
    from fasterisnet.lrp.rules import RuleTable


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
        self.positive: dict[Node, Tensor] = {}  # what ReLUs made of the results of these
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
        return any(edge[0] is end[0] and edge[1] == end[1] for edge in asked for end in self.ends)

    def joins_outputs(self, node: Node) -> bool:
        """Whether a node, one number a sample, is made of outputs of which none comes from another one."""
        found: set[Node] = set()
        waiting = [node] if len(shape((node, 0))) == 1 else []
        while waiting:
            for edge, on in zip(edges(waiting[-1]), self.active(waiting.pop()), strict=True):
                below = source(edge)[0]
                if on and below in self.reached:
                    (waiting.append if len(shape((below, 0))) <= 1 else found.add)(below)
        return len([n for n in found if not self._leads_to(n, found - {n})]) > 1

    def _leads_to(self, node: Node, others: set[Node]) -> bool:
        seen, waiting = {node}, [node]
        while waiting and not seen & others:
            on = [n for n, _ in edges(waiting.pop()) if n in self.reached and n not in seen]
            seen.update(on)
            waiting += on
        return bool(seen & others)

    # --- what lies in front of the first layer ---------------------------------------------------------------------

    def _is_affine(self, node: Node) -> bool:
        what, below = kind(node), [n for (n, _), on in zip(edges(node), self.active(node), strict=True) if on]
        one = len(below) == 1 and (what in MOVING or what in AFFINE)
        one = one and not (what in ("Div", "Addcdiv") and self.active(node)[-1])  # a denominator
        joined = what in ("Cat", "Stack", "CopySlices") and len(below) > 0
        in_place = replays(note(node)) if what == "CopySlices" else ""
        joined = joined and (not in_place or (in_place in AFFINE and len(below) == 1 and self.active(node)[0]))
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
                x
                + torch.autograd.grad(
                    flow, u, (bound - images).to(flow.dtype), retain_graph=True, create_graph=self.create_graph
                )[0]
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
