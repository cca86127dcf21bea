"""What a confusion matrix tells of a classifier, with what it does not tell: the model of Zhang et al., drawn exactly.

The share of each class and the answers given to each class (a row of the matrix) have flat Dirichlet priors. Both are
conjugate to the counts, so their posteriors are Dirichlet too: no Markov chain is needed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from fasterisnet.errors import InputError
from fasterisnet.evaluation.intervals import Estimate, Numbers, of_draws

MEASURES = ("precision", "recall", "specificity", "f1")
DRAWS = 100_000
MOST = 200_000_000  # random numbers; matrices of very many classes are drawn less often
FEWEST = 1000
AT_ONCE = 4_000_000


class Posterior(NamedTuple):
    """Accuracy, the means of the measures over the classes, and each class's measures; from how many draws."""

    accuracy: Estimate
    macro: dict[str, Estimate]
    per_class: list[dict[str, Estimate]]
    draws: int


def posterior(confusion: Tensor | list[list[int]], *, draws: int = DRAWS, seed: int = 0) -> Posterior:
    """Precision, recall, specificity, F1 and accuracy of a confusion matrix (rows: truth, columns: answers)."""
    counts = _counts(confusion)
    classes = len(counts)
    draws = max(min(draws, MOST // classes**2), FEWEST)
    generator = np.random.default_rng(seed)
    drawn = np.empty((draws, len(MEASURES), classes))
    accuracy = np.empty(draws)
    step = max(1, AT_ONCE // classes**2)
    for begin in range(0, draws, step):
        part = slice(begin, min(begin + step, draws))
        prior = _dirichlet(generator, counts.sum(1), part.stop - part.start)
        rows = _dirichlet(generator, counts, part.stop - part.start)
        drawn[part], accuracy[part] = _measures(prior, rows)
    seen, right = _measures_of_counts(counts)
    per_class = [
        {name: of_draws(drawn[:, m, c], _known(seen[m, c])) for m, name in enumerate(MEASURES)} for c in range(classes)
    ]
    macro = {name: of_draws(drawn[:, m].mean(1), _mean_of_known(seen[m])) for m, name in enumerate(MEASURES)}
    return Posterior(of_draws(accuracy, _known(right)), macro, per_class, draws)


def _dirichlet(generator: np.random.Generator, counts: Numbers, draws: int) -> Numbers:
    """Draws of Dirichlet(1 + counts), for each row: gamma variables, divided by their sum."""
    found = generator.standard_gamma(np.broadcast_to(1 + counts, (draws, *counts.shape)))
    return found / found.sum(-1, keepdims=True)


def _measures(prior: Numbers, rows: Numbers) -> tuple[Numbers, Numbers]:
    """(..., measure, class) and accuracy, from the shares of the classes and of the answers given to each."""
    joint = prior[..., None] * rows
    hit, said = np.einsum("...ii->...i", joint), joint.sum(-2)
    recall = np.einsum("...ii->...i", rows)
    specificity = (1 - prior - said + hit) / (1 - prior)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.stack([hit / said, recall, specificity, 2 * hit / (prior + said)], -2)
    return found, hit.sum(-1)


def _measures_of_counts(counts: Numbers) -> tuple[Numbers, float]:
    """The same of the counts themselves; NaN where a class was never there or never answered."""
    with np.errstate(invalid="ignore", divide="ignore"):
        total, there = counts.sum(), counts.sum(1)
        found, right = _measures(there / total, counts / there[:, None])
        hit, said = counts.diagonal(), counts.sum(0)
        found[0], found[3] = hit / said, 2 * hit / (there + said)
        found[2] = (total - there - said + hit) / (total - there)
    return found, float(counts.diagonal().sum() / total) if total else float(right)


def _counts(confusion: Tensor | list[list[int]]) -> Numbers:
    counts = np.asarray(confusion, dtype=np.float64)
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1] or len(counts) < 2:
        raise InputError(f"A confusion matrix has shape {counts.shape}; it has to be square, of two classes or more.")
    if not np.isfinite(counts).all() or (counts < 0).any():
        raise InputError("A confusion matrix holds counts, so no number in it can be negative or missing.")
    return counts


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _mean_of_known(values: Numbers) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None
