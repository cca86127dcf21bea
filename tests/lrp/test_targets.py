"""Every target by hand, at its limits, and as an object."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasterisnet import explain
from fasterisnet.errors import FasterISNetError
from fasterisnet.lrp import targets
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
from lrp.helpers import Net, pictures, randomised
from lrp.small_nets import RULES

LOGITS = torch.tensor([[0.5, -1.0, 2.0], [3.0, 1.0, -0.25]], dtype=torch.float64)
MU = 0.01


def softmax(row: list[float], c: int) -> float:
    return math.exp(row[c]) / sum(math.exp(z) for z in row)


def log_odds(p: float, mu: float = MU) -> float:
    return math.log(p + mu) - math.log(1 - p + mu)


def same(actual: Tensor, expected: list[Any]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), rtol=1e-12, atol=1e-14)


ROWS = LOGITS.tolist()
VALUES: dict[str, tuple[Callable[[Tensor], Tensor], list[Any]]] = {
    "one class": (Logit(1), [-1.0, 1.0]),
    "a class each": (Logit(torch.tensor([2, 0])), [2.0, 3.0]),
    "32 bits": (Logit(torch.tensor([2, 0], dtype=torch.int32)), [2.0, 3.0]),
    "class in a tensor": (Logit(torch.tensor(1)), [-1.0, 1.0]),
    "joint": (Joint(), [1.5, 3.75]),
    "highest": (Highest(), [2.0, 3.0]),
    "lowest": (Lowest(), [-1.0, -0.25]),
    "probability": (Probability(0), [softmax(row, 0) for row in ROWS]),
    "probabilities": (Probability(torch.tensor([2, 1])), [softmax(ROWS[0], 2), softmax(ROWS[1], 1)]),
    "eta": (Eta(0), [log_odds(softmax(row, 0)) for row in ROWS]),
    "etas": (Eta(torch.tensor([2, 1])), [log_odds(softmax(ROWS[0], 2)), log_odds(softmax(ROWS[1], 1))]),
    "eta, other mu": (Eta(0, mu=0.3), [log_odds(softmax(row, 0), 0.3) for row in ROWS]),
    "eta, no mu": (Eta(1, mu=0), [log_odds(softmax(row, 1), 0) for row in ROWS]),
    "eta of lowest": (EtaOfLowest(), [log_odds(softmax(ROWS[0], 1)), log_odds(softmax(ROWS[1], 2))]),
    "eta of lowest, other mu": (EtaOfLowest(0.1), [log_odds(softmax(row, row.index(min(row))), 0.1) for row in ROWS]),
    "all": (AllLogits(), ROWS),
}


@pytest.mark.parametrize("name", VALUES)
def test_value_by_hand(name: str) -> None:
    target, expected = VALUES[name]
    same(target(LOGITS), expected)


@pytest.mark.parametrize("name", VALUES)
def test_derivative(name: str) -> None:
    target, _ = VALUES[name]
    assert torch.autograd.gradcheck(target, LOGITS.clone().requires_grad_())


@pytest.mark.parametrize("target", [value[0] for name, value in VALUES.items() if name != "all"], ids=str)
def test_every_sample_counts_for_itself(target: Callable[[Tensor], Tensor]) -> None:
    """One number a sample, which depends on the logits of that sample only."""
    logits = LOGITS.clone().requires_grad_()
    scores = target(logits)
    assert scores.shape == (2,)
    (gradient,) = torch.autograd.grad(scores[0], logits)
    assert torch.equal(gradient[1], torch.zeros(3, dtype=torch.float64))
    assert gradient[0].abs().max() > 0


# --- eta at its limits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mu", [MU, 1e-6, 0.0])
@pytest.mark.parametrize("size", [1.0, 30.0, 200.0, 1e4])
def test_eta_is_finite(size: float, mu: float, dtype: torch.dtype) -> None:
    """Also where a probability is exactly 0 or 1 in floating point: value and gradient."""
    rows = [[size, -size, 0.0], [-size, size, size], [size, size, size], [-size, -size, size], [size, -size, -size]]
    for c in range(3):
        logits = torch.tensor(rows, dtype=dtype, requires_grad=True)
        scores = Eta(c, mu=mu)(logits)
        (gradient,) = torch.autograd.grad(scores.sum(), logits)
        assert scores.isfinite().all() and gradient.isfinite().all()
        if mu > 0:
            assert scores.abs().max() <= math.log((1 + mu) / mu) * (1 + 1e-6)


def test_eta_at_certainty() -> None:
    """P = 1 and P = 0 give plus and minus ln((1 + mu)/mu)."""
    logits = torch.tensor([[1e4, -1e4], [-1e4, 1e4]], dtype=torch.float64)
    bound = math.log((1 + MU) / MU)
    same(Eta(0)(logits), [bound, -bound])
    same(Eta(1)(logits), [-bound, bound])


def test_eta_without_mu_is_the_logit_against_all_others() -> None:
    """`z_c - ln sum exp(z_others)`, exact where probabilities would have been rounded to 0 and 1."""
    logits = torch.tensor([[1e4, 0.0, 0.0], [-1e4, 5.0, 5.0]], dtype=torch.float64, requires_grad=True)
    scores = Eta(0, mu=0.0)(logits)
    same(scores.detach(), [1e4 - math.log(2), -1e4 - 5 - math.log(2)])
    (gradient,) = torch.autograd.grad(scores.sum(), logits)
    same(gradient, [[1.0, -0.5, -0.5], [1.0, -0.5, -0.5]])


def test_eta_keeps_small_probabilities() -> None:
    """In single precision 1 - P would lose what the smallest mu still shows."""
    logits = torch.tensor([[20.0, 0.0]])
    exact = log_odds(1 / (1 + math.exp(-20.0)), 1e-12)
    assert Eta(0, mu=1e-12)(logits).item() == pytest.approx(exact, rel=1e-5)
    assert Eta(1, mu=1e-12)(logits).item() == pytest.approx(-exact, rel=1e-5)


def test_eta_of_lowest_is_eta_of_that_class() -> None:
    lowest = LOGITS.argmin(1)
    assert torch.equal(EtaOfLowest(0.02)(LOGITS), Eta(lowest, 0.02)(LOGITS))


# --- one logit, ties -----------------------------------------------------------------------------------------------


def test_one_logit() -> None:
    """A binary model: its probability is the sigmoid, its eta is bounded in the same way."""
    logits = torch.tensor([[0.7], [-2.0]], dtype=torch.float64)
    p = [1 / (1 + math.exp(-z)) for z in (0.7, -2.0)]
    for target in (Highest(), Lowest(), Joint(), Logit(0)):
        same(target(logits), [0.7, -2.0])
    same(Probability(0)(logits), p)
    same(Eta(0)(logits), [log_odds(q) for q in p])
    same(EtaOfLowest()(logits), [log_odds(q) for q in p])
    same(Eta(0, mu=0)(logits), [0.7, -2.0])
    same(AllLogits()(logits), [[0.7], [-2.0]])


@pytest.mark.parametrize("target", [Eta(0), Eta(0, mu=0.0), EtaOfLowest(), Probability(0)], ids=str)
def test_one_logit_at_its_limits(target: Callable[[Tensor], Tensor]) -> None:
    logits = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    scores = target(logits)
    (gradient,) = torch.autograd.grad(scores.sum(), logits)
    assert scores.isfinite().all() and gradient.isfinite().all()
    assert scores[0] > scores[2] > scores[1]


@pytest.mark.parametrize("rule", RULES)
def test_maps_of_a_model_with_one_logit(rule: str) -> None:
    model = randomised(Net(lambda m, x: m.fc(torch.relu(m.hidden(x))), hidden=nn.Linear(5, 8), fc=nn.Linear(8, 1)))
    images = pictures(3, 5)
    logit = explain(model, images, 0, rule=rule)
    assert logit.abs().max() > 0
    for target in (None, Highest(), Lowest(), Joint()):
        assert torch.equal(explain(model, images, target, rule=rule), logit)
    assert torch.equal(explain(model, images, AllLogits(), rule=rule), logit[:, None])
    p = model(images).detach().sigmoid()
    slope = p * (1 - p)
    eta = slope / (p + MU) + slope / (1 - p + MU)
    torch.testing.assert_close(explain(model, images, Probability(0), rule=rule), logit * slope, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(explain(model, images, Eta(0), rule=rule), logit * eta, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("target", [Highest(), Lowest()], ids=str)
def test_ties_explain_one_logit(target: Callable[[Tensor], Tensor]) -> None:
    logits = torch.full((2, 4), 0.3, dtype=torch.float64, requires_grad=True)
    scores = target(logits)
    same(scores.detach(), [0.3, 0.3])
    (gradient,) = torch.autograd.grad(scores.sum(), logits)
    assert gradient.sum(1).tolist() == [1.0, 1.0]
    assert (gradient != 0).sum(1).tolist() == [1, 1]


def test_ties_of_eta_of_lowest() -> None:
    logits = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    scores = EtaOfLowest()(logits)
    same(scores.detach(), [log_odds(0.25)])
    (gradient,) = torch.autograd.grad(scores.sum(), logits)
    assert (gradient > 0).sum() == 1 and (gradient < 0).sum() == 3


# --- what explain makes of a target --------------------------------------------------------------------------------


@pytest.fixture
def linear() -> nn.Module:
    return randomised(nn.Linear(5, 3, bias=False))


def test_none_is_the_highest_logit(linear: nn.Module) -> None:
    images = pictures(4, 5)
    assert torch.equal(explain(linear, images), explain(linear, images, Highest()))
    assert torch.equal(explain(linear, images), explain(linear, images, linear(images).argmax(1)))


def test_classes_as_integer_tensor_and_logit(linear: nn.Module) -> None:
    images = pictures(4, 5)
    by_hand = images * linear.weight[2].detach()
    for target in (2, torch.tensor(2), torch.full((4,), 2), torch.full((4,), 2, dtype=torch.uint8), Logit(2)):
        torch.testing.assert_close(explain(linear, images, target), by_hand)


def test_any_callable_is_a_target(linear: nn.Module) -> None:
    images = pictures(4, 5)
    difference = explain(linear, images, lambda z: z[:, 0] - z[:, 1])
    torch.testing.assert_close(difference, explain(linear, images, 0) - explain(linear, images, 1))


def test_joint_is_the_sum_of_all_logits(linear: nn.Module) -> None:
    images = pictures(4, 5)
    every = explain(linear, images, AllLogits())
    assert every.shape == (4, 3, 5)
    torch.testing.assert_close(explain(linear, images, Joint()), every.sum(1))


# --- targets as objects --------------------------------------------------------------------------------------------

OBJECTS = [
    Logit(1), Logit(torch.tensor([0, 2])), Joint(), Highest(), Lowest(),
    Probability(1), Probability(torch.tensor([1, 1])),
    Eta(0), Eta(0, mu=0.1), Eta(torch.tensor([0, 1])), EtaOfLowest(), EtaOfLowest(0.5), AllLogits(),
]  # fmt: skip


@pytest.mark.parametrize("target", OBJECTS, ids=str)
def test_targets_are_pickled_copied_and_compared(target: Any) -> None:
    for other in (pickle.loads(pickle.dumps(target)), copy.deepcopy(target)):
        assert type(other) is type(target)
        assert torch.equal(other(LOGITS), target(LOGITS))
        assert (other == target) is True
        assert hash(other) == hash(target)


def test_different_targets_are_not_equal() -> None:
    for n, first in enumerate(OBJECTS):
        for second in OBJECTS[n + 1 :]:
            assert (first == second) is False, (first, second)
    assert (Logit(torch.tensor([0, 2])) == Logit(torch.tensor([0, 1]))) is False
    assert (Logit(torch.tensor([0, 2])) == Logit(torch.tensor([0, 2, 1]))) is False
    assert Logit(1) != "Logit(1)"


def test_targets_are_shown_with_their_settings() -> None:
    assert repr(Eta(3, mu=0.1)) == "Eta(classes=3, mu=0.1)"
    assert "Joint" in repr(Joint())


def test_targets_are_in_the_package() -> None:
    import fasterisnet

    assert all(getattr(fasterisnet.targets, name) is getattr(targets, name) for name in fasterisnet.targets.__all__)


@pytest.mark.parametrize("kind", [Logit, Probability, Eta])
@pytest.mark.parametrize(
    "classes", [3, -1, torch.tensor([0, 3]), torch.tensor([0, 1, 2]), torch.tensor([0.0, 1.0]), True]
)
def test_wrong_classes_are_refused(kind: Callable[[Any], Any], classes: Any) -> None:
    with pytest.raises(FasterISNetError):
        kind(classes)(LOGITS)


@pytest.mark.parametrize("make", [lambda mu: Eta(0, mu=mu), lambda mu: EtaOfLowest(mu)], ids=["Eta", "EtaOfLowest"])
@pytest.mark.parametrize("mu", [-0.01, math.nan, math.inf])
def test_a_wrong_mu_is_refused(mu: float, make: Callable[[float], Any]) -> None:
    with pytest.raises(FasterISNetError, match="mu"):
        make(mu)(LOGITS)
