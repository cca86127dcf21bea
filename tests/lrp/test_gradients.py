"""Parameter gradients of a loss on the maps: finite differences, and the oracle where something is held constant."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet import explain
from fasterisnet.lrp import rules
from fasterisnet.lrp.explain import relevance_maps
from fasterisnet.lrp.targets import (
    AllLogits,
    Eta,
    EtaOfLowest,
    Highest,
    Joint,
    Logit,
    Lowest,
    Probability,
)
from fasterisnet.lrp.trace import Trace
from lrp.cases import (
    ACTIVATIONS,
    IN_PLACE,
    LINEAR,
    MEANS,
    OTHER_NORMS,
    POOLS,
    SIZE,
    Attention,
    Excited,
    StandardisedConv,
    iadd,
    residual,
    sandwich,
)
from lrp.reference import (
    EPSILON,
    Act,
    Add,
    Cat,
    Lin,
    MaxPool,
    Move,
    Norm,
    Offset,
    Oracle,
    Program,
    Relu,
    Step,
    assert_same,
    chain,
    images,
    one_hot,
    plain_gradient,
    randomise,
)
from seeds import generator

CLASSES = torch.tensor([2, 0])
TARGETS = {
    "logit": Logit(CLASSES),
    "joint": Joint(),
    "eta": Eta(CLASSES),
    "probability": Probability(CLASSES),
    "highest": Highest(),
    "lowest": Lowest(),
    "eta of the lowest": EtaOfLowest(),
    "all logits": AllLogits(),
    "a callable": lambda logits: 0.5 * (logits**2).sum(1) + logits[:, 0].exp(),
}


# Steps of finite differences: a longer one may cross a kink of ReLU or max pooling, a shorter one is lost in rounding.
STEPS = (1e-5, 1e-6, 1e-7)
# Weights of the values one, two... steps away: second order, and what is asked if that is not enough.
DIFFERENCES = ((1 / 2,), (2 / 3, -1 / 12))
# A number that went through a network of some ten steps is off by a few units in its last place, not by one.
ROUNDINGS = 16


def terms_of(maps: Tensor) -> Tensor:
    """Random linear and quadratic terms."""
    return images(*maps.shape, seed=21) * maps + images(*maps.shape, seed=22) * maps**2


def loss_of(maps: Tensor) -> Tensor:
    return terms_of(maps).sum()


def gradients(maps: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    grads = torch.autograd.grad(loss_of(maps), wanted, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(wanted, grads, strict=True)]


def difference(
    losses: Callable[[], Tensor], variable: Tensor, direction: Tensor, step: float, weights: tuple[float, ...]
) -> Tensor:
    """The derivatives of losses along a direction, from their values around where the variable is."""
    start, total = variable.detach().clone(), torch.zeros(())
    for number, weight in enumerate(weights, 1):
        for k in (number, -number):
            with torch.no_grad():
                variable.copy_(start + k * step * direction)
            total = total + (weight if k > 0 else -weight) * losses()
    with torch.no_grad():
        variable.copy_(start)
    return total / step


def check_by_differences(model: nn.Module, x: Tensor, *targets: object, **settings: object) -> None:
    """Every parameter, and the images, along a random direction: central differences to 1e-6, fourth-order if need be.

    A difference knows its values only up to their rounding, `ROUNDINGS * eps * (sum of all terms' sizes)`, divided by
    the step; gradients that are zero by theory (a shift in front of a norm) are compared with that. Several targets:
    the values of all come from the same forward passes.
    """
    x = x.clone().requires_grad_()
    variables = [*model.parameters(), x]
    maps = [explain(model, x, target, create_graph=True, **settings) for target in targets]
    analytic = [gradients(m, variables) for m in maps]
    assert all(any(float(g.abs().max()) > 0 for g in gradient) for gradient in analytic)
    summed = torch.tensor([float(terms_of(m.detach()).abs().sum()) for m in maps], dtype=torch.float64)
    losses = partial(losses_of_maps, model, x.detach(), targets, settings)
    torch.testing.assert_close(losses(), torch.stack([loss_of(m.detach()) for m in maps]), rtol=1e-10, atol=1e-12)
    largest, least = torch.zeros(len(targets)), torch.full((len(targets),), torch.inf)
    for number, (variable, *gradient) in enumerate(zip(variables, *analytic, strict=True)):
        direction = images(*variable.shape, seed=30 + number)
        along = torch.stack([(g * direction).sum() for g in gradient])
        sizes = torch.stack([g.norm() * direction.norm() / variable.numel() ** 0.5 for g in gradient])
        sizes = torch.maximum(along.abs(), sizes)
        wrong, errors = torch.ones(len(targets), dtype=torch.bool), []
        for step, weights in product(STEPS, DIFFERENCES):
            numeric = difference(losses, variable, direction, step, weights)
            rounding = ROUNDINGS * torch.finfo(torch.float64).eps * summed * 2 * sum(map(abs, weights)) / step
            right = wrong & ((numeric - along).abs() <= 1e-6 * sizes + rounding)
            least, wrong = torch.where(right, torch.minimum(least, rounding), least), wrong & ~right
            errors.append((numeric - along).tolist())
            if not wrong.any():
                break
        assert not wrong.any(), f"variable {number}, targets {wrong.tolist()}: {along.tolist()}, off by {errors}"
        largest = torch.maximum(largest, sizes)
    assert bool((least <= 1e-6 * largest).all()), "rounding would hide an error"


def losses_of_maps(model: nn.Module, x: Tensor, targets: tuple[Any, ...], settings: dict[str, Any]) -> Tensor:
    """One for each target; if there are several, over one trace."""
    if len(targets) == 1:
        return loss_of(explain(model, x, *targets, **settings)).unsqueeze(0)
    table = rules.table(settings["rule"])
    trace = Trace(model, x, [table], box=settings["box"])
    with trace.open():
        maps = [relevance_maps(trace, table, target, create_graph=False)["input"] for target in targets]
    return torch.stack([loss_of(m) for m in maps])


def check_by_oracle(
    program: Program, x: Tensor, rule: str, target: Callable[[Tensor], Tensor] = TARGETS["logit"],
    box: tuple[float, float] | None = None, tolerance: float = 1e-9,
) -> None:  # fmt: skip
    """Gradients of all parameters through the engine and through the oracle, which detaches the constants."""
    parameters = list(program.parameters())

    def start(logits: Tensor) -> Tensor:
        return torch.autograd.grad(target(logits).sum(), logits, create_graph=True)[0]

    bounds = None
    if box is not None:
        bounds = tuple(torch.full((x.shape[1], *[1] * (x.ndim - 2)), b, dtype=x.dtype) for b in box)
    oracle = Oracle(program, x, start, rule, box=bounds)
    maps = explain(program, x, target, rule=rule, box=box, create_graph=True)
    assert_same(maps, oracle.input)
    wanted = gradients(oracle.input, parameters)
    size = max(float(g.abs().max()) for g in wanted)
    assert size > 1e-6
    for p, actual, reference in zip(parameters, gradients(maps, parameters), wanted, strict=True):
        assert float((actual - reference).abs().max()) <= tolerance * size, p.shape


# --- finite differences, eval mode ----------------------------------------------------------------------------------


class SmallResNet(nn.Module):
    """Convolution, batch norm, ReLU, overlapping max pool, a residual block, average pool, dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.conv2, self.bn2 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv3, self.bn3 = nn.Conv2d(4, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.mean, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.bn1(self.conv1(x))))
        y = self.relu(self.bn2(self.conv2(x)))
        y = self.bn3(self.conv3(y))
        y += x
        return self.head(self.mean(self.relu(y)).flatten(1))


def small_resnet(seed: int = 0) -> SmallResNet:
    """With negative biases and shifts: their positive part is zero, so holding it constant or not is the same.

    That makes finite differences valid for *every* parameter, also under z+ and zB.
    """
    model = randomise(SmallResNet(), seed).eval()
    with torch.no_grad():
        for norm in (model.bn1, model.bn2, model.bn3):
            shift = -0.05 - 0.1 * torch.rand(norm.bias.shape, generator=generator(seed))
            norm.bias.copy_(shift + norm.running_mean * norm.weight / (norm.running_var + norm.eps).sqrt())
        model.head.bias.copy_(-model.head.bias.abs() - 0.05)
    return model


@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gamma", "gradient"])
def test_every_rule_and_target(rule: str, box: tuple[float, float] | None) -> None:
    model = small_resnet()
    check_by_differences(model, images(2, 2, 8, 8, low=0.05, high=0.95), *TARGETS.values(), rule=rule, box=box)


@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
def test_signed_images_and_a_box_per_channel(rule: str) -> None:
    low, high = torch.tensor([-1.0, -2.0], dtype=torch.float64), torch.tensor([1.5, 1.0], dtype=torch.float64)
    check_by_differences(small_resnet(1), images(2, 2, 8, 8), Joint(), rule=rule, box=(low, high))
    check_by_differences(small_resnet(1), images(2, 2, 8, 8), Joint(), rule=rule)


@pytest.mark.parametrize("name", [*ACTIVATIONS, "prelu"])
def test_other_activations(name: str) -> None:
    activation = ACTIVATIONS.get(name) or nn.PReLU(4, 0.2)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), Act(activation), nn.Conv2d(4, 3, 3), Act(activation), nn.Flatten(), nn.Linear(12, 3)
    )
    if name == "prelu":
        model = nn.Sequential(nn.Conv2d(2, 4, 3), activation, nn.Flatten(), nn.Linear(64, 3))
    randomise(model, 3)
    check_by_differences(model, 2 * images(2, 2, 6, 6), Logit(CLASSES))


@pytest.mark.parametrize("name", IN_PLACE)
def test_other_activations_in_place(name: str) -> None:
    act = IN_PLACE[name][0]
    model = nn.Sequential(nn.Conv2d(2, 4, 3), Act(act), nn.Conv2d(4, 3, 3), Act(act), nn.Flatten(), nn.Linear(12, 3))
    check_by_differences(randomise(model, 3), 2 * images(2, 2, 6, 6), Logit(CLASSES))


@pytest.mark.parametrize("spelling", ["by hand", "sdpa", "causal sdpa", "module", "module with weights"])
def test_attention(spelling: str) -> None:
    check_by_differences(randomise(Attention(spelling), 7).eval(), images(2, 2, 6, 6), Logit(CLASSES))


@pytest.mark.parametrize("gate", [torch.sigmoid, F.hardsigmoid])
def test_gates(gate: Callable[[Tensor], Tensor]) -> None:
    """A gate gets no relevance, yet the map depends on its value: that part of the gradient must be there."""
    model = randomise(Excited(gate, in_place=False), 5)
    check_by_differences(model, images(2, 2, 6, 6), Eta(CLASSES))
    parameters = dict(model.named_parameters())
    maps = explain(model, images(2, 2, 6, 6), Eta(CLASSES), create_graph=True)
    assert float(gradients(maps, [parameters["up.weight"]])[0].abs().max()) > 1e-9


@pytest.mark.parametrize("rule", ["epsilon", "gradient"])
def test_weights_computed_on_the_fly(rule: str) -> None:
    conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))
    model = nn.Sequential(StandardisedConv(2, 4, 3), nn.ReLU(), conv, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    check_by_differences(randomise(model, 8), images(2, 2, 6, 6), Logit(CLASSES), rule=rule)


# --- every operation, against the oracle ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gamma"])
@pytest.mark.parametrize("case", LINEAR)
def test_convolutions(case: str, rule: str) -> None:
    dims, make = LINEAR[case]
    program = randomise(sandwich(Lin(make()), dims=dims, signed=True), 0)
    check_by_oracle(program, images(2, 2, *SIZE[dims]), rule)


@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
@pytest.mark.parametrize("case", [*MEANS, *POOLS])
def test_pools(case: str, rule: str) -> None:
    dims, make = (MEANS | POOLS)[case]
    step = Lin(make(), weighted=False) if case in MEANS else MaxPool(make())
    check_by_oracle(randomise(sandwich(step, dims=dims, signed=True), 16), images(2, 2, *SIZE[dims]), rule)


@pytest.mark.parametrize("name", OTHER_NORMS)
def test_other_norms(name: str) -> None:
    """Relevance takes the normaliser for a constant; the gradient of the map is exact all the same."""
    program = randomise(sandwich(OTHER_NORMS[name](), signed=True), 2)
    check_by_oracle(program, images(2, 2, 6, 6), "epsilon")
    check_by_differences(program, images(2, 2, 6, 6), Logit(CLASSES))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
def test_sums_and_concatenations(rule: str, in_place: bool) -> None:
    program = Program(
        [
            (Lin(nn.Conv2d(2, 3, 3, padding=1)), (0,)),
            (Relu(), (1,)),
            (Lin(nn.Conv2d(3, 3, 3, padding=1)), (2,)),
            (Add(iadd, in_place=True) if in_place else Add(), (3, 2)),
            (Cat(), (4, 2)),
            (Norm(nn.BatchNorm2d(6)), (5,)),
            (Relu(), (6,)),
            (Move(nn.Flatten()), (7,)),
            (Lin(nn.Linear(150, 3)), (8,)),
        ]
    )
    check_by_oracle(randomise(program.eval(), 4), images(2, 2, 5, 5), rule)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_parameter_in_a_sum_that_is_overwritten(in_place: bool) -> None:
    """In z it is a constant, in the activation it is not, whether or not the sum's memory is used again."""
    relu = Relu(torch.relu_, in_place=True) if in_place else Relu()
    program = chain(Lin(nn.Linear(5, 4)), Relu(), Offset(images(4, seed=9)), relu, Lin(nn.Linear(4, 3)))
    check_by_oracle(randomise(program, 5), images(2, 5), "zplus")


# --- biases and batch norm shifts are constants in z+ and zB --------------------------------------------------------


@pytest.mark.parametrize("box", [None, (-1.0, 1.0)])
@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
@pytest.mark.parametrize("target", ["logit", "joint", "eta", "a callable"])
def test_biases_and_shifts_of_either_sign(target: str, rule: str, box: tuple[float, float] | None) -> None:
    steps: list[Step] = [Lin(nn.Conv2d(2, 3, 3)), Relu(), Lin(nn.Conv2d(3, 4, 3)), Norm(nn.BatchNorm2d(4)), Relu()]
    program = chain(*steps, Move(nn.Flatten()), Lin(nn.Linear(16, 3))).eval()
    randomise(program, 6)
    with torch.no_grad():
        for name, p in program.named_parameters():
            if name.endswith("bias"):
                p.add_(0.2)
    check_by_oracle(program, images(2, 2, 6, 6), rule, TARGETS[target], box)


def scalar_net(w: float, b: float, v: float, c: float) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).double()
    with torch.no_grad():
        for p, value in zip(model.parameters(), (w, b, v, c), strict=True):
            p.fill_(value)
    return model


def test_zplus_biases_done_by_hand() -> None:
    """R = x w y v s/(z1+eps), s = z2/(z2+eps), y = w x + b; constant biases inside z1 = w x + b and z2 = v y + c."""
    w, b, v, c, x = 1.3, 0.4, 0.7, 0.3, 0.9
    y, z1 = w * x + b, w * x + b
    z2 = v * y + c
    s, slope = z2 / (z2 + EPSILON), EPSILON / (z2 + EPSILON) ** 2
    of_y = x * w / (z1 + EPSILON) * v * (s + y * slope * v)
    R = x * w / (z1 + EPSILON) * y * v * s
    wanted = [
        R / w + of_y * x - R / (z1 + EPSILON) * x,  # w: in the share, in y, in z1
        of_y,  # b: in y only
        R / v + x * w / (z1 + EPSILON) * y * v * slope * y,  # v
        0.0,  # c
    ]
    model = scalar_net(w, b, v, c)
    maps = explain(model, torch.tensor([[x]], dtype=torch.float64), 0, rule="zplus", create_graph=True)
    assert float(maps.detach()) == pytest.approx(R, rel=1e-12)
    actual = torch.autograd.grad(maps.sum(), list(model.parameters()), allow_unused=True)
    for a, e in zip(actual, wanted, strict=True):
        assert (0.0 if a is None else float(a)) == pytest.approx(e, rel=1e-10, abs=1e-15)


def test_zb_biases_done_by_hand() -> None:
    """R = (x-l) w y v/(z+eps), y = w x + b, with the bias inside z = w (x-l) + b constant."""
    w, b, v, c, x, low = 1.3, 0.4, 0.7, 0.3, 0.9, -0.5
    y, z = w * x + b, w * (x - low) + b
    R = (x - low) * w * y * v / (z + EPSILON)
    wanted = [R / w + R / y * x - R / (z + EPSILON) * (x - low), R / y, R / v, 0.0]
    model = scalar_net(w, b, v, c)
    maps = explain(model, torch.tensor([[x]], dtype=torch.float64), 0, box=(low, 2.0), create_graph=True)
    assert float(maps.detach()) == pytest.approx(R, rel=1e-12)
    actual = torch.autograd.grad(maps.sum(), list(model.parameters()), allow_unused=True)
    for a, e in zip(actual, wanted, strict=True):
        assert (0.0 if a is None else float(a)) == pytest.approx(e, rel=1e-10, abs=1e-15)


# --- train mode -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("box", [None, (-1.0, 1.0)])
@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gamma"])
@pytest.mark.parametrize("target", ["logit", "joint", "eta of the lowest"])
def test_train_mode(target: str, rule: str, box: tuple[float, float] | None) -> None:
    """Batch statistics are constants of the relevance, but the activations depend on the batch as ever."""
    check_by_oracle(randomise(residual(), 9).train(), images(2, 2, 6, 6), rule, TARGETS[target], box)


@pytest.mark.parametrize("box", [None, (-1.0, 1.0)])
@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
def test_train_mode_written_out(rule: str, box: tuple[float, float] | None) -> None:
    """Conv, batch norm, ReLU, dense layer in plain torch, without the oracle."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(75, 3))
    randomise(model, 10).train()
    conv, norm, head = model[0], model[1], model[4]
    x = images(2, 2, 5, 5)
    a = conv(x)
    mean, var = a.mean((0, 2, 3)), a.var((0, 2, 3), unbiased=False)
    column = (1, -1, 1, 1)
    hat = (a - mean.view(column)) / (var.view(column) + norm.eps).sqrt()
    y = (norm.weight.view(column) * hat + norm.bias.view(column)).relu()
    scale = norm.weight / (var.detach() + norm.eps).sqrt()
    weight = conv.weight * scale.view(-1, 1, 1, 1)
    shift = (conv.bias * scale + norm.bias - mean * scale).detach().clamp(min=0)
    plus, minus = weight.clamp(min=0), weight.clamp(max=0)
    back = partial(F.conv_transpose2d, padding=1)
    if rule == "epsilon":
        G = head.weight[CLASSES].view_as(y)
    else:
        flat = y.flatten(1)
        z = flat @ head.weight.clamp(min=0).T + head.bias.detach().clamp(min=0)
        s = z / (z + EPSILON) * one_hot(CLASSES, 3)
        G = (s @ head.weight.clamp(min=0)).view_as(y)
    if box is not None:
        low, high = (torch.full_like(x, b) for b in box)
        z = F.conv2d(x - low, plus, padding=1) + F.conv2d(x - high, minus, padding=1) + shift.view(column)
        s = y * G / (z + EPSILON)
        wanted = (x - low) * back(s, plus) + (x - high) * back(s, minus)
    elif rule == "epsilon":
        wanted = x * back(G * y / (y + EPSILON), weight)
    else:
        z = F.conv2d(x.clamp(min=0), plus, padding=1) + F.conv2d(x.clamp(max=0), minus, padding=1) + shift.view(column)
        s = y * G / (z + EPSILON)
        wanted = x.clamp(min=0) * back(s, plus) + x.clamp(max=0) * back(s, minus)
    parameters = list(model.parameters())
    maps = explain(model, x, CLASSES, rule=rule, box=box, create_graph=True)
    assert_same(maps, wanted)
    reference = gradients(wanted, parameters)
    size = max(float(g.abs().max()) for g in reference)
    for actual, g in zip(gradients(maps, parameters), reference, strict=True):
        assert float((actual - g).abs().max()) <= 1e-10 * size


def test_train_mode_plain_gradient() -> None:
    """Gradient*Input has no constants: batch norm keeps its true derivative, once and twice."""
    model = randomise(residual(), 11).train()
    x = images(2, 2, 6, 6)
    parameters = list(model.parameters())
    wanted = plain_gradient(model, x, one_hot(CLASSES, 3), create_graph=True)
    maps = explain(model, x, CLASSES, rule="gradient", create_graph=True)
    assert_same(maps, wanted)
    for actual, g in zip(gradients(maps, parameters), gradients(wanted, parameters), strict=True):
        torch.testing.assert_close(actual, g, rtol=1e-9, atol=1e-12)


# --- memory layout --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("rule", ["epsilon", "zplus", "zB"])
def test_large_activations(rule: str, channels_last: bool) -> None:
    """Enough numbers for kernels that work in parts, in either layout: 1x1 convolutions written as matrix products."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1),
        nn.GELU() if rule == "epsilon" else nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip
    randomise(model, 12).eval()
    x = images(2, 3, 190, 190, low=0.0)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    maps = explain(
        model, x, CLASSES, rule="zplus" if rule == "zplus" else "epsilon", box=(0.0, 1.0) if rule == "zB" else None,
        create_graph=True,
    )  # fmt: skip
    conv, norm, _, conv2, act, _, _, head = model
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    weight = conv.weight[:, :, 0, 0] * scale.unsqueeze(1)
    shift = (conv.bias * scale + norm.bias - norm.running_mean * scale).detach().clamp(min=0)
    weight2, bias2 = conv2.weight[:, :, 0, 0], conv2.bias.detach().clamp(min=0)
    pixels = x.flatten(2).mT
    y = norm(conv(x)).relu().flatten(2).mT
    y2 = conv2(norm(conv(x)).relu()).flatten(2).mT
    a2 = act(y2)
    count = 190 * 190
    if rule == "zplus":
        mean, plus = a2.mean(1), head.weight.clamp(min=0)
        z = mean @ plus.T + head.bias.detach().clamp(min=0)
        R = mean * ((z / (z + EPSILON) * one_hot(CLASSES, 3)) @ plus)
        R = a2 / count * (R / (mean + EPSILON)).unsqueeze(1)
        R = y * ((R / (y @ weight2.clamp(min=0).T + bias2 + EPSILON)) @ weight2.clamp(min=0))
        wanted = pixels * ((R / (pixels @ weight.clamp(min=0).T + shift + EPSILON)) @ weight.clamp(min=0))
    else:
        G = (head.weight[CLASSES] / count).unsqueeze(1)
        G = G * a2 / torch.where(y2 >= 0, y2 + EPSILON, y2 - EPSILON)
        if rule == "zB":
            G = (head.weight[CLASSES] / count).unsqueeze(1) * a2 / (a2 + EPSILON)
        G = G @ weight2
        if rule == "epsilon":
            wanted = pixels * ((G * y / (y + EPSILON)) @ weight)
        else:
            plus, minus = weight.clamp(min=0), weight.clamp(max=0)
            s = y * G / (pixels @ plus.T + (pixels - 1) @ minus.T + shift + EPSILON)
            wanted = pixels * (s @ plus) + (pixels - 1) * (s @ minus)
    wanted = wanted.mT.reshape(x.shape)
    assert_same(maps, wanted)
    parameters = list(model.parameters())
    reference = gradients(1e3 * wanted, parameters)
    size = max(float(g.abs().max()) for g in reference)
    for actual, g in zip(gradients(1e3 * maps, parameters), reference, strict=True):
        assert float((actual - g).abs().max()) <= 1e-9 * size


@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gamma", "gradient"])
def test_channels_last_changes_nothing(rule: str) -> None:
    model = small_resnet()
    x = images(2, 2, 8, 8, low=0.0)
    parameters = list(model.parameters())
    wanted = explain(model, x, CLASSES, rule=rule, create_graph=True)
    wanted_gradients = gradients(wanted, parameters)
    model.to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    maps = explain(model, x, CLASSES, rule=rule, create_graph=True)
    assert_same(maps, wanted)
    for actual, g in zip(gradients(maps, parameters), wanted_gradients, strict=True):
        torch.testing.assert_close(actual, g, rtol=1e-9, atol=1e-12)


# --- one graph for the maps and the classification loss -------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
def test_the_rules_are_off_in_the_classification_loss(box: tuple[float, float] | None, training: bool) -> None:
    """The logits of a trace are the model's, and so are their gradients, before and after relevance passes."""
    model = small_resnet().train(training)
    x = images(2, 2, 8, 8, low=0.0)
    parameters = list(model.parameters())
    plain = torch.autograd.grad(F.cross_entropy(model(x), CLASSES), parameters)
    tables = [rules.table("epsilon"), rules.table("zplus")]
    trace = Trace(model, x, tables, box=box)
    with trace.open():
        loss = F.cross_entropy(trace.logits, CLASSES)
        before = torch.autograd.grad(loss, parameters, retain_graph=True)
        dual = [relevance_maps(trace, table, Joint(), create_graph=True)["input"] for table in tables]
        during = torch.autograd.grad(loss, parameters, retain_graph=True)
    total = loss + sum(loss_of(maps) for maps in dual)
    together = torch.autograd.grad(total, parameters)
    alone = [gradients(explain(model, x, Joint(), rule=t.name, box=box, create_graph=True), parameters) for t in tables]
    for i, p in enumerate(plain):
        size = float(p.abs().max()) + 1e-12
        assert float((before[i] - p).abs().max()) <= 1e-12 * max(size, 1e-3)
        assert torch.equal(during[i], before[i])
        torch.testing.assert_close(together[i], p + alone[0][i] + alone[1][i], rtol=1e-9, atol=1e-12)


# --- under no_grad --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gamma", "gradient"])
@pytest.mark.parametrize("target", ["logit", "all logits", "eta of the lowest", "a callable"])
def test_a_caller_without_gradients(target: str, rule: str, box: tuple[float, float] | None) -> None:
    model = small_resnet()
    x = images(2, 2, 8, 8, low=0.0)
    maps = explain(model, x, TARGETS[target], rule=rule, box=box)
    trained = explain(model, x, TARGETS[target], rule=rule, box=box, create_graph=True)
    with torch.no_grad():
        same = explain(model, x, TARGETS[target], rule=rule, box=box)
        graph = explain(model, x, TARGETS[target], rule=rule, box=box, create_graph=True)
        assert not torch.is_grad_enabled()
    assert not maps.requires_grad and not same.requires_grad
    assert torch.equal(maps, same)
    assert torch.equal(maps, graph.detach())
    parameters = list(model.parameters())
    for actual, wanted in zip(gradients(graph, parameters), gradients(trained, parameters), strict=True):
        assert torch.equal(actual, wanted)


def test_frozen_parameters_get_no_gradient_and_change_no_map() -> None:
    model = small_resnet()
    x = images(2, 2, 8, 8, low=0.0)
    maps = explain(model, x, CLASSES)
    model.requires_grad_(False)
    assert torch.equal(explain(model, x, CLASSES), maps)
    model.head.weight.requires_grad_()
    graph = explain(model, x, CLASSES, create_graph=True)
    assert torch.equal(graph.detach(), maps)
    loss_of(graph).backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["head.weight"]
