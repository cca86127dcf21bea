"""Linear layers and convolutions in every spelling; weights that are functions, of parameters or of the images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import fasterisnet as fi
from lrp.helpers import (
    RULES,
    Net,
    assert_alike,
    assert_close,
    explained,
    gradient_times_input,
    pictures,
    product_rule,
    randomised,
    relu_rule,
    twins,
)

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
ONES = torch.ones(2, 1, dtype=torch.float64)


def dense(layer: Layer) -> Callable[[Any, Tensor], Tensor]:
    """The layer first, in the middle and as the head."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = torch.relu(layer(x, m.first.weight, m.first.bias))
        x = torch.relu(layer(x, m.middle.weight, m.middle.bias))
        return layer(x, m.fc.weight, m.fc.bias)

    return forward


def dense_parts() -> dict[str, nn.Module]:
    return {"first": nn.Linear(5, 8), "middle": nn.Linear(8, 8), "fc": nn.Linear(8, 3)}


def accumulated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x @ w.t()
    y += b
    return y


def into_a_buffer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    buffer = x.new_zeros(len(x), len(w))
    buffer[:, :1] = F.linear(x, w[:1], b[:1])
    buffer[:, 1:] = F.linear(x, w[1:], b[1:])
    return buffer


LINEAR: dict[str, Layer] = {
    "x @ W.t() + b": lambda x, w, b: x @ w.t() + b,
    "b + x @ W.T": lambda x, w, b: b + x @ w.T,
    "+=": accumulated,
    "add_": lambda x, w, b: torch.mm(x, w.t()).add_(b),
    "(W @ x.T).T": lambda x, w, b: (w @ x.T).T + b,
    "matmul keywords": lambda x, w, b: torch.matmul(input=x, other=w.mT) + b,
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "addmm of halves": lambda x, w, b: torch.addmm(b / 2, x, w.t() / 4, beta=2, alpha=4),
    "addmm, bias on": lambda x, w, b: torch.addmm(b.expand(len(x), -1), x, w.t()),
    "baddbmm": lambda x, w, b: torch.baddbmm(b, x[:, None], w.t().expand(len(x), -1, -1))[:, 0],
    "bmm": lambda x, w, b: torch.bmm(w.expand(len(x), -1, -1), x[..., None])[..., 0] + b,
    "einsum": lambda x, w, b: torch.einsum("ni,oi->no", x, w) + b,
    "einsum, reversed": lambda x, w, b: torch.einsum("oi,ni->no", w, x) + b,
    "tensordot": lambda x, w, b: torch.tensordot(x, w, dims=([1], [1])) + b,
    "inner": lambda x, w, b: torch.inner(x, w) + b,
    "mv": lambda x, w, b: torch.stack([torch.mv(w, row) + b for row in x]),
    "addmv": lambda x, w, b: torch.stack([torch.addmv(b, w, row) for row in x]),
    "linear without a batch": lambda x, w, b: torch.stack([F.linear(row, w, b) for row in x]),
    "3-D": lambda x, w, b: F.linear(x[:, None], w, b)[:, 0],
    "3-D, strided": lambda x, w, b: F.linear(x.t()[:, None].expand(-1, 2, -1).permute(2, 1, 0), w, b)[:, 0],
    "by rows": lambda x, w, b: torch.stack([F.linear(x, w[i : i + 1], b[i : i + 1])[:, 0] for i in range(len(w))], 1),
    "split and joined": lambda x, w, b: torch.cat([F.linear(x, w[:2], b[:2]), F.linear(x, w[2:], b[2:])], 1),
    "into a buffer": into_a_buffer,
    "bias as a column": lambda x, w, b: F.linear(torch.cat([x, ONES[: len(x)]], 1), torch.cat([w, b[:, None]], 1)),
    "1x1 conv": lambda x, w, b: F.conv2d(x[..., None, None], w[..., None, None], b)[..., 0, 0],
    "conv1d": lambda x, w, b: F.conv1d(x[:, None], w[:, None], b)[..., 0],
    "whole-image conv": lambda x, w, b: F.conv2d(x[:, None, None], w[:, None, None], b)[..., 0, 0],
    "conv_transpose": lambda x, w, b: F.conv_transpose2d(x[..., None, None], w.t()[..., None, None], b)[..., 0, 0],
    "unbatched conv": lambda x, w, b: torch.stack([F.conv1d(r[:, None], w[..., None], b)[:, 0] for r in x]),
    "module": lambda x, w, b: torch.func.functional_call(
        nn.Linear(w.shape[1], w.shape[0], device="meta"), {"weight": w, "bias": b}, (x,)
    ),
    "multi_dot": lambda x, w, b: torch.linalg.multi_dot([x, w.t()]) + b,
    "aten": lambda x, w, b: torch.ops.aten.linear(x, w, b),
    "weight cloned": lambda x, w, b: F.linear(x, w.clone(), b.contiguous()),
    "weight stacked": lambda x, w, b: F.linear(x, torch.stack(list(w)), torch.cat([b])),
    "vmap": lambda x, w, b: torch.vmap(lambda r: F.linear(r, w, b))(x),
    "vmap over rows": lambda x, w, b: torch.vmap(lambda v, c: x @ v + c, out_dims=1)(w, b),
    "bias subtracted": lambda x, w, b: x @ w.t() - (-b),
    "bias unsqueezed": lambda x, w, b: x @ w.t() + b[None],
    "bias expanded": lambda x, w, b: x @ w.t() + b.expand(len(x), -1).clone(),
}
RARE_LINEAR: dict[str, Layer] = {
    "product and sum": lambda x, w, b: (x[:, None] * w).sum(-1) + b,
    "sparse": lambda x, w, b: torch.sparse.mm(w.to_sparse(), x.t()).t() + b,
    "bilinear": lambda x, w, b: F.bilinear(x, ONES[: len(x)], w[..., None], b),
    "kron": lambda x, w, b: torch.stack([torch.kron(torch.eye(1, dtype=w.dtype), w) @ r for r in x]) + b,
    "dot": lambda x, w, b: torch.stack([torch.stack([torch.dot(r, v) for v in w]) for r in x]) + b,
}


# In z+ and gamma a bias is a constant, a column of the weight is not.
LINEAR_CASES = [(name, rule) for name in LINEAR for rule in RULES if name != "bias as a column" or rule == "epsilon"]


@pytest.mark.parametrize(("name", "rule"), LINEAR_CASES)
def test_linear(name: str, rule: str) -> None:
    assert_alike(*twins([dense(F.linear), dense(LINEAR[name])], **dense_parts()), pictures(2, 5), rule=rule, what=name)


@pytest.mark.parametrize(
    ("name", "rule"),
    [(n, r) for n in RARE_LINEAR for r in ("epsilon", "zplus") if (n, r) != ("product and sum", "zplus")],
)
def test_rare_spellings_of_linear_are_right_or_loud(name: str, rule: str) -> None:
    nets = twins([dense(F.linear), dense(RARE_LINEAR[name])], **dense_parts())
    options: dict[str, Any] = {"epsilon": 1e-9, "tolerance": 1e-4} if rule == "zplus" else {}
    loud = name != "product and sum"  # which, with a bias apart, is not one layer to z+
    assert_alike(*nets, pictures(2, 5), rule=rule, loud=loud, what=name, **options)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["x @ W.t() + b", "einsum", "1x1 conv", "baddbmm", "3-D"])
def test_linear_in_a_box(name: str, rule: str) -> None:
    nets = twins([dense(F.linear), dense(LINEAR[name])], **dense_parts())
    assert_alike(*nets, pictures(2, 5), rule=rule, box=(-6.0, 6.0), what=name)


# --- convolutions --------------------------------------------------------------------------------------------------


def convolutional(layer: Layer, norm: bool) -> Callable[[Any, Tensor], Tensor]:
    """3x3 convolutions with padding one: the first, with a batch norm or without, and one behind a rectifier."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = layer(x, m.conv.weight, m.conv.bias)
        x = torch.relu(m.bn(x) if norm else x)
        return m.fc(torch.relu(layer(x, m.conv2.weight, m.conv2.bias)).flatten(1))

    return forward


def convolutional_parts() -> dict[str, nn.Module]:
    return {
        "conv": nn.Conv2d(2, 4, 3, padding=1),
        "bn": nn.BatchNorm2d(4),
        "conv2": nn.Conv2d(4, 4, 3, padding=1),
        "fc": nn.Linear(64, 3),
    }


def unfolded(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    columns = F.unfold(x, 3, padding=1)
    return (w.flatten(1) @ columns + b[:, None]).view(len(x), -1, 4, 4)


def strided_windows(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    windows = F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
    return torch.einsum("bchwij,ocij->bohw", windows, w) + b.view(-1, 1, 1)


CONVOLUTIONS: dict[str, Layer] = {
    "same": lambda x, w, b: F.conv2d(x, w, b, padding="same"),
    "padded first": lambda x, w, b: F.conv2d(F.pad(x, (1, 1, 1, 1)), w, b),
    "bias apart": lambda x, w, b: F.conv2d(x, w, padding=1) + b.view(-1, 1, 1),
    "aten": lambda x, w, b: torch.ops.aten.convolution(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "torch.conv2d": lambda x, w, b: torch.conv2d(input=x, weight=w, bias=b, padding=(1, 1)),
    "unbatched": lambda x, w, b: torch.stack([F.conv2d(i, w, b, padding=1) for i in x]),
    "sample by sample": lambda x, w, b: torch.cat([F.conv2d(i, w, b, padding=1) for i in x.split(1)]),
    "conv3d": lambda x, w, b: F.conv3d(x[:, :, None], w[:, :, None], b, padding=(0, 1, 1))[:, :, 0],
    "transposed": lambda x, w, b: F.conv_transpose2d(x, w.flip(2, 3).transpose(0, 1), b, padding=1),
    "channels last": lambda x, w, b: F.conv2d(
        x.to(memory_format=torch.channels_last), w.to(memory_format=torch.channels_last), b, padding=1
    ),
    "outputs apart": lambda x, w, b: torch.cat(
        [F.conv2d(x, v, c, padding=1) for v, c in zip(w.split(1), b.split(1), strict=True)], 1
    ),
    "samples as groups": lambda x, w, b: F.conv2d(
        x.reshape(1, -1, 4, 4), w.repeat(len(x), 1, 1, 1), b.repeat(len(x)), padding=1, groups=len(x)
    ).view(len(x), -1, 4, 4),
    "unfold": unfolded,
    "windows": strided_windows,
    "vmap": lambda x, w, b: torch.vmap(lambda i: F.conv2d(i, w, b, padding=1))(x),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str, rule: str) -> None:
    plain: Layer = lambda x, w, b: F.conv2d(x, w, b, padding=1)  # noqa: E731
    joined = name in (
        "unbatched",
        "sample by sample",
        "outputs apart",
        "samples as groups",
        "conv3d",
        "unfold",
        "windows",
        "vmap",
    )
    alone = joined and rule in ("zplus", "gamma")  # to them a norm behind a concat is a step of its own
    norms = [False] if alone else [False, True]
    for norm in norms:
        nets = twins([convolutional(f, norm) for f in (plain, CONVOLUTIONS[name])], **convolutional_parts())
        assert_alike(*nets, pictures(2, 2, 4, 4), rule=rule, what=f"{name}, norm={norm}")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("groups", [2, 4])
def test_groups_are_convolutions_side_by_side(groups: int, rule: str) -> None:
    def split(m: Any, x: Tensor) -> Tensor:
        inputs = torch.relu(m.stem(x)).chunk(groups, 1)
        weights, biases = m.conv.weight.chunk(groups), m.conv.bias.chunk(groups)
        outputs = [F.conv2d(i, w, b) for i, w, b in zip(inputs, weights, biases, strict=True)]
        return m.fc(torch.relu(torch.cat(outputs, 1)).flatten(1))

    def whole(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.relu(m.conv(torch.relu(m.stem(x)))).flatten(1))

    nets = twins([whole, split], stem=nn.Conv2d(2, 4, 1), conv=nn.Conv2d(4, 8, 3, groups=groups), fc=nn.Linear(32, 3))
    assert_alike(*nets, pictures(2, 2, 4, 4), rule=rule)


# --- weights that are functions of parameters ----------------------------------------------------------------------

WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda w: w.clamp(min=-0.1),
    "relu": lambda w: torch.relu(w + 0.2),
    "abs": lambda w: w.abs(),
    "softmax": lambda w: w.softmax(1),
    "sigmoid": lambda w: torch.sigmoid(w) - 0.5,
    "normalised": lambda w: F.normalize(w, dim=1),
    "standardised": lambda w: (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True),
    "squared": lambda w: w * w.detach(),
    "masked": lambda w: w * (w > 0),
    "product": lambda w: w @ w.t() @ w,
    "where": lambda w: torch.where(w > 0, w, 0.1 * w),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_computed_from_parameters(name: str, rule: str) -> None:
    """The map is that of the weight's value, the gradient follows by the chain rule; in two spellings."""
    function = WEIGHTS[name]

    def net(layer: Layer) -> Callable[[Any, Tensor], Tensor]:
        return dense(lambda x, w, b: layer(x, function(w), b))

    images = pictures(2, 5)
    nets = twins([net(F.linear), net(lambda x, w, b: x @ w.t() + b)], **dense_parts())
    everything = fi.targets.Joint()
    assert_alike(*nets, images, rule=rule, what=name, target=everything)
    (fixed,) = twins([dense(F.linear)], **dense_parts())
    with torch.no_grad():
        for layer, raw in ((fixed.first, nets[0].first), (fixed.middle, nets[0].middle), (fixed.fc, nets[0].fc)):
            layer.weight.copy_(function(raw.weight))
            layer.bias.copy_(raw.bias)
    found, expected = (explained(net, images, everything, rule=rule) for net in (nets[0], fixed))
    assert_close(found.heatmap, expected.heatmap, 1e-9, "fixed weights")
    raw = nets[0].middle.weight
    chained = torch.autograd.grad(function(raw), raw, expected.gradients["middle.weight"])[0]
    assert_close(found.gradients["middle.weight"], chained, 1e-8, "chain rule")


REPARAMETRISED: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "old weight_norm": torch.nn.utils.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old spectral_norm": torch.nn.utils.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "pruned": lambda m: prune.l1_unstructured(m, "weight", 0.3),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", REPARAMETRISED)
def test_reparametrised_modules(name: str, rule: str) -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model = randomised(model).eval()
    REPARAMETRISED[name](model[2])
    model.eval()
    images = pictures(2, 5)
    model(images)
    (plain,) = twins(
        [lambda m, x: m.c(torch.relu(m.b(torch.relu(m.a(x)))))], a=nn.Linear(5, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 3)
    )
    with torch.no_grad():
        for ours, theirs in ((plain.a, model[0]), (plain.b, model[2]), (plain.c, model[4])):
            ours.weight.copy_(theirs.weight)
            ours.bias.copy_(theirs.bias)
    found, expected = explained(model, images, rule=rule), explained(plain, images, rule=rule)
    assert not found.messages
    assert_close(found.heatmap, expected.heatmap, 1e-9, name)
    assert_close(found.gradients["0.weight"], expected.gradients["a.weight"], 1e-8, name)
    with parametrize.cached():
        cached = explained(model, images, rule=rule)
    assert_close(cached.heatmap, expected.heatmap, 1e-9, f"{name}, cached")


# --- weights computed from the images ------------------------------------------------------------------------------


def mixture(m: Any, x: Tensor) -> Tensor:
    """(batch, out, in): a weight for every sample."""
    return torch.einsum("nk,koi->noi", m.router(x), m.experts)


DYNAMIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: (w @ x[..., None])[..., 0],
    "bmm": lambda x, w: torch.bmm(x[:, None], w.mT)[:, 0],
    "einsum": lambda x, w: torch.einsum("ni,noi->no", x, w),
    "baddbmm": lambda x, w: torch.baddbmm(torch.zeros(1, 1, 1, dtype=x.dtype), x[:, None], w.mT)[:, 0],
    "linear for each": lambda x, w: torch.stack([F.linear(r, v) for r, v in zip(x, w, strict=True)]),
    "conv for each": lambda x, w: torch.cat(
        [F.conv1d(r[None, :, None], v[..., None]) for r, v in zip(x, w, strict=True)]
    )[..., 0],
    "grouped conv": lambda x, w: F.conv1d(x.reshape(1, -1, 1), w.flatten(0, 1)[..., None], groups=len(x)).view(
        len(x), -1
    ),
    "vmap": lambda x, w: torch.vmap(F.linear)(x, w),
    "product and sum": lambda x, w: (x[:, None] * w).sum(-1),
}


def dynamic(layer: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: m.fc(torch.relu(layer(x, mixture(m, x)) + m.shift(x)))


def dynamic_parts() -> dict[str, nn.Module | nn.Parameter]:
    return {
        "router": nn.Linear(5, 4),
        "experts": nn.Parameter(torch.zeros(4, 8, 5)),
        "shift": nn.Linear(5, 8),
        "fc": nn.Linear(8, 3),
    }


@pytest.mark.parametrize("rule", ["epsilon", "gamma", "gradient"])
@pytest.mark.parametrize("name", DYNAMIC)
def test_weights_computed_from_the_images(name: str, rule: str) -> None:
    """A factor of a product: half each under epsilon; under "gradient" the gradient."""
    nets = twins([dynamic(DYNAMIC["matmul"]), dynamic(DYNAMIC[name])], **dynamic_parts())
    images = pictures(2, 5)
    assert_alike(*nets, images, rule=rule, what=name)
    net = nets[1]
    if rule == "gradient":
        assert_close(fi.explain(net, images, 1, rule=rule), gradient_times_input(net, images), 1e-9, name)
    elif rule == "epsilon":

        def ruled(x: Tensor) -> Tensor:
            y = product_rule(DYNAMIC["matmul"], x, mixture(net, x))
            return net.fc(relu_rule(y + net.shift(x)))

        assert_close(fi.explain(net, images, 1), gradient_times_input(ruled, images), 1e-9, name)


@pytest.mark.parametrize("rule", ["epsilon", "gradient"])
def test_bias_computed_from_the_images(rule: str) -> None:
    """A summand like any other."""

    def as_bias(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.relu(F.linear(x, m.hidden.weight, m.shift(x.mean(0)))))

    def as_sum(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.relu(F.linear(x, m.hidden.weight) + m.shift(x.mean(0))))

    def as_conv_bias(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.relu(F.conv1d(x[..., None], m.hidden.weight[..., None], m.shift(x.mean(0)))[..., 0]))

    nets = twins([as_sum, as_bias, as_conv_bias], hidden=nn.Linear(5, 8), shift=nn.Linear(5, 8), fc=nn.Linear(8, 3))
    images = pictures(2, 5)
    for net in nets[1:]:
        assert isinstance(net, Net)
        assert_alike(nets[0], net, images, rule=rule)
    if rule == "gradient":
        assert_close(fi.explain(nets[1], images, 1, rule=rule), gradient_times_input(nets[1], images), 1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_batch_norm_scale_from_the_images(rule: str) -> None:
    """Conditional normalisation: the scale is a factor of a product (epsilon), and nothing crashes under the others."""

    def conditional(m: Any, x: Tensor) -> Tensor:
        h = m.conv(x)
        scale = m.scale(x.mean((0, 2, 3)))
        return m.fc(F.batch_norm(h, m.bn.running_mean, m.bn.running_var, scale, m.bn.bias).mean((2, 3)))

    def by_hand(m: Any, x: Tensor) -> Tensor:
        h = m.conv(x)
        scale = m.scale(x.mean((0, 2, 3)))
        h = F.batch_norm(h, m.bn.running_mean, m.bn.running_var) * scale.view(-1, 1, 1) + m.bn.bias.view(-1, 1, 1)
        return m.fc(h.mean((2, 3)))

    nets = twins(
        [by_hand, conditional], conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4), scale=nn.Linear(3, 4), fc=nn.Linear(4, 3)
    )
    assert_alike(*nets, pictures(2, 3, 4, 4), rule=rule, loud=True)
