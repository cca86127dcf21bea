"""`fi.relevance(score, inputs)`: relevance of a finished forward pass, as torch.autograd.grad gives gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.errors import FasterISNetError, RuleWarning
from lrp.helpers import RULES, assert_close, attempt, parameter_gradients, pictures, quietly, randomised, twins

LABELS = torch.tensor([2, 0])
BOX = (-6.0, 6.0)


def network(training: bool = False) -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )
    randomised(model).train(training)
    return model


def images() -> Tensor:
    return pictures(2, 3, 4, 4).requires_grad_()


def recorded(model: nn.Module, x: Tensor, rule: str) -> Tensor:
    """A forward pass; z+ and gamma may need what autograd does not keep."""
    if rule == "epsilon":
        return model(x)
    with fi.recording():
        return model(x)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rule", [*RULES, "gradient"])
def test_equals_explain(rule: str, training: bool) -> None:
    model, x = network(training), images()
    logits = recorded(model, x, rule)
    found = fi.relevance(logits[range(2), LABELS], x, rule=rule)
    expected = fi.explain(network(training), x.detach(), LABELS, rule=rule)
    assert isinstance(found, Tensor) and found.shape == x.shape
    assert_close(found.detach(), expected, 1e-10)


@pytest.mark.parametrize("rule", RULES)
def test_scores_however_picked(rule: str) -> None:
    """By index, gather, sum, one sample, a number: sums over what is given, as autograd does."""
    x = images()
    logits = recorded(network(), x, rule)
    expected = fi.explain(network(), x.detach(), LABELS, rule=rule)
    rows = torch.arange(2)
    scores = {
        "tensors": logits[rows, LABELS],
        "gather": logits.gather(1, LABELS[:, None])[:, 0],
        "column": logits.gather(1, LABELS[:, None]),
        "sum": logits[rows, LABELS].sum(),
        "stack": torch.stack([logits[0, 2], logits[1, 0]]),
        "one-hot": (logits * F.one_hot(LABELS, 3)).sum(1),
        "take_along_dim": logits.take_along_dim(LABELS[:, None], 1),
    }
    for name, score in scores.items():
        found, messages = quietly(lambda s=score: fi.relevance(s, x, rule=rule))
        assert not messages
        assert_close(found, expected, 1e-9, name)
    alone = fi.relevance(logits[0, 2], x, rule=rule)
    assert_close(alone[0], expected[0], 1e-9, "one sample")
    assert float(alone[1].abs().max()) == 0.0


def test_epsilon_scores_that_are_functions_of_logits() -> None:
    """eta, probability and their like, as in `explain`'s targets."""
    x = images()
    logits = network()(x)
    for target in (
        fi.targets.Eta(LABELS),
        fi.targets.Probability(LABELS),
        fi.targets.Joint(),
        fi.targets.EtaOfLowest(),
    ):
        found = fi.relevance(target(logits), x)
        assert_close(found, fi.explain(network(), x.detach(), target), 1e-10, repr(target))


@pytest.mark.parametrize("rule", RULES)
def test_trained_through(rule: str) -> None:
    """`create_graph=True`: the gradients of a loss on the map, and of the classification loss beside it."""
    model, x = network(), images()
    logits = recorded(model, x, rule)
    heatmap = fi.relevance(logits[range(2), LABELS], x, rule=rule, create_graph=True)
    loss = heatmap.square().sum() + F.cross_entropy(logits, LABELS)
    found = parameter_gradients(model, loss)
    other = network()
    y = images()
    again = fi.explain(other, y.detach(), LABELS, rule=rule, create_graph=True)
    expected = parameter_gradients(other, again.square().sum() + F.cross_entropy(other(y), LABELS))
    for name, gradient in expected.items():
        assert_close(found[name], gradient, 1e-8, name)


@pytest.mark.parametrize("rule", RULES)
def test_create_graph_false_leaves_nothing(rule: str) -> None:
    model, x = network(), images()
    logits = recorded(model, x, rule)
    heatmap = fi.relevance(logits[range(2), LABELS], x, rule=rule, create_graph=False)
    assert not heatmap.requires_grad and heatmap.grad_fn is None
    assert x.grad is None and all(p.grad is None for p in model.parameters())
    # The graph of the forward pass is still there for the caller's own loss.
    F.cross_entropy(logits, LABELS).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_several_maps_over_one_forward_pass() -> None:
    model, x = network(), images()
    with fi.recording():
        logits = model(x)
    for rule in (*RULES, "epsilon", "gradient"):
        for c in range(3):
            found = fi.relevance(logits[:, c], x, rule=rule, create_graph=True)
            assert_close(found.detach(), fi.explain(network(), x.detach(), c, rule=rule), 1e-10, f"{rule} {c}")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("container", [list, tuple])
def test_inputs_may_be_hidden_activations(container: Any, rule: str) -> None:
    """A tensor in gives a tensor out, a list or tuple a tuple: deep supervision is a list of tensors."""
    model, x = network(), images()

    def run() -> tuple[Tensor, Tensor, Tensor]:
        first = model[:3](x)
        second = model[3:5](first)
        return first, second, model[5:](second)

    if rule == "epsilon":
        first, second, logits = run()
    else:
        with fi.recording():
            first, second, logits = run()
    score = logits[range(2), LABELS]
    expected = fi.explain(network(), x.detach(), LABELS, rule=rule, layers=["2", "4"])
    found = fi.relevance(score, container([x, first, second]), rule=rule)
    assert isinstance(found, tuple) and len(found) == 3
    for heatmap, name in zip(found, ("input", "2", "4"), strict=True):
        assert_close(heatmap.detach(), expected[name], 1e-10, name)
    assert isinstance(fi.relevance(score, first, rule=rule), Tensor)
    assert_close(fi.relevance(score, first, rule=rule).detach(), expected["2"], 1e-10)
    (only,) = fi.relevance(score, [second], rule=rule)
    assert_close(only.detach(), expected["4"], 1e-10)
    again = fi.relevance(score, container([second, second, x]), rule=rule)
    assert_close(again[0].detach(), expected["4"], 1e-10, "given twice")
    assert_close(again[1].detach(), expected["4"], 1e-10, "given twice")
    assert_close(again[2].detach(), expected["input"], 1e-10, "behind")


@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
def test_the_part_of_a_network_alone(rule: str) -> None:
    """Hidden activations that start a graph of their own: the head explained from features."""
    model = network()
    features = model[:5](pictures(2, 3, 4, 4)).detach().requires_grad_()
    logits = recorded(model[5:], features, rule)
    found = fi.relevance(logits[:, 1], features, rule=rule)
    assert_close(found.detach(), fi.explain(model, pictures(2, 3, 4, 4), 1, rule=rule, layers=["4"])["4"], 1e-10)


@pytest.mark.parametrize("rule", RULES)
def test_box(rule: str) -> None:
    x = images()
    logits = recorded(network(), x, rule)
    found = fi.relevance(logits[range(2), LABELS], x, rule=rule, box=BOX)
    assert_close(found.detach(), fi.explain(network(), x.detach(), LABELS, rule=rule, box=BOX), 1e-10)


@pytest.mark.parametrize("epsilon", [1e-6, 0.3])
def test_epsilon(epsilon: float) -> None:
    x = images()
    found = fi.relevance(network()(x)[range(2), LABELS], x, epsilon=epsilon)
    assert_close(found, fi.explain(network(), x.detach(), LABELS, epsilon=epsilon), 1e-10)


@pytest.mark.parametrize("rule", ["zplus", "gamma"])
def test_without_recording(rule: str) -> None:
    """Where autograd kept enough: right. Otherwise an error that names `explain` or `fi.recording()`."""

    def residual(m: Any, x: Tensor) -> Tensor:
        x = torch.relu(m.conv(x))
        return m.fc((m.conv2(x) + x).mean((2, 3)))

    nets = [network(), twins([residual], conv=nn.Conv2d(3, 4, 3), conv2=nn.Conv2d(4, 4, 1), fc=nn.Linear(4, 3))[0]]
    for net in nets:
        x = images()
        score = net(x)[range(2), LABELS]
        found, _, refusal = attempt(lambda s=score, x=x: fi.relevance(s, x, rule=rule))
        if refusal:
            assert refusal.startswith("RuleError") and ("explain" in refusal or "recording" in refusal)
            continue
        assert_close(found.detach(), fi.explain(net, x.detach(), LABELS, rule=rule), 1e-10)


def test_zplus_of_a_residual_network_needs_recording_and_gets_it() -> None:
    """Operands of a sum and of a mean are what autograd does not keep."""

    def residual(m: Any, x: Tensor) -> Tensor:
        x = torch.relu(m.conv(x))
        return m.fc(torch.tanh(m.conv2(x) + x).mean((2, 3)))

    (net,) = twins([residual], conv=nn.Conv2d(3, 4, 3), conv2=nn.Conv2d(4, 4, 1), fc=nn.Linear(4, 3))
    x = images()
    with fi.recording():
        logits = net(x)
    found = fi.relevance(logits[range(2), LABELS], x, rule="zplus")
    assert_close(found.detach(), fi.explain(net, x.detach(), LABELS, rule="zplus"), 1e-10)


def test_epsilon_of_tanh_from_a_finished_forward_pass() -> None:
    """Autograd keeps the result of tanh and sigmoid, not their x: right, or the error that names the remedy."""
    for act in (torch.tanh, torch.sigmoid, F.elu, F.softplus, F.hardsigmoid, F.logsigmoid, F.celu):
        (net,) = twins([lambda m, x, a=act: m.fc(a(m.hidden(x)))], hidden=nn.Linear(5, 6), fc=nn.Linear(6, 3))
        x = pictures(2, 5).requires_grad_()
        expected = fi.explain(net, x.detach(), 1)
        found, _, refusal = attempt(lambda net=net, x=x: fi.relevance(net(x)[:, 1], x))
        if refusal:
            assert refusal.startswith("RuleError") and ("explain" in refusal or "recording" in refusal)
        else:
            assert_close(found, expected, 1e-9, str(act))
        with fi.recording():
            logits = net(x)
        assert_close(fi.relevance(logits[:, 1], x), expected, 1e-9, f"{act}, recorded")


def test_recording_changes_nothing() -> None:
    """Around a forward pass: the same logits, gradients and statistics; several passes and nesting are fine."""
    plain, other = network(True), network(True)
    x = images()
    expected = plain(x)
    with fi.recording():
        found = other(x)
        with fi.recording():
            inner = other[8](found.new_ones(2, 8))
    assert torch.equal(found, expected) and inner.shape == (2, 3)
    wanted = torch.autograd.grad(expected.square().sum(), list(plain.parameters()))
    gradients = torch.autograd.grad(found.square().sum(), list(other.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))


# --- refused -------------------------------------------------------------------------------------------------------


def test_images_that_did_not_require_gradients() -> None:
    x = pictures(2, 3, 4, 4)
    logits = network()(x)
    with pytest.raises(FasterISNetError, match="requires_grad"):
        fi.relevance(logits[range(2), LABELS], x)
    with torch.no_grad():
        nothing = network()(images())
    with pytest.raises(FasterISNetError):
        fi.relevance(nothing[:, 1], images())


def test_images_the_score_does_not_depend_on() -> None:
    """Never a map of zeros."""
    x, stranger = images(), images()
    logits = network()(x)
    with pytest.raises(FasterISNetError):
        fi.relevance(logits[:, 1], stranger)
    with pytest.raises(FasterISNetError):
        fi.relevance(logits[:, 1], [x, stranger])
    with pytest.raises(FasterISNetError):
        fi.relevance(logits[:, 1].detach(), x)


def test_a_graph_that_was_freed() -> None:
    x = images()
    logits = network()(x)
    logits.sum().backward()
    with pytest.raises((FasterISNetError, RuntimeError), match=r"(?i)retain|freed|second time|backward"):
        fi.relevance(logits[:, 1], x)


def test_arguments_that_make_no_sense() -> None:
    x = images()
    score = network()(x)[:, 1]
    for arguments, options in (
        ((score, "images"), {}), (([1.0], x), {}), ((score, []), {}), ((score, x), {"rule": "nonsense"}),
        ((score, x), {"epsilon": -1.0}), ((score, x), {"box": (1.0, 0.0)}),
    ):  # fmt: skip
        with pytest.raises(FasterISNetError):
            fi.relevance(*arguments, **options)


def test_unknown_operations_are_loud() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    x = pictures(2, 5).requires_grad_()
    (net,) = twins([lambda m, x: m.fc(Own.apply(m.hidden(x)))], hidden=nn.Linear(5, 6), fc=nn.Linear(6, 3))
    with pytest.warns(RuleWarning):
        fi.relevance(net(x)[:, 1], x)


def test_anybody_s_loop() -> None:
    """Ten lines of plain PyTorch: the loss on the map falls."""
    torch.manual_seed(0)
    model = network(training=True)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    background = torch.zeros(2, 3, 4, 4, dtype=torch.float64)
    background[..., :2] = 1
    losses = []
    for _ in range(25):
        x = images()
        logits = model(x)
        heatmap = fi.relevance(logits[range(2), LABELS], x, create_graph=True)
        loss = (heatmap * background).square().sum()
        optimiser.zero_grad()
        (loss + 0.01 * F.cross_entropy(logits, LABELS)).backward()
        optimiser.step()
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]
