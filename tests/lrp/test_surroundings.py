"""Memory layout, precision, frozen and unused parameters, outputs, gradient modes: the map stays the same."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fasterisnet import explain
from fasterisnet.errors import FasterISNetError
from lrp.helpers import (
    Net,
    moved_by_rounding,
    parameter_gradients,
    pictures,
    randomised,
)
from lrp.small_nets import (
    BOX,
    RULES,
    assert_derivative,
    assert_explained_alike,
    attention_net,
    behind,
    gate_by_operator,
    residual,
    squeeze_excite,
)


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
@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gradient"])
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
    # The network runs in bf16, as it would without.
    allowed = 4 * moved_by_rounding(model, lambda m: explain(m, images, 1, rule=rule, box=box), torch.bfloat16)
    assert distance(heatmap, exact) <= allowed
    loss = heatmap.square().sum() + maps["pool"].float().square().sum()
    grads = parameter_gradients(model, loss)
    assert all(grad.isfinite().all() for grad in grads.values())
    assert grads["conv1.weight"].abs().max() > 0


@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gradient"])
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
    allowed = 4 * moved_by_rounding(model, lambda m: explain(m, images.float(), 1, rule=rule), torch.bfloat16)
    assert distance(heatmap, exact) <= allowed
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
