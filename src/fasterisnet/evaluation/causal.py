"""Tests that need no heatmap: change the background, or the object, and see whether the answer changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fasterisnet.backgrounds import LEAST, Palette, grown
from fasterisnet.errors import FasterISNetError, InputError
from fasterisnet.evaluation.alterations import DONORS, TESTS, Label, altered, boxes_around, partners
from fasterisnet.evaluation.attention import decisions
from fasterisnet.evaluation.intervals import Estimate, Groups, average, difference, ratio, share

Predict = Callable[[Tensor], Tensor]
Fetch = Callable[[list[int]], tuple[Tensor, Tensor]]
VISIBLE = 0.02  # of the range of the images: a difference that is more than noise of a file
MODEL_ERRORS = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError, FasterISNetError)


# --- a network's answers ---------------------------------------------------------------------------------------------


@dataclass
class Answers:
    """Logits (sample, class) of the images as they are and under each test; rows of NaN where there are none.

    donors: of each kind the other sample's number, -1 for none. problems: why a sample has no answer. visible: whether
    the background of another class was another background, 1 or 0; NaN where there is none.
    """

    original: Tensor
    tests: dict[str, Tensor]
    donors: dict[str, list[int]]
    problems: dict[int, str] = field(default_factory=dict)
    visible: Tensor | None = None


def careful(predict: Predict, images: Tensor) -> tuple[Tensor, dict[int, str]]:
    """Logits of a batch; if it fails, of each image alone. Rows of NaN, and what was wrong, for those that fail."""
    problems: dict[int, str] = {}
    try:
        logits = predict(images)
    except MODEL_ERRORS as error:
        if len(images) == 1:
            return torch.full((1, 0), torch.nan, dtype=torch.float64), {0: f"{type(error).__name__}: {error}"[:300]}
        parts = [careful(predict, image[None]) for image in images]
        problems = {i: found[0] for i, (_, found) in enumerate(parts) if found}
        width = max(part.shape[1] for part, _ in parts)
        empty = torch.full((1, width), torch.nan, dtype=torch.float64)
        return torch.cat([part if part.shape[1] == width else empty for part, _ in parts]), problems
    logits = logits.detach().cpu().double()
    if logits.ndim != 2 or len(logits) != len(images):
        raise InputError(f"The model returned {tuple(logits.shape)} for {len(images)} images, not (sample, class).")
    broken = ~logits.isfinite().all(1)
    logits = logits.where(~broken[:, None], torch.nan)
    return logits, {int(i): "its logits are not finite numbers" for i in broken.nonzero()[:, 0]}


@torch.no_grad()
def ask(
    predict: Predict, fetch: Fetch, labels: Sequence[Label], palette: Palette, usable: Sequence[bool], *,
    original: Tensor | None = None, tests: Sequence[str] = tuple(TESTS), batch: int = 32, seed: int = 0,
) -> Answers:  # fmt: skip
    """What a network says to every image and to every changed image.

    fetch: images and masks by their numbers. usable: which samples have a mask and a background; the others are shown
    as they are only. original: logits that are known already.
    """
    donors = partners(labels, usable, seed=seed)
    rows: dict[str, list[Tensor]] = {name: [] for name in ("original", *tests)}
    problems: dict[int, str] = {}
    visible = torch.full((len(labels),), torch.nan, dtype=torch.float64)
    for begin in range(0, len(labels), batch):
        numbers = list(range(begin, min(begin + batch, len(labels))))
        images, masks = fetch(numbers) if original is None or any(usable[i] for i in numbers) else (None, None)
        if original is None:
            assert images is not None
            found, wrong = careful(predict, images)
            rows["original"].append(found)
            problems |= {begin + i: text for i, text in wrong.items()}
        for name in tests:
            kind = DONORS.get(name)
            shown = [i for i in numbers if usable[i] and (kind is None or donors[kind][i] >= 0)]
            answers: dict[int, Tensor] = {}
            if shown:
                assert images is not None and masks is not None
                places = [i - begin for i in shown]
                others = fetch([donors[kind][i] for i in shown]) if kind else (images[places], masks[places])
                changed = altered(name, images[places], masks[places], others, palette, shown)
                if name == "mixed_other":
                    seen = (changed - images[places]).abs() > VISIBLE * (images.amax() - images.amin())
                    visible[shown] = seen.flatten(1).any(1).double().cpu()
                if name.startswith("object_erased"):  # nothing but the box: nothing is left to answer from
                    left = (~boxes_around(grown(masks[places]))).flatten(1).double().mean(1) >= LEAST
                    changed, shown = changed[left], [i for i, kept in zip(shown, left.tolist(), strict=True) if kept]
                if shown:
                    answers = dict(zip(shown, careful(predict, changed)[0], strict=True))
            rows[name].append(_rows(numbers, answers))
    if original is None:
        original = _widened(rows["original"], max((part.shape[1] for part in rows["original"]), default=0))
    said = {name: _widened(rows[name], original.shape[1]) for name in tests}
    return Answers(original, said, donors, problems, visible)


# --- what they mean --------------------------------------------------------------------------------------------------


class Effect(NamedTuple):
    """What a change of the images does: accuracy under it, how much was lost, answers that changed, change of the
    decided class's probability and of the logits; of the images that it got right, whose class is named in a conflict.
    """

    samples: int
    accuracy: Estimate | None
    lost: Estimate | None
    changed: Estimate | None
    probability: Estimate | None
    logits: Estimate | None
    follows_object: Estimate | None = None
    follows_background: Estimate | None = None


class Causal(NamedTuple):
    """Every test; and what is drawn from several of them.

    background_gap: accuracy in Mixed-Same minus that in Mixed-Rand (Backgrounds Challenge). pull: accuracy with the
    object erased on its own background minus that on one of another class, so that what the outline of the hole tells
    does not count. influence: of the outputs' movement when object or background is exchanged, the background's part.
    chance: the accuracy of always naming the most frequent class. exchanged: in how many of the images a background of
    another class is another background at all.
    """

    original: Estimate | None
    effects: dict[str, Effect]
    background_gap: Estimate | None
    pull: Estimate | None
    influence: Estimate | None
    object_moves: Estimate | None
    chance: float | None
    exchanged: Estimate | None = None


def judge(
    answers: Answers, labels: Sequence[Label], groups: Groups | None = None, *, multi_label: bool = False
) -> Causal:
    """The effects of all tests, with intervals; samples without an answer are left out."""
    truth = torch.tensor(labels)
    known = answers.original.isfinite().all(1)
    right = {name: rights(logits, labels, multi_label) for name, logits in answers.tests.items()}
    at_first = rights(answers.original, labels, multi_label)
    effects = {
        name: _effect(name, logits, answers, truth, at_first, right[name], groups, multi_label)
        for name, logits in answers.tests.items()
    }
    counts: dict[Hashable, int] = {}
    for i in known.nonzero()[:, 0].tolist():
        counts[labels[i]] = counts.get(labels[i], 0) + 1
    return Causal(
        _share(at_first, groups),
        effects,
        _difference(right, "mixed_same", "mixed_random", groups),
        _difference(right, "object_erased", "object_erased_other", groups),
        _influence(answers, groups),
        _distance(answers, "object_swapped", groups),
        max(counts.values()) / sum(counts.values()) if counts else None,
        None if answers.visible is None else _share(answers.visible, groups),
    )


def _effect(
    name: str, logits: Tensor, answers: Answers, truth: Tensor, at_first: Tensor, right: Tensor, groups: Groups | None,
    multi_label: bool,
) -> Effect:  # fmt: skip
    both = logits.isfinite().all(1) & answers.original.isfinite().all(1)
    decided, now = decisions(answers.original, multi_label), decisions(logits, multi_label)
    changed = (decided != now).reshape(len(now), -1).any(1).double().where(both, torch.nan)
    moved = (_probabilities(logits, multi_label) - _probabilities(answers.original, multi_label)).abs()
    moved = moved.amax(1) if multi_label else moved.gather(1, decided[:, None])[:, 0]
    steps = (logits - answers.original).abs().mean(1)
    follows: list[Estimate | None] = [None, None]
    if not multi_label and name in ("mixed_other", "object_swapped"):
        donor = torch.tensor(answers.donors["other"])
        theirs = truth[donor.clamp(min=0)]
        of_object, of_background = (truth, theirs) if name == "mixed_other" else (theirs, truth)
        sure = both & (at_first == 1)  # who errs without any conflict follows nobody
        follows = [_share((now == c).double().where(sure, torch.nan), groups) for c in (of_object, of_background)]
    return Effect(
        int(both.sum()),
        _share(right.where(both, torch.nan), groups),
        difference(at_first.where(both, torch.nan), right, groups),
        _share(changed, groups),
        average(moved.where(both, torch.nan), groups),
        average(steps.where(both, torch.nan), groups),
        *follows,
    )


def _influence(answers: Answers, groups: Groups | None) -> Estimate | None:
    """`|change by background| / (|change by background| + |change by object|)`, each summed over the samples."""
    if not {"mixed_other", "object_swapped"} <= answers.tests.keys():
        return None
    ground, thing = (_moved(answers, name) for name in ("mixed_other", "object_swapped"))
    return ratio(ground, ground + thing, groups)


def _distance(answers: Answers, name: str, groups: Groups | None) -> Estimate | None:
    return average(_moved(answers, name), groups) if name in answers.tests else None


def _moved(answers: Answers, name: str) -> Tensor:
    """How far the logits went; of several, what they have in common does not count, as it decides nothing."""
    step = answers.tests[name] - answers.original
    return (step - step.mean(1, keepdim=True) if step.shape[1] > 1 else step).norm(dim=1)


def _difference(right: dict[str, Tensor], first: str, second: str, groups: Groups | None) -> Estimate | None:
    return difference(right[first], right[second], groups) if {first, second} <= right.keys() else None


def rights(logits: Tensor, labels: Sequence[Label], multi_label: bool) -> Tensor:
    """Whether each sample was answered rightly, 1 or 0; NaN without an answer."""
    truth, said = torch.tensor(labels), decisions(logits, multi_label)
    hit = (said == (truth >= 0.5)).all(1) if multi_label else said == truth
    return hit.double().where(logits.isfinite().all(1), torch.nan)


def _probabilities(logits: Tensor, multi_label: bool) -> Tensor:
    if multi_label:
        return logits.sigmoid()
    if logits.shape[1] == 1:
        return torch.cat([(-logits).sigmoid(), logits.sigmoid()], 1)
    return logits.softmax(1)


def _share(hits: Tensor, groups: Groups | None) -> Estimate | None:
    known = ~hits.isnan()
    chosen = None if groups is None else [g for g, kept in zip(groups, known.tolist(), strict=True) if kept]
    return share(hits[known], chosen)


def _rows(numbers: Sequence[int], answers: dict[int, Tensor]) -> Tensor:
    width = max((len(a) for a in answers.values()), default=0)
    empty = torch.full((width,), torch.nan, dtype=torch.float64)
    return torch.stack([answers.get(i, empty) for i in numbers])


def _widened(parts: Sequence[Tensor], width: int) -> Tensor:
    """Batches in which no image has an answer know nothing of the number of classes."""
    return torch.cat([p if p.shape[1] == width else p.new_full((len(p), width), torch.nan) for p in parts])
