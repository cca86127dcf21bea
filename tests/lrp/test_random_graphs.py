"""Random networks with skips, concatenations, re-used and in-place steps: the engine against the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet
from lrp.cases import iadd
from lrp.reference import (
    Act,
    Add,
    Cat,
    Lin,
    MaxPool,
    Move,
    Mul,
    Norm,
    Offset,
    Oracle,
    Program,
    Relu,
    Step,
    images,
    one_hot,
    randomise,
)

SIZE = 6
SHARED, SHARED_IN_PLACE = nn.ReLU(), nn.ReLU(inplace=True)
CLAMP = partial(torch.clamp, min=0)
RELUS = [SHARED, SHARED, nn.ReLU(), F.relu, torch.relu, lambda t: t.relu(), CLAMP]
RELUS_IN_PLACE = [SHARED_IN_PLACE, SHARED_IN_PLACE, nn.ReLU(inplace=True), partial(F.relu, inplace=True), torch.relu_]


ADDS = [torch.add, lambda a, b: a + b, lambda a, b: a.add(b)]
ADDS_IN_PLACE = [iadd, lambda a, b: a.add_(b)]


@dataclass
class Draft:
    """A program being written. Names of one tensor (in-place steps make those) share what is known of it.

    kept: autograd needs the value, so it must not be overwritten. pooled: the value comes out of an average pool.
    gates: names that only multiply one signal.
    """

    steps: list[tuple[Step, tuple[int, ...]]] = field(default_factory=list)
    channels: list[int] = field(default_factory=lambda: [2])
    sizes: list[int] = field(default_factory=lambda: [SIZE])
    tensors: list[int] = field(default_factory=lambda: [0])
    kept: dict[int, bool] = field(default_factory=lambda: {0: True})
    pooled: dict[int, bool] = field(default_factory=lambda: {0: False})
    gates: set[int] = field(default_factory=set)

    def add(
        self, step: Step, *inputs: int, channels: int | None = None, size: int | None = None,
        keeps: bool = True, kept: bool = False, pooled: bool = False,
    ) -> int:  # fmt: skip
        """`keeps`: autograd keeps the inputs; `kept`: it keeps the output."""
        first = inputs[0]
        for i in inputs:
            self.kept[self.tensors[i]] |= keeps
        tensor = self.tensors[first] if step.in_place else len(self.tensors)
        self.steps.append((step, inputs))
        self.channels.append(self.channels[first] if channels is None else channels)
        self.sizes.append(self.sizes[first] if size is None else size)
        self.tensors.append(tensor)
        self.kept[tensor], self.pooled[tensor] = kept, pooled
        return len(self.steps)

    def may_overwrite(self, name: int) -> bool:
        return not self.kept[self.tensors[name]]

    def like(self, name: int) -> list[int]:
        return [
            i
            for i in range(1, len(self.channels))
            if i != name
            and i not in self.gates
            and (self.channels[i], self.sizes[i]) == (self.channels[name], self.sizes[name])
        ]


@st.composite
def programs(draw: st.DrawFn, smooth: bool = False) -> Program:
    """A stem, up to ten random steps, and a head. `smooth`: other activations, products and gates too."""
    draft = Draft()

    def pick(items: list) -> object:
        return items[draw(st.integers(0, len(items) - 1))]

    def conv(name: int, channels: int) -> int:
        kernel = pick([1, 3])
        groups = 2 if draft.channels[name] % 2 == 0 and channels % 2 == 0 and draw(st.booleans()) else 1
        layer = nn.Conv2d(
            draft.channels[name], channels, kernel, padding=kernel // 2, bias=draw(st.booleans()), groups=groups
        )
        return draft.add(Lin(layer), name, channels=channels)

    def relu(name: int) -> int:
        if draft.may_overwrite(name) and draw(st.booleans()):
            return draft.add(Relu(pick(RELUS_IN_PLACE), in_place=True), name, keeps=False, kept=True)
        spelling = pick(RELUS)
        return draft.add(Relu(spelling), name, keeps=spelling is CLAMP, kept=True)  # clamp keeps what it was given

    def add(name: int) -> int:
        others = draft.like(name) or [conv(name, draft.channels[name])]
        other = pick(others)
        if draft.may_overwrite(name) and draw(st.booleans()):
            return draft.add(Add(pick(ADDS_IN_PLACE), in_place=True), name, other, keeps=False)
        return draft.add(Add(pick(ADDS)), name, other, keeps=False)

    def norm(name: int) -> int:
        module = nn.BatchNorm2d(draft.channels[name], affine=draw(st.booleans()))
        return draft.add(Norm(module), name)

    def concat(name: int) -> int:
        others = [i for i in range(1, len(draft.sizes)) if draft.sizes[i] == draft.sizes[name] and i not in draft.gates]
        other = pick(others)
        total = draft.channels[name] + draft.channels[other]
        return draft.add(Cat(), name, other, channels=total, keeps=False)

    def pool(name: int) -> int:
        halve = draft.sizes[name] == SIZE and draw(st.booleans())
        size = SIZE // 2 if halve else draft.sizes[name]
        stride = 2 if halve else 1
        if draw(st.booleans()):
            return draft.add(MaxPool(nn.MaxPool2d(3, stride, 1)), name, size=size)
        return draft.add(Lin(nn.AvgPool2d(3, stride, 1), weighted=False), name, size=size, pooled=True)

    def act(name: int) -> int:
        if draft.may_overwrite(name) and draw(st.booleans()):
            return draft.add(Act(nn.SiLU(inplace=True), F.silu, in_place=True), name, keeps=False, kept=True)
        return draft.add(Act(pick([F.silu, F.gelu, torch.tanh, F.elu, nn.LeakyReLU(0.1)])), name, kept=True)

    def product(name: int) -> int:
        other = pick([*draft.like(name), name])
        if draw(st.booleans()):
            return draft.add(Mul(), name, other)
        gate = draft.add(Act(torch.sigmoid), other, keeps=False, kept=True)
        draft.gates.add(gate)
        own = draft.tensors[other] == draft.tensors[name]  # steps in place give one tensor several names
        return draft.add(Mul(gated=True, own=own), name, gate)

    kinds = ["conv", "conv", "relu", "relu", "add", "norm", "concat", "pool", "offset"]
    kinds += ["act", "act", "product", "roll"] if smooth else []
    relu(conv(0, pick([2, 3, 4])))
    for _ in range(draw(st.integers(2, 10))):
        name = draw(st.integers(max(1, len(draft.steps) - 3), len(draft.steps)))
        kind = draw(st.sampled_from(kinds))
        if name in draft.gates:
            continue
        if kind == "conv":
            conv(name, pick([2, 3, 4]))
        elif kind == "relu":
            relu(name)
        elif kind == "add":
            add(name)
        elif kind == "norm" and not draft.pooled[draft.tensors[name]]:
            norm(name)
        elif kind == "concat" and draft.channels[name] < 6:
            concat(name)
        elif kind == "pool":
            pool(name)
        elif kind == "offset" and not isinstance(draft.steps[name - 1][0], Lin):  # there it would be the layer's bias
            draft.add(Offset(torch.zeros(draft.channels[name], 1, 1)), name, keeps=False)
        elif kind == "act":
            act(name)
        elif kind == "product":
            product(name)
        elif kind == "roll":
            draft.add(Move(lambda t: t.roll(1, 3)), name, keeps=False)
    last = len(draft.steps)
    last = draft.add(Lin(nn.AdaptiveAvgPool2d(2), weighted=False), last, size=2, pooled=True)
    last = draft.add(Move(nn.Flatten()), last)
    draft.add(Lin(nn.Linear(4 * draft.channels[last], 3)), last)
    program = Program(draft.steps)
    seed = draw(st.integers(0, 99))
    return randomise(program, seed).train(draw(st.booleans()))


def agree(actual: Tensor, wanted: Tensor, tolerance: float) -> None:
    difference, size = float((actual - wanted).detach().abs().max()), float(wanted.detach().abs().max())
    assert difference <= tolerance * max(size, 1e-3)


@given(programs(), st.sampled_from(["epsilon", "zplus", "gamma"]))
@settings(max_examples=150)
def test_maps(program: Program, rule: str) -> None:
    x = images(3, 2, SIZE, SIZE, seed=1)
    classes = [2, 0, 1]
    with torch.no_grad():
        wanted = Oracle(program, x, one_hot(classes, 3), rule).input
    agree(fasterisnet.explain(program, x, torch.tensor(classes), rule=rule, strict=True), wanted, 1e-10)


@given(programs(smooth=True))
@settings(max_examples=80)
def test_maps_of_smooth_networks(program: Program) -> None:
    x = images(3, 2, SIZE, SIZE, seed=6)
    classes = [2, 0, 1]
    with torch.no_grad():
        wanted = Oracle(program, x, one_hot(classes, 3)).input
    agree(fasterisnet.explain(program, x, torch.tensor(classes), strict=True), wanted, 1e-10)


@given(programs(), st.sampled_from(["epsilon", "zplus"]))
@settings(max_examples=60)
def test_maps_with_a_box(program: Program, rule: str) -> None:
    x = images(3, 2, SIZE, SIZE, seed=2)
    bounds = torch.full((2, 1, 1), -1.0, dtype=torch.float64), torch.full((2, 1, 1), 1.5, dtype=torch.float64)
    classes = [1, 0, 2]
    with torch.no_grad():
        wanted = Oracle(program, x, one_hot(classes, 3), rule, box=bounds).input
    maps = fasterisnet.explain(program, x, torch.tensor(classes), rule=rule, box=(-1.0, 1.5), strict=True)
    agree(maps, wanted, 1e-10)


@given(programs(), st.sampled_from(["epsilon", "zplus"]), st.booleans())
@settings(max_examples=60)
def test_parameter_gradients(program: Program, rule: str, boxed: bool) -> None:
    check_parameter_gradients(program, rule, boxed)


@given(programs(smooth=True))
@settings(max_examples=40)
def test_parameter_gradients_of_smooth_networks(program: Program) -> None:
    check_parameter_gradients(program, "epsilon", boxed=False)


def check_parameter_gradients(program: Program, rule: str, boxed: bool) -> None:
    """A loss on the maps, differentiated through the engine and through the oracle."""
    x = images(3, 2, SIZE, SIZE, seed=3)
    bounds = torch.full((2, 1, 1), -1.0, dtype=torch.float64), torch.full((2, 1, 1), 1.0, dtype=torch.float64)
    classes = [1, 0, 2]
    first, second = images(3, 2, SIZE, SIZE, seed=4), images(3, 2, SIZE, SIZE, seed=5)
    parameters = list(program.parameters())

    def gradients(maps: Tensor) -> list[Tensor]:
        loss = (first * maps + second * maps**2).sum()
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]

    wanted = gradients(Oracle(program, x, one_hot(classes, 3), rule, box=bounds if boxed else None).input)
    maps = fasterisnet.explain(
        program, x, torch.tensor(classes), rule=rule, box=(-1.0, 1.0) if boxed else None, create_graph=True
    )
    size = max(float(g.abs().max()) for g in wanted)
    for actual, reference in zip(gradients(maps), wanted, strict=True):
        assert float((actual - reference).abs().max()) <= 1e-9 * max(size, 1e-3)


def test_the_generator_makes_what_it_promises() -> None:
    """Among the drawn networks there are skips, concatenations, in-place and re-used steps, and both modes."""
    seen: set[str] = set()

    @given(st.booleans().flatmap(programs))
    @settings(max_examples=200)
    def look(program: Program) -> None:
        program(images(3, 2, SIZE, SIZE)).sum().backward()  # torch itself accepts the network
        seen.add("train" if program.training else "eval")
        relus = [s.spelling for s in program.steps if isinstance(s, Relu)]
        seen.update(["re-used"] if max(relus.count(SHARED), relus.count(SHARED_IN_PLACE)) > 1 else [])
        for step, inputs in zip(program.steps, program.wiring, strict=True):
            seen.add(type(step).__name__ + (" in place" if step.in_place else ""))
            if isinstance(step, Norm):
                before = program.steps[inputs[0] - 1]
                seen.add("fused norm" if isinstance(before, Lin) and before.weighted else "lone norm")
        reads = [i for inputs in program.wiring for i in inputs]
        seen.update(["skip"] if len(reads) != len(set(reads)) else [])

    look()
    assert seen >= {
        "train", "eval", "re-used", "skip", "fused norm", "lone norm", "Relu", "Relu in place", "Add", "Add in place",
        "Cat", "MaxPool", "Lin", "Norm", "Offset", "Act", "Act in place", "Mul", "Move",
    }  # fmt: skip
