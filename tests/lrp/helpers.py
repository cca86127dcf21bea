"""Networks in two spellings, what they are compared by, and the rules written into ordinary functions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import fasterisnet as fi
from fasterisnet.errors import RuleError, RuleWarning
from seeds import generator

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
RULES = ["epsilon", "zplus", "gamma"]
TWO_RULES = ["epsilon", "zplus"]  # where gamma goes the way of one of them
EPSILON = 0.01
# Spellings that differ in where a stabiliser stands are compared with a small one; what is left is of its size.
SMALL = {"epsilon": 1e-9, "tolerance": 1e-4}
Function = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """A network made of a function of itself and its input, and of named modules and parameters."""

    def __init__(self, function: Function, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def randomised(model: M, seed: int = 0) -> M:
    """The same model in float64, nothing in it at a special value, variances and scales positive."""
    source = generator(seed)
    model = model.double()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(0.4 * torch.randn(tensor.shape, generator=source, dtype=torch.float64))
                if name.endswith("running_var"):
                    tensor.abs_().add_(0.5)
    return model


def twins(functions: Sequence[Function], seed: int = 0, **parts: nn.Module | nn.Parameter) -> list[Any]:
    """One network for each function, all with the same parameters, in evaluation mode."""
    first = randomised(Net(functions[0], **parts), seed).eval()
    nets = [first]
    for function in functions[1:]:
        other: Any = copy.deepcopy(first)
        other.function = function
        nets.append(other)
    return nets


def pictures(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape or (3, 3, 6, 6), generator=generator(seed), dtype=torch.float64)


@dataclass
class Explained:
    """A map, the gradients of a loss on it, and the warnings that came with them."""

    heatmap: Tensor
    gradients: dict[str, Tensor]
    messages: list[str]


def quietly(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What the call returns and the texts of its RuleWarnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(w.message) for w in caught if issubclass(w.category, RuleWarning)]


def attempt(call: Callable[[], Any]) -> tuple[Any, list[str], str]:
    """What the call returns, its RuleWarnings, and the words of the error it raised instead, if any."""
    try:
        result, messages = quietly(call)
    except RuntimeError as error:  # RuleError is one
        return None, [], f"{type(error).__name__}: {error}"
    return result, messages, ""


def parameter_gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of the loss by parameter; zeros where it has none."""
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), grads, strict=True)}


def explained(model: nn.Module, images: Tensor, target: Any = 1, *, twice: bool = False, **options: Any) -> Explained:
    """The map that can be trained through; twice: checked against the one that cannot."""
    heatmap, messages = quietly(lambda: fi.explain(model, images, target, create_graph=True, **options))
    if twice:
        alone, _ = quietly(lambda: fi.explain(model, images, target, **options))
        torch.testing.assert_close(alone, heatmap.detach(), rtol=1e-10, atol=1e-12)
    weights = torch.linspace(0.5, 1.5, heatmap.numel(), dtype=heatmap.dtype).view(heatmap.shape)
    gradients = parameter_gradients(model, (heatmap.square() * weights).sum())
    return Explained(heatmap.detach(), gradients, messages)


# --- what a plain network gave is kept: hundreds of spellings are compared with the same few -----------------------

KEPT: dict[Any, Any] = {}
EVERY_MODULE = set(vars(nn.Module()))  # what each of them has, apart from its parts


def recognised(thing: Any) -> Any:
    """Equal for things that compute the same, and hashable; TypeError for what is not known well enough to say."""
    if thing is None or isinstance(thing, bool | int | float | str | torch.dtype | BuiltinFunctionType):
        return type(thing), thing
    if isinstance(thing, tuple | list):
        return type(thing), tuple(map(recognised, thing))
    if isinstance(thing, dict):
        return tuple((key, recognised(value)) for key, value in sorted(thing.items()))
    if type(thing) is Tensor or type(thing) is nn.Parameter:
        return thing.shape, thing.stride(), thing.dtype, thing.requires_grad, thing.detach().numpy().tobytes()
    if isinstance(thing, FunctionType):
        inside = [cell.cell_contents for cell in thing.__closure__ or ()]
        given = recognised([inside, thing.__defaults__, thing.__kwdefaults__])
        return thing.__module__, thing.__qualname__, thing.__code__, given
    if isinstance(thing, nn.Module) and type(thing).__module__.startswith(("torch.nn.modules.", __name__)):
        hooks = [value for name, value in vars(thing).items() if name.endswith("_hooks")]
        if thing.training or any(hooks):
            raise TypeError("a network that changes, or that others take part in")
        rest = {name: value for name, value in vars(thing).items() if name not in EVERY_MODULE}
        parts = [getattr(thing, name) for name in ("_parameters", "_buffers", "_modules")]
        own = [name for name, _ in thing.named_parameters()]  # one that has two names stands here once
        return type(thing), recognised([parts, rest, own])
    raise TypeError(f"a {type(thing).__name__}")


def kept(compute: Callable[[], T], *things: Any) -> T:
    """What the function returns, from the last time that it was asked for the same things."""
    try:
        key = recognised(
            [*things, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()]
        )
    except TypeError:
        return compute()
    if key not in KEPT:
        KEPT[key] = compute()
    return KEPT[key]


def assert_close(first: Tensor, second: Tensor, tolerance: float, what: str = "") -> None:
    """Equal up to rounding, relative to the largest value."""
    scale = float(second.abs().max())
    torch.testing.assert_close(
        first, second, rtol=tolerance, atol=tolerance * max(scale, 1e-300), msg=lambda text: f"{what}: {text}"
    )


def moved_by_rounding(model: nn.Module, heatmap: Callable[[nn.Module], Tensor], dtype: torch.dtype) -> float:
    """How far maps move, relative to their size, when every parameter is off by up to the precision of a dtype.

    A forward pass in that precision rounds activations too, so a few times this is what it may do to a map.
    """
    exact, moved = heatmap(model).detach(), []
    for seed in range(4):
        other, source = copy.deepcopy(model), generator(seed)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1 + torch.finfo(dtype).eps * (2 * torch.rand(p.shape, generator=source, dtype=p.dtype) - 1))
        moved.append(float((heatmap(other).detach() - exact).norm() / exact.norm()))
    return max(moved)


def assert_alike(
    plain: nn.Module, other: nn.Module, images: Tensor, *, rule: str = "epsilon", loud: bool = False,
    tolerance: float = 1e-9, what: str = "", gradients: bool = True, target: Any = 1, **options: Any,
) -> None:  # fmt: skip
    """Same logits, same map, same gradients of a loss on it, and no warning.

    loud: the second one may warn instead, and then has to be an error under strict.
    """
    training = plain.training
    assert other.training == training
    torch.default_generator.manual_seed(0)
    known = plain, images, target, rule, options
    forward = kept(lambda: copy.deepcopy(plain)(images).detach(), "logits", *known)
    assert_close(copy.deepcopy(other)(images), forward, 1e-10, f"{what} logits")
    expected = kept(lambda: explained(plain, images, target, rule=rule, **options), "maps", *known)
    for seed in range(1000, 1010):
        if float(expected.heatmap.abs().max()) > 0 or plain.state_dict().keys() != other.state_dict().keys():
            break
        other.load_state_dict(randomised(plain, seed).state_dict())  # a small random network may be dead
        expected = explained(plain, images, target, rule=rule, **options)
    assert not expected.messages, f"{what} the plain spelling warned: {expected.messages}"
    assert bool(expected.heatmap.isfinite().all()) and float(expected.heatmap.abs().max()) > 0
    try:
        found = explained(other, images, target, twice=True, rule=rule, **options)
    except RuleError:
        if loud:
            return
        raise
    if found.messages:
        assert loud, f"{what} warned: {found.messages}"
        try:
            fi.explain(other, images, target, rule=rule, strict=True, **options)
        except RuleError:
            return
        raise AssertionError(f"{what} warned, but was no error with strict=True")
    assert_close(found.heatmap, expected.heatmap, tolerance, f"{what} map, {rule}")
    if not gradients:
        return
    scale = max(float(g.abs().max()) for g in expected.gradients.values())
    assert expected.gradients.keys() == found.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(
            found.gradients[name],
            gradient,
            rtol=tolerance,
            atol=tolerance * scale,
            msg=lambda text: f"{what} gradient of {name}, {rule}: {text}",
        )


# --- the rules, written into ordinary functions: an independent definition of the map ------------------------------


def with_slope(y: Tensor, x: Tensor, slope: Tensor) -> Tensor:
    """The value y whose derivative by x is `slope`, elementwise."""
    return y.detach() + slope.detach() * (x - x.detach())


def relu_rule(x: Tensor, epsilon: float = EPSILON) -> Tensor:
    """`G_x = G_y * y/(y + eps)`."""
    y = x.clamp(min=0)
    return with_slope(y, x, y / (y + epsilon))


def activation_rule(function: Callable[[Tensor], Tensor], x: Tensor, epsilon: float = EPSILON) -> Tensor:
    """`G_x = G_y * f(x)/(x + eps*sign(x))`, sign(0) = 1."""
    y = function(x)
    return with_slope(y, x, y / torch.where(x < 0, x - epsilon, x + epsilon))


def product_rule(function: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Half of the ordinary derivative of a bilinear function to each factor."""
    y = function(a.detach(), b.detach())
    return y + 0.5 * (function(a, b.detach()) - y) + 0.5 * (function(a.detach(), b) - y)


def gradient_times_input(function: Callable[[Tensor], Tensor], images: Tensor, target: int = 1) -> Tensor:
    """The map by ordinary autograd, the rules being written into `function`."""
    x = images.clone().requires_grad_()
    return (x * torch.autograd.grad(function(x)[:, target].sum(), x)[0]).detach()
