"""How the Stochastic ISNet draws the class it explains."""

import pytest
import torch
from scipy import stats

import fasterisnet as fi

DRAWS = 100_000


@pytest.mark.parametrize("classes", [2, 3, 10, 1000])
def test_highest_half_of_the_time_the_others_alike(classes: int) -> None:
    torch.manual_seed(classes)
    highest = classes // 2
    logits = torch.randn(classes)
    logits[highest] = logits.max() + 1
    method = fi.Stochastic(generator=torch.Generator().manual_seed(1))
    counts = method.draw(logits.expand(DRAWS, -1)).bincount(minlength=classes)
    expected = torch.full((classes,), DRAWS / 2 / (classes - 1))
    expected[highest] = DRAWS / 2
    assert counts.sum() == DRAWS
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3


def test_one_class_is_always_drawn() -> None:
    assert fi.Stochastic().draw(torch.randn(7, 1)).tolist() == [0] * 7


def test_samples_are_drawn_on_their_own() -> None:
    """Each sample's highest class counts, and neighbours are independent."""
    logits = torch.eye(4).repeat(DRAWS // 4, 1)
    drawn = fi.Stochastic(generator=torch.Generator().manual_seed(3)).draw(logits)
    hit = (drawn == logits.argmax(1)).double()
    assert abs(hit.mean() - 0.5) < 0.01
    assert abs(torch.corrcoef(torch.stack([hit[:-1], hit[1:]]))[0, 1]) < 0.02


def test_a_generator_makes_draws_repeatable() -> None:
    logits = torch.randn(50, 10)
    one, two = (fi.Stochastic(generator=torch.Generator().manual_seed(5)).draw(logits) for _ in range(2))
    other = fi.Stochastic(generator=torch.Generator().manual_seed(6)).draw(logits)
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_without_one_the_global_random_state_decides() -> None:
    logits = torch.randn(50, 10)
    torch.manual_seed(0)
    one = fi.Stochastic().draw(logits)
    torch.manual_seed(0)
    assert torch.equal(one, fi.Stochastic().draw(logits))
