"""Normalisation written out: the normaliser is a constant of the relevance pass, and not of its derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from lrp.helpers import (
    TWO_RULES,
    assert_alike,
    assert_close,
    gradient_times_input,
    pictures,
    quietly,
    relu_rule,
    twins,
)

Step = Callable[[Any, Tensor], Tensor]
WIDTH = 8


def network(norm: Step) -> Callable[[Any, Tensor], Tensor]:
    """A norm with parameters `scale` and `shift` between two convolutions."""
    return lambda m, x: m.fc(torch.relu(m.conv2(norm(m, m.conv(x)))).flatten(1))


def parts() -> dict[str, nn.Module | nn.Parameter]:
    return {
        "conv": nn.Conv2d(3, WIDTH, 3, padding=1),
        "scale": nn.Parameter(torch.zeros(WIDTH)),
        "shift": nn.Parameter(torch.zeros(WIDTH)),
        "conv2": nn.Conv2d(WIDTH, 4, 1),
        "fc": nn.Linear(36, 3),
    }


def affine(m: Any, x: Tensor) -> Tensor:
    return x * m.scale.view(-1, 1, 1) + m.shift.view(-1, 1, 1)


def last(t: Tensor) -> Tensor:
    return t.movedim(1, -1)


def first(t: Tensor) -> Tensor:
    return t.movedim(-1, 1)


def layer_norm(m: Any, x: Tensor) -> Tensor:
    return first(F.layer_norm(last(x), [WIDTH], m.scale, m.shift, 1e-5))


def layer_norm_by_steps(m: Any, x: Tensor) -> Tensor:
    centred = x - x.mean(1, keepdim=True)
    variance = (centred * centred).mean(1, keepdim=True)
    return affine(m, centred / (variance + 1e-5).sqrt())


def layer_norm_by_var_mean(m: Any, x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    return affine(m, (x - mean) * torch.rsqrt(variance + 1e-5))


def grouped(x: Tensor) -> Tensor:
    return x.view(len(x), 2, -1)


def group_norm_by_hand(m: Any, x: Tensor) -> Tensor:
    g = grouped(x)
    g = (g - g.mean(-1, keepdim=True)) * (g.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
    return affine(m, g.view_as(x))


def rms_norm(m: Any, x: Tensor) -> Tensor:
    return first(F.rms_norm(last(x), [WIDTH], m.scale, eps=1e-5))


def scaled(m: Any, x: Tensor) -> Tensor:
    return x * m.scale.view(-1, 1, 1)


NORMS: dict[str, tuple[Step, Step]] = {
    "layer norm, steps": (layer_norm, layer_norm_by_steps),
    "layer norm, var_mean": (layer_norm, layer_norm_by_var_mean),
    "layer norm, var": (
        layer_norm,
        lambda m, x: affine(
            m, (x - x.mean(1, keepdim=True)) / torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5)
        ),
    ),
    "layer norm, pow": (
        layer_norm,
        lambda m, x: affine(
            m,
            (x - x.mean(1, keepdim=True))
            * ((x - x.mean(1, keepdim=True)).pow(2).mean(1, keepdim=True) + 1e-5).pow(-0.5),
        ),
    ),
    "layer norm, no affine": (layer_norm, lambda m, x: affine(m, first(F.layer_norm(last(x), [WIDTH])))),
    "layer norm, contiguous": (
        layer_norm,
        lambda m, x: first(F.layer_norm(last(x).contiguous(), [WIDTH], m.scale, m.shift).clone()),
    ),
    "layer norm, native": (
        layer_norm,
        lambda m, x: first(torch.native_layer_norm(last(x), [WIDTH], m.scale, m.shift, 1e-5)[0]),
    ),
    "layer norm as group norm": (
        layer_norm,
        lambda m, x: first(F.group_norm(last(x).reshape(-1, WIDTH), 1, m.scale, m.shift).view(last(x).shape)),
    ),
    "rms norm, rsqrt": (rms_norm, lambda m, x: scaled(m, x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5))),
    "rms norm, square": (rms_norm, lambda m, x: scaled(m, x / torch.sqrt(x.square().mean(1, keepdim=True) + 1e-5))),
    "rms norm, x*x": (rms_norm, lambda m, x: scaled(m, x / ((x * x).sum(1, keepdim=True) / WIDTH + 1e-5).sqrt())),
    "normalize": (
        lambda m, x: scaled(m, F.normalize(x, dim=1)),
        lambda m, x: scaled(m, x / x.norm(dim=1, keepdim=True)),
    ),
    "normalize, linalg": (
        lambda m, x: scaled(m, F.normalize(x, dim=1)),
        lambda m, x: scaled(m, x / torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(1e-12)),
    ),
    "normalize, sqrt": (
        lambda m, x: scaled(m, F.normalize(x, dim=1)),
        lambda m, x: scaled(m, x / x.square().sum(1, keepdim=True).sqrt()),
    ),
    "group norm": (lambda m, x: F.group_norm(x, 2, m.scale, m.shift), group_norm_by_hand),
    "group norm, native": (
        lambda m, x: F.group_norm(x, 2, m.scale, m.shift),
        lambda m, x: affine(m, F.group_norm(x, 2)),
    ),
    "instance norm": (
        lambda m, x: F.instance_norm(x, weight=m.scale, bias=m.shift),
        lambda m, x: affine(
            m, (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
        ),
    ),
    "instance norm, groups": (
        lambda m, x: F.instance_norm(x, weight=m.scale, bias=m.shift),
        lambda m, x: F.group_norm(x, WIDTH, m.scale, m.shift),
    ),
}
RARE_NORMS: dict[str, tuple[Step, Step]] = {
    "std": (
        lambda m, x: affine(m, (x - x.mean(1, keepdim=True)) / x.var(1, keepdim=True).sqrt()),
        lambda m, x: affine(m, (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)),
    ),
    "l1": (
        lambda m, x: scaled(m, F.normalize(x, p=1.0, dim=1)),
        lambda m, x: scaled(m, x / x.abs().sum(1, keepdim=True)),
    ),
    "max": (
        lambda m, x: scaled(m, F.normalize(x, p=float("inf"), dim=1)),
        lambda m, x: scaled(m, x / x.abs().amax(1, keepdim=True)),
    ),
    "local response": (lambda m, x: F.local_response_norm(x, 2), lambda m, x: nn.LocalResponseNorm(2)(x)),
}


@pytest.mark.parametrize("rule", ["epsilon"])
@pytest.mark.parametrize("name", NORMS)
def test_norms_written_out(name: str, rule: str) -> None:
    """The normaliser is a constant of the relevance pass and not of its derivative, in every spelling."""
    nets = twins([network(f) for f in NORMS[name]], **parts())
    assert_alike(*nets, pictures(2, 3, 3, 3), rule=rule, what=name, tolerance=1e-8)


@pytest.mark.parametrize("name", RARE_NORMS)
def test_rare_norms_agree_or_are_loud(name: str) -> None:
    nets = twins([network(f) for f in RARE_NORMS[name]], **parts())
    (one, warned), (two, also) = (quietly(lambda n=n: fi.explain(n, pictures(2, 3, 3, 3), 1)) for n in nets)
    if not (warned or also):
        assert_close(one, two, 1e-8, name)


@pytest.mark.parametrize("name", NORMS)
def test_norms_have_a_constant_normaliser(name: str) -> None:
    """By value: against autograd with the normaliser detached, for the spelling by hand."""
    images = pictures(2, 3, 3, 3)
    (net,) = twins([network(NORMS[name][1])], **parts())
    h = net.conv(images).detach()

    def constant(x: Tensor) -> Tensor:
        """The norm with its normaliser fixed at these images: an affine function, found by what it does to `h`."""
        kind = name.split(",")[0]
        if kind.startswith("layer norm"):
            y = (x - x.mean(1, keepdim=True)) / (h.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
        elif kind == "rms norm":
            return scaled(net, x / (h.square().mean(1, keepdim=True) + 1e-5).sqrt())
        elif kind == "normalize":
            return scaled(net, x / h.norm(dim=1, keepdim=True))
        elif kind == "group norm":
            g, fixed = grouped(x), grouped(h)
            y = ((g - g.mean(-1, keepdim=True)) / (fixed.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()).view_as(x)
        else:
            y = (x - x.mean((2, 3), keepdim=True)) / (h.var((2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
        return affine(net, y)

    def ruled(x: Tensor) -> Tensor:
        return net.fc(relu_rule(net.conv2(constant(net.conv(x)))).flatten(1))

    assert_close(ruled(images), net(images), 1e-9, "the reference computes the same")
    assert_close(fi.explain(net, images, 1), gradient_times_input(ruled, images), 1e-9, name)


def batch_norm(m: Any, x: Tensor) -> Tensor:
    return m.bn(x)


def frozen(m: Any, x: Tensor) -> Tensor:
    """FrozenBatchNorm2d of detection models: scale and shift computed on the fly."""
    scale = m.bn.weight * (m.bn.running_var + m.bn.eps).rsqrt()
    return x * scale.view(1, -1, 1, 1) + (m.bn.bias - m.bn.running_mean * scale).view(1, -1, 1, 1)


BATCH_NORMS: dict[str, Step] = {
    "frozen": frozen,
    "written out": lambda m, x: (
        (x - m.bn.running_mean.view(-1, 1, 1))
        / (m.bn.running_var + m.bn.eps).sqrt().view(-1, 1, 1)
        * m.bn.weight.view(-1, 1, 1)
        + m.bn.bias.view(-1, 1, 1)
    ),
    "functional": lambda m, x: F.batch_norm(x, m.bn.running_mean, m.bn.running_var, m.bn.weight, m.bn.bias, False),
    "1-D": lambda m, x: F.batch_norm(x.flatten(2), m.bn.running_mean, m.bn.running_var, m.bn.weight, m.bn.bias).view_as(
        x
    ),
    "3-D": lambda m, x: F.batch_norm(x[..., None], m.bn.running_mean, m.bn.running_var, m.bn.weight, m.bn.bias)[..., 0],
    "native": lambda m, x: torch.native_batch_norm(
        x, m.bn.weight, m.bn.bias, m.bn.running_mean, m.bn.running_var, False, 0.1, m.bn.eps
    )[0],
    "addcmul": lambda m, x: torch.addcmul(
        m.bn.bias.view(-1, 1, 1)
        - (m.bn.running_mean * m.bn.weight / (m.bn.running_var + m.bn.eps).sqrt()).view(-1, 1, 1),
        x,
        (m.bn.weight / (m.bn.running_var + m.bn.eps).sqrt()).view(-1, 1, 1),
    ),
    "depthwise conv": lambda m, x: F.conv2d(
        x,
        (m.bn.weight * (m.bn.running_var + m.bn.eps).rsqrt()).view(-1, 1, 1, 1),
        m.bn.bias - m.bn.running_mean * m.bn.weight * (m.bn.running_var + m.bn.eps).rsqrt(),
        groups=WIDTH,
    ),
}


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_batch_norm_in_evaluation(name: str) -> None:
    """Epsilon: an affine function of each channel. (z+ fuses a batch norm with the layer in front of it.)"""
    nets = twins([network(batch_norm), network(BATCH_NORMS[name])], bn=nn.BatchNorm2d(WIDTH), **parts())
    assert_alike(*nets, pictures(2, 3, 3, 3), what=name)


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["functional", "1-D", "3-D", "native"])
def test_batch_norm_functions(name: str, training: bool, rule: str) -> None:
    def spelled(m: Any, x: Tensor) -> Tensor:
        arguments = (m.bn.running_mean, m.bn.running_var, m.bn.weight, m.bn.bias, training)
        if name == "1-D":
            return F.batch_norm(x.flatten(2), *arguments).view_as(x)
        if name == "3-D":
            return F.batch_norm(x.unsqueeze(-1), *arguments).squeeze(-1)
        if name == "native":
            return torch.native_batch_norm(x, m.bn.weight, m.bn.bias, *arguments[:2], training, 0.1, m.bn.eps)[0]
        return F.batch_norm(x, *arguments)

    nets = twins([network(batch_norm), network(spelled)], bn=nn.BatchNorm2d(WIDTH), **parts())
    for net in nets:
        net.train(training)
    assert_alike(*nets, pictures(3, 3, 3, 3), rule=rule, what=f"{name}, training={training}")


def test_batch_norm_by_hand_in_training_is_batch_norm_or_loud() -> None:
    """Batch statistics written out: constants for a batch norm; a norm across samples by hand at least warns."""

    def by_hand(m: Any, x: Tensor) -> Tensor:
        mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
        x = (x - mean) / (variance + m.bn.eps).sqrt()
        return x * m.bn.weight.view(-1, 1, 1) + m.bn.bias.view(-1, 1, 1)

    def detached(m: Any, x: Tensor) -> Tensor:
        mean, variance = x.mean((0, 2, 3), keepdim=True).detach(), x.var((0, 2, 3), correction=0, keepdim=True).detach()
        x = (x - mean) / (variance + m.bn.eps).sqrt()
        return x * m.bn.weight.view(-1, 1, 1) + m.bn.bias.view(-1, 1, 1)

    nets = twins([network(batch_norm), network(detached), network(by_hand)], bn=nn.BatchNorm2d(WIDTH), **parts())
    for net in nets:
        net.train()
    images = pictures(3, 3, 3, 3)
    assert_alike(nets[0], nets[1], images, gradients=False, what="detached statistics")
    normaliser_only = fi.explain(nets[2], images, 1)
    h = nets[2].conv(images).detach()

    def ruled(x: Tensor) -> Tensor:
        m, x = nets[2], nets[2].conv(x)
        x = (x - x.mean((0, 2, 3), keepdim=True)) / (h.var((0, 2, 3), correction=0, keepdim=True) + m.bn.eps).sqrt()
        return m.fc(relu_rule(m.conv2(x * m.bn.weight.view(-1, 1, 1) + m.bn.bias.view(-1, 1, 1))).flatten(1))

    assert_close(
        normaliser_only, gradient_times_input(ruled, images), 1e-9, "its mean is a mean, its deviation a constant"
    )
