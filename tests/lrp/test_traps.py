"""What real networks do that an engine may stumble over: each trap against the same network without it."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fasterisnet import explain
from fasterisnet.errors import FasterISNetError, RuleError, RuleWarning
from fasterisnet.lrp.targets import AllLogits, Eta, Joint
from lrp.helpers import Net, parameter_gradients, pictures, randomised
from lrp.small_nets import BOX, RULES, assert_derivative, residual

EPSILON = 0.01


def assert_explained_alike(
    trap: nn.Module, plain: nn.Module, images: Tensor, *, rule: str, tolerance: float = 1e-10, **options: Any
) -> Tensor:
    """Same map, trainable or not, and same gradients of a loss on it, for two networks with the same parameters."""
    results = []
    for model in (trap, plain):
        untrained = explain(model, images, 1, rule=rule, **options)
        heatmap = explain(model, images, 1, rule=rule, create_graph=True, strict=True, **options)
        torch.testing.assert_close(untrained, heatmap.detach())
        results.append((heatmap.detach(), parameter_gradients(model, heatmap.square().sum())))
    (first, first_grads), (second, second_grads) = results
    assert second.abs().max() > 0 and second.isfinite().all()
    torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)
    scale = max(float(grad.abs().max()) for grad in second_grads.values())
    for name in first_grads.keys() | second_grads.keys():
        torch.testing.assert_close(first_grads[name], second_grads[name], rtol=tolerance, atol=tolerance * scale)
    return first


def rectified(x: Tensor, epsilon: float = EPSILON) -> Tensor:
    """ReLU whose derivative is the epsilon rule `y/(y + eps)`."""
    y = x.detach().clamp(min=0)
    return y + y / (y + epsilon) * (x - x.detach())


def gradient_times_input(function: Callable[[Tensor], Tensor], images: Tensor, c: int = 1) -> Tensor:
    """The map by ordinary autograd, the rules being written into `function`."""
    x = images.clone().requires_grad_()
    return (x * torch.autograd.grad(function(x)[:, c].sum(), x)[0]).detach()


# --- in-place activations ------------------------------------------------------------------------------------------

RELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "module": nn.ReLU(inplace=True),
    "F.relu(inplace)": lambda t: F.relu(t, inplace=True),
    "F.relu_": F.relu_,
    "torch.relu_": torch.relu_,
    "Tensor.relu_": lambda t: t.relu_(),
    "clamp_(min=0)": lambda t: t.clamp_(min=0),
    "clamp_min_": lambda t: t.clamp_min_(0),
    "F.threshold": lambda t: F.threshold(t, 0, 0, inplace=True),
    "torch.relu": torch.relu,
    "clamp": lambda t: t.clamp(0),
    "maximum": lambda t: torch.maximum(t, torch.zeros((), dtype=t.dtype)),
}


def behind(place: str, act: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Tensor]:
    """A network with an activation behind a convolution, batch norm, linear operation, sum or view."""
    images = pictures(2, 3, 4, 4)
    parts: dict[str, nn.Module] = {"conv": nn.Conv2d(3, 5, 3, padding=1), "fc": nn.Linear(80, 3)}
    functions: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "conv": lambda m, x: m.fc(act(m.conv(x)).flatten(1)),
        "bn": lambda m, x: m.fc(act(m.bn(m.conv(x))).flatten(1)),
        "first bn": lambda m, x: m.fc(act(m.conv(act(m.bn(x)))).flatten(1)),
        "linear": lambda m, x: m.fc(act(m.hidden(x.flatten(1)))),
        "linear 3-D": lambda m, x: m.fc(act(m.tokens(x.flatten(2))).flatten(1)),
        "linear 4-D": lambda m, x: m.fc(act(m.deep(x)).flatten(1)),
        "matmul": lambda m, x: m.fc(act(x.flatten(1) @ m.hidden.weight.T)),
        "add": lambda m, x: m.fc(act(m.conv(x) + m.other(x)).flatten(1)),
        "iadd": lambda m, x: m.fc(act(m.conv(x).add_(m.other(x))).flatten(1)),
        "view": lambda m, x: m.fc(act(m.conv(x).view(2, -1))),
        "transpose": lambda m, x: m.fc(act(m.conv(x).transpose(1, 2)).flatten(1)),
        "cat": lambda m, x: m.fc(act(torch.cat([m.conv(x)[:, :2], m.other(x)[:, :3]], 1)).flatten(1)),
        "pool": lambda m, x: m.fc(F.pad(act(F.avg_pool2d(m.conv(x), 3, 1)), (1, 1, 1, 1)).flatten(1)),
        "layer norm": lambda m, x: m.fc(act(m.norm(m.conv(x))).flatten(1)),
        "product": lambda m, x: m.fc(act(m.conv(x) * m.other(x)).flatten(1)),
    }
    extra: dict[str, dict[str, Callable[[], nn.Module]]] = {
        "bn": {"bn": lambda: nn.BatchNorm2d(5)},
        "first bn": {"bn": lambda: nn.BatchNorm2d(3)},
        "linear": {"hidden": lambda: nn.Linear(48, 80)},
        "matmul": {"hidden": lambda: nn.Linear(48, 80, bias=False)},
        "linear 3-D": {"tokens": lambda: nn.Linear(16, 16), "fc": lambda: nn.Linear(48, 3)},
        "linear 4-D": {"deep": lambda: nn.Linear(4, 4), "fc": lambda: nn.Linear(48, 3)},
        "layer norm": {"norm": lambda: nn.LayerNorm([5, 4, 4])},
    }
    for name in ("add", "iadd", "cat", "product"):
        extra[name] = {"other": lambda: nn.Conv2d(3, 5, 1)}
    parts |= {name: build() for name, build in extra.get(place, {}).items()}
    return randomised(Net(functions[place], **parts)).eval(), images


PLACES = [
    "conv", "bn", "first bn", "linear", "linear 3-D", "linear 4-D", "matmul", "add", "iadd", "view", "transpose", "cat",
    "pool", "layer norm", "product",
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("place", PLACES)
def test_in_place_relu(place: str, rule: str) -> None:
    trap, images = behind(place, lambda t: t.relu_())
    plain, _ = behind(place, lambda t: t.relu())
    assert_explained_alike(trap, plain, images, rule=rule)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("place", ["conv", "bn", "linear", "linear 3-D", "view"])
@pytest.mark.parametrize("rule", RULES)
def test_in_place_relu_behind_the_first_layer_in_a_box(rule: str, place: str, training: bool) -> None:
    trap, images = behind(place, lambda t: t.relu_())
    plain, _ = behind(place, lambda t: t.relu())
    assert_explained_alike(trap.train(training), plain.train(training), images, rule=rule, box=BOX)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spelling", RELUS)
def test_every_spelling_of_relu(spelling: str, rule: str) -> None:
    for place in ("bn", "add", "linear 3-D"):
        trap, images = behind(place, RELUS[spelling])
        plain, _ = behind(place, nn.ReLU())
        assert_explained_alike(trap, plain, images, rule=rule)


@pytest.mark.parametrize("place", ["conv", "linear", "linear 3-D", "add", "view", "transpose", "cat"])
def test_in_place_relu_follows_the_epsilon_rule(place: str) -> None:
    """Against autograd with the rule written into the activation."""
    trap, images = behind(place, lambda t: t.relu_())
    surrogate, _ = behind(place, rectified)
    torch.testing.assert_close(
        explain(trap, images, 1), gradient_times_input(surrogate, images), rtol=1e-10, atol=1e-12
    )


ACTIVATIONS: dict[str, Callable[[bool], Callable[[Tensor], Tensor]]] = {
    "silu": lambda p: lambda t: F.silu(t, inplace=p),
    "mish": lambda p: lambda t: F.mish(t, inplace=p),
    "hardswish": lambda p: lambda t: F.hardswish(t, inplace=p),
    "hardsigmoid": lambda p: lambda t: F.hardsigmoid(t, inplace=p),
    "relu6": lambda p: lambda t: F.relu6(t, inplace=p),
    "hardtanh": lambda p: nn.Hardtanh(inplace=p),
    "leaky_relu": lambda p: lambda t: F.leaky_relu(t, 0.1, inplace=p),
    "elu": lambda p: lambda t: F.elu(t, inplace=p),
    "celu": lambda p: lambda t: F.celu(t, inplace=p),
    "selu": lambda p: lambda t: F.selu(t, inplace=p),
    "tanh": lambda p: lambda t: t.tanh_() if p else t.tanh(),
    "sigmoid": lambda p: lambda t: t.sigmoid_() if p else t.sigmoid(),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_in_place_activations(name: str, rule: str) -> None:
    for place in ("conv", "bn", "add", "view", "linear 3-D"):
        trap, images = behind(place, ACTIVATIONS[name](True))
        plain, _ = behind(place, ACTIVATIONS[name](False))
        assert_explained_alike(trap, plain, images, rule=rule)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_in_place_activations_follow_the_epsilon_rule(name: str) -> None:
    def ruled(t: Tensor) -> Tensor:
        x = t.detach()
        y = ACTIVATIONS[name](False)(x)
        return y + y / (x + EPSILON * torch.where(x < 0, -1.0, 1.0).double()) * (t - x)

    trap, images = behind("bn", ACTIVATIONS[name](True))
    surrogate, _ = behind("bn", ruled)
    torch.testing.assert_close(
        explain(trap, images, 1), gradient_times_input(surrogate, images), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("rule", RULES)
def test_in_place_relu_on_a_view_changes_its_base(rule: str) -> None:
    """`y.view(...).relu_()` for its effect on y alone."""

    def trapped(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        y.view(2, -1).relu_()
        return m.fc(y.flatten(1))

    def plain(m: Any, x: Tensor) -> Tensor:
        return m.fc(m.conv(x).relu().flatten(1))

    trap, images = behind("conv", nn.Identity())
    other = copy.deepcopy(trap)
    trap.function, other.function = trapped, plain
    assert torch.equal(trap(images), other(images))
    assert_explained_alike(trap, other, images, rule=rule)


@pytest.mark.parametrize("rule", RULES)
def test_in_place_on_an_activation_another_branch_reads(rule: str) -> None:
    """The pre-activation ResNet: the ReLU overwrites what the shortcut adds afterwards."""

    def trapped(m: Any, x: Tensor) -> Tensor:
        x = m.conv(x)
        out = m.conv2(F.relu(x, inplace=True))
        out += x
        return m.fc(F.relu(out, inplace=True).flatten(1))

    def plain(m: Any, x: Tensor) -> Tensor:
        x = torch.relu(m.conv(x))
        return m.fc(torch.relu(m.conv2(x) + x).flatten(1))

    nets = [
        randomised(Net(f, conv=nn.Conv2d(3, 5, 3, padding=1), conv2=nn.Conv2d(5, 5, 1), fc=nn.Linear(80, 3)))
        for f in (trapped, plain)
    ]
    assert_explained_alike(*nets, pictures(2, 3, 4, 4), rule=rule)


def zeroed(t: Tensor) -> Tensor:
    t[:, 0] = 0
    return t


def doubled_slice(t: Tensor) -> Tensor:
    t[:, 1:] *= 2
    return t


OVERWRITES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "scale": (lambda t: t.mul_(2.0), lambda t: t * 2.0),
    "shift": (lambda t: t.add_(0.3), lambda t: t + 0.3),
    "divide": (lambda t: t.div_(3.0), lambda t: t / 3.0),
    "subtract": (lambda t: t.sub_(0.1), lambda t: t - 0.1),
    "negate": (lambda t: t.neg_(), lambda t: -t),
    "mask": (lambda t: t.masked_fill_(t.detach() > 1, 0), lambda t: t.masked_fill(t.detach() > 1, 0)),
    "zero a channel": (zeroed, lambda t: torch.cat([torch.zeros_like(t[:, :1]), t[:, 1:]], 1)),
    "double a slice": (doubled_slice, lambda t: torch.cat([t[:, :1], t[:, 1:] * 2], 1)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("step", OVERWRITES)
def test_values_overwritten_between_layer_and_relu(step: str, rule: str) -> None:
    """What stands between a layer and its ReLU, in place or not, keeps the two apart."""
    in_place, plain = OVERWRITES[step]
    for place in ("conv", "bn", "add", "linear 3-D"):
        trap, images = behind(place, lambda t: in_place(t).relu_())
        other, _ = behind(place, lambda t: plain(t).relu())
        assert torch.equal(trap(images), other(images))
        assert_explained_alike(trap, other, images, rule=rule)


def shared_outputs(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    z = m.bn(y)
    return m.fc((torch.relu(z) + torch.relu(y) + z.tanh()).flatten(1))


def own_outputs(m: Any, x: Tensor) -> Tensor:
    return m.fc((torch.relu(m.bn(m.conv(x))) + torch.relu(m.conv(x)) + m.bn(m.conv(x)).tanh()).flatten(1))


@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("rule", RULES)
def test_outputs_that_several_operations_read(rule: str, box: Any) -> None:
    """A layer fused with one of its readers still serves the others, as if each had a layer of its own."""
    nets = [
        randomised(Net(f, conv=nn.Conv2d(3, 5, 3, padding=1), bn=nn.BatchNorm2d(5), fc=nn.Linear(80, 3))).eval()
        for f in (shared_outputs, own_outputs)
    ]
    assert_explained_alike(*nets, pictures(2, 3, 4, 4), rule=rule, box=box)


# --- sums and products in place ------------------------------------------------------------------------------------

SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch.add": torch.add,
    "Tensor.add": lambda a, b: a.add(b),
    "Tensor.add_": lambda a, b: a.add_(b),
    "alpha": lambda a, b: a.add(0.5 * b, alpha=2.0),
    "reversed": lambda a, b: b + a,
    "minus minus": lambda a, b: a - (-b),
    "sub_": lambda a, b: a.sub_(-b),
}


def in_place_sum(a: Tensor, b: Tensor) -> Tensor:
    a += b
    return a


def residual_with(add: Callable[[Tensor, Tensor], Tensor], body: str, training: bool) -> nn.Module:
    """One residual block whose branch ends in a convolution, a batch norm, a pooling or a SiLU."""

    def forward(m: Any, x: Tensor) -> Tensor:
        identity = torch.relu(m.stem(x))
        out = m.conv(identity)
        if body == "bn":
            out = m.bn(out)
        elif body == "pool":
            out = F.avg_pool2d(out, 3, 1, 1)
        elif body == "silu":
            out = F.silu(out)
        return m.fc(F.relu(add(out, identity), inplace=True).flatten(1))

    parts = {"stem": nn.Conv2d(3, 5, 3, padding=1), "conv": nn.Conv2d(5, 5, 3, padding=1), "fc": nn.Linear(80, 3)}
    return randomised(Net(forward, **parts, bn=nn.BatchNorm2d(5))).train(training)


@pytest.mark.parametrize("body", ["conv", "bn", "pool", "silu"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spelling", ["+=", *SUMS])
def test_every_spelling_of_a_sum(spelling: str, rule: str, body: str) -> None:
    add = in_place_sum if spelling == "+=" else SUMS[spelling]
    trap, plain = (residual_with(f, body, training=body == "bn") for f in (add, lambda a, b: a + b))
    assert_explained_alike(trap, plain, pictures(2, 3, 4, 4), rule=rule)


MORE_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "stack, sum": lambda a, b: torch.stack([a, b]).sum(0),
    "twice the mean": lambda a, b: 2 * torch.stack([a, b]).mean(0),
    "reversed difference": lambda a, b: torch.rsub(-a, b),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spelling", MORE_SUMS)
def test_sums_that_do_not_look_like_one(spelling: str, rule: str) -> None:
    """The stabiliser aside, which is added to another multiple of the sum."""
    nets = [residual_with(f, "bn", training=False) for f in (MORE_SUMS[spelling], torch.add)]
    assert_explained_alike(*nets, pictures(2, 3, 4, 4), rule=rule, epsilon=1e-9, tolerance=1e-6)


CONSTANTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "1 - x": (lambda x: 1 - x, lambda x: (-x) + 1),
    "rsub": (lambda x: torch.rsub(x, 1), lambda x: (-x) + 1),
    "radd": (lambda x: 0.5 + x, lambda x: x + 0.5),
    "tensor + x": (lambda x: torch.full((4, 1), 0.5).double() + x, lambda x: x + torch.full((4, 1), 0.5).double()),
    "rmul": (lambda x: 3 * x, lambda x: x * 3),
    "x / c": (lambda x: x / 4, lambda x: x * 0.25),
    "tensor * x": (lambda x: torch.full((4, 1), -0.5).double() * x, lambda x: x * -0.5),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spelling", CONSTANTS)
def test_constants_on_either_side(spelling: str, rule: str) -> None:
    for place in ("conv", "bn"):
        (trap, images), (plain, _) = (behind(place, lambda t, f=f: torch.relu(f(t))) for f in CONSTANTS[spelling])
        assert_explained_alike(trap, plain, images, rule=rule)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch.mul": torch.mul,
    "Tensor.mul_": lambda a, b: a.mul_(b),
    "reversed": lambda a, b: b * a,
    "einsum": lambda a, b: torch.einsum("bchw,bchw->bchw", a, b),
    "addcmul": lambda a, b: torch.addcmul(torch.zeros((), dtype=a.dtype), a, b),
    "matmul": lambda a, b: (a.unsqueeze(-1).unsqueeze(-1) @ b.unsqueeze(-1).unsqueeze(-1))[..., 0, 0],
}


def product_net(product: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    parts = {"conv": nn.Conv2d(3, 5, 3, padding=1), "other": nn.Conv2d(3, 5, 1), "fc": nn.Linear(80, 3)}
    return randomised(Net(lambda m, x: m.fc(product(m.conv(x), m.other(x)).flatten(1)), **parts))


@pytest.mark.parametrize("rule", ["epsilon", "gradient"])
@pytest.mark.parametrize("spelling", PRODUCTS)
def test_every_spelling_of_a_product(spelling: str, rule: str) -> None:
    """Half of the relevance to each factor, or a warning that there is no rule; never twice as much in silence."""
    images = pictures(2, 3, 4, 4)
    trap, plain = product_net(PRODUCTS[spelling]), product_net(lambda a, b: a * b)
    heatmaps: list[Tensor] = []
    messages = warned(lambda: heatmaps.append(explain(trap, images, 1, rule=rule)))
    if messages:
        assert spelling == "addcmul" and "'addcmul'" in messages[0]
    else:
        torch.testing.assert_close(heatmaps[0], explain(plain, images, 1, rule=rule), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spelling", [torch.square, lambda t: t**2, lambda t: t.pow(2), lambda t: t.square_()])
def test_a_square_is_a_product(spelling: Callable[[Tensor], Tensor]) -> None:
    """Its relevance is that of the product: all of it, once."""
    (trap, images), (plain, _) = behind("bn", spelling), behind("bn", lambda t: t * t)
    for rule in RULES:
        assert_explained_alike(trap, plain, images, rule=rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("weights", ["bi,oi->bo", "oi,bi->bo"])
def test_einsum_with_a_weight_is_linear(weights: str, rule: str) -> None:
    def by_einsum(m: Any, x: Tensor) -> Tensor:
        pair = (x, m.hidden.weight) if weights.startswith("b") else (m.hidden.weight, x)
        return m.fc(torch.relu(torch.einsum(weights, *pair)))

    def by_linear(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.relu(m.hidden(x)))

    nets = [randomised(Net(f, hidden=nn.Linear(5, 6, bias=False), fc=nn.Linear(6, 3))) for f in (by_einsum, by_linear)]
    assert_explained_alike(*nets, pictures(2, 5), rule=rule)


MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda t: t.mean((2, 3)),
    "mean twice": lambda t: t.mean(3).mean(2),
    "adaptive": lambda t: F.adaptive_avg_pool2d(t, 1).flatten(1),
    "sum": lambda t: t.sum((2, 3)) / 16,
    "flat": lambda t: t.flatten(2).mean(-1),
}


# In two steps it is another network to z+, which cuts off negative values in between.
POOLINGS = [
    (s, rule, signed)
    for s in MEANS
    for rule in RULES
    for signed in (False, True)
    if not (s == "mean twice" and rule == "zplus" and signed)
]


@pytest.mark.parametrize(("spelling", "rule", "signed"), POOLINGS)
def test_every_spelling_of_global_pooling(spelling: str, rule: str, signed: bool) -> None:
    """The stabiliser aside, as above."""

    def net(pool: Callable[[Tensor], Tensor]) -> nn.Module:
        def forward(m: Any, x: Tensor) -> Tensor:
            x = m.conv(x)
            return m.fc(pool(x if signed else torch.relu(x)))

        return randomised(Net(forward, conv=nn.Conv2d(3, 5, 3, padding=1), fc=nn.Linear(5, 3)))

    trap, plain = net(MEANS[spelling]), net(lambda t: F.avg_pool2d(t, 4).flatten(1))
    assert_explained_alike(trap, plain, pictures(2, 3, 4, 4), rule=rule, epsilon=1e-9, tolerance=1e-6)


# --- normalisation and activations written out ---------------------------------------------------------------------


def layer_norm_by_hand(x: Tensor) -> Tensor:
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5)


def layer_norm_by_rsqrt(x: Tensor) -> Tensor:
    return (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(1, correction=0, keepdim=True) + 1e-5)


def rms_norm_by_hand(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)


WRITTEN_OUT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "layer norm": (layer_norm_by_hand, lambda t: F.layer_norm(t, [80])),
    "layer norm, rsqrt": (layer_norm_by_rsqrt, lambda t: F.layer_norm(t, [80])),
    "RMS norm": (rms_norm_by_hand, lambda t: F.rms_norm(t, [80], eps=1e-5)),
    "normalize": (lambda t: t / t.norm(dim=1, keepdim=True), lambda t: F.normalize(t, dim=1)),
    "swish": (lambda t: t * t.sigmoid(), F.silu),
    "GLU": (lambda t: (t[:, :40] * t[:, 40:].sigmoid()).repeat(1, 2), lambda t: F.glu(t, 1).repeat(1, 2)),
    "softmax": (lambda t: t * F.softmax(t, 1), lambda t: t * nn.Softmax(1)(t)),
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_written_out(name: str) -> None:
    """Epsilon treats what people write out by hand like the function torch has for it."""
    nets = [
        randomised(Net(lambda m, x, f=f: m.fc(f(m.hidden(x))), hidden=nn.Linear(5, 80), fc=nn.Linear(80, 3)))
        for f in WRITTEN_OUT[name]
    ]
    assert_explained_alike(*nets, pictures(2, 5), rule="epsilon", epsilon=1e-9, tolerance=1e-6)


def test_in_place_sum_under_zplus_by_hand() -> None:
    """`R_1 = a1+/(a1+ + a2+ + eps) R_y` where `out += identity` overwrites a1, on a network of plain numbers."""

    def forward(m: Any, x: Tensor) -> Tensor:
        out = m.branch(x)
        out += x
        return m.fc(torch.relu(out))

    model = Net(forward, branch=nn.Linear(2, 2, bias=False), fc=nn.Linear(2, 1, bias=False)).double()
    with torch.no_grad():
        model.branch.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 0.5]]))
        model.fc.weight.copy_(torch.tensor([[1.0, 3.0]]))
    heatmap = explain(model, torch.tensor([[1.0, 4.0]], dtype=torch.float64), 0, rule="zplus")
    branch, identity = (2.0, 2.0), (1.0, 4.0)
    z = sum(w * (a + b) for w, a, b in zip((1, 3), branch, identity, strict=True))
    expected = []
    for w, weight, a, b in zip((1, 3), (2.0, 0.5), branch, identity, strict=True):
        R = w * (a + b) * z / (z + EPSILON)
        R_branch, R_identity = (part / (a + b + EPSILON) * R for part in (a, b))
        expected.append(R_identity + weight * b * R_branch / (a + EPSILON))
    torch.testing.assert_close(heatmap, torch.tensor([expected], dtype=torch.float64), rtol=1e-12, atol=0)


def gate_by_operator(x: Tensor, g: Tensor) -> Tensor:
    x *= g
    return x


GATINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "*=": gate_by_operator,
    "mul_": lambda x, g: x.mul_(g),
    "g * x": lambda x, g: g * x,
    "torch.mul": torch.mul,
}


def squeeze_excite(apply: Callable[[Tensor, Tensor], Tensor], *, surrogate: bool = False) -> nn.Module:
    relu = rectified if surrogate else torch.relu

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.conv(x)
        gate = torch.sigmoid(m.up(relu(m.down(x.mean((2, 3), keepdim=True)))))
        return m.fc(apply(x, gate.detach() if surrogate else gate).flatten(1))

    parts = {"down": nn.Conv2d(5, 2, 1), "up": nn.Conv2d(2, 5, 1)}
    return randomised(Net(forward, conv=nn.Conv2d(3, 5, 3, padding=1), fc=nn.Linear(80, 3), **parts))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spelling", GATINGS)
def test_gate_with_in_place_product(spelling: str, rule: str) -> None:
    trap, plain = squeeze_excite(GATINGS[spelling]), squeeze_excite(lambda x, g: x * g)
    assert_explained_alike(trap, plain, pictures(2, 3, 4, 4), rule=rule)


def test_a_gate_is_a_constant() -> None:
    images = pictures(2, 3, 4, 4)
    expected = gradient_times_input(squeeze_excite(lambda x, g: x * g, surrogate=True), images)
    torch.testing.assert_close(explain(squeeze_excite(gate_by_operator), images, 1), expected, rtol=1e-10, atol=1e-12)


def test_glu_is_a_signal_and_a_gate() -> None:
    model = randomised(Net(lambda m, x: m.fc(F.glu(m.hidden(x), 1)), hidden=nn.Linear(5, 8), fc=nn.Linear(4, 3)))
    images = pictures(2, 5)

    def surrogate(x: Tensor) -> Tensor:
        signal, gate = model.hidden(x).chunk(2, 1)
        return model.fc(signal * gate.sigmoid().detach())

    expected = gradient_times_input(surrogate, images)
    torch.testing.assert_close(explain(model, images, 1, strict=True), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        explain(model, images, 1, rule="gradient"), gradient_times_input(model, images), rtol=1e-10, atol=1e-12
    )


def test_normalize_divides_by_a_constant() -> None:
    model = randomised(
        Net(lambda m, x: m.fc(F.normalize(m.hidden(x), dim=1)), hidden=nn.Linear(5, 8), fc=nn.Linear(8, 3))
    )
    images = pictures(2, 5)

    def surrogate(x: Tensor) -> Tensor:
        hidden = model.hidden(x)
        return model.fc(hidden / hidden.detach().norm(dim=1, keepdim=True))

    expected = gradient_times_input(surrogate, images)
    torch.testing.assert_close(explain(model, images, 1, strict=True), expected, rtol=1e-10, atol=1e-12)


# --- batch norm, weights computed on the fly, shared modules -------------------------------------------------------


def with_norm(norm: nn.Module) -> nn.Module:
    net = Net(
        lambda m, x: m.fc(F.relu(m.bn(m.conv(x)), inplace=True).flatten(1)),
        conv=nn.Conv2d(3, 5, 3, padding=1), fc=nn.Linear(80, 3),
    )  # fmt: skip
    net = randomised(net)
    net.add_module("bn", norm.double())
    return net


@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("rule", RULES)
def test_batch_norm_without_affine_parameters(rule: str, training: bool, box: Any) -> None:
    """The same as one whose gamma is one and beta zero."""
    nets = []
    for affine in (False, True):
        net = with_norm(nn.BatchNorm2d(5, affine=affine))
        net.bn.running_mean.copy_(pictures(5))
        net.bn.running_var.copy_(pictures(5).abs() + 0.5)
        nets.append(net.train(training))
    images = pictures(3, 3, 4, 4)
    bare, affine = (explain(net, images, 1, rule=rule, box=box, create_graph=True) for net in nets)
    torch.testing.assert_close(bare, affine, rtol=1e-10, atol=1e-12)
    grads = [parameter_gradients(net, m.square().sum()) for net, m in zip(nets, (bare, affine), strict=True)]
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gamma"])
def test_batch_norm_without_running_statistics(rule: str, affine: bool, box: Any) -> None:
    """Takes the batch's, in eval mode too; for a map that is the same as running ones of these values."""
    images = pictures(3, 3, 4, 4)
    trap = with_norm(nn.BatchNorm2d(5, affine=affine, track_running_stats=False)).eval()
    plain = with_norm(nn.BatchNorm2d(5, affine=affine)).eval()
    if affine:
        for net in (trap, plain):
            with torch.no_grad():
                net.bn.weight.copy_(pictures(5, seed=7))
                net.bn.bias.copy_(pictures(5, seed=8))
    hidden = plain.conv(images).detach()
    plain.bn.running_mean.copy_(hidden.mean((0, 2, 3)))
    plain.bn.running_var.copy_(hidden.var((0, 2, 3), correction=0))
    first, second = (explain(net, images, 1, rule=rule, box=box) for net in (trap, plain))
    torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-11)


def test_batch_norm_in_train_mode_has_constant_statistics() -> None:
    """Against autograd with detached biased statistics."""
    net = with_norm(nn.BatchNorm2d(5)).train()
    with torch.no_grad():
        net.bn.weight.copy_(pictures(5, seed=7))
        net.bn.bias.copy_(pictures(5, seed=8))
    images = pictures(3, 3, 4, 4)

    def surrogate(x: Tensor) -> Tensor:
        x = net.conv(x)
        mean, var = x.detach().mean((0, 2, 3), keepdim=True), x.detach().var((0, 2, 3), correction=0, keepdim=True)
        y = (x - mean) / (var + net.bn.eps).sqrt() * net.bn.weight.view(-1, 1, 1) + net.bn.bias.view(-1, 1, 1)
        return net.fc(rectified(y).flatten(1))

    torch.testing.assert_close(explain(net, images, 1), gradient_times_input(surrogate, images), rtol=1e-9, atol=1e-11)


def standardised(weight: Tensor) -> Tensor:
    dims = (1, 2, 3)
    return (weight - weight.mean(dims, keepdim=True)) / (weight.std(dims, keepdim=True) + 1e-5)


class StandardisedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, standardised(self.weight), self.bias, self.stride, self.padding)


@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("rule", RULES)
def test_weight_standardised_convolution(rule: str, box: Any) -> None:
    """Same map as with the weight computed beforehand; its gradient reaches the raw parameter by the chain rule."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.fc(F.relu(m.conv(x), inplace=True).flatten(1))

    nets = [
        randomised(Net(forward, conv=kind(3, 5, 3, padding=1), fc=nn.Linear(80, 3)))
        for kind in (StandardisedConv, nn.Conv2d)
    ]
    with torch.no_grad():
        nets[1].conv.weight.copy_(standardised(nets[0].conv.weight))
    images = pictures(2, 3, 4, 4)
    maps = [explain(net, images, 1, rule=rule, box=box, create_graph=True, strict=True) for net in nets]
    torch.testing.assert_close(*maps, rtol=1e-10, atol=1e-12)
    raw, direct = (parameter_gradients(net, m.square().sum()) for net, m in zip(nets, maps, strict=True))
    weight = nets[0].conv.weight
    chained = torch.autograd.grad(standardised(weight), weight, direct["conv.weight"])[0]
    assert chained.abs().max() > 0
    torch.testing.assert_close(raw["conv.weight"], chained, rtol=1e-9, atol=1e-9 * float(chained.abs().max()))
    torch.testing.assert_close(raw["fc.weight"], direct["fc.weight"], rtol=1e-9, atol=1e-9)


def parametrised(kind: Callable[..., nn.Module]) -> nn.Module:
    net = randomised(
        Net(
            lambda m, x: m.fc(F.relu(m.conv(x), inplace=True).flatten(1)),
            conv=nn.Conv2d(3, 5, 3, padding=1),
            fc=nn.Linear(80, 3),
        )
    )
    torch.manual_seed(2)
    kind(net.conv)
    kind(net.fc)
    return net.train()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "kind", [parametrizations.weight_norm, parametrizations.spectral_norm], ids=["weight", "spectral"]
)
def test_parametrised_weights_in_train_mode(kind: Callable[..., nn.Module], rule: str) -> None:
    trap, images = parametrised(kind), pictures(2, 3, 4, 4)
    before = copy.deepcopy(trap.state_dict())
    plain = Net(trap.function, conv=nn.Conv2d(3, 5, 3, padding=1), fc=nn.Linear(80, 3)).double()
    used = copy.deepcopy(trap)  # spectral norm moves on each time its weight is asked for
    with torch.no_grad():
        for name in ("conv", "fc"):
            source, copied = used.get_submodule(name), plain.get_submodule(name)
            copied.weight.copy_(source.weight)
            copied.bias.copy_(source.bias)
    heatmap = explain(trap, images, 1, rule=rule, strict=True)
    torch.testing.assert_close(heatmap, explain(plain, images, 1, rule=rule), rtol=1e-10, atol=1e-12)
    for name, value in trap.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    "kind", [parametrizations.weight_norm, parametrizations.spectral_norm], ids=["weight", "spectral"]
)
def test_gradients_reach_parametrised_weights(kind: Callable[..., nn.Module]) -> None:
    """By finite differences, in eval mode, where spectral norm stands still."""
    model, images = parametrised(kind).eval(), pictures(2, 3, 4, 4)

    def loss(create_graph: bool = False) -> Tensor:
        return explain(model, images, 1, create_graph=create_graph).square().sum()

    grads = parameter_gradients(model, loss(True))
    originals = [name for name in grads if "original" in name]
    assert len(originals) >= 2
    for name in originals:
        assert grads[name].abs().max() > 0
        assert_derivative(loss, model.get_parameter(name).data, grads[name])


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_reused_modules(rule: str, create_graph: bool) -> None:
    """One convolution, batch norm and ReLU used twice: the same as copies of them, whose gradients add up."""

    def shared(m: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            x = m.relu(m.bn(m.conv(x)))
        return m.fc(x.flatten(1))

    def apart(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.relu(m.bn2(m.conv2(torch.relu(m.bn(m.conv(x)))))).flatten(1))

    parts = {"conv": nn.Conv2d(3, 3, 3, padding=1), "bn": nn.BatchNorm2d(3), "fc": nn.Linear(48, 3)}
    one = randomised(Net(shared, **parts, relu=nn.ReLU(inplace=True))).eval()
    two = Net(apart, **copy.deepcopy(parts), conv2=copy.deepcopy(one.conv), bn2=copy.deepcopy(one.bn)).eval()
    images = pictures(2, 3, 4, 4)
    maps = [explain(net, images, 1, rule=rule, create_graph=create_graph) for net in (one, two)]
    torch.testing.assert_close(*maps, rtol=1e-10, atol=1e-12)
    if create_graph:
        once, twice = (parameter_gradients(net, m.square().sum()) for net, m in zip((one, two), maps, strict=True))
        for name in ("conv.weight", "bn.weight"):
            expected = twice[name] + twice[name.replace(".", "2.")]
            torch.testing.assert_close(once[name], expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


# --- zeros ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", [None, 1, Joint(), Eta(0), AllLogits()], ids=["highest", "logit", "joint", "eta", "all"]
)
@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("rule", RULES)
def test_zero_initialised_head(rule: str, box: Any, target: Any) -> None:
    """The map is zero, not NaN, and its loss has finite gradients."""
    model, images = residual(), pictures()
    nn.init.zeros_(model.fc.weight)
    nn.init.zeros_(model.fc.bias)
    heatmap = explain(model, images, target, rule=rule, box=box, create_graph=True)
    assert torch.equal(heatmap, torch.zeros_like(heatmap))
    grads = parameter_gradients(model, (heatmap + 1).square().sum())
    assert all(grad.isfinite().all() for grad in grads.values())
    if rule != "zplus":
        assert grads["fc.weight"].abs().max() > 0


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("rule", RULES)
def test_zero_initialised_residual_branch_and_black_image(rule: str, training: bool) -> None:
    """Batch norms whose gamma is zero, a black image, dead units: finite maps and gradients."""
    model, images = residual(training=training), pictures()
    nn.init.zeros_(model.bn2.weight)
    nn.init.zeros_(model.bn2.bias)
    with torch.no_grad():
        model.bn1.bias[0] = -100.0
    images[1] = 0
    torch.manual_seed(0)
    heatmap = explain(model, images, rule=rule, create_graph=True)
    assert heatmap.isfinite().all() and heatmap[0].abs().max() > 0
    assert torch.equal(heatmap[1], torch.zeros_like(heatmap[1]))
    grads = parameter_gradients(model, heatmap.square().sum())
    assert all(grad.isfinite().all() for grad in grads.values())


# --- attention -----------------------------------------------------------------------------------------------------


def attention_net(function: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> nn.Module:
    return randomised(Net(function, embed=nn.Linear(5, 8), **parts, fc=nn.Linear(8, 3))).eval()


def halved(t: Tensor) -> Tensor:
    """A factor that takes half of the relevance."""
    return t.detach() + 0.5 * (t - t.detach())


def written_out(attention: nn.MultiheadAttention, x: Tensor, factor: Callable[[Tensor], Tensor]) -> Tensor:
    """Self-attention from its parts; every product of activations gets its factors from `factor`."""
    batch, tokens, width = x.shape
    q, k, v = (
        t.view(batch, tokens, attention.num_heads, -1).transpose(1, 2)
        for t in F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
    )
    scores = factor(q) @ factor(k).transpose(-2, -1) / math.sqrt(width / attention.num_heads)
    mixed = factor(scores.softmax(-1)) @ factor(v)
    return attention.out_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("rule", ["epsilon", "gradient"])
def test_multihead_attention(rule: str, need_weights: bool) -> None:
    """Half of the relevance to each factor of every product, in eval mode as well."""

    def forward(m: Any, x: Tensor) -> Tensor:
        tokens = m.embed(x)
        return m.fc(m.attention(tokens, tokens, tokens, need_weights=need_weights)[0].mean(1))

    model = attention_net(forward, attention=nn.MultiheadAttention(8, 2, batch_first=True))
    images = pictures(2, 4, 5)
    factor = halved if rule == "epsilon" else lambda t: t

    def surrogate(x: Tensor) -> Tensor:
        return model.fc(written_out(model.attention, model.embed(x), factor).mean(1))

    torch.testing.assert_close(surrogate(images), model(images), rtol=1e-10, atol=1e-12)
    expected = gradient_times_input(surrogate, images)
    heatmap = explain(model, images, 1, rule=rule, strict=True)
    torch.testing.assert_close(heatmap, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_multihead_attention_is_its_parts(rule: str) -> None:
    """The same under every rule as attention written out in the model itself, gradients included."""

    def forward(m: Any, x: Tensor) -> Tensor:
        tokens = m.embed(x)
        return m.fc(m.attention(tokens, tokens, tokens)[0].mean(1))

    def parts(m: Any, x: Tensor) -> Tensor:
        return m.fc(written_out(m.attention, m.embed(x), lambda t: t).mean(1))

    nets = [attention_net(f, attention=nn.MultiheadAttention(8, 2, batch_first=True)) for f in (forward, parts)]
    assert_explained_alike(*nets, pictures(2, 4, 5), rule=rule, tolerance=1e-9)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_transformer_layer_has_no_way_around_the_engine(rule: str, frozen: bool) -> None:
    """Eval mode, where torch has a fused kernel, gives the map of train mode, where it has none; under no_grad too."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation="relu")
    model = attention_net(lambda m, x: m.fc(m.layer(m.embed(x)).mean(1)), layer=layer).requires_grad_(not frozen)
    images = pictures(2, 4, 5)
    slow = explain(model.train(), images, 1, rule=rule, strict=True)
    with torch.no_grad():
        fast = explain(model.eval(), images, 1, rule=rule, strict=True)
    assert slow.abs().max() > 0
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-12)
    ordinary = gradient_times_input(model.train(), images)
    assert torch.allclose(fast, ordinary, rtol=1e-8) is (rule == "gradient")


def test_transformer_encoder_in_eval_mode_trains() -> None:
    """Two layers, gelu, norm first, a padding mask: exact gradients by finite differences."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, activation="gelu", norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    padding = torch.tensor([[False, False, False, True], [False] * 4])
    model = attention_net(
        lambda m, x: m.fc(m.encoder(m.embed(x), src_key_padding_mask=padding).mean(1)), encoder=encoder
    )
    images = pictures(2, 4, 5)

    def loss(create_graph: bool = False) -> Tensor:
        return explain(model, images, 1, create_graph=create_graph, strict=True).square().sum()

    grads = parameter_gradients(model, loss(True))
    for name in ("embed.weight", "encoder.layers.0.self_attn.in_proj_weight", "encoder.layers.1.linear1.weight"):
        assert grads[name].abs().max() > 0
        assert_derivative(loss, model.get_parameter(name).data, grads[name])


# --- memory layout, precision, frozen and unused parameters, outputs -----------------------------------------------


@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("rule", RULES)
def test_channels_last(rule: str, training: bool, box: Any) -> None:
    model, images = residual(training=training), pictures()
    model.dropout.p = 0.0  # random numbers are drawn in the order of memory
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    results = []
    for net, x in ((model, images), (last, images.to(memory_format=torch.channels_last))):
        maps = explain(net, x, rule=rule, box=box, create_graph=True, layers=["pool"])
        loss = maps["input"].square().sum() + maps["pool"].square().sum()
        results.append(({n: m.detach() for n, m in maps.items()}, parameter_gradients(net, loss)))
    for first, second in zip(*results, strict=True):
        assert first.keys() == second.keys()
        for name in first:
            scale = float(first[name].abs().max())
            torch.testing.assert_close(second[name], first[name], rtol=1e-9, atol=1e-10 * scale + 1e-12)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "transposed": lambda x: x.transpose(2, 3),
    "sliced": lambda x: x.repeat(2, 2, 2, 2)[::2, :3, ::2, :6],
    "one channel last": lambda x: x[:, :1].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).expand(-1, 3, -1, -1),
}


@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_that_are_not_contiguous(layout: str, rule: str, box: Any) -> None:
    model, images = residual(), LAYOUTS[layout](pictures(4, 3, 6, 6))
    expected = explain(model, images.contiguous(), 1, rule=rule, box=box)
    torch.testing.assert_close(explain(model, images, 1, rule=rule, box=box), expected, rtol=1e-12, atol=1e-14)


def distance(first: Tensor, second: Tensor) -> float:
    first, second = first.detach().double(), second.detach().double()
    return float((first - second).norm() / second.norm())


@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("rule", RULES)
def test_single_precision(rule: str, box: Any) -> None:
    model, images = residual(), pictures()
    exact = explain(model, images, 1, rule=rule, box=box)
    single = explain(model.float(), images.float(), 1, rule=rule, box=box)
    assert single.dtype == torch.float32
    assert distance(single, exact) < 1e-4


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("rule", RULES)
def test_autocast(rule: str, box: Any, training: bool) -> None:
    """Mixed precision: maps in the images' own precision, finite, near the exact ones; trainable."""
    model, images = residual().float().train(training), pictures().float()
    model.dropout.p = 0.0
    exact = explain(model, images, 1, rule=rule, box=box)
    with torch.autocast("cpu", torch.bfloat16):
        maps = explain(model, images, 1, rule=rule, box=box, layers=["pool", "fc"], create_graph=True)
    heatmap = maps["input"]
    assert heatmap.dtype == torch.float32 and heatmap.isfinite().all()
    # The network runs in bf16, as it would without; gamma divides by small numbers, of which 8 bits are left.
    assert distance(heatmap, exact) < (0.4 if rule == "gamma" else 0.1)
    loss = heatmap.square().sum() + maps["pool"].float().square().sum()
    grads = parameter_gradients(model, loss)
    assert all(grad.isfinite().all() for grad in grads.values())
    assert grads["conv1.weight"].abs().max() > 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["transformer", "gate", "linear 3-D", "layer norm", "product"])
def test_autocast_elsewhere(kind: str, rule: str) -> None:
    if kind == "transformer":
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation="gelu")
        model, images = attention_net(lambda m, x: m.fc(m.layer(m.embed(x)).mean(1)), layer=layer), pictures(2, 4, 5)
    elif kind == "gate":
        model, images = squeeze_excite(gate_by_operator), pictures(2, 3, 4, 4)
    else:
        model, images = behind(kind, lambda t: t.relu_())
    exact = explain(model, images, 1, rule=rule)
    with torch.autocast("cpu", torch.bfloat16):
        heatmap = explain(model.float(), images.float(), 1, rule=rule, create_graph=True)
    assert heatmap.dtype == torch.float32
    assert distance(heatmap, exact) < 0.1
    grads = parameter_gradients(model, heatmap.square().sum())
    assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_frozen_parameters(rule: str, create_graph: bool) -> None:
    model, images = residual(), pictures()
    options: dict[str, Any] = {"rule": rule, "box": BOX, "layers": ["bn2", "fc"] if rule != "zplus" else ["pool", "fc"]}
    free = explain(model, images, **options)
    frozen = explain(model.requires_grad_(False), images, create_graph=create_graph, **options)
    for name in free:
        torch.testing.assert_close(frozen[name], free[name], rtol=1e-12, atol=1e-14)


def test_a_frozen_trunk_trains_its_head() -> None:
    model, images = residual(), pictures()
    free = parameter_gradients(model, explain(model, images, 1, create_graph=True).square().sum())
    model.requires_grad_(False).fc.requires_grad_(True)
    explain(model, images, 1, create_graph=True).square().sum().backward()
    torch.testing.assert_close(model.fc.weight.grad, free["fc.weight"], rtol=1e-10, atol=1e-12)
    assert model.conv1.weight.grad is None


def test_an_unused_parameter() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.relu(m.hidden(x)))

    parts = {"hidden": nn.Linear(5, 8), "fc": nn.Linear(8, 3)}
    model = randomised(Net(forward, **parts, unused=nn.Linear(4, 4)))
    images = pictures(2, 5)
    heatmap = explain(model, images, 1, create_graph=True)
    heatmap.square().sum().backward()
    assert model.unused.weight.grad is None and model.hidden.weight.grad is not None
    assert torch.equal(heatmap.detach(), explain(Net(forward, **parts), images, 1))


def test_an_input_the_output_does_not_depend_on() -> None:
    """A channel nobody reads has relevance zero."""
    model = randomised(Net(lambda m, x: m.fc(x[:, :2].flatten(1)), fc=nn.Linear(8, 3)))
    heatmap = explain(model, pictures(2, 3, 2, 2), 1)
    assert torch.equal(heatmap[:, 2], torch.zeros(2, 2, 2, dtype=torch.float64))
    assert heatmap[:, :2].abs().min() > 0


Outputs = namedtuple("Outputs", ["logits", "aux_logits"])


def test_named_tuple_with_logits() -> None:
    """The way GoogLeNet and Inception answer in train mode."""
    parts = {"hidden": nn.Linear(5, 8), "fc": nn.Linear(8, 3), "aux": nn.Linear(8, 3)}

    def forward(m: Any, x: Tensor) -> Outputs:
        hidden = torch.relu(m.hidden(x))
        return Outputs(m.fc(hidden), m.aux(hidden))

    model = randomised(Net(forward, **parts))
    plain = Net(lambda m, x: m.fc(torch.relu(m.hidden(x))), **parts)
    for rule in RULES:
        assert torch.equal(explain(model, pictures(2, 5), 1, rule=rule), explain(plain, pictures(2, 5), 1, rule=rule))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_under_no_grad(rule: str, create_graph: bool) -> None:
    model, images = residual(), pictures()
    expected = explain(model, images, 1, rule=rule, box=BOX, layers=["pool"])
    with torch.no_grad():
        maps = explain(model, images, 1, rule=rule, box=BOX, layers=["pool"], create_graph=create_graph)
    for name in maps:
        assert torch.equal(maps[name], expected[name])
        assert maps[name].requires_grad is create_graph


def test_in_inference_mode() -> None:
    """Where validation loops run: around the call, and of images made there."""
    model, images = residual(), pictures()
    expected = explain(model, images, 1)
    with torch.inference_mode():
        torch.testing.assert_close(explain(model, images, 1), expected, rtol=1e-12, atol=1e-14)
        made = images.clone()
    torch.testing.assert_close(explain(model, made, 1), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_checkpointed_part(rule: str) -> None:
    """Activations computed anew in the backward pass: explained as without that, or refused by name; never wrong."""

    def block(m: Any, x: Tensor) -> Tensor:
        return F.relu(m.bn(m.conv(x)), inplace=True)

    parts = {"conv": nn.Conv2d(3, 5, 3, padding=1), "bn": nn.BatchNorm2d(5), "fc": nn.Linear(80, 3)}
    nets = [
        randomised(Net(f, **copy.deepcopy(parts))).eval()
        for f in (
            lambda m, x: m.fc(checkpoint(block, m, x, use_reentrant=False).flatten(1)),
            lambda m, x: m.fc(block(m, x).flatten(1)),
        )
    ]
    refusal = "checkpoint"
    try:
        assert_explained_alike(*nets, pictures(2, 3, 4, 4), rule=rule)
    except FasterISNetError as error:
        refusal = str(error)
    assert "checkpoint" in refusal


@pytest.mark.parametrize("rule", RULES)
def test_a_model_that_turns_gradients_off_for_a_part(rule: str) -> None:
    """A no_grad block inside the model makes constants, as in training."""

    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.relu(m.hidden(x)).amax(1, keepdim=True) + 1
        return m.fc(x / scale)

    model = randomised(Net(forward, hidden=nn.Linear(5, 8), fc=nn.Linear(5, 3)))
    images = pictures(2, 5)
    scale = (torch.relu(model.hidden(images)).amax(1, keepdim=True) + 1).detach()
    plain = Net(lambda m, x: m.fc(x / scale), fc=model.fc)
    torch.testing.assert_close(
        explain(model, images, 1, rule=rule, strict=True), explain(plain, images, 1, rule=rule), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("rule", RULES)
def test_images_that_require_grad_get_exact_gradients(rule: str, box: Any) -> None:
    model, images = residual(), pictures().requires_grad_()

    def loss(create_graph: bool = False) -> Tensor:
        maps = explain(model, images, 1, rule=rule, box=box, layers=["pool"], create_graph=create_graph)
        return maps["input"].square().sum() + maps["pool"].square().sum()

    (gradient,) = torch.autograd.grad(loss(True), images)
    assert gradient.abs().max() > 0
    assert_derivative(loss, images.detach(), gradient)


def test_images_computed_by_another_network() -> None:
    """A loss on the map reaches the parameters behind the images."""
    generator, model = (
        randomised(nn.Linear(5, 5), 3),
        randomised(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))),
    )
    noise = pictures(2, 5)

    def loss(create_graph: bool = False) -> Tensor:
        return explain(model, generator(noise).tanh(), 1, create_graph=create_graph).square().sum()

    gradient = parameter_gradients(generator, loss(True))["weight"]
    assert gradient.abs().max() > 0
    assert_derivative(loss, generator.weight.data, gradient)


# --- operations without a rule -------------------------------------------------------------------------------------


class Doubler(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


STRANGERS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "custom Function": (Doubler.apply, "Doubler"),
    "sin": (torch.sin, "sin"),
    "sinh in place": (lambda t: t.sinh_(), "sinh"),
    "digamma": (lambda t: torch.digamma(t + 9), "digamma"),
}


def with_stranger(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """An operation without a rule in the middle, in the module `block.inner`."""
    block = Net(lambda m, x: m.inner(m.hidden(x)), hidden=nn.Linear(5, 8), inner=Net(lambda _m, x: function(x)))
    return randomised(Net(lambda m, x: m.fc(torch.relu(m.block(x))), block=block, fc=nn.Linear(8, 3)))


def warned(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, RuleWarning)]


@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gamma"])
@pytest.mark.parametrize("stranger", STRANGERS)
def test_an_operation_without_a_rule_is_named_once(stranger: str, rule: str) -> None:
    function, name = STRANGERS[stranger]
    model, images = with_stranger(function), pictures(2, 5)
    messages = warned(lambda: explain(model, images, AllLogits(), rule=rule))
    ours = [m for m in messages if name in m]
    assert len(ours) == 1
    where = "in module 'block.inner'"
    assert where in ours[0]
    assert len(messages) == 1
    with pytest.raises(RuleError, match=f"{name}.*{re.escape(where)}"):
        explain(model, images, rule=rule, strict=True)


def test_an_operation_without_a_rule_keeps_its_derivative() -> None:
    model, images = with_stranger(torch.sin), pictures(2, 5)
    with pytest.warns(RuleWarning, match="sin"):
        heatmap = explain(model, images, 1)

    def surrogate(x: Tensor) -> Tensor:
        return model.fc(rectified(model.block(x)))

    torch.testing.assert_close(heatmap, gradient_times_input(surrogate, images), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stranger", STRANGERS)
def test_the_plain_gradient_needs_no_rules(stranger: str) -> None:
    model, images = with_stranger(STRANGERS[stranger][0]), pictures(2, 5)
    assert warned(lambda: explain(model, images, rule="gradient", strict=True)) == []
    expected = gradient_times_input(model, images)
    torch.testing.assert_close(explain(model, images, 1, rule="gradient"), expected, rtol=1e-10, atol=1e-12)


def test_the_same_stranger_in_two_modules_is_named_twice() -> None:
    parts = {"one": Net(lambda _m, x: x.sin()), "two": Net(lambda _m, x: x.sin().sin())}
    model = randomised(Net(lambda m, x: m.fc(m.two(m.one(x))), **parts, fc=nn.Linear(5, 3)))
    messages = warned(lambda: explain(model, pictures(2, 5)))
    assert sorted(m.split("module ")[1].split(" ")[0] for m in messages) == ["'one'", "'two'"]


def test_a_traced_model_is_its_model() -> None:
    model, images = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double(), pictures(2, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, images)
    torch.testing.assert_close(explain(traced, images, strict=True), explain(model, images))


def unread(m: Any, x: Tensor) -> Tensor:
    m.inner(x)
    return m.fc(x)


OFF_PATH: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "detached normaliser": lambda m, x: m.fc(x / (2 + torch.sin(x.detach()))),
    "constant denominator": lambda m, x: m.fc(x / (2 + m.inner(x))),
    "no_grad factor": lambda m, x: m.fc(x * torch.no_grad()(m.inner)(x)),
    "detached result": lambda m, x: m.fc(x * m.inner(x).detach()),
    "result nobody reads": unread,
    "gate": lambda m, x: m.fc(x * torch.sigmoid(m.inner(x))),
    "of parameters only": lambda m, x: F.linear(x, torch.sin(m.fc.weight)),
    "integers": lambda m, x: m.fc(x) + torch.cumsum(torch.arange(3), 0),
}


@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
@pytest.mark.parametrize("case", OFF_PATH)
def test_a_stranger_off_the_path_is_no_matter(case: str, rule: str) -> None:
    """Relevance never passes it, so there is nothing to warn of."""
    model = randomised(Net(OFF_PATH[case], inner=Net(lambda _m, x: torch.sin(x)), fc=nn.Linear(5, 3)))
    images = pictures(2, 5)
    assert warned(lambda: explain(model, images, rule=rule)) == []
    assert explain(model, images, rule=rule, strict=True).abs().max() > 0


# --- relevance at layers -------------------------------------------------------------------------------------------


def bias_free(*, in_place: bool = True) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.ReLU(in_place), nn.AvgPool2d(2),
        nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.ReLU(in_place), nn.MaxPool2d(3, 1, 1),
        nn.Flatten(), nn.Linear(54, 8, bias=False), nn.ReLU(in_place), nn.Linear(8, 3, bias=False),
    ).double()  # fmt: skip


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rule", ["epsilon", "gradient"])
def test_relevance_is_conserved_from_layer_to_layer(rule: str, in_place: bool) -> None:
    """No biases, no stabiliser: at every layer it sums up to the explained logit."""
    model, images = bias_free(in_place=in_place), pictures()
    names = [name for name, _ in model.named_children()]
    classes = torch.tensor([0, 2, 1])
    maps = explain(model, images, classes, rule=rule, epsilon=1e-12, layers=names)
    logits = model(images).gather(1, classes[:, None])[:, 0].detach()
    assert list(maps) == ["input", *names]
    for name, heatmap in maps.items():
        torch.testing.assert_close(
            heatmap.flatten(1).sum(1), logits, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_relevance_is_conserved_under_zplus() -> None:
    """Started from its own z, the positive part of the logit: the same sum everywhere behind."""
    model, images = bias_free(), pictures()
    names = ["1", "2", "4", "5", "6", "8"]
    maps = explain(model, images, 0, rule="zplus", epsilon=1e-12, layers=names)
    hidden = model[:-1](images).detach()
    start = hidden @ model[-1].weight[0].detach().clamp(min=0)
    assert start.min() > 0
    for name in ("input", *names):
        torch.testing.assert_close(maps[name].flatten(1).sum(1), start, rtol=1e-6, atol=1e-9)
        assert maps[name].min() >= 0


def test_shapes_of_relevance_at_layers() -> None:
    model, images = bias_free(), pictures()
    one = explain(model, images, layers=["0", "2", "9"])
    every = explain(model, images, AllLogits(), layers=["0", "2", "9"])
    for name, shape in {"input": (3, 6, 6), "0": (6, 6, 6), "2": (6, 3, 3), "9": (3,)}.items():
        assert one[name].shape == (3, *shape)
        assert every[name].shape == (3, 3, *shape)
    for c in range(3):
        torch.testing.assert_close(every["2"][:, c], explain(model, images, c, layers=["2"])["2"])


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("rule", ["epsilon", "gamma", "gradient"])
@pytest.mark.parametrize("layer", ["conv", "bn"])
def test_relevance_in_front_of_an_in_place_relu(layer: str, rule: str, training: bool, create_graph: bool) -> None:
    """That of the layer's own output, not of what the ReLU made of it."""
    results = []
    for in_place in (True, False):
        net = randomised(
            Net(
                lambda m, x: m.fc(m.relu(m.bn(m.conv(x)) if layer == "bn" else m.conv(x)).flatten(1)),
                conv=nn.Conv2d(3, 5, 3, padding=1),
                bn=nn.BatchNorm2d(5),
                relu=nn.ReLU(in_place),
                fc=nn.Linear(80, 3),
            )
        ).train(training)
        maps = explain(net, pictures(3, 3, 4, 4), 1, rule=rule, layers=[layer, "relu"], create_graph=create_graph)
        grads = parameter_gradients(net, maps[layer].square().sum()) if create_graph else {}
        results.append(({n: m.detach() for n, m in maps.items()}, grads))
        if rule == "epsilon" and not in_place and not training:
            value = net.conv(pictures(3, 3, 4, 4))
            value = (net.bn(value) if layer == "bn" else value).detach()
            y = value.clamp(min=0)
            by_hand = value * y / (y + EPSILON) * net.fc.weight[1].detach().view(5, 4, 4)
            torch.testing.assert_close(maps[layer].detach(), by_hand, rtol=1e-10, atol=1e-12)
    for first, second in zip(*results, strict=True):
        for name in first:
            torch.testing.assert_close(first[name], second[name], rtol=1e-10, atol=1e-12)


def test_two_names_for_one_tensor() -> None:
    """A module that returns its input, in front of an in-place ReLU: both layers keep the value they had."""
    results = []
    for in_place in (True, False):
        parts = {"conv": nn.Conv2d(3, 5, 3, padding=1), "same": nn.Identity(), "relu": nn.ReLU(in_place)}
        net = Net(lambda m, x: m.fc(m.relu(m.same(m.conv(x))).flatten(1)), **parts, fc=nn.Linear(80, 3))
        results.append(explain(randomised(net), pictures(2, 3, 4, 4), 1, layers=["conv", "same", "relu"]))
    for name in ("input", "conv", "same", "relu"):
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-12, atol=1e-14)
    assert torch.equal(results[0]["conv"], results[0]["same"])


OVERWRITTEN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": (in_place_sum, torch.add),
    "product": (lambda a, b: a.mul_(b), torch.mul),
    "scale": (lambda a, b: a.mul_(2.0) + b, lambda a, b: a * 2.0 + b),
    "channel": (lambda a, b: zeroed(a) + b, lambda a, b: torch.cat([torch.zeros_like(a[:, :1]), a[:, 1:]], 1) + b),
    "activation": (lambda a, b: F.silu(a, inplace=True) + b, lambda a, b: F.silu(a) + b),
    "view": (lambda a, b: a.view(2, -1).relu_().view_as(a) + b, lambda a, b: a.view(2, -1).relu().view_as(a) + b),
}


@pytest.mark.parametrize("rule", ["epsilon", "gradient"])
@pytest.mark.parametrize("step", OVERWRITTEN)
def test_relevance_at_a_layer_that_is_overwritten(step: str, rule: str) -> None:
    results = []
    for change in OVERWRITTEN[step]:
        net = Net(
            lambda m, x, f=change: m.fc(f(m.bn(m.conv(x)), m.other(x)).flatten(1)),
            conv=nn.Conv2d(3, 5, 3, padding=1), bn=nn.BatchNorm2d(5), other=nn.Conv2d(3, 5, 1), fc=nn.Linear(80, 3),
        )  # fmt: skip
        results.append(explain(randomised(net).eval(), pictures(2, 3, 4, 4), 1, rule=rule, layers=["bn", "other"]))
    for name in results[0]:
        assert results[1][name].abs().max() > 0
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-11, atol=1e-13)


def test_the_model_itself_as_a_layer() -> None:
    model, images = residual(), pictures()
    maps = explain(model, images, Joint(), layers=["", "fc"])
    torch.testing.assert_close(maps[""], model(images).detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(maps["fc"], maps[""])


@pytest.mark.parametrize("rule", RULES)
def test_asking_for_layers_changes_no_map(rule: str) -> None:
    model, images = residual(), pictures()
    for box in (None, BOX):
        bare = explain(model, images, 1, rule=rule, box=box)
        names = ["pool", "dropout", "fc"] if rule == "zplus" else ["bn2", "pool", "fc"]
        maps = explain(model, images, 1, rule=rule, box=box, layers=names)
        torch.testing.assert_close(maps["input"], bare, rtol=1e-12, atol=1e-14)
        again = explain(model, images, 1, rule=rule, box=box, layers=names[::-1])
        for name in names:
            torch.testing.assert_close(maps[name], again[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_relevance_at_the_last_layer(rule: str) -> None:
    """The explained logit itself, nothing at the others (z+ starts from its z, asked for below the layer)."""
    model, images = residual(), pictures()
    logits = model(images).detach()
    maps = explain(model, images, 2, rule=rule, layers=["fc"])
    torch.testing.assert_close(maps["fc"], logits * torch.tensor([0.0, 0.0, 1.0, 0.0]), rtol=1e-12, atol=1e-14)
    joint = explain(model, images, Joint(), rule=rule, layers=["fc"])
    torch.testing.assert_close(joint["fc"], logits, rtol=1e-12, atol=1e-14)


def test_no_layers_and_an_empty_list_of_layers() -> None:
    model, images = residual(), pictures()
    heatmap = explain(model, images, 1)
    maps = explain(model, images, 1, layers=[])
    assert isinstance(heatmap, Tensor)
    assert list(maps) == ["input"] and torch.equal(maps["input"], heatmap)


def test_layers_train() -> None:
    """A loss on the relevance of a hidden layer: exact gradients, in front of and behind it."""
    model, images = residual(), pictures()

    def loss(create_graph: bool = False) -> Tensor:
        maps = explain(model, images, 1, layers=["bn1", "pool"], create_graph=create_graph)
        return maps["bn1"].square().sum() + maps["pool"].square().sum()

    grads = parameter_gradients(model, loss(True))
    for name in ("conv1.weight", "bn1.weight", "conv2.weight", "fc.weight"):
        assert grads[name].abs().max() > 0
        assert_derivative(loss, model.get_parameter(name).data, grads[name])
