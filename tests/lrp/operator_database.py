"""Torch's own database of operations inside small networks: what the map has to be, found without the engine.

`linear -> operation -> linear`, one sample. What the operation is (affine, selecting, an activation, a product, a norm)
is measured on its values; the specification then gives the map. What is none of these has to be loud.
`python operator_database.py` prints the counts for docs/coverage.md.
"""

from __future__ import annotations

import random
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.errors import FasterISNetError, RuleWarning

EPSILON = 0.01
DATABASE_SEED = 1234  # torch's own, set before each sample
LARGEST_INPUT, LARGEST_OUTPUT, SAMPLES_TRIED, SAMPLES_KEPT = 64, 200, 24, 2
Parts = tuple[Tensor, ...]
Function = Callable[..., Tensor]


@dataclass
class Trial:
    """An operation as a function of its activations (one or two tensors), everything else fixed."""

    name: str
    mode: str
    function: Function
    values: Parts
    kwargs: dict[str, Any]
    arguments: tuple[Any, ...]


@dataclass
class Verdict:
    """right, loud, wrong or crashed, and why."""

    trial: Trial
    rule: str
    outcome: str
    reason: str = ""


def as_tensor(result: Any) -> Tensor | None:
    """The first real tensor of what an operation returns."""
    if isinstance(result, tuple | list):
        result = next((r for r in result if isinstance(r, Tensor) and r.is_floating_point()), None)
    return result if isinstance(result, Tensor) and result.dtype == torch.float64 else None


def functions(op: Any, sample: Any) -> Iterator[Trial]:
    """The operation on one activation, in place on a copy of it, and on two activations."""
    x, arguments, kwargs = sample.input, tuple(sample.args), dict(sample.kwargs)
    name = op.name if not op.variant_test_name else f"{op.name}.{op.variant_test_name}"

    def call(function: Callable[..., Any], t: Tensor, *rest: Any) -> Tensor:
        torch.default_generator.manual_seed(0)  # torch.manual_seed writes down a traceback for every kind of device
        result = as_tensor(function(t, *rest, **kwargs))
        assert result is not None
        return result

    if isinstance(x, list | tuple):  # cat, stack, block_diag: the first two of a list are the activations
        if len(x) >= 2 and all(usable(t) for t in x[:2]):
            yield Trial(
                name, "list", lambda a, b: call(op.op, [a, b, *x[2:]], *arguments), (x[0], x[1]), kwargs, arguments
            )
        return
    if not usable(x):
        return
    yield Trial(name, "one", lambda t: call(op.op, t, *arguments), (x,), kwargs, arguments)
    if op.inplace_variant is not None:
        yield Trial(
            name, "in place", lambda t: call(op.inplace_variant, t.clone(), *arguments), (x,), kwargs, arguments
        )
    if arguments and usable(arguments[0]):
        rest = arguments[1:]
        yield Trial(name, "two", lambda a, b: call(op.op, a, b, *rest), (x, arguments[0]), kwargs, arguments)


def usable(t: Any) -> bool:
    return isinstance(t, Tensor) and t.dtype == torch.float64 and 2 <= t.numel() <= LARGEST_INPUT and not t.is_sparse


# --- what an operation is, measured on its values ------------------------------------------------------------------


def near(values: Parts, seed: int, size: float = 0.1) -> Parts:
    generator = torch.Generator().manual_seed(seed)
    return tuple(v + size * torch.randn(v.shape, generator=generator, dtype=v.dtype) for v in values)


def alike(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> bool:
    if a.shape != b.shape or not bool(a.isfinite().all() and b.isfinite().all()):
        return False
    return bool((a - b).abs().max() <= tolerance * max(1.0, float(a.abs().max()), float(b.abs().max())))


def is_affine(function: Function, values: Parts, which: tuple[int, ...]) -> bool:
    """In these operands together, over a range that no clamp or rectifier survives."""
    for size, share in ((0.3, 0.3), (5.0, 0.3), (5.0, 1.7)):
        others = [near(values, seed, size) for seed in (1, 2)]
        points = [tuple(o[i] if i in which else v for i, v in enumerate(values)) for o in others]
        between = tuple(share * a + (1 - share) * b for a, b in zip(*points, strict=True))
        a, b, c = function(*points[0]), function(*points[1]), function(*between)
        if a.shape != b.shape or a.shape != c.shape or not alike(c, share * a + (1 - share) * b, 1e-8):
            return False
    return True


def is_homogeneous(function: Function, values: Parts, degree: int) -> bool:
    return all(alike(function(*(s * v for v in values)), s**degree * function(*values), 1e-8) for s in (0.5, 3.0))


def is_locally_linear(function: Function, values: Parts) -> bool:
    """Piecewise linear: equal to its tangent in a small neighbourhood."""
    moved = near(values, 3, 1e-4)
    _, change = torch.autograd.functional.jvp(
        function, values, tuple(m - v for m, v in zip(moved, values, strict=True))
    )
    return alike(function(*moved) - function(*values), change, 1e-11)


def is_elementwise(function: Function, x: Tensor) -> bool:
    y = function(x)
    if y.shape != x.shape:
        return False
    permuted = x.flatten()[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(5))].view(x.shape)
    for point in (x, permuted, near((x,), 4, 0.5)[0]):
        jacobian = torch.autograd.functional.jacobian(function, point).reshape(x.numel(), x.numel())
        if not bool((jacobian - torch.diag(torch.diagonal(jacobian)) == 0).all()):
            return False
    return True


# Normalisers that only divide: y = x * n(x), and n is a constant of the relevance pass.
DIVIDING = {
    "nn.functional.normalize",
    "nn.functional.rms_norm",
    "nn.functional.local_response_norm",
    "masked.normalize",
}
CENTRING = {
    "nn.functional.layer_norm", "native_layer_norm", "nn.functional.group_norm", "native_group_norm",
    "nn.functional.instance_norm",
}  # fmt: skip
BATCH_NORMS = {
    "nn.functional.batch_norm",
    "nn.functional.batch_norm.without_cudnn",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
}
# To autograd these are several operations, which are judged on their own; what they are together cannot be measured.
COMPOSED = {
    "nn.functional.multi_head_attention_forward", "nn.functional.gaussian_nll_loss", "nn.functional.cosine_similarity",
    "nn.functional.multilabel_soft_margin_loss", "nn.functional.cross_entropy", "nn.functional.margin_ranking_loss",
    "nn.functional.hinge_embedding_loss", "nn.functional.cosine_embedding_loss", "corrcoef", "linalg.matrix_power",
}  # fmt: skip


def is_softmax(name: str) -> bool:
    """The specification: ordinary."""
    return any(word in name for word in ("softmax", "softmin", "logsumexp", "scaled_dot_product_attention"))


def norm_derivative(trial: Trial, G: Tensor) -> Tensor | None:
    """The normaliser held at its value; the mean that a layer, group or instance norm subtracts in the derivative."""
    (x,) = trial.values
    y = trial.function(x)
    if trial.name in DIVIDING:
        return G * y / x if bool((x != 0).all()) else None
    if y.shape != x.shape:
        return None
    if trial.name in ("nn.functional.layer_norm", "native_layer_norm"):
        shape = trial.arguments[0] if trial.arguments else trial.kwargs["normalized_shape"]
        weight = trial.arguments[1] if len(trial.arguments) > 1 else trial.kwargs.get("weight")
        eps = trial.kwargs.get("eps", trial.arguments[3] if len(trial.arguments) > 3 else 1e-5)
        dims = list(range(-len(shape), 0))
        scaled = (G if weight is None else G * weight) * (x.var(dims, correction=0, keepdim=True) + eps).rsqrt()
        return scaled - scaled.mean(dims, keepdim=True)
    groups = trial.arguments[0] if trial.name == "nn.functional.group_norm" else x.shape[1]
    weight, eps = trial.kwargs.get("weight"), trial.kwargs.get("eps", 1e-5)
    if trial.name == "native_group_norm":
        weight, groups, eps = trial.arguments[0], trial.arguments[5], trial.arguments[6]
    if trial.name in CENTRING:
        if trial.kwargs.get("running_mean") is not None and not trial.kwargs.get("use_input_stats", True):
            return None
        scaled = G if weight is None else G * weight.view(1, -1, *[1] * (x.ndim - 2))
        g, scaled = x.reshape(len(x), groups, -1), scaled.reshape(len(x), groups, -1)
        scaled = scaled * (g.var(-1, correction=0, keepdim=True) + eps).rsqrt()
        return (scaled - scaled.mean(-1, keepdim=True)).view(x.shape)
    return batch_norm_derivative(x, y, G)


def batch_norm_derivative(x: Tensor, y: Tensor, G: Tensor) -> Tensor | None:
    """`G * a` where y = a*x + b for each channel: a found from two values of the channel."""
    flat_x, flat_y = (t.transpose(0, 1).flatten(1) for t in (x, y))
    first, last = flat_x.argmin(1, keepdim=True), flat_x.argmax(1, keepdim=True)
    rise, run = (t.gather(1, last) - t.gather(1, first) for t in (flat_y, flat_x))
    if not bool((run > 1e-3).all()):
        return None
    return G * (rise / run).view(1, -1, *[1] * (x.ndim - 2))


def glu_derivative(trial: Trial, G: Tensor) -> Tensor:
    """A signal and a gate: the signal takes all."""
    dim = trial.kwargs.get("dim", trial.arguments[0] if trial.arguments else -1)
    gate = trial.values[0].chunk(2, dim)[1].sigmoid()
    return torch.cat([G * gate, torch.zeros_like(G)], dim)


def selects(function: Function, trial: Trial) -> bool:
    """Every number of the result is one of the operands' or of a constant's: a maximum, a sort, a choice."""
    constants = [
        a for a in (*trial.arguments, *trial.kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point()
    ]
    pool = torch.cat([t.double().flatten() for t in (*trial.values, *constants)])
    return bool((function(*trial.values).flatten()[:, None] == pool).any(1).all())


def activation(trial: Trial, G: Tensor) -> Parts:
    """`G * f(x)/(x + eps*sign(x))`, summed where x was broadcast against a constant."""
    x, y = trial.values[0], trial.function(*trial.values)
    return ((G * y / torch.where(x < 0, x - EPSILON, x + EPSILON)).sum_to_size(x.shape),)


def broadcasts(x: Tensor, y: Tensor) -> bool:
    """Against a larger constant, as in `maximum(x, constants)`; a reduction makes y smaller, not larger."""
    return y.numel() > x.numel() and torch.broadcast_shapes(x.shape, y.shape) == y.shape if y.ndim >= x.ndim else False


def expected(trial: Trial, G: Tensor) -> list[Parts]:
    """Every answer the specification allows for G at the operands; none if it has to be loud."""
    function, values = trial.function, trial.values
    ordinary = tuple(torch.autograd.functional.vjp(function, values, G)[1])
    everything = tuple(range(len(values)))
    if is_affine(function, values, everything):
        identity = "shrink" in trial.name  # shrinking by nothing: the activation that it is called, or none
        return [ordinary, activation(trial, G)] if identity else [ordinary]
    if trial.name in DIVIDING | CENTRING | BATCH_NORMS:
        answer = norm_derivative(trial, G) if len(values) == 1 else None
        return [] if answer is None else [(answer,)]
    if trial.name == "nn.functional.glu":
        return [(glu_derivative(trial, G),)]
    if len(values) == 2 and trial.mode == "two":
        separately = [is_affine(function, values, (i,)) for i in (0, 1)]
        if all(separately):
            return [tuple(0.5 * o for o in ordinary)]
        if any(separately):  # a quotient: its divisor is a constant, or it is a product with the reciprocal
            constant = tuple(
                o if linear else torch.zeros_like(o) for o, linear in zip(ordinary, separately, strict=True)
            )
            return [constant, tuple(0.5 * o for o in ordinary)]
        if trial.name == "nn.functional.scaled_dot_product_attention":
            return [tuple(0.5 * o for o in ordinary)]
        if is_locally_linear(function, values) and (is_homogeneous(function, values, 1) or selects(function, trial)):
            return [ordinary]
        return []
    if is_softmax(trial.name):
        return [ordinary]
    if len(values) == 1 and is_elementwise(function, values[0]):
        answers: list[Parts] = [activation(trial, G)]
        if is_homogeneous(function, values, 2):
            answers.append((0.5 * ordinary[0],))
        if (
            is_locally_linear(function, values)
            and trial.arguments
            and any(isinstance(a, Tensor) for a in trial.arguments)
        ):
            answers.append(ordinary)  # the larger or smaller of x and a constant: the winner takes all
        return answers
    if is_homogeneous(function, values, 2):
        return [tuple(0.5 * o for o in ordinary)]
    if is_locally_linear(function, values) and (is_homogeneous(function, values, 1) or selects(function, trial)):
        return [ordinary, activation(trial, G)] if broadcasts(values[0], function(*values)) else [ordinary]
    return []


# --- the network, and the judgement --------------------------------------------------------------------------------


class Around(torch.nn.Module):
    """`head(operation(W x + sample))`: every operand near its sample, whatever domain that is in."""

    def __init__(self, trial: Trial, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def random(*shape: int, size: float) -> torch.nn.Parameter:
            return torch.nn.Parameter(size * torch.randn(shape, generator=generator, dtype=torch.float64))

        self.trial = trial
        self.weights = torch.nn.ParameterList([random(v.numel(), 4, size=0.02) for v in trial.values])
        self.biases = torch.nn.ParameterList([torch.nn.Parameter(v.detach().flatten().clone()) for v in trial.values])
        self.head = random(3, width, size=0.5)

    def operands(self, x: Tensor) -> Parts:
        layers = zip(self.weights, self.biases, self.trial.values, strict=True)
        return tuple(F.linear(x, w, b).view(v.shape) for w, b, v in layers)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.trial.function(*self.operands(x)).reshape(1, -1), self.head)


def images() -> Tensor:
    return torch.tensor([[0.7, -0.4, 0.9, 0.3]], dtype=torch.float64)


def judge(trial: Trial, rule: str) -> Verdict | None:
    """None where the operation cannot stand in such a network: random, not differentiable, not finite, no gradient."""
    x = images()
    try:
        y = trial.function(*trial.values)
        if not 1 <= y.numel() <= LARGEST_OUTPUT or not bool(y.isfinite().all()):
            return None
        model = Around(trial, y.numel())
        operands = tuple(o.detach() for o in model.operands(x))
        y = trial.function(*operands)
        if not alike(y, trial.function(*operands), 1e-12):
            return None
        G = model.head[1].detach().view(y.shape)
        ordinary = torch.autograd.functional.vjp(trial.function, operands, G)[1]
        if not all(bool(o.isfinite().all()) for o in ordinary) or not any(float(o.abs().max()) > 0 for o in ordinary):
            return None
        there = Trial(trial.name, trial.mode, trial.function, operands, trial.kwargs, trial.arguments)
        answers = expected(there, G) if rule == "epsilon" else []
    except (RuntimeError, ValueError, NotImplementedError, IndexError, TypeError, AssertionError, KeyError):
        return None  # outside its domain, or not differentiable
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = fi.explain(model, x, 1, rule=rule)
    except FasterISNetError as error:
        return Verdict(trial, rule, "loud", str(error)[:80])
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        return Verdict(trial, rule, "crashed", f"{type(error).__name__}: {error}"[:160])
    messages = [str(w.message) for w in caught if issubclass(w.category, RuleWarning)]
    if messages:
        return Verdict(trial, rule, "loud", messages[0][:80])
    if rule == "zplus":
        good = bool(found.isfinite().all()) and float(found.min()) >= 0.0
        return Verdict(trial, rule, "right" if good else "wrong", "" if good else f"min {float(found.min()):.1e}")
    maps = [
        x * sum(a.reshape(1, -1) @ w.detach() for a, w in zip(answer, model.weights, strict=True)) for answer in answers
    ]
    if any(alike(found, m, 1e-8) for m in maps):
        return Verdict(trial, rule, "right")
    return Verdict(trial, rule, "wrong", "silent, without a rule in the specification" if not maps else "another map")


@cache
def operations() -> tuple[Any, ...]:
    """The differentiable operations of the database, in its order.

    Torch's helpers for its own tests ask for a package that only their TestCase uses, and lock torch.backends' flags
    for the whole process: the first gets a stand-in, the second is undone.
    """
    stand_in: Any = types.ModuleType("expecttest")
    stand_in.TestCase, stand_in.ACCEPT = unittest.TestCase, False
    sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db

    vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True
    return tuple(op for op in op_db if op.supports_autograd and torch.float64 in op.dtypes and op.name not in COMPOSED)


def samples_of(op: Any) -> Iterator[Any]:
    """`op.sample_inputs` with the same seeds; that one reads the sources of all frames to find a TestCase in them."""
    samples = iter(op.sample_inputs_func(op, "cpu", torch.float64, False))
    while True:
        torch.default_generator.manual_seed(DATABASE_SEED)
        random.seed(DATABASE_SEED)
        np.random.seed(DATABASE_SEED)  # noqa: NPY002  the database draws from it
        try:
            yield next(samples)
        except StopIteration:
            return


def judged(part: int, parts: int) -> list[Verdict]:
    """The verdicts on every `parts`-th operation: epsilon for two samples in each mode, z+ for the first."""
    verdicts: list[Verdict] = []
    for op in operations()[part::parts]:
        kept = 0
        torch.default_generator.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number, sample in enumerate(samples_of(op)):
                if number >= SAMPLES_TRIED or kept >= SAMPLES_KEPT:
                    break
                found = [v for t in functions(op, sample) if (v := judge(t, "epsilon")) is not None]
                if found and not kept:
                    found += [v for t in functions(op, sample) if (v := judge(t, "zplus")) is not None]
                kept += bool(found)
                verdicts += found
    return verdicts


def counts(verdicts: list[Verdict]) -> dict[str, Counter[str]]:
    """By rule: how many operations were right, loud, wrong or crashed in their worst trial."""
    order = ["right", "loud", "wrong", "crashed"]
    worst: dict[tuple[str, str], str] = {}
    for v in verdicts:
        key = (v.rule, v.trial.name)
        worst[key] = max(worst.get(key, "right"), v.outcome, key=order.index)
    result: dict[str, Counter[str]] = {}
    for (rule, _), outcome in worst.items():
        result.setdefault(rule, Counter())[outcome] += 1
    return result


if __name__ == "__main__":
    every = judged(0, 1)
    for v in every:
        if v.outcome in ("wrong", "crashed"):
            print(f"{v.outcome:8} {v.rule:8} {v.trial.name} ({v.trial.mode}): {v.reason}")
    for rule, counter in counts(every).items():
        print(rule, dict(counter), f"of {sum(counter.values())} operations, {len(operations())} in the database")
