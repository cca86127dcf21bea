"""Shares, means, comparisons and calibration: against scipy, scikit-learn, and data whose answer is known."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy import stats

from fasterisnet.errors import InputError
from fasterisnet.evaluation.comparison import compare, compare_seeds, mcnemar
from fasterisnet.evaluation.intervals import Estimate, as_json, average, difference, ratio, share
from fasterisnet.evaluation.reliability import reliability


def given(estimate: Estimate | None) -> Estimate:
    assert estimate is not None
    return estimate


def test_a_share_has_the_posterior_of_a_flat_prior() -> None:
    found = given(share([True] * 7 + [False] * 13))
    wanted = stats.beta(8, 14)
    assert found.value == 0.35 and found.mean == pytest.approx(8 / 22) and found.sd == pytest.approx(wanted.std())
    assert wanted.cdf(found.high) - wanted.cdf(found.low) == pytest.approx(0.95, abs=1e-6)
    assert wanted.pdf(found.low) == pytest.approx(wanted.pdf(found.high), rel=0.02)


def test_a_share_of_none_or_all_has_an_end_and_a_rest_of_doubt() -> None:
    none, every = given(share([False] * 60)), given(share([True] * 60))
    assert none.low == 0 and none.high == pytest.approx(1 - 0.05 ** (1 / 61), abs=1e-6)
    assert every.high == 1 and every.low == pytest.approx(1 - none.high, abs=1e-6)
    assert share([]) is None


def test_a_share_counts_groups_that_agree_once() -> None:
    alone = given(share([True] * 6 + [False] * 4))
    copies = [name for name in range(10) for _ in range(20)]
    hits = [True] * 120 + [False] * 80
    together = given(share(hits, copies))
    assert together.sd == pytest.approx(alone.sd, rel=0.1)
    assert given(share(hits)).sd < 0.4 * together.sd
    assert given(share([True] * 100, [i // 10 for i in range(100)])) == given(share([True] * 10))
    assert given(share(hits, [None] * 200)) == given(share(hits))  # no group: a sample on its own


def test_an_average_has_about_the_interval_of_the_normal_distribution() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1
    found = given(average(torch.cat([values, torch.tensor([torch.nan], dtype=torch.float64)])))
    assert found.value == pytest.approx(float(values.mean()))
    assert found.high - found.low == pytest.approx(2 * 1.96 * float(values.std()) / 20, rel=0.1)
    assert average([float("nan")]) is None
    assert ratio(values, torch.zeros_like(values)) is None
    assert given(ratio(values, 2 * torch.ones_like(values))).value == pytest.approx(float(values.mean()) / 2)
    assert given(average([0.0] * 9))[:5] == (0, 0, 0, 0, 0)


def test_an_average_over_groups_resamples_them_as_wholes() -> None:
    values = torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alone = given(average(values))
    together = given(average(values.repeat_interleave(8), [i // 8 for i in range(240)]))
    assert together.value == pytest.approx(alone.value) and together.sd == pytest.approx(alone.sd, rel=0.1)


def test_a_difference_of_nothing_is_not_known_to_be_nothing() -> None:
    same = torch.tensor([1.0, 0.0] * 10)
    found = given(difference(same, same))
    assert found.value == 0 and -0.2 < found.low < -0.05 and 0.05 < found.high < 0.2
    grouped = given(difference(same.repeat(5), same.repeat(5), [i // 5 for i in range(100)]))
    assert (grouped.low, grouped.high) == pytest.approx((found.low, found.high), abs=0.01)
    unknown = torch.tensor([torch.nan])
    assert difference(unknown, unknown) is None
    more = given(difference(torch.tensor([1.0] * 30 + [0.0] * 70), torch.tensor([0.0] * 90 + [1.0] * 10)))
    assert more.value == pytest.approx(0.2) and 0.05 < more.low < 0.2 < more.high < 0.35


@pytest.mark.parametrize(("a", "b"), [(0, 0), (5, 0), (10, 2), (7, 7), (40, 61), (900, 1000)])
def test_mcnemar_is_the_binomial_test(a: int, b: int) -> None:
    wanted = stats.binomtest(a, a + b).pvalue if a + b else 1.0
    assert mcnemar(a, b) == pytest.approx(wanted, rel=1e-9) and mcnemar(b, a) == mcnemar(a, b)


def test_two_classifiers_on_the_same_samples() -> None:
    """Right both 70, first alone 20, second alone 5, none 5."""
    first = torch.tensor([1] * 70 + [1] * 20 + [0] * 5 + [0] * 5)
    second = torch.tensor([1] * 70 + [0] * 20 + [1] * 5 + [0] * 5)
    found = compare(first, second)
    assert (found.only_first, found.only_second, found.p) == (20, 5, mcnemar(20, 5))
    assert found.difference.value == 0.15 and 0.05 < found.difference.low < 0.15 < found.difference.high < 0.25
    assert found.probability == pytest.approx(stats.beta(21, 6).sf(0.5), abs=1e-9)
    back = compare(second, first)
    assert back.probability == pytest.approx(1 - found.probability, abs=1e-9) and back.difference.value == -0.15
    assert compare(first, first).probability == pytest.approx(0.5)


def test_groups_take_confidence_from_a_comparison() -> None:
    first, second = torch.tensor([1, 1, 1, 0, 1, 1]), torch.tensor([0, 1, 1, 1, 1, 0])
    alone = compare(first.repeat(20), second.repeat(20))
    grouped = compare(first.repeat(20), second.repeat(20), [i % 6 for i in range(120)])
    assert grouped.difference.value == pytest.approx(alone.difference.value)
    assert 0.5 < grouped.probability < alone.probability
    assert compare(first, first, list(range(6))).probability == 0.5


def test_across_seeds() -> None:
    a, b = [0.91, 0.93, 0.95, 0.92], [0.90, 0.90, 0.91, 0.92]
    found = compare_seeds(a, b)
    assert found is not None
    wanted = stats.ttest_rel(a, b)
    assert found.difference.value == pytest.approx(0.02)
    interval = wanted.confidence_interval()
    assert (found.difference.low, found.difference.high) == pytest.approx((interval.low, interval.high))
    assert 2 * (1 - found.probability) == pytest.approx(wanted.pvalue)
    assert compare_seeds([0.9], [0.8]) is None
    with pytest.raises(InputError, match="same seeds"):
        compare_seeds([0.9], [])


def test_calibration_error() -> None:
    """Certain of 90 % and right in 60 %: an error of 0.3; of 50 % and right in half: none. Half of each."""
    certainty = torch.tensor([0.9] * 50 + [0.5] * 50)
    right = torch.tensor([1] * 30 + [0] * 20 + [1] * 25 + [0] * 25)
    found = reliability(certainty, right)
    assert found.error.value == pytest.approx(0.15)
    assert [(b.samples, b.right.value) for b in found.curve] == [(50, 0.5), (50, 0.6)]
    assert [b.certainty for b in found.curve] == pytest.approx([0.5, 0.9])
    assert found.error.low < 0.15 < found.error.high


def test_calibration_error_is_the_one_of_torchmetrics() -> None:
    from torchmetrics.functional.classification import binary_calibration_error

    generator = np.random.default_rng(0)
    certainty = torch.from_numpy(generator.random(500))
    right = torch.from_numpy(generator.random(500) < 0.6)
    wanted = binary_calibration_error(certainty, right.long(), n_bins=15, norm="l1")
    assert reliability(certainty, right).error.value == pytest.approx(float(wanted), abs=1e-6)


def test_as_json() -> None:
    content = {"a": [Estimate(None, 1.0, float("nan"), 0.0, 1.0)], 3: (1, "x", None, True)}
    text = json.dumps(as_json(content), allow_nan=False)
    assert json.loads(text) == {
        "a": [{"value": None, "mean": 1.0, "sd": None, "low": 0.0, "high": 1.0}], "3": [1, "x", None, True]
    }  # fmt: skip


def test_refusals() -> None:
    with pytest.raises(InputError, match="2 groups for 3"):
        share([True, False, True], ["a", "b"])
    with pytest.raises(InputError, match="same samples"):
        compare(torch.ones(3), torch.ones(4))
    with pytest.raises(InputError, match="one a sample"):
        reliability(torch.rand(3), torch.ones(4))
