"""`check`: can this model be explained and trained through? A verdict before anyone trains for a day."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fasterisnet.errors import RuleWarning
from fasterisnet.lrp import rules
from fasterisnet.lrp.explain import check_inputs, observing, relevance_maps
from fasterisnet.lrp.targets import Classes, Target, resolve
from fasterisnet.lrp.trace import Trace
from fasterisnet.lrp.walk import Met

EXPLOSION = 1e4
SECOND_ORDER_TOLERANCE = 1e-4
WIDEST_TOLERANCE = 0.1
LARGE = 200_000_000
STEPS = (1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-11, 1e-5, 1e-4, 1e-3)
Maps = Callable[[nn.Module, Tensor, bool], Tensor]


@dataclass
class Verdict:
    """What `check` found. True if the maps can be trusted; prints as a small table."""

    rule: str
    operations: list[Met]
    without_rule: list[Met]
    scores: list[float]
    sums: list[float]
    magnitude: float
    finite: bool
    second_order_error: float
    second_order_tolerance: float
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        rows = [("operation", "times", "first in", "treatment")]
        rows += [(m.name, str(m.count), m.module or "(model)", m.treatment) for m in self.operations]
        kept = [f"{total:.3g} of {score:.3g}" for total, score in zip(self.sums, self.scores, strict=True)][:4]
        facts = [
            ("relevance of a score", ", ".join(kept) + (", ..." if len(self.sums) > len(kept) else "")),
            ("", "(biases and the stabiliser take or add the difference; without them it is nothing)"),
            ("sum of |relevance|", f"{self.magnitude:.3g} a sample"),
            ("finite values", "yes" if self.finite else "NO"),
            ("second-order gradient", f"relative error {self.second_order_error:.1e} against finite differences"),
        ]
        verdict = "OK: every operation has a rule, the maps can be trusted." if self.ok else "Problems:"
        problems = [f"- {problem}" for problem in self.problems]
        return "\n".join([f"rule {self.rule}", *_columns(rows), "", *_columns(facts), "", verdict, *problems])


def check(
    model: nn.Module,
    images: Tensor,
    target: Target | Classes | None = None,
    *,
    rule: str | rules.RuleTable = "epsilon",
    epsilon: float = 0.01,
    box: tuple[Any, Any] | None = None,
) -> Verdict:
    """Explains `images` once and says which operations were met, what becomes of relevance, and if gradients hold.

    Takes what `explain` takes. The verdict is true if the maps can be trusted, lists its `problems` and prints as a
    table.

    Example:
        >>> verdict = check(model, images)
        >>> bool(verdict), verdict.problems
        (True, [])
    """
    check_inputs(model, images)
    table = rules.table(rule, epsilon)
    wanted = resolve(target)
    with torch.inference_mode(False), torch.enable_grad(), observing(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuleWarning)
        images = images.clone() if images.is_inference() else images
        trace = Trace(model, images, [table], box=box)
        with trace.open():
            scores = wanted(trace.logits).detach()
            maps = relevance_maps(trace, table, wanted, create_graph=False)["input"]
        few = 1 if sum(p.numel() for p in model.parameters()) > LARGE else 2
        classes: Any = target
        several = hasattr(classes, "__getitem__") and getattr(classes, "ndim", 1) > 0
        of_few = resolve(classes[:few] if several else target)

        def maps_of(model: nn.Module, images: Tensor, create_graph: bool) -> Tensor:
            trace = Trace(model, images, [table], box=box)
            with trace.open():
                return relevance_maps(trace, table, of_few, create_graph=create_graph)["input"]

        error, tolerance = _second_order(model, images[:few].detach(), maps_of)
    maps = maps.reshape(scores.numel(), -1)
    verdict = Verdict(
        rule=table.name,
        operations=sorted(trace.log.met.values(), key=lambda m: (m.treatment, m.name)),
        without_rule=[Met(name, "ordinary derivative", module=module) for name, module in sorted(trace.log.warned)],
        scores=scores.flatten().tolist(),
        sums=maps.sum(1).tolist(),
        magnitude=float(maps.abs().sum(1).mean()),
        finite=bool(torch.isfinite(maps).all()),
        second_order_error=error,
        second_order_tolerance=tolerance,
    )
    verdict.problems = _problems(verdict, maps)
    return verdict


def _problems(verdict: Verdict, maps: Tensor) -> list[str]:
    found = [
        f"'{m.name}' in '{m.module or '(model)'}' has no rule; its ordinary derivative is used instead."
        for m in verdict.without_rule
    ]
    if not verdict.finite:
        return [*found, "Some relevance is not finite. Is the model trained, or its initialisation far too large?"]
    if bool((maps == 0).all()):
        return [*found, "All relevance is zero. A zero-initialised last layer does this; so does a dead network."]
    scale = max(abs(s) for s in verdict.scores)
    if verdict.magnitude > EXPLOSION * max(scale, 1.0):
        found.append(f"Relevance explodes: {verdict.magnitude:.1e} a sample for scores up to {scale:.1e}.")
    if not verdict.second_order_error <= verdict.second_order_tolerance:
        found.append(
            f"Gradients of the maps differ from finite differences by {verdict.second_order_error:.1e}: "
            "training through them would go wrong."
        )
    return found


def _second_order(model: nn.Module, images: Tensor, maps_of: Maps) -> tuple[float, float]:
    """In double precision on a copy of the model, where it can be copied and run so; else on the model itself."""
    try:
        return _second_order_error(_copied(model).eval().double(), images.double(), maps_of)
    except (RuntimeError, TypeError, NotImplementedError):  # some insist on float32, some cannot be copied
        before = [(p, p.detach().clone()) for p in model.parameters()]
        training = [module for module in model.modules() if module.training]
        try:
            return _second_order_error(model.eval(), images, maps_of)
        finally:
            for parameter, value in before:
                parameter.data.copy_(value)
            for module in training:
                module.training = True


def _copied(model: nn.Module) -> nn.Module:
    """A copy; tensors with a history, which forward passes have left in the model, are constants in it."""
    kept = [value for module in model.modules() for value in vars(module).values()]
    kept += [value for held in kept if isinstance(held, dict) for value in held.values()]
    history = [value for value in kept if isinstance(value, Tensor) and not value.is_leaf]
    return copy.deepcopy(model, {id(t): t.detach().clone() for t in history})


def _second_order_error(model: nn.Module, images: Tensor, maps_of: Maps) -> tuple[float, float]:
    """A random directional derivative of a random projection of the maps, against central differences.

    Measured for the weights (not biases: constants in z+) of three layers across the network, which it changes.
    Returns the relative error and what finite differences can tell here.
    """
    weights = [p for p in model.parameters() if p.ndim > 1 and p.is_floating_point() and p.requires_grad]
    if not weights:
        return 0.0, SECOND_ORDER_TOLERANCE
    weights = [weights[i] for i in sorted({0, len(weights) // 2, len(weights) - 1})]
    generator = torch.Generator().manual_seed(0)

    def random_like(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device)

    projection = random_like(images)

    def loss(create_graph: bool) -> Tensor:
        maps = maps_of(model, images, create_graph)
        return (maps.reshape(len(images), -1, *images.shape[1:]).sum(1) * projection).sum()

    value = loss(create_graph=True)
    if not value.requires_grad:
        return float("nan"), SECOND_ORDER_TOLERANCE
    gradients = torch.autograd.grad(value, weights, allow_unused=True)
    directions = [random_like(w) * w.detach().std() for w in weights]
    expected = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None)
    return _best_agreement(weights, directions, expected, lambda: float(loss(create_graph=False)))


def _best_agreement(
    weights: Sequence[Tensor], directions: Sequence[Tensor], expected: float, loss: Callable[[], float]
) -> tuple[float, float]:
    """The smallest relative error over several step sizes, and the tolerance that their own scatter asks for.

    ReLU and max pooling have kinks, which a step may cross; parts in float32 add noise, which small steps blow up.
    """
    originals = [w.detach().clone() for w in weights]
    measured: list[float] = []
    for step in STEPS:
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for weight, original, direction in zip(weights, originals, directions, strict=True):
                    weight.copy_(original + sign * step * direction)
            values.append(loss())
        measured.append((values[0] - values[1]) / (2 * step))
        if _relative(measured[-1], expected) < SECOND_ORDER_TOLERANCE / 100:
            return _relative(measured[-1], expected), SECOND_ORDER_TOLERANCE
    error = min(_relative(value, expected) for value in measured)
    scatter = min(_relative(a, b) for i, a in enumerate(measured) for b in measured[:i])
    return error, min(max(SECOND_ORDER_TOLERANCE, 3 * scatter), WIDEST_TOLERANCE)


def _relative(a: float, b: float) -> float:
    size = max(abs(a), abs(b))
    return abs(a - b) / size if size > 0 else 0.0


def first_bad_layer(model: nn.Module, images: Tensor, table: rules.RuleTable) -> str:
    """The module where values stop being finite: in the forward pass, or else on relevance's way back from the head."""
    order: list[str] = []
    bad: list[str] = []
    runs: dict[str, int] = {}

    def hook(name: str) -> Any:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            runs[name] = runs.get(name, 0) + 1
            if isinstance(output, Tensor) and output.requires_grad:
                order.append(name)
                if not bool(torch.isfinite(output).all()):
                    bad.append(name)

        return record

    leaves = [(name, m) for name, m in model.named_modules() if name and not any(True for _ in m.children())]
    handles = [module.register_forward_hook(hook(name)) for name, module in leaves]
    try:
        with observing(model):
            Trace(model, images, [table]).close()
    finally:
        for handle in handles:
            handle.remove()
    if bad:
        return bad[0]
    once = [name for name in order if runs[name] == 1]
    with observing(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuleWarning)
        trace = Trace(model, images, [rules.table("epsilon", table.epsilon)], layers=once)
        with trace.open():
            maps = trace.relevance(rules.table("epsilon", table.epsilon), trace.logits.sum(1))
    return next((name for name in reversed(once) if not bool(torch.isfinite(maps[name]).all())), "input")


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
