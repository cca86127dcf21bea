"""Everything that can be measured of one classifier on some samples."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fasterisnet.audit.subjects import Subject
from fasterisnet.audit.verdict import decide
from fasterisnet.backgrounds import Palette, has_background, palette_of
from fasterisnet.data.base import Label, Samples, Subset
from fasterisnet.data.preparation import Preparation
from fasterisnet.errors import InputError, UsageError
from fasterisnet.evaluation.attention import (
    background_area,
    background_mass,
    decisions,
    highest_pixel_inside,
    rank_accuracy,
)
from fasterisnet.evaluation.auc import delong, macro_auc
from fasterisnet.evaluation.causal import (
    MODEL_ERRORS,
    Answers,
    ask,
    careful,
    judge,
    rights,
)
from fasterisnet.evaluation.explainers import DEFAULT, EXPLAINERS, heatmaps, trained_with
from fasterisnet.evaluation.intervals import Estimate, Groups, average, share
from fasterisnet.evaluation.metrics import GOLDEN, classification_metrics, log_odds
from fasterisnet.evaluation.posterior import posterior
from fasterisnet.evaluation.reliability import reliability
from fasterisnet.losses import are_chances

CACHED = 400_000_000  # bytes of prepared images kept in memory
FEW = 30  # sources that get a row each; more of them are patients
LEAST_OF_SOURCE = 5  # samples on average, to be a source and no patient
DRAWN_FOR_COLOURS = 256
CHANCES = "Its outputs are probabilities; their logarithms stand for its logits."
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How much is measured. limit: images; explained: of them, with heatmaps; shown: in the gallery."""

    limit: int = 1000
    explained: int = 200
    shown: int = 8
    explainers: tuple[str, ...] = DEFAULT
    batch: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.explainers:
            if name not in EXPLAINERS:
                raise UsageError(f"There is no explainer '{name}'; there are {', '.join(EXPLAINERS)}.")


class Pictures:
    """Samples as one network sees them, images and masks by number; the last ones are kept in memory."""

    def __init__(self, samples: Samples, prepare: Preparation) -> None:
        self.samples, self.prepare = samples, prepare
        self.kept: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()
        self.room = max(64, CACHED // (5 * prepare.channels * prepare.size**2))

    def __call__(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Images and masks of some samples."""
        images, masks = zip(*(self.one(i) for i in numbers), strict=True)
        return torch.stack(images), torch.stack(masks)

    def one(self, number: int) -> tuple[Tensor, Tensor]:
        """Image and mask of a sample; a mask of nothing stands for none."""
        if number not in self.kept:
            reading = self.samples.read(number)
            self.kept[number] = self.prepare(reading.image, reading.mask)
            if len(self.kept) > self.room:
                self.kept.popitem(last=False)
        return self.kept[number]


@dataclass
class Examined:
    """All that was measured of one classifier: `report` is for JSON, the rest for pictures."""

    subject: Subject
    pictures: Pictures
    palette: Palette
    usable: list[bool]
    answers: Answers
    report: dict[str, Any]
    mass: dict[str, Tensor] = field(default_factory=dict)
    right: Tensor = field(default_factory=lambda: torch.empty(0))


def examine(
    subject: Subject,
    pictures: Pictures,
    classes: Sequence[str],
    groups: Groups | None,
    settings: Settings,
    *,
    multi_label: bool = False,
) -> Examined:
    """Everything that can be measured of one classifier on some samples."""
    samples = pictures.samples
    labels = [samples.label(i) for i in range(len(samples))]
    original, problems, usable, palette = _first_look(subject, pictures, settings)
    known = original.isfinite().all(1)
    if not bool(known.any()):
        text = next(iter(problems.values()), "there is no image")
        raise InputError(f"'{subject.name}' answered to none of {len(samples)} images; the first: {text}.")
    _check_width(subject, original.shape[1], classes, multi_label)
    chances = original.shape[1] > 1 and not multi_label and are_chances(original[known])
    if chances:
        subject, original = replace(subject, predict=_logarithms(subject.predict)), _logarithm(original)
    usable = [u and k for u, k in zip(usable, known.tolist(), strict=True)]
    answers = ask(
        subject.predict, pictures, labels, palette, usable,
        original=original, batch=settings.batch, seed=settings.seed,
    )  # fmt: skip
    causal = judge(answers, labels, groups, multi_label=multi_label)
    looked, mass = _attention(subject, pictures, usable, groups, settings)
    masses = {
        EXPLAINERS[name]: (row["mass"], row["area"])
        for name, row in looked.items()
        if row.get("mass") is not None and not row["trained_with"]
    }
    verdict = decide(causal, masses)
    verdict.caveats.extend([CHANCES] if chances else [])
    right = rights(original, labels, multi_label)
    report: dict[str, Any] = {
        "name": subject.name,
        "kind": subject.kind,
        "method": subject.method,
        **subject.facts,
        **verdict._asdict(),
        "answered": int(known.sum()),
        "with_background": sum(usable),
        "problems": [{"image": samples.name(i), "problem": text} for i, text in sorted(problems.items())],
        "performance": _performance(original, labels, classes, groups, multi_label),
        "causal": {
            "accuracy": causal.original,
            "chance": causal.chance,
            "background_gap": causal.background_gap,
            "pull": causal.pull,
            "influence": causal.influence,
            "exchanged": causal.exchanged,
            "tests": {name: effect._asdict() for name, effect in causal.effects.items()},
        },
        "attention": looked,
        **_breakdown(samples, labels, classes, right, answers, mass, groups, multi_label),
        "preparation": subject.prepare.to_dict(),
    }
    return Examined(subject, pictures, palette, usable, answers, report, mass, right)


def groups_of(samples: Samples) -> list[str | None] | None:
    """Whom the samples belong to; None if nobody knows of any."""
    found = [samples.group(i) for i in range(len(samples))]
    return found if any(group is not None for group in found) else None


def _sources(samples: Samples) -> list[str | None] | None:
    """Where samples come from: what the data call a source, or groups that are too large to be patients."""
    place, chosen = samples, list(range(len(samples)))
    while isinstance(place, Subset):
        place, chosen = place.samples, [place.chosen[i] for i in chosen]
    ask_source = getattr(place, "source", None)
    named = [ask_source(i) for i in chosen] if callable(ask_source) else []
    if any(name is not None for name in named):
        return ["" if name is None else str(name) for name in named]
    groups = groups_of(samples)
    names = {g for g in groups or () if g is not None}
    return groups if 1 < len(names) <= FEW and len(samples) >= LEAST_OF_SOURCE * len(names) else None


# --- measuring -------------------------------------------------------------------------------------------------------


def _first_look(
    subject: Subject, pictures: Pictures, settings: Settings
) -> tuple[Tensor, dict[int, str], list[bool], Palette]:
    """Logits of every image as it is, why some have none, which have a background, and the backgrounds' colours."""
    count = len(pictures.samples)
    logits: list[Tensor] = []
    problems: dict[int, str] = {}
    usable: list[bool] = []
    colours: list[tuple[Tensor, Tensor]] = []
    images = masks = torch.empty(0)
    for begin in range(0, count, settings.batch):
        images, masks = pictures(list(range(begin, min(begin + settings.batch, count))))
        found, wrong = careful(subject.predict, images)
        logits.append(found)
        problems |= {begin + i: text for i, text in wrong.items()}
        fine = has_background(masks)
        usable += fine.tolist()
        if sum(len(part) for part, _ in colours) < DRAWN_FOR_COLOURS:
            colours.append((images[fine], masks[fine]))
    width = max(part.shape[1] for part in logits)
    whole = [p if p.shape[1] == width > 0 else p.new_full((len(p), max(width, 1)), torch.nan) for p in logits]
    seen = [torch.cat(parts) for parts in zip(*colours, strict=True)] if any(usable) else [images, masks]
    return torch.cat(whole), problems, usable, palette_of(*seen)


def _logarithm(chances: Tensor) -> Tensor:
    """Logits whose softmax these probabilities are."""
    return chances.clamp(min=torch.finfo(chances.dtype).tiny).log()


def _logarithms(predict: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda images: _logarithm(predict(images))


def _attention(
    subject: Subject, pictures: Pictures, usable: list[bool], groups: Groups | None, settings: Settings
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """By explainer, how much of the maps lies in the background; and for each sample (NaN if it has no map)."""
    if subject.model is None:
        return {}, {}
    able = [i for i, fine in enumerate(usable) if fine]
    every = min(1.0, settings.explained / max(len(able), 1))
    chosen = [i for k, i in enumerate(able) if k * GOLDEN % 1 < every]
    trained = trained_with(subject.method)
    device = next((p.device for p in subject.model.parameters()), torch.device("cpu"))
    rows: dict[str, dict[str, Any]] = {}
    of_samples: dict[str, Tensor] = {}
    for name in settings.explainers:
        values = torch.full((len(usable), 4), torch.nan, dtype=torch.float64)
        problem = None
        for begin in range(0, len(chosen), settings.batch):
            numbers = chosen[begin : begin + settings.batch]
            images, masks = pictures(numbers)
            try:
                maps = heatmaps(name, subject.model, images.to(device), box=subject.box).detach().cpu()
            except MODEL_ERRORS as error:
                problem = f"{type(error).__name__}: {error}"[:300]
                continue
            found = [background_mass(maps, masks), background_area(masks, maps.shape[2:])]
            found += [highest_pixel_inside(maps, masks), rank_accuracy(maps, masks)]
            values[numbers] = torch.stack(found, 1)
        known = ~values.isnan().any(1)
        of_known = None if groups is None else [g for g, k in zip(groups, known.tolist(), strict=True) if k]
        rows[name] = {
            "explainer": EXPLAINERS[name],
            "trained_with": name in trained,
            "samples": int(known.sum()),
            "without_relevance": len(chosen) - int(known.sum()),
            "problem": problem,
            "mass": average(values[known, 0], of_known),
            "area": average(values[known, 1], of_known),
            "highest_pixel_inside": share(values[known, 2], of_known),
            "rank_accuracy": average(values[known, 3], of_known),
        }
        of_samples[name] = values[:, 0]
    return rows, of_samples


def _performance(
    logits: Tensor, labels: Sequence[Label], classes: Sequence[str], groups: Groups | None, multi_label: bool
) -> dict[str, Any]:
    """How good the answers are, as far as there are answers."""
    known = logits.isfinite().all(1)
    scores, truth = logits[known], torch.tensor(labels)[known]
    of_known = None if groups is None else [g for g, k in zip(groups, known.tolist(), strict=True) if k]
    found = classification_metrics(scores, truth, classes, multi_label=multi_label)
    right = rights(logits, labels, multi_label)[known]
    result: dict[str, Any] = {
        "accuracy": share(right, of_known),
        "macro_f1": found["macro_f1"],
        "confusion": found["confusion"],
    }
    tables = found["confusion"] if multi_label else [found["confusion"]]
    drawn = [posterior(table) for table in tables]
    names = list(found["per_class"])
    if multi_label:
        result["posterior"] = {"per_class": {n: p.per_class[1] for n, p in zip(names, drawn, strict=True)}}
        areas = {n: _area(scores[:, c], truth[:, c]) for c, n in enumerate(names)}
        return result | {"auc": areas, "macro_auc": found["macro_auc"], "draws": drawn[0].draws}
    result["posterior"] = {
        "accuracy": drawn[0].accuracy,
        "macro": drawn[0].macro,
        "per_class": dict(zip(names, drawn[0].per_class, strict=True)),
        "draws": drawn[0].draws,
    }
    two = torch.cat([torch.zeros_like(scores), scores], 1) if scores.shape[1] == 1 else scores
    if two.shape[1] == 2:
        result["auc"] = _area(log_odds(two)[:, 1], truth)
    result["macro_auc"] = macro_auc(two, truth, of_known) if len(truth.unique()) > 1 else None
    certainty = two.softmax(1).amax(1)
    result["calibration"] = _calibration(certainty, right, of_known)
    return result


def _area(scores: Tensor, truth: Tensor) -> Estimate | None:
    return delong(scores, truth) if 0 < float(truth.double().mean()) < 1 else None


def _calibration(certainty: Tensor, right: Tensor, groups: Groups | None) -> dict[str, Any]:
    found = reliability(certainty, right, groups)
    return {"error": found.error, "curve": [b._asdict() for b in found.curve]}


def _breakdown(
    samples: Samples, labels: Sequence[Label], classes: Sequence[str], right: Tensor, answers: Answers,
    mass: dict[str, Tensor], groups: Groups | None, multi_label: bool,
) -> dict[str, Any]:  # fmt: skip
    """The same by class and by source, and where the classifier is worst."""
    known = answers.original.isfinite().all(1)
    swapped = answers.tests["mixed_other"]
    moved = (decisions(answers.original, multi_label) != decisions(swapped, multi_label)).reshape(len(right), -1).any(1)
    both = known & swapped.isfinite().all(1)
    first = next(iter(mass.values()), None)

    def row(members: Tensor) -> dict[str, Any]:
        def of(kept: Tensor) -> Groups | None:
            return None if groups is None else [g for g, k in zip(groups, kept.tolist(), strict=True) if k]

        return {
            "samples": int((members & known).sum()),
            "accuracy": share(right[members & known], of(members & known)),
            "changed": share(moved[members & both], of(members & both)),
            "mass": None if first is None else average(first[members], of(members)),
        }

    def belongs(c: int) -> Tensor:
        return torch.tensor([(bool(label[c]) if isinstance(label, tuple) else label == c) for label in labels])

    found: dict[str, Any] = {"per_class": {name: row(belongs(c)) for c, name in enumerate(classes)}}
    sources = _sources(samples)
    if sources is not None:
        names = sorted({s for s in sources if s is not None})
        found["per_source"] = {name: row(torch.tensor([s == name for s in sources])) for name in names}
    kinds = {"class": found["per_class"], "source": found.get("per_source", {})}
    rows = [(kind, name, r) for kind, part in kinds.items() for name, r in part.items() if r["accuracy"] is not None]
    if rows:
        kind, name, worst = min(rows, key=lambda r: r[2]["accuracy"].value)
        found["worst_group"] = {"kind": kind, "name": name, **worst}
    return found


def _check_width(subject: Subject, width: int, classes: Sequence[str], multi_label: bool) -> None:
    if width != len(classes) and not (width == 1 and len(classes) == 2 and not multi_label):
        raise InputError(
            f"'{subject.name}' has {width} outputs, but the data {len(classes)} classes: {', '.join(classes[:8])}."
        )
