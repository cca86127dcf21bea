"""The same network in another wrapping: compiled, traced, exported, checkpointed, offloaded, called functionally."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fasterisnet as fi
from fasterisnet.errors import FasterISNetError
from lrp.helpers import (
    RULES,
    Net,
    assert_alike,
    assert_close,
    attempt,
    explained,
    moved_by_rounding,
    pictures,
    quietly,
    randomised,
    twins,
)


def network() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )
    randomised(model).eval()
    return model


IMAGES = pictures(2, 3, 4, 4)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    yield
    torch._dynamo.reset()


def right_or_refused(model: nn.Module, rule: str, times: int = 1) -> str:
    """The map of `network()`, or an error or warning of ours; never another map in silence."""
    expected = fi.explain(network(), IMAGES, 1, rule=rule)
    outcome = "right"
    for _ in range(times):
        try:
            found, messages = quietly(lambda: fi.explain(model, IMAGES, 1, rule=rule))
        except FasterISNetError as error:
            outcome = f"refused: {error}"
            continue
        if messages:
            outcome = "warned"
            continue
        assert_close(found.to(expected.dtype), expected, 1e-9, rule)
    return outcome


@pytest.mark.parametrize(
    ("backend", "rule", "in_place"),
    [
        ("eager", "epsilon", False),
        ("eager", "zplus", True),
        ("aot_eager", "epsilon", True),
        ("aot_eager", "zplus", False),
    ],
)
def test_compiled_model(backend: str, rule: str, in_place: bool) -> None:
    """`torch.compile(model)` and `model.compile()`: the module underneath is explained, or it is refused."""
    model: Any = network()
    if in_place:
        model.compile(backend=backend)
    else:
        model = torch.compile(model, backend=backend)
    right_or_refused(model, rule)


def test_a_compiled_model_trains_its_own_parameters() -> None:
    model = network()
    compiled = torch.compile(model, backend="aot_eager")
    try:
        heatmap = fi.explain(compiled, IMAGES, 1, create_graph=True)
    except FasterISNetError:
        return
    gradients = torch.autograd.grad(heatmap.square().sum(), list(model.parameters()), allow_unused=True)
    plain = network()
    expected = fi.explain(plain, IMAGES, 1, create_graph=True)
    wanted = torch.autograd.grad(expected.square().sum(), list(plain.parameters()), allow_unused=True)
    for found, gradient in zip(gradients, wanted, strict=True):
        assert (found is None) == (gradient is None)
        if found is not None and gradient is not None:
            assert_close(found, gradient, 1e-8)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_parts_are_right_or_loud(backend: str) -> None:
    block = network()
    block[2] = torch.compile(nn.ReLU(), backend=backend)
    right_or_refused(block, "epsilon")
    function = torch.compile(lambda t: F.relu(t) * 1.0, backend=backend)
    model = network()
    model[4] = Net(lambda _m, t: function(t))
    right_or_refused(model, "epsilon")
    model = network()
    model[3].compile(backend=backend)
    right_or_refused(model, "zplus")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "rule"),
    [(k, r) for k in ("trace", "script", "freeze") for r in RULES],
)
def test_torchscript(kind: str, rule: str) -> None:
    """Also after the profiling runs, when TorchScript has optimised its graph."""
    model = network()
    scripted = torch.jit.trace(model, IMAGES) if kind == "trace" else torch.jit.script(model)
    if kind == "freeze":
        scripted = torch.jit.freeze(scripted)
    right_or_refused(scripted, rule, times=4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("rule", RULES)
def test_torchscript_of_sums_and_activations(rule: str) -> None:
    @torch.jit.script
    def swish_sum(x: Tensor, y: Tensor) -> Tensor:
        return F.silu(x) + torch.relu(y) * 0.5

    functions = [
        lambda m, x: m.fc(F.silu(m.a(x)) + torch.relu(m.b(x)) * 0.5),
        lambda m, x: m.fc(swish_sum(m.a(x), m.b(x))),
    ]
    plain, other = twins(functions, a=nn.Linear(5, 6), b=nn.Linear(5, 6), fc=nn.Linear(6, 3))
    images = pictures(2, 5)
    expected = fi.explain(plain, images, 1, rule=rule)
    for _ in range(4):
        found, messages = quietly(lambda: fi.explain(other, images, 1, rule=rule))
        if not messages:
            assert_close(found, expected, 1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_exported_module(rule: str) -> None:
    """torch.export's module is made of aten operations: right, without a warning."""
    exported = torch.export.export(network(), (IMAGES,)).module()
    found, messages = quietly(lambda: fi.explain(exported, IMAGES, 1, rule=rule))
    assert not messages
    assert_close(found, fi.explain(network(), IMAGES, 1, rule=rule), 1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_symbolically_traced_module(rule: str) -> None:
    assert_alike(network(), torch.fx.symbolic_trace(network()), IMAGES, rule=rule)


def within(context: Callable[[], Any]) -> Callable[[Any, Tensor], Tensor]:
    def forward(m: Any, x: Tensor) -> Tensor:
        with context():
            return m.inner(x)

    return forward


class Inside(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = network()
        self.way = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


CONTEXTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "save_on_cpu": within(save_on_cpu),
    "saved tensors hooks": within(lambda: saved_tensors_hooks(lambda t: t.clone(), lambda t: t)),
    "packed as bytes": within(lambda: saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy)),
    "enable_grad": within(torch.enable_grad),
    "autocast off": within(lambda: torch.autocast("cpu", enabled=False)),
    "checkpoint": lambda m, x: checkpoint(m.inner, x, use_reentrant=False),
    "checkpoint of a part": lambda m, x: m.inner[6:](checkpoint(m.inner[:6], x, use_reentrant=False)),
    "checkpoint_sequential": lambda m, x: checkpoint_sequential(m.inner, 3, x, use_reentrant=False),
    "functional_call": lambda m, x: torch.func.functional_call(m.inner, dict(m.inner.named_parameters()), (x,)),
    "stateless with buffers": lambda m, x: torch.func.functional_call(
        m.inner, {**dict(m.inner.named_parameters()), **{k: b.clone() for k, b in m.inner.named_buffers()}}, x
    ),
    "DataParallel": lambda m, x: nn.DataParallel(m.inner)(x),
    "half batches": lambda m, x: torch.cat([m.inner(part) for part in x.split(1)]),
    "vmap": lambda m, x: torch.vmap(lambda i: m.inner(i[None])[0])(x),
    "nested": lambda m, x: nn.Sequential(nn.Sequential(m.inner, nn.Identity()))(x),
}


# Under vmap torch spells the batch norm otherwise, so that z+ does not see it behind its layer.
@pytest.mark.parametrize(("name", "rule"), [(n, r) for n in CONTEXTS for r in RULES if (n, r) != ("vmap", "zplus")])
def test_surroundings(name: str, rule: str) -> None:
    plain, other = Inside(lambda m, x: m.inner(x)), Inside(CONTEXTS[name])
    gradients = name != "packed as bytes"  # detached on purpose: its maps cannot be trained through
    assert_alike(plain.eval(), other.eval(), IMAGES, rule=rule, what=name, gradients=gradients)


@pytest.mark.parametrize("name", ["save_on_cpu", "checkpoint", "checkpoint of a part", "DataParallel"])
@pytest.mark.parametrize("rule", RULES)
def test_surroundings_in_train_mode(name: str, rule: str) -> None:
    plain, other = Inside(lambda m, x: m.inner(x)), Inside(CONTEXTS[name])
    assert_alike(plain.train(), other.train(), IMAGES, rule=rule, what=name)


@pytest.mark.filterwarnings("ignore:.*use_reentrant")
def test_reentrant_checkpointing_says_what_to_do() -> None:
    """It hides its part of the graph: right, or an error that names checkpointing."""
    model = Inside(lambda m, x: checkpoint(m.inner, x, use_reentrant=True)).eval()
    found, messages, refusal = attempt(lambda: fi.explain(model, IMAGES, 1))
    if refusal:
        assert refusal.startswith("RuleError") and "checkpoint" in refusal.lower()
        return
    assert messages or torch.allclose(found, fi.explain(network(), IMAGES, 1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", ["epsilon", "gamma"])
def test_ensembles_by_vmap(rule: str) -> None:
    """`torch.func.stack_module_state` and vmap over the members: the mean of their logits."""
    members = [copy.deepcopy(network()) for _ in range(2)]
    with torch.no_grad():
        for parameter in members[1].parameters():
            parameter.mul_(1.3)

    class Ensemble(nn.Module):
        def __init__(self, way: str) -> None:
            super().__init__()
            self.members, self.way = nn.ModuleList(copy.deepcopy(members)), way

        def forward(self, x: Tensor) -> Tensor:
            if self.way == "loop":
                return torch.stack([m(x) for m in self.members]).mean(0)
            if self.way == "batched":
                names = [n for n, _ in self.members[0].named_parameters()]
                stacked = {n: torch.stack([m.get_parameter(n) for m in self.members]) for n in names}
                buffers = {
                    n: torch.stack([m.get_buffer(n) for m in self.members]) for n, _ in self.members[0].named_buffers()
                }
                call = lambda p, b: torch.func.functional_call(self.members[0], (p, b), (x,))  # noqa: E731
                return torch.vmap(call)(stacked, buffers).mean(0)
            raise AssertionError(self.way)

    assert_alike(Ensemble("loop").eval(), Ensemble("batched").eval(), IMAGES, rule=rule, target=fi.targets.Joint())


@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
def test_autocast_inside_explain_is_that_of_the_model(rule: str) -> None:
    """bf16 in a model: the map of that forward pass, within its precision, whoever switches autocast on."""
    model = network().float()
    images = IMAGES.float()
    inside = Net(lambda m, x: m.inner(x), inner=copy.deepcopy(model))

    def casting(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.inner(x).float()

    inside.function = casting
    found, messages = quietly(lambda: fi.explain(inside.eval(), images, 1, rule=rule))
    with torch.autocast("cpu", torch.bfloat16):
        outside, also = quietly(lambda: fi.explain(model, images, 1, rule=rule))
    exact = fi.explain(model, images, 1, rule=rule)
    assert not messages and not also
    allowed = 4 * moved_by_rounding(model, lambda m: fi.explain(m, images, 1, rule=rule), torch.bfloat16)
    for heatmap in (found, outside.float()):
        assert bool(heatmap.isfinite().all())
        assert float((heatmap - exact).norm() / exact.norm()) <= allowed


@pytest.mark.parametrize("rule", RULES)
def test_requires_grad_of_parameters_does_not_matter_for_the_map(rule: str) -> None:
    plain, other = network(), network()
    for parameter in other.parameters():
        parameter.requires_grad_(False)
    assert_close(fi.explain(other, IMAGES, 1, rule=rule), fi.explain(plain, IMAGES, 1, rule=rule), 1e-10)
    half = network()
    half[3].weight.requires_grad_(False)
    half[0].bias.requires_grad_(False)
    assert_close(fi.explain(half, IMAGES, 1, rule=rule), fi.explain(plain, IMAGES, 1, rule=rule), 1e-10)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("surrounding", ["no_grad", "inference_mode", "anomaly"])
def test_explained_under(surrounding: str, rule: str) -> None:
    expected = fi.explain(network(), IMAGES, 1, rule=rule)
    context = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    }[surrounding]
    model = network()
    with context():
        found, messages = quietly(lambda: fi.explain(model, IMAGES.clone(), 1, rule=rule))
    assert not messages
    assert_close(found.clone(), expected, 1e-10)


@pytest.mark.parametrize("rule", RULES)
def test_trained_through_twice(rule: str) -> None:
    """Two maps of one model live side by side; each backward is its own."""
    model = network()
    expected = explained(model, IMAGES, rule=rule).gradients
    first = fi.explain(model, IMAGES, 1, rule=rule, create_graph=True)
    second = fi.explain(model, IMAGES, 1, rule=rule, create_graph=True)
    weights = torch.linspace(0.5, 1.5, first.numel(), dtype=first.dtype).view(first.shape)
    for heatmap in (second, first):
        grads = torch.autograd.grad((heatmap.square() * weights).sum(), list(model.parameters()), allow_unused=True)
        for (name, wanted), grad in zip(expected.items(), grads, strict=True):
            assert_close(torch.zeros_like(wanted) if grad is None else grad, wanted, 1e-8, name)
