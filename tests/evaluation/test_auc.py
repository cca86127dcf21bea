"""DeLong's intervals: published examples, and the definition by loops; the macro AUC: scikit-learn."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from fasterisnet.errors import InputError
from fasterisnet.evaluation import auc
from fasterisnet.evaluation.auc import delong, delong_difference, macro_auc
from fasterisnet.evaluation.intervals import bootstrap
from fasterisnet.evaluation.metrics import one_versus_one_auc

# The example of DeLong, DeLong and Clarke-Pearson (1988), as in the SAS manual (PROC LOGISTIC, comparing ROC curves):
# albumin, total protein, K-G score, and whether surgery helped.
PATIENTS = """
3.0 5.8 10 0  3.2 6.3 5 1  3.9 6.8 3 1  2.8 4.8 6 0  3.2 5.8 3 1  0.9 4.0 5 0  2.5 5.7 8 0  1.6 5.6 5 1  3.8 5.7 5 1
3.7 6.7 6 1  3.2 5.4 4 1  3.8 6.6 6 1  4.1 6.6 5 1  3.6 5.7 5 1  4.3 7.0 4 1  3.6 6.7 4 0  2.3 4.4 6 1  4.2 7.6 4 0
4.0 6.6 6 0  3.5 5.8 6 1  3.8 6.8 7 1  3.0 4.7 8 0  4.5 7.4 5 1  3.7 7.4 5 1  3.1 6.6 6 1  4.1 8.2 6 1  4.3 7.0 5 1
4.3 6.5 4 1  3.2 5.1 5 1  2.6 4.7 6 1  3.3 6.8 6 0  1.7 4.0 7 0  3.7 6.1 5 1  3.3 6.3 7 1  4.2 7.7 6 1  3.5 6.2 5 1
2.9 5.7 9 0  2.1 4.8 7 1  2.8 6.2 8 0  4.0 7.0 7 1  3.3 5.7 6 1  3.7 6.9 5 1  3.6 6.6 5 1
"""


def patients() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    table = torch.tensor([float(word) for word in PATIENTS.split()], dtype=torch.float64).view(-1, 4)
    return table[:, 0], table[:, 1], 10 - table[:, 2], table[:, 3]


def test_the_example_of_the_authors() -> None:
    _, protein, score, helped = patients()
    found = delong(score, helped)
    assert found.value == pytest.approx(0.7258, abs=5e-5) and found.sd == pytest.approx(0.1028, abs=5e-5)
    assert (found.low, found.high) == pytest.approx((0.5243, 0.9273), abs=5e-5)
    found = delong(protein, helped)
    assert (found.value, found.sd, found.low, found.high) == pytest.approx((0.6478, 0.1000, 0.4518, 0.8439), abs=6e-5)
    difference = delong_difference(protein, score, helped)  # no published figure: placement values by brute force
    assert (difference.estimate.value, difference.estimate.sd) == pytest.approx((-0.0780, 0.1046), abs=5e-5)
    assert difference.p == pytest.approx(0.4561, abs=5e-5)


def test_the_example_of_pROC() -> None:
    """Grades 1 to 5 of 72 patients with a good and 41 with a poor outcome (Turck et al. 2010): 0.7485-0.8988."""
    grades = torch.arange(1, 6)
    good = grades.repeat_interleave(torch.tensor([37, 20, 3, 8, 4]))
    poor = grades.repeat_interleave(torch.tensor([2, 12, 1, 8, 18]))
    found = delong(torch.cat([good, poor]), torch.cat([torch.zeros(72), torch.ones(41)]))
    assert (found.value, found.low, found.high) == pytest.approx((0.8237, 0.7485, 0.8988), abs=5e-5)


def by_loops(scores: Tensor, truth: Tensor) -> tuple[list[float], list[float]]:
    """Placements as they are defined."""
    positive, negative = scores[truth > 0.5].tolist(), scores[truth < 0.5].tolist()
    beats = [[(p > n) + 0.5 * (p == n) for n in negative] for p in positive]
    of_positive = [sum(row) / len(negative) for row in beats]
    return of_positive, [sum(column) / len(positive) for column in zip(*beats, strict=True)]


@pytest.mark.parametrize("digits", [0, 1, 8])
def test_against_the_definition(digits: int) -> None:
    generator = torch.Generator().manual_seed(digits)
    truth = (torch.rand(60, generator=generator) < 0.4).double()
    a = (torch.randn(60, generator=generator, dtype=torch.float64) + truth).round(decimals=digits)
    b = (torch.randn(60, generator=generator, dtype=torch.float64) + a).round(decimals=digits)

    def variance(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values)

    (a_positive, a_negative), (b_positive, b_negative) = by_loops(a, truth), by_loops(b, truth)
    found = delong(a, truth)
    assert found.value == pytest.approx(roc_auc_score(truth, a), abs=1e-12)
    assert found.sd**2 == pytest.approx(variance(a_positive) + variance(a_negative), rel=1e-10)
    positive = [x - y for x, y in zip(a_positive, b_positive, strict=True)]
    negative = [x - y for x, y in zip(a_negative, b_negative, strict=True)]
    difference = delong_difference(a, b, truth).estimate
    assert difference.sd**2 == pytest.approx(variance(positive) + variance(negative), rel=1e-10)
    assert difference.value == pytest.approx(roc_auc_score(truth, a) - roc_auc_score(truth, b), abs=1e-12)


def test_equal_scores_do_not_differ() -> None:
    _, protein, _, helped = patients()
    assert delong_difference(protein, protein, helped).p == 1
    assert delong_difference(protein, protein, helped).estimate.value == 0


def test_macro_auc_is_scikit_learns_and_lies_in_its_interval() -> None:
    generator = torch.Generator().manual_seed(3)
    truth = torch.randint(4, (200,), generator=generator)
    logits = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    logits[torch.arange(200), truth] += 1
    found = macro_auc(logits, truth, draws=200)
    wanted = roc_auc_score(truth, logits.softmax(1), multi_class="ovo", average="macro")
    assert found.value == pytest.approx(wanted, abs=1e-12)
    assert found.low < wanted < found.high and 0.005 < found.sd < 0.05


@pytest.mark.parametrize("at_once", [1, 100, 10**6])
def test_macro_auc_resamples_all_at_once_what_could_be_done_one_by_one(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ties, a class that is rare and one that is not there."""
    monkeypatch.setattr(auc, "AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(5)
    truth = torch.randint(3, (40,), generator=generator)
    truth[truth == 2] = 0
    truth[0] = 2
    logits = torch.randn(40, 4, generator=generator, dtype=torch.float64).round(decimals=0)
    groups = [i // 2 for i in range(40)]
    wanted = bootstrap(lambda i: float(one_versus_one_auc(logits[i], truth[i])), 40, groups, draws=30, seed=2)
    found = macro_auc(logits, truth, groups, draws=30, seed=2)
    assert found == pytest.approx(tuple(wanted), abs=1e-12)


def test_groups_are_resampled_as_wholes() -> None:
    """Every sample ten times, as ten pictures of one patient: known by their groups they make nothing surer."""
    generator = torch.Generator().manual_seed(4)
    truth = torch.randint(2, (40,), generator=generator)
    logits = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    logits[torch.arange(40), truth] += 0.5
    once = macro_auc(logits, truth, draws=300)
    patients = [f"patient {i}" for i in range(40) for _ in range(10)]
    many = macro_auc(logits.repeat_interleave(10, 0), truth.repeat_interleave(10), patients, draws=300)
    naive = macro_auc(logits.repeat_interleave(10, 0), truth.repeat_interleave(10), draws=300)
    assert many.value == pytest.approx(once.value) and many.sd == pytest.approx(once.sd, rel=0.2)
    assert naive.sd < 0.5 * many.sd


def test_refusals() -> None:
    with pytest.raises(InputError, match="both kinds"):
        delong(torch.rand(4), torch.ones(4))
    with pytest.raises(InputError, match="3 scores for 4"):
        delong(torch.rand(3), torch.tensor([0, 1, 0, 1]))
