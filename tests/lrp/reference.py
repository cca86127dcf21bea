"""An oracle for the relevance engine, sharing no code with it.

A `Program` is a network written as a list of steps, each with its inputs; torch runs it like any module. `oracle` walks
the same list backwards with the formulas of the specification, using dense matrices: a linear step's matrix is found by
sending a basis through it, so a convolution's positive part is the positive part of that matrix. z+ is computed on
relevances, the other rules on G = R / y. Everything is differentiable, so the oracle also gives parameter gradients;
what the specification calls constant is detached here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet
from seeds import generator

EPSILON = 0.01
GAMMA = 0.25


# --- steps ----------------------------------------------------------------------------------------------------------


class Step(nn.Module):
    """`forward` is what the network calls, `value` is the same for the oracle, `epsilon` sends G to the inputs."""

    in_place = False

    def value(self, *xs: Tensor) -> Tensor:
        return self(*xs)

    def epsilon(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        raise NotImplementedError

    def gamma(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        return self.epsilon(xs, y, G, eps)

    def gradient(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        """The derivative, by autograd."""
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in xs]
            return list(torch.autograd.grad(self.value(*leaves), leaves, G))

    def zplus(self, xs: list[Tensor], y: Tensor, R: Tensor, eps: float) -> list[Tensor]:
        raise NotImplementedError

    def z(self, xs: list[Tensor], y: Tensor) -> Tensor:
        """What z+ starts from if this step made the logits."""
        return y


class Lin(Step):
    """Linear in its only input, perhaps with a bias: convolution, dense layer, average pooling, upsampling.

    `weighted`: it has weights, so a batch norm behind it is fused with it and a first one takes zB.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], weighted: bool | None = None) -> None:
        super().__init__()
        self.function = function
        self.weighted = isinstance(function, nn.Module) if weighted is None else weighted

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def matrix(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The matrix (outputs, inputs) of one sample, and the bias of every output."""
        shape = x.shape[1:]
        bias = self.function(x.new_zeros(1, *shape))
        basis = torch.eye(shape.numel(), dtype=x.dtype).view(-1, *shape)
        return (self.function(basis) - bias).flatten(1).T, bias.flatten()

    def epsilon(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        (x,) = xs
        return [(G.flatten(1) @ self.matrix(x)[0]).view_as(x)]

    def zplus(self, xs: list[Tensor], y: Tensor, R: Tensor, eps: float) -> list[Tensor]:
        return [dense_zplus(xs[0], *self.matrix(xs[0]), R, eps)]

    def z(self, xs: list[Tensor], y: Tensor) -> Tensor:
        return positive_z(xs[0].flatten(1), *self.matrix(xs[0])).view_as(y)


class Move(Lin):
    """Every output is one of the inputs, or zero: reshape, slice, padding, permutation."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(function, weighted=False)

    def zplus(self, xs: list[Tensor], y: Tensor, R: Tensor, eps: float) -> list[Tensor]:
        return self.epsilon(xs, y, R, eps)


class Dropout(Step):
    """Dropout in train mode; the oracle draws the same mask if the seed is the same."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def value(self, x: Tensor) -> Tensor:
        self.mask = self.function(torch.ones_like(x))
        return x * self.mask

    def epsilon(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        return [G * self.mask]

    def zplus(self, xs: list[Tensor], y: Tensor, R: Tensor, eps: float) -> list[Tensor]:
        return [R]


class Scale(Step):
    """Multiplied by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def affine(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_full((), self.factor), x.new_zeros(())

    def epsilon(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        return [G * self.factor]

    def zplus(self, xs: list[Tensor], y: Tensor, R: Tensor, eps: float) -> list[Tensor]:
        return [R]


class Norm(Step):
    """Batch norm written out; its statistics are constants of the relevance."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.module.training or self.module.running_mean is None:
            samples = x.transpose(0, 1).flatten(1)
            return samples.mean(1), ((samples - samples.mean(1, keepdim=True)) ** 2).mean(1)
        return self.module.running_mean, self.module.running_var

    def value(self, x: Tensor) -> Tensor:
        mean, var = (along(t, x) for t in self.statistics(x))
        y = (x - mean) / (var + self.module.eps).sqrt()
        if self.module.weight is not None:
            y = y * along(self.module.weight, x)
        return y if self.module.bias is None else y + along(self.module.bias, x)

    def affine(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = (t.detach() for t in self.statistics(x))
        scale = 1 / (var + self.module.eps).sqrt()
        if self.module.weight is not None:
            scale = self.module.weight * scale
        bias = 0 if self.module.bias is None else self.module.bias
        return along(scale, x), along(bias - mean * scale, x)

    def epsilon(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        return [G * self.affine(xs[0])[0]]


class Normalise(Step):
    """Layer, group, instance or RMS norm: `formula(x, inverse)` is linear in x once `inverse(x)` is held constant.

    Relevance does not pass through the normaliser, but G depends on its value, and gradients of the maps know that.
    """

    def __init__(
        self,
        module: nn.Module,
        inverse: Callable[[Tensor], Tensor],
        formula: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.module, self.inverse, self.formula = module, inverse, formula

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def value(self, x: Tensor) -> Tensor:
        return self.formula(x, self.inverse(x))

    def epsilon(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        inverse = self.inverse(xs[0])
        zero = torch.zeros_like(xs[0], requires_grad=True)
        return list(torch.autograd.grad(self.formula(zero, inverse), zero, G, create_graph=True))


class Relu(Step):
    """ReLU in some spelling."""

    def __init__(self, spelling: Callable[[Tensor], Tensor] = F.relu, in_place: bool = False) -> None:
        super().__init__()
        self.spelling, self.in_place = spelling, in_place

    def forward(self, x: Tensor) -> Tensor:
        return self.spelling(x)

    def value(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0)

    def epsilon(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        return [G * y / (y + eps)]

    def gamma(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        return [G * (y > 0)]

    def zplus(self, xs: list[Tensor], y: Tensor, R: Tensor, eps: float) -> list[Tensor]:
        return [R]


class Act(Step):
    """Any other element-wise activation."""

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        plain: Callable[[Tensor], Tensor] | None = None,
        in_place: bool = False,
    ) -> None:
        super().__init__()
        self.function, self.plain, self.in_place = function, plain or function, in_place

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def value(self, x: Tensor) -> Tensor:
        return self.plain(x)

    def epsilon(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        return [G * self.plain(xs[0]) / stabilised(xs[0], eps)]


class MaxPool(Step):
    """Numbers that are taken over: the winner of a window takes all; where windows overlap, they add up."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def epsilon(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        return [torch.stack([self.of_sample(x, g) for x, g in zip(xs[0], G, strict=True)])]

    def of_sample(self, x: Tensor, G: Tensor) -> Tensor:
        jacobian = torch.autograd.functional.jacobian(self.function, x.detach().unsqueeze(0))
        return (G.flatten() @ jacobian.view(G.numel(), x.numel())).view_as(x)

    def zplus(self, xs: list[Tensor], y: Tensor, R: Tensor, eps: float) -> list[Tensor]:
        return self.epsilon(xs, y, R, eps)


class Add(Step):
    """`a + alpha*b`; the spelling may change a in place."""

    def __init__(
        self, spelling: Callable[[Tensor, Tensor], Tensor] = torch.add, alpha: float = 1.0, in_place: bool = False
    ) -> None:
        super().__init__()
        self.spelling, self.alpha, self.in_place = spelling, alpha, in_place

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.spelling(a, b)

    def value(self, a: Tensor, b: Tensor) -> Tensor:
        return a + self.alpha * b

    def epsilon(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        return [G.sum_to_size(xs[0].shape), (self.alpha * G).sum_to_size(xs[1].shape)]

    def zplus(self, xs: list[Tensor], y: Tensor, R: Tensor, eps: float) -> list[Tensor]:
        a, b = xs[0].clamp(min=0), (self.alpha * xs[1]).clamp(min=0)
        s = R / (a + b + eps)
        return [(a * s).sum_to_size(a.shape), (b * s).sum_to_size(b.shape)]

    def z(self, xs: list[Tensor], y: Tensor) -> Tensor:
        return xs[0].clamp(min=0) + (self.alpha * xs[1]).clamp(min=0)


class Offset(Step):
    """A parameter added to an activation: like a bias, it takes part in z and gets nothing."""

    def __init__(self, offset: Tensor) -> None:
        super().__init__()
        self.offset = nn.Parameter(offset)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset

    def affine(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_ones(()), self.offset

    def epsilon(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        return [G]


class Cat(Step):
    """Concatenation."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, *xs: Tensor) -> Tensor:
        return torch.cat(xs, self.dim)

    def epsilon(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        return list(G.split([x.shape[self.dim] for x in xs], self.dim))

    def zplus(self, xs: list[Tensor], y: Tensor, R: Tensor, eps: float) -> list[Tensor]:
        return self.epsilon(xs, y, R, eps)


class Mul(Step):
    """Product of two activations: half to each, or all to the first if the second is a gate.

    own: the gate is the sigmoid of the first, so that both are a SiLU.
    """

    def __init__(self, gated: bool = False, own: bool = False) -> None:
        super().__init__()
        self.gated, self.own = gated, own

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def epsilon(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        a, b = xs
        if self.own:
            return [G * a * b / stabilised(a, eps), torch.zeros_like(b)]
        if self.gated:
            return [(G * b).sum_to_size(a.shape), torch.zeros_like(b)]
        return [(G * b / 2).sum_to_size(a.shape), (G * a / 2).sum_to_size(b.shape)]


class MatMul(Step):
    """Matrix product of two activations, half to each."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def epsilon(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        a, b = xs
        return [torch.einsum("...ij,...kj->...ik", G, b) / 2, torch.einsum("...ki,...kj->...ij", a, G) / 2]


class Softmax(Step):
    """Softmax inside the network: its ordinary derivative, diag(p) - p p^T."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)

    def epsilon(self, xs: list[Tensor], y: Tensor, G: Tensor, eps: float) -> list[Tensor]:
        jacobian = torch.diag_embed(y) - y.unsqueeze(-1) * y.unsqueeze(-2)
        return [(G.unsqueeze(-2) @ jacobian).squeeze(-2)]


CONSTANTS = (Scale, Norm, Offset)


# --- formulas -------------------------------------------------------------------------------------------------------


def along(vector: Tensor, like: Tensor) -> Tensor:
    """One number a channel, shaped to be multiplied with an activation."""
    return vector.view(-1, *[1] * (like.ndim - 2))


def stabilised(z: Tensor, eps: float) -> Tensor:
    return torch.where(z >= 0, z + eps, z - eps)


def positive_z(x: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    """`z = W+ x+ + W- x- + b+`, the bias constant."""
    plus, minus = matrix.clamp(min=0), matrix.clamp(max=0)
    return x.clamp(min=0) @ plus.T + x.clamp(max=0) @ minus.T + bias.detach().clamp(min=0)


def dense_zplus(x: Tensor, matrix: Tensor, bias: Tensor, R: Tensor, eps: float) -> Tensor:
    flat = x.flatten(1)
    s = R.flatten(1) / (positive_z(flat, matrix, bias) + eps)
    plus, minus = matrix.clamp(min=0), matrix.clamp(max=0)
    return (flat.clamp(min=0) * (s @ plus) + flat.clamp(max=0) * (s @ minus)).view_as(x)


def diagonal_z(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """`(scale x)+`, and z with the shift: constants as a layer with one weight a number."""
    part = (x * scale).clamp(min=0)
    return part, part + shift.detach().clamp(min=0)


def dense_gamma(x: Tensor, matrix: Tensor, bias: Tensor, G: Tensor, y: Tensor | None, eps: float) -> Tensor:
    """`G_x = (W + gamma W+)^T s`, `s = G y/z` with those weights; without y: the score itself, `s = G`."""
    raised, raised_bias = matrix + GAMMA * matrix.clamp(min=0), bias + GAMMA * bias.clamp(min=0)
    z = x.flatten(1) @ raised.T + raised_bias
    s = G.flatten(1) if y is None else (G * y).flatten(1) / stabilised(z, eps)
    return (s @ raised).view_as(x)


def dense_zb(x: Tensor, low: Tensor, high: Tensor, matrix: Tensor, bias: Tensor, R: Tensor, eps: float) -> Tensor:
    """`R_x = x*(W^T s) - l*(W+^T s) - h*(W-^T s)`, the way the specification writes it."""
    x_, l, h = x.flatten(1), low.flatten(1), high.flatten(1)
    plus, minus = matrix.clamp(min=0), matrix.clamp(max=0)
    bias = bias.detach()
    z = x_ @ matrix.T + bias - l @ plus.T - h @ minus.T - bias.clamp(max=0)
    s = R.flatten(1) / (z + eps)
    return (x_ * (s @ matrix) - l * (s @ plus) - h * (s @ minus)).view_as(x)


# --- programs and their oracle --------------------------------------------------------------------------------------


class Program(nn.Module):
    """Steps in order; step i reads the values named in `wiring[i]` (0 is the input, k+1 the output of step k).

    After an in-place step the name of its first input stands for the new value, as in torch.
    """

    def __init__(self, steps: Sequence[tuple[Step, tuple[int, ...]]]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(step for step, _ in steps)
        self.wiring = [inputs for _, inputs in steps]

    def __repr__(self) -> str:
        """One line a step: what it computes from which values."""
        lines = []
        for i, (step, inputs) in enumerate(zip(self.steps, self.wiring, strict=True), 1):
            inner = next((v for k, v in vars(step).items() if k in ("function", "spelling")), "")
            inner = next(iter(step.children()), inner)
            place = " in place" if step.in_place else ""
            lines.append(f"  {i} = {type(step).__name__}{place}{inputs} {inner}")
        return "\n".join(["Program, train mode" if self.training else "Program, eval mode", *lines])

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for step, inputs in zip(self.steps, self.wiring, strict=True):
            values.append(step(*[values[i] for i in inputs]))
        return values[-1]


def chain(*steps: Step) -> Program:
    """A program without branches."""
    return Program([(step, (i,)) for i, step in enumerate(steps)])


@dataclass
class Value:
    y: Tensor
    step: Step | None
    inputs: list[int]


def run(program: Program, x: Tensor) -> list[Value]:
    """All values ever computed, in order (in-place steps make new ones)."""
    values = [Value(x, None, [])]
    names = [0]
    for step, wires in zip(program.steps, program.wiring, strict=True):
        inputs = [names[i] for i in wires]
        values.append(Value(step.value(*[values[i].y for i in inputs]), step, inputs))
        if step.in_place:
            old = inputs[0]
            names = [len(values) - 1 if name == old else name for name in names]
        names.append(len(values) - 1)
    return values


class Oracle:
    """Relevance of `start` (G at the logits) at the input and behind every step, by the rule's formulas."""

    def __init__(
        self,
        program: Program,
        x: Tensor,
        start: Tensor | Callable[[Tensor], Tensor],
        rule: str = "epsilon",
        eps: float = EPSILON,
        box: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.values = run(program, x)
        self.rule, self.eps, self.box = rule, eps, box
        self.flow: list[Tensor | None] = [None] * len(self.values)
        self.direct = torch.zeros_like(x)
        self.logits = self.values[-1].y
        self._start(start(self.logits) if callable(start) else start)
        for i in reversed(range(1, len(self.values))):
            flow = self.flow[i]
            if flow is not None and not (box is not None and self._zb(i, flow)):
                self._send(i, flow)

    @property
    def input(self) -> Tensor:
        if self.box is not None:
            return self.direct
        return self.behind(-1)

    def behind(self, step: int) -> Tensor:
        """Relevance at the output of a step (-1: the network input)."""
        value, flow = self.values[step + 1], self.flow[step + 1]
        assert flow is not None
        return flow if self.rule == "zplus" else flow * value.y

    def _start(self, G: Tensor) -> None:
        last = len(self.values) - 1
        self.output = last
        while isinstance(self.values[self.output].step, Move):
            value = self.values[self.output]
            (G,) = value.step.epsilon([self.values[i].y for i in value.inputs], value.y, G, self.eps)
            self.output = value.inputs[0]
        self.G = G
        if self.rule != "zplus":
            self.flow[self.output] = G
            return
        value = self.values[self.output]
        xs = [self.values[i].y for i in value.inputs]
        layer, steps = self._at(self.output)
        if layer is not None:
            matrix, bias, source = self._fused(*layer)
            z = positive_z(source.flatten(1), matrix, bias).view_as(value.y)
        else:
            z = value.step.z(xs, value.y) if steps is None else diagonal_z(*steps)[1]
        self.flow[self.output] = z * G

    def _send(self, i: int, flow: Tensor) -> None:
        value = self.values[i]
        step, xs = value.step, [self.values[j].y for j in value.inputs]
        layer, steps = self._at(i) if self.rule in ("zplus", "gamma") else (None, None)
        if layer is not None:
            matrix, bias, source = self._fused(*layer)
            if self.rule == "zplus":
                share = dense_zplus(source, matrix, bias, flow, self.eps)
            else:
                y = None if i == self.output else value.y
                share = dense_gamma(source, matrix, bias, flow, y, self.eps)
            self._add(self.values[layer[0]].inputs[0], share)
            return
        if steps is not None and self.rule == "zplus":
            part, z = diagonal_z(*steps)
            self._add(self._bottom, part * flow / (z + self.eps))
            return
        shares = getattr(step, self.rule)(xs, value.y, flow, self.eps)
        for j, share in zip(value.inputs, shares, strict=True):
            self._add(j, share)

    def _add(self, i: int, share: Tensor) -> None:
        flow = self.flow[i]
        self.flow[i] = share if flow is None else flow + share

    def _at(self, i: int) -> tuple[tuple[int, list[int]] | None, tuple[Tensor, Tensor, Tensor] | None]:
        """What value i is the output of: a layer with constants behind it, or constants alone; neither of a number."""
        step = self.values[i].step
        number = isinstance(step, Scale)
        layer = self._unit(i)
        steps = self._constants(i) if layer is None and not (number and step.factor < 0) else None
        return None if number else layer, steps

    def _unit(self, i: int) -> tuple[int, list[int]] | None:
        """The linear step, and the constants behind it that are one with it, that value i is the output of.

        A constant added to a layer that has a bias is a step of its own, unless a scale follows.
        """
        behind = []
        while isinstance(self.values[i].step, CONSTANTS):
            behind.insert(0, i)
            i = self.values[i].inputs[0]
        step = self.values[i].step
        if not (isinstance(step, Lin) and step.weighted):
            return None
        has_bias = getattr(step.function, "bias", None) is not None
        for j in behind:
            after = self.values[j].step
            if isinstance(after, Offset) and has_bias and any(n > 1 for n in after.offset.shape[1:]):
                return None
            has_bias = has_bias or not isinstance(after, Scale)
        scaled = any(not isinstance(self.values[j].step, Offset) for j in behind)
        doubtful = bool(behind) and not scaled and getattr(step.function, "bias", None) is not None
        return None if doubtful else (i, behind)

    def _constants(self, i: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """x, scale and shift of the constants that value i is the output of, down to the first that is added."""
        step = self.values[i].step
        if not isinstance(step, CONSTANTS):
            return None
        below = self.values[i].inputs[0]
        before = self._constants(below) if self._unit(below) is None else None
        scale, shift = step.affine(self.values[below].y)
        if before is not None:
            return before[0], before[1] * scale, before[2] * scale + shift
        self._bottom = below
        return None if isinstance(step, Scale) else (self.values[below].y, scale, shift)

    def _fused(self, linear: int, behind: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        value = self.values[linear]
        source = self.values[value.inputs[0]].y
        matrix, bias = value.step.matrix(source)
        for i in behind:
            scale, shift = self.values[i].step.affine(self.values[self.values[i].inputs[0]].y)
            scale, shift = (t.expand(value.y.shape[1:]).flatten() for t in (scale, shift))
            matrix, bias = matrix * scale.unsqueeze(1), bias * scale + shift
        return matrix, bias, source

    def _zb(self, i: int, flow: Tensor) -> bool:
        """zB if value i comes out of a first layer, with its batch norm and its activation."""
        value = self.values[i]
        behind = value.inputs[0] if isinstance(value.step, Relu | Act) else i
        unit = self._unit(behind)
        if unit is None:
            return False
        path, j = [], self.values[unit[0]].inputs[0]
        while j != 0:
            if not isinstance(self.values[j].step, Move):
                return False
            path.append(j)
            j = self.values[j].inputs[0]
        R = flow if self.rule == "zplus" else flow * value.y
        low, high = (bound.expand_as(self.values[0].y) for bound in self.box)
        for j in reversed(path):
            low, high = self.values[j].step(low), self.values[j].step(high)
        matrix, bias, source = self._fused(*unit)
        R = dense_zb(source, low, high, matrix, bias, R, self.eps)
        for j in path:
            (R,) = self.values[j].step.epsilon([self.values[self.values[j].inputs[0]].y], self.values[j].y, R, 0)
        self.direct = self.direct + R
        return True


# --- comparing ------------------------------------------------------------------------------------------------------


def plain_gradient(model: nn.Module, x: Tensor, start: Tensor, create_graph: bool = False) -> Tensor:
    """Gradient*Input by autograd alone."""
    x = x.detach().requires_grad_()
    (G,) = torch.autograd.grad(model(x), x, start, create_graph=create_graph)
    return G * x.detach()


def one_hot(classes: Sequence[int], count: int) -> Tensor:
    return torch.eye(count, dtype=torch.float64)[torch.as_tensor(classes)]


def expected(program: Program, x: Tensor, start: Tensor, rule: str, **settings: object) -> Tensor:
    if rule == "gradient" and settings.get("box") is None:
        return plain_gradient(program, x, start)
    return Oracle(program, x, start, rule, **settings).input


def error(actual: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest value wanted."""
    size = float(wanted.detach().abs().max())
    assert size > 1e-9, "nothing to compare"
    assert actual.shape == wanted.shape
    return float((actual.detach() - wanted.detach()).abs().max()) / size


def assert_same(actual: Tensor, wanted: Tensor, tolerance: float = 1e-10) -> None:
    assert error(actual, wanted) <= tolerance


def explain_class(
    model: nn.Module, x: Tensor, classes: Sequence[int], rule: str = "epsilon", **settings: object
) -> Tensor:
    return fasterisnet.explain(model, x, torch.tensor(classes), rule=rule, strict=True, **settings)


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Double precision, seeded parameters of sensible size, running statistics away from 0 and 1."""
    source = generator(seed)

    def normal(like: Tensor, scale: float) -> Tensor:
        return torch.randn(like.shape, generator=source, dtype=torch.float64) * scale

    model.double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.copy_(normal(p, 1.3 / (p[0].numel() ** 0.5)))
            else:
                p.copy_(normal(p, 0.3) + (1.0 if name.endswith("weight") else 0.0))
        for name, b in model.named_buffers():
            if name.endswith("running_mean"):
                b.copy_(normal(b, 0.2))
            elif name.endswith("running_var"):
                b.copy_(torch.rand(b.shape, generator=source, dtype=torch.float64) + 0.5)
    return model


def images(*shape: int, seed: int = 0, low: float = -1.0, high: float = 1.0) -> Tensor:
    return torch.rand(shape, generator=generator(seed), dtype=torch.float64) * (high - low) + low
