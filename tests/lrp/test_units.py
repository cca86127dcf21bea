"""What z+, gamma and zB take for one layer: constants behind it, however written; in parts it is loud."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.errors import RuleError
from lrp.helpers import Function, assert_alike, pictures, quietly, twins

Step = Callable[[Any, Tensor], Tensor]


def parts() -> dict[str, nn.Module]:
    return {"conv": nn.Conv2d(3, 4, 3, padding=1, bias=False), "bn": nn.BatchNorm2d(4), "fc": nn.Linear(4, 3)}


def headed(step: Step) -> Function:
    return lambda m, x: m.fc(torch.relu(step(m, x)).mean((2, 3)))


def column(t: Tensor) -> Tensor:
    return t.view(-1, 1, 1)


def scale(m: Any) -> Tensor:
    return column(m.bn.weight * (m.bn.running_var + m.bn.eps).rsqrt())


def normed(m: Any, y: Tensor, **changed: Tensor) -> Tensor:
    own = {"weight": m.bn.weight, "bias": m.bn.bias, "mean": m.bn.running_mean, "var": m.bn.running_var} | changed
    return F.batch_norm(y, own["mean"], own["var"], own["weight"], own["bias"], eps=m.bn.eps)


BATCH_NORM: dict[str, Step] = {
    "frozen": lambda m, x: m.conv(x) * scale(m) + (column(m.bn.bias) - column(m.bn.running_mean) * scale(m)),
    "written out": lambda m, x: (
        (m.conv(x) - column(m.bn.running_mean)) / (column(m.bn.running_var) + m.bn.eps).sqrt() * column(m.bn.weight)
        + column(m.bn.bias)
    ),
    "in place": lambda m, x: m.conv(x).sub_(column(m.bn.running_mean)).mul_(scale(m)).add_(column(m.bn.bias)),
    "scale apart": lambda m, x: (
        F.batch_norm(m.conv(x), m.bn.running_mean, m.bn.running_var, eps=m.bn.eps) * column(m.bn.weight)
        + column(m.bn.bias)
    ),
    "times one before": lambda m, x: m.bn(m.conv(x) * 1.0),
    "negated twice": lambda m, x: normed(m, -m.conv(x), mean=-m.bn.running_mean, weight=-m.bn.weight),
    "einsum": lambda m, x: m.bn(
        torch.einsum("ok,bkl->bol", m.conv.weight.flatten(1), F.unfold(x, 3, padding=1)).view(len(x), 4, *x.shape[2:])
    ),
}


@pytest.mark.parametrize("options", [{"rule": "zplus"}, {"box": (-6.0, 6.0)}], ids=["zplus", "zB"])
@pytest.mark.parametrize("name", BATCH_NORM)
def test_a_batch_norm_written_out_is_one_with_its_layer(name: str, options: dict[str, Any]) -> None:
    nets = twins([headed(lambda m, x: m.bn(m.conv(x))), headed(BATCH_NORM[name])], **parts())
    assert_alike(*nets, pictures(2, 3, 4, 4), what=name, **options)


def in_groups(m: Any, x: Tensor, outputs: int) -> list[Tensor]:
    """Two convolutions, of the first and of the last two channels of one tensor."""
    t = torch.relu(m.conv(x))
    return [F.conv2d(part, t.new_ones(outputs, 2, 1, 1)) for part in t.split(2, 1)]


@pytest.mark.parametrize("rule", ["zplus", "gamma"])
@pytest.mark.parametrize(
    "step",
    [lambda m, x: m.bn(torch.cat(in_groups(m, x, 2), 1)), lambda m, x: torch.add(*in_groups(m, x, 4))],
    ids=["batch norm behind groups", "sum of parts"],
)
def test_a_layer_of_parts_of_one_tensor_is_loud(step: Step, rule: str) -> None:
    (net,) = twins([headed(step)], **parts())
    _, messages = quietly(lambda: fi.explain(net, pictures(2, 3, 4, 4), 1, rule=rule))
    assert messages and "parts of" in messages[0]


@pytest.mark.parametrize("options", [{"rule": "zplus"}, {"box": (-6.0, 6.0)}], ids=["zplus", "zB"])
@pytest.mark.parametrize(
    "pieces",
    [
        lambda t: torch.cat(t.split(1)),
        lambda t: torch.stack(t.unbind(1), 1),
        lambda t: F.pad(t, (1, 1))[..., 1:-1],
    ],
)
def test_a_batch_norm_behind_parts_of_a_layer_is_loud(
    pieces: Callable[[Tensor], Tensor], options: dict[str, Any]
) -> None:
    (net,) = twins([headed(lambda m, x: m.bn(pieces(m.conv(x))))], **parts())
    _, messages = quietly(lambda: fi.explain(net, pictures(2, 3, 4, 4), 1, **options))
    assert messages and "parts of" in messages[0]


def added_through_a_view(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y.flatten(2).add_(m.bn.bias[:, None])
    return y


def added_to_halves(m: Any, x: Tensor) -> Tensor:
    halves = m.conv(x).chunk(2, 1)
    return torch.cat([y + column(b) for y, b in zip(halves, m.bn.bias.chunk(2), strict=True)], 1)


@pytest.mark.parametrize("rule", ["zplus", "gamma"])
@pytest.mark.parametrize("step", [added_through_a_view, added_to_halves])
def test_a_bias_of_parts_of_a_layer_is_loud(step: Step, rule: str) -> None:
    (net,) = twins([headed(step)], **parts())
    _, messages = quietly(lambda: fi.explain(net, pictures(2, 3, 4, 4), 1, rule=rule))
    assert messages and "parts of layers" in messages[0]


@pytest.mark.parametrize("rule", ["zplus", "gamma"])
def test_a_bias_in_two_parts(rule: str) -> None:
    plain = headed(lambda m, x: m.conv(x) + column(m.bn.bias))
    other = headed(lambda m, x: m.conv(x) + column(m.bn.bias / 2) + column(m.bn.bias / 2))
    assert_alike(*twins([plain, other], **parts()), pictures(2, 3, 4, 4), rule=rule)


def test_a_layer_inside_a_unit_has_no_relevance_of_its_own() -> None:
    (net,) = twins([headed(BATCH_NORM["frozen"])], **parts())
    with pytest.raises(RuleError, match="one unit"):
        fi.explain(net, pictures(2, 3, 4, 4), 1, rule="zplus", layers=["conv"])


# --- attention -----------------------------------------------------------------------------------------------------


def attending(attention: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> Function:
    def forward(m: Any, x: Tensor) -> Tensor:
        t = m.embed(x).flatten(2).transpose(1, 2)
        return m.fc(torch.relu(attention(m, *m.qkv(t).chunk(3, -1))).mean(1))

    return forward


def attention_parts() -> dict[str, nn.Module | nn.Parameter]:
    return {
        "embed": nn.Conv2d(3, 4, 2, 2),
        "qkv": nn.Linear(4, 12),
        "fc": nn.Linear(4, 3),
        "bias": nn.Parameter(torch.zeros(4, 4)),
    }


MASK = torch.ones(4, 4, dtype=torch.bool).tril()


def test_a_mask_that_is_added_is_a_mask() -> None:
    """Adding zero is nothing, number by number."""
    masked = attending(lambda m, q, k, v: (q @ k.mT).masked_fill(~MASK, -math.inf).softmax(-1) @ v)
    added = attending(lambda m, q, k, v: (q @ k.mT + torch.where(MASK, 0.0, -1e9)).softmax(-1) @ v)
    assert_alike(*twins([masked, added], **attention_parts()), pictures(2, 3, 4, 4), rule="zplus")


def test_a_product_with_an_offset_is_a_product_and_a_sum() -> None:
    summed = attending(lambda m, q, k, v: (q @ k.mT + m.bias).softmax(-1) @ v)
    offset = attending(lambda m, q, k, v: torch.baddbmm(m.bias.expand(len(q), -1, -1), q, k.mT).softmax(-1) @ v)
    assert_alike(*twins([summed, offset], **attention_parts()), pictures(2, 3, 4, 4), rule="zplus", gradients=False)


# --- gates and complex numbers -------------------------------------------------------------------------------------


def in_a_buffer(g: Tensor) -> Tensor:
    filled = torch.empty_like(g)
    filled[:, :2], filled[:, 2:] = g[:, :2], g[:, 2:]
    return filled


@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
def test_a_gate_that_is_copied_into_a_buffer_is_a_gate(rule: str) -> None:
    def gated(copied: Callable[[Tensor], Tensor]) -> Function:
        return headed(lambda m, x: m.conv(x) * copied(torch.sigmoid(m.bn(m.conv(x)).mean((2, 3), keepdim=True))))

    assert_alike(*twins([gated(lambda g: g), gated(in_a_buffer)], **parts()), pictures(2, 3, 4, 4), rule=rule)


@pytest.mark.parametrize("dim", [-1, -3, 1])
def test_glu_along_any_dimension(dim: int) -> None:
    def by_hand(m: Any, x: Tensor) -> Tensor:
        signal, gate = m.conv(x).chunk(2, dim)
        return signal * gate.sigmoid()

    first, second = (
        lambda m, x: m.fc(f(m, x).flatten(1)[:, :4]) for f in (by_hand, lambda m, x: F.glu(m.conv(x), dim))
    )
    assert_alike(*twins([first, second], **parts()), pictures(2, 3, 4, 4))


def spectral(m: Any, x: Tensor) -> Tensor:
    """A 1x1 convolution of frequencies."""
    weight = m.conv.weight.sum((2, 3)).to(torch.complex128)
    return torch.fft.ifft2(torch.einsum("bchw,oc->bohw", torch.fft.fft2(x), weight)).real


def test_a_layer_of_frequencies() -> None:
    plain = headed(lambda m, x: F.conv2d(x, m.conv.weight.sum((2, 3), keepdim=True)))
    nets = twins([plain, headed(spectral)], **parts())
    assert_alike(*nets, pictures(2, 3, 4, 4), tolerance=1e-8)
    for rule in ("zplus", "gamma"):
        assert quietly(lambda rule=rule: fi.explain(nets[1], pictures(2, 3, 4, 4), 1, rule=rule))[1]
