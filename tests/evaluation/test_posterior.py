"""The posterior of a confusion matrix: against a Markov chain, and where its answer is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from evaluation.mcmc_reference import CONFUSION
from fasterisnet.errors import InputError
from fasterisnet.evaluation import posterior as module
from fasterisnet.evaluation.intervals import highest_density
from fasterisnet.evaluation.posterior import MEASURES, posterior

# Mean, sd and 95 % highest-density interval by mcmc_reference.py (256 chains of 20,000 steps, the first 2,000 dropped,
# every tenth kept; accepted 0.49; the means' own errors are 0.00015 or less).
REFERENCE = {
    "precision 0": (0.88013, 0.04229, 0.7961, 0.9565),
    "precision 1": (0.80487, 0.05509, 0.6953, 0.9070),
    "precision 2": (0.75322, 0.06722, 0.6188, 0.8777),
    "recall 0": (0.87933, 0.04235, 0.7958, 0.9563),
    "recall 1": (0.77355, 0.05693, 0.6609, 0.8808),
    "recall 2": (0.79501, 0.06379, 0.6682, 0.9123),
    "specificity 0": (0.92383, 0.02750, 0.8696, 0.9734),
    "specificity 1": (0.89726, 0.03058, 0.8362, 0.9531),
    "specificity 2": (0.90997, 0.02701, 0.8564, 0.9595),
    "f1 0": (0.87883, 0.03214, 0.8149, 0.9380),
    "f1 1": (0.78730, 0.04421, 0.6997, 0.8709),
    "f1 2": (0.77135, 0.05226, 0.6679, 0.8696),
    "accuracy": (0.82020, 0.03127, 0.7571, 0.8789),
}


def test_agrees_with_a_markov_chain_to_monte_carlo_error() -> None:
    found = posterior(CONFUSION)
    assert found.draws == 100_000
    for name, (mean, sd, low, high) in REFERENCE.items():
        measure, _, number = name.partition(" ")
        estimate = found.per_class[int(number)][measure] if number else found.accuracy
        assert estimate.mean == pytest.approx(mean, abs=6e-4), name  # 100,000 draws: sd / 316
        assert estimate.sd == pytest.approx(sd, rel=0.02), name
        assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=0.1 * sd), name


def test_the_mean_of_the_recall_is_the_one_of_textbooks() -> None:
    """Recall is a Beta variable: (k + 1) / (n + classes), with its variance."""
    found = posterior(CONFUSION)
    for row, (k, n) in enumerate([(50, 55), (40, 50), (30, 36)]):
        a, b = k + 1, n - k + 2
        recall = found.per_class[row]["recall"]
        assert recall.mean == pytest.approx(a / (a + b), abs=6e-4)
        assert recall.sd == pytest.approx((a * b / (a + b) ** 2 / (a + b + 1)) ** 0.5, rel=0.01)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_values_are_those_of_the_counts(classes: int) -> None:
    counts = torch.randint(1, 40, (classes, classes), generator=torch.Generator().manual_seed(classes))
    truth, predicted = np.divmod(np.repeat(np.arange(classes * classes), counts.flatten()), classes)
    found = posterior(counts, draws=1000)
    precision, recall, f1, _ = sk.precision_recall_fscore_support(truth, predicted)
    for c in range(classes):
        specificity = sk.recall_score(truth != c, predicted != c)
        wanted = (precision[c], recall[c], specificity, f1[c])
        assert [found.per_class[c][m].value for m in MEASURES] == pytest.approx(wanted)
    assert found.accuracy.value == pytest.approx(sk.accuracy_score(truth, predicted))
    assert found.macro["f1"].value == pytest.approx(sk.f1_score(truth, predicted, average="macro"))


def test_much_data_leaves_little_doubt_and_no_data_all_of_it() -> None:
    sure = posterior([[90_000, 10_000], [20_000, 80_000]], draws=20_000)
    assert sure.accuracy.mean == pytest.approx(0.85, abs=1e-3)
    assert sure.accuracy.high - sure.accuracy.low < 0.005
    assert sure.per_class[0]["precision"].mean == pytest.approx(9 / 11, abs=1e-3)
    nothing = posterior([[0, 0], [0, 0]], draws=20_000)
    assert nothing.accuracy.value is None and nothing.per_class[0]["precision"].value is None
    recall = nothing.per_class[0]["recall"]
    assert recall.mean == pytest.approx(0.5, abs=0.01) and recall.high - recall.low > 0.9


def test_a_class_never_answered_has_no_precision_but_a_posterior() -> None:
    found = posterior([[10, 0], [5, 0]], draws=5000)
    assert found.per_class[1]["precision"].value is None
    assert 0 < found.per_class[1]["precision"].mean < 1
    assert found.per_class[1]["recall"].value == 0


def test_parts_of_the_draws_are_drawn_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limited memory changes which numbers are drawn, not what they say."""
    monkeypatch.setattr(module, "AT_ONCE", 1000)
    found = posterior(CONFUSION, draws=50_000)
    assert found.accuracy.mean == pytest.approx(REFERENCE["accuracy"][0], abs=1e-3)
    assert found.macro["f1"].sd == pytest.approx(posterior(CONFUSION).macro["f1"].sd, rel=0.05)


def test_the_same_seed_the_same_numbers() -> None:
    assert posterior(CONFUSION, draws=2000) == posterior(CONFUSION, draws=2000)
    assert posterior(CONFUSION, draws=2000) != posterior(CONFUSION, draws=2000, seed=1)


def test_highest_density_interval_of_a_lopsided_distribution() -> None:
    """Of an exponential distribution it begins at 0 and ends where 5 % are left."""
    low, high = highest_density(np.random.default_rng(0).exponential(size=200_000))
    assert low == pytest.approx(0, abs=0.01) and high == pytest.approx(-np.log(0.05), abs=0.05)


@pytest.mark.parametrize("wrong", [[[1, 2, 3], [4, 5, 6]], [[3]], [[1, -1], [0, 2]], [[1, float("nan")], [0, 2]]])
def test_refusals(wrong: list[list[int]]) -> None:
    with pytest.raises(InputError, match="confusion matrix"):
        posterior(wrong)
