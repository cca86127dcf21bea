"""A map depends on its own sample and its own call only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasterisnet import explain
from fasterisnet.lrp.targets import AllLogits, Eta, Joint, Logit, Probability
from lrp.helpers import Net, pictures, randomised
from lrp.small_nets import BOX, RULES, residual

ROUNDS = 15
RULED = [rule for rule in RULES if rule != "gradient"]  # the plain gradient does go through the batch statistics


@pytest.mark.parametrize("target", [Logit, Eta, Probability])
@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("rule", RULED)
def test_class_of_a_sample_leaves_other_maps_alone(rule: str, box: Any, target: Callable[[Tensor], Any]) -> None:
    """Train mode, where batch statistics tie the samples together; input and hidden maps, bit for bit."""
    model, images = residual(training=True), pictures()
    torch.manual_seed(0)
    first, second = (
        explain(model, images, target(torch.tensor([2, c, 0])), rule=rule, box=box, layers=["dropout", "pool"])
        for c in (1, 3)
    )
    for name in ("input", "dropout", "pool"):
        assert torch.equal(first[name][[0, 2]], second[name][[0, 2]]), name
        assert not torch.equal(first[name][1], second[name][1]), name


@pytest.mark.parametrize("rule", RULED)
def test_class_of_a_sample_leaves_other_gradients_alone(rule: str) -> None:
    """A loss on the map of sample 0 trains the same parameters the same way, whatever sample 1 explains."""
    grads = []
    for c in (1, 3):
        model = residual(training=True)
        torch.manual_seed(0)
        heatmap = explain(model, pictures(), torch.tensor([2, c, 0]), rule=rule, create_graph=True)
        heatmap[0].square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and "conv1.weight" in grads[0]
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-12, atol=1e-14)


def test_the_plain_gradient_in_train_mode_is_that_of_the_sum_over_the_batch() -> None:
    """Gradient*Input has no rules: in train mode batch norm ties the samples together, as it does in training."""
    model, images = residual(training=True), pictures().requires_grad_()
    torch.manual_seed(0)
    heatmap = explain(model, images, torch.tensor([2, 1, 0]), rule="gradient")
    logits = model(images)
    gradient = torch.autograd.grad(logits[0, 2] + logits[1, 1] + logits[2, 0], images)[0]
    torch.testing.assert_close(heatmap, (images * gradient).detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("target", [None, Joint(), Eta(1), AllLogits()], ids=["highest", "joint", "eta", "all"])
@pytest.mark.parametrize("box", [None, BOX], ids=["plain", "box"])
@pytest.mark.parametrize("rule", RULES)
def test_batch_size_does_not_matter_in_eval_mode(rule: str, box: Any, target: Any) -> None:
    model, images = residual(), pictures(5, 3, 6, 6)
    images[0] = images[0].abs()  # one sample without negative values among samples with them
    together = explain(model, images, target, rule=rule, box=box)
    for n, image in enumerate(images):
        alone = explain(model, image[None], target, rule=rule, box=box)
        torch.testing.assert_close(alone[0], together[n], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_the_same_call_gives_the_same_bits(rule: str) -> None:
    model, images = residual(training=True), pictures()
    torch.manual_seed(4)
    first = explain(model, images, rule=rule, layers=["pool"])
    second = explain(model, images, rule=rule, layers=["pool"])
    assert torch.equal(first["input"], second["input"])
    assert torch.equal(first["pool"], second["pool"])


def test_one_explanation_leaves_no_mark_on_the_next() -> None:
    """Rules, layers, boxes and targets of earlier calls do not linger."""
    model, images = residual(), pictures()
    fresh = explain(model, images, 1)
    explain(model, images, 2, rule="zplus", box=BOX, layers=["pool"], create_graph=True)
    explain(model, images.requires_grad_(), Joint(), rule="gradient", create_graph=True)
    assert torch.equal(explain(model, images, 1), fresh)


def test_a_tensor_the_model_keeps_between_calls() -> None:
    """A table computed from parameters once, in the first forward pass, and used again in the second."""

    def forward(m: Any, x: Tensor) -> Tensor:
        if m.table is None:
            m.table = m.embedding.weight.tanh()
        return m.fc(torch.relu(x @ m.table))

    model = randomised(Net(forward, embedding=nn.Embedding(5, 6), fc=nn.Linear(6, 3)))
    model.table = None
    images = pictures(2, 5)
    assert torch.equal(explain(model, images, 1), explain(model, images, 1))


# --- threads -------------------------------------------------------------------------------------------------------


def in_threads(jobs: list[Callable[[], Any]]) -> list[list[Any]]:
    """Each job many times, all at the same time."""
    barrier = threading.Barrier(len(jobs))

    def repeat(job: Callable[[], Any]) -> list[Any]:
        torch.set_num_threads(1)
        barrier.wait()
        return [job() for _ in range(ROUNDS)]

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(repeat, jobs))


def assert_same_maps(jobs: list[Callable[[], dict[str, Tensor]]]) -> None:
    alone = [job() for job in jobs]
    for expected, results in zip(alone, in_threads(jobs), strict=True):
        assert len(results) == ROUNDS
        for maps in results:
            assert maps.keys() == expected.keys()
            for name, heatmap in maps.items():
                torch.testing.assert_close(heatmap, expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("rules", [("epsilon", "zplus"), ("gradient", "gamma"), ("zplus", "zplus")], ids="-".join)
def test_two_models_in_two_threads(rules: tuple[str, str], create_graph: bool) -> None:
    def job(seed: int, rule: str) -> Callable[[], dict[str, Tensor]]:
        model, images = residual(seed=seed), pictures(seed=seed)
        return lambda: explain(model, images, seed, rule=rule, box=BOX, layers=["pool"], create_graph=create_graph)

    assert_same_maps([job(1, rules[0]), job(2, rules[1])])


@pytest.mark.parametrize("create_graph", [False, True])
def test_one_model_in_two_threads(create_graph: bool) -> None:
    """Other images, other rules, other layers at the same time."""
    model = residual()

    def job(seed: int, rule: str, layers: list[str]) -> Callable[[], dict[str, Tensor]]:
        images = pictures(seed=seed)
        return lambda: explain(model, images, rule=rule, layers=layers, create_graph=create_graph)

    assert_same_maps([job(1, "epsilon", ["pool", "bn1"]), job(2, "zplus", ["bn2", "pool"])])
    assert all(not module._forward_hooks for module in model.modules())


def test_an_ordinary_forward_in_another_thread() -> None:
    """In the middle of a traced forward pass: it is neither captured nor disturbed."""
    traced = threading.current_thread()
    answers: list[Tensor] = []

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = m.layer(x)
        if threading.current_thread() is traced and m.meddling:
            with ThreadPoolExecutor(1) as pool:
                answers.append(pool.submit(torch.no_grad()(model), images).result())
        return m.fc(torch.relu(hidden))

    model, images = randomised(Net(forward, layer=nn.Linear(5, 6), fc=nn.Linear(6, 3))), pictures(2, 5)
    model.meddling = False
    expected, logits = explain(model, images, layers=["layer"]), model(images).detach()
    model.meddling = True
    maps = explain(model, images, layers=["layer"])
    assert len(answers) == 1 and torch.equal(answers[0], logits)
    assert torch.equal(maps["layer"], expected["layer"]) and torch.equal(maps["input"], expected["input"])


def meddling_with(action: Callable[[], None]) -> nn.Module:
    """A network that runs `action` in the middle of its backward pass."""

    class Meddler(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                action()
            return grad

    return randomised(
        Net(lambda m, x: m.fc(Meddler.apply(torch.relu(m.hid(x)))), hid=nn.Linear(5, 6), fc=nn.Linear(6, 3))
    )


@pytest.mark.filterwarnings("ignore::fasterisnet.errors.RuleWarning")
def test_rules_are_active_in_their_own_graph_only() -> None:
    """While one network is in its relevance pass, another takes an ordinary step and is explained."""
    model, images = residual(), pictures()

    def step() -> list[Tensor]:
        grads = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
        return [*grads, explain(model, images, 1, rule="zplus")]

    alone, inside = step(), []
    explain(meddling_with(lambda: inside.append(step())), pictures(2, 5), 1)
    assert len(inside) == 1
    assert all(torch.equal(a, b) for a, b in zip(alone, inside[0], strict=True))


def test_training_through_maps_in_two_threads() -> None:
    """`backward` of one thread while the other is in its relevance pass: the rules of one never reach the other."""

    def job(seed: int) -> Callable[[], dict[str, Tensor]]:
        model, images = residual(seed=seed), pictures(seed=seed)

        def gradients() -> dict[str, Tensor]:
            loss = explain(model, images, seed, create_graph=True).square().sum()
            names, parameters = zip(*model.named_parameters(), strict=True)
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
            return {n: g for n, g in zip(names, grads, strict=True) if g is not None}

        return gradients

    assert_same_maps([job(1), job(2)])
