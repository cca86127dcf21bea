"""Draws of the Stochastic ISNet in odd corners; their frequencies are in test_draws.py."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

import fasterisnet as fi

DRAWS = 100_000


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_ties_still_have_one_highest(classes: int) -> None:
    """Equal logits: `argmax` names one, which is drawn half of the time; the rest share the other half."""
    logits = torch.zeros(DRAWS, classes)
    counts = fi.Stochastic(generator=torch.Generator().manual_seed(classes)).draw(logits).bincount(minlength=classes)
    expected = torch.full((classes,), DRAWS / 2 / (classes - 1))
    expected[int(logits[0].argmax())] = DRAWS / 2
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3


def test_a_thousand_classes_are_all_reached() -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)).expand(DRAWS, -1)
    drawn = fi.Stochastic(generator=torch.Generator().manual_seed(1)).draw(logits)
    assert len(drawn.unique()) == 1000
    assert drawn.dtype == torch.int64 and not drawn.requires_grad


def test_a_generator_of_its_own_leaves_the_global_one_alone() -> None:
    before = torch.get_rng_state()
    method = fi.Stochastic(generator=torch.Generator().manual_seed(2))
    first, second = (method.draw(torch.zeros(64, 10)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_draws_do_not_depend_on_precision(dtype: torch.dtype) -> None:
    logits = torch.eye(10).repeat(20, 1)
    one, two = (fi.Stochastic(generator=torch.Generator().manual_seed(3)).draw(t) for t in (logits, logits.to(dtype)))
    assert torch.equal(one, two)
