"""`audit`: does this classifier look at the background? Numbers with intervals, a verdict, and a page to hand over."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasterisnet.audit.examination import Examined, Pictures, Settings, examine, groups_of
from fasterisnet.audit.subjects import Subject, card_of, is_run, open_subject
from fasterisnet.audit.verdict import BOUND, FREE, TOLERANCE
from fasterisnet.data.base import Samples, Source, Subset, readable_part
from fasterisnet.data.preparation import Preparation
from fasterisnet.data.sources import open_source
from fasterisnet.errors import FasterISNetError, InputError, UsageError
from fasterisnet.evaluation.causal import rights
from fasterisnet.evaluation.comparison import compare
from fasterisnet.evaluation.intervals import Groups, as_json
from fasterisnet.files import write_text
from fasterisnet.runs.folder import Run
from fasterisnet.runs.report import source_for

Say = Callable[[str], None]


def audit(
    models: Sequence[str],
    data: str,
    out: str | Path,
    *,
    split: str | None = None,
    prepare: Preparation | None = None,
    trust: bool = False,
    settings: Settings | None = None,
    say: Say = lambda _: None,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Examine one classifier or several on the same images; writes audit.json and audit.html into `out`, and returns
    what is in the JSON. prepare: how images become the input of classifiers that are no runs. device: where networks
    compute (the fastest there is).
    """
    from fasterisnet.audit.page import page

    settings = settings or Settings()
    source, split = _data(models, data, split, settings.seed)
    subjects = [open_subject(text, len(source.classes), prepare=prepare, trust=trust, device=device) for text in models]
    _name_apart(subjects)
    for subject in subjects:
        if subject.classes is not None and prepare not in (None, Preparation(), subject.prepare):
            say(f"{subject.name}: says itself how images become its input, so other sizes and the like are not used")
        known = None if subject.classes is None else (subject.classes, subject.multi_label)
        if known not in (None, (source.classes, source.multi_label)):
            kinds = {True: ", of which several can be true", False: ""}
            raise UsageError(
                f"'{subject.name}' knows the classes {', '.join(subject.classes or [])}{kinds[subject.multi_label]}; "
                f"the data has {', '.join(source.classes)}{kinds[source.multi_label]}. Name folders or labels alike."
            )
    samples, unread = _readable(_chosen(source.split(split), settings))
    groups = groups_of(samples)
    examined: list[Examined] = []
    failed: list[dict[str, str]] = []
    cache: dict[Preparation, Pictures] = {}
    for subject in subjects:
        say(f"{subject.name}: {len(samples)} images")
        pictures = cache.setdefault(subject.prepare, Pictures(samples, subject.prepare))
        try:
            found = examine(subject, pictures, source.classes, groups, settings, multi_label=source.multi_label)
        except FasterISNetError as error:
            failed.append({"name": subject.name, "problem": str(error)})
            say(str(error))
            continue
        examined.append(found)
        say(found.report["sentence"])
    if not examined:
        raise InputError(f"Nothing could be audited. {failed[0]['problem']}")
    first = examined[0].report
    content: dict[str, Any] = {
        "format": 1,
        "verdict": first["verdict"],
        "sentence": first["sentence"],
        "reasons": first["reasons"],
        "data": data or Run(models[0]).config.data,
        "split": split,
        "images": len(samples),
        "classes": source.classes,
        "unread": unread,
        "models": [e.report for e in examined],
        "failed": failed,
        "comparisons": _comparisons(examined, groups),
        "bounds": {"tolerance": TOLERANCE, "influence_free": FREE, "influence_bound": BOUND},
        "settings": settings.__dict__ | {"explainers": list(settings.explainers), "grouped": groups is not None},
        "versions": _versions(),
    }
    content = as_json(content)
    write_text(Path(out) / "audit.json", json.dumps(content, indent=2, allow_nan=False) + "\n")
    write_text(Path(out) / "audit.html", page(content, examined, samples, settings.shown))
    return content


def audit_run(run: Run, images: int, say: Say, *, trust: bool = False) -> None:
    """The audit at the end of a training, into the run's folder `audit`; what is in the way of it is said, no more."""
    out = run.path("audit")
    if (out / "audit.html").is_file():
        return
    settings = Settings(images, min(images, Settings.explained), seed=run.config.seed)
    try:
        audit([str(run.folder)], "", out, trust=trust, settings=settings, say=say)
    except FasterISNetError as error:
        say(f"There is no audit: {error}")


# --- data ------------------------------------------------------------------------------------------------------------


def _data(models: Sequence[str], data: str, split: str | None, seed: int) -> tuple[Source, str]:
    runs_first = sorted(models, key=lambda text: not is_run(text))  # a run also knows how its masks are read
    text, card = next(((text, card) for text in runs_first if (card := card_of(text)) is not None), ("", None))
    source = open_source(data, seed=seed) if card is None else source_for(Run(text), card, data, seed=seed)
    tests = [name for name in source.splits if name != "train" and not name.startswith("val")]
    chosen = split or ("test" if "test" in tests else next(iter(tests), None))
    if chosen is None:
        raise UsageError(f"The data has no test split (it has {', '.join(source.splits)}); name one with --split.")
    source.split(chosen)
    return source, chosen


def _chosen(samples: Samples, settings: Settings) -> Samples:
    from fasterisnet.data.biased import representative

    if len(samples) <= settings.limit:
        return samples
    return Subset(samples, representative(samples, settings.limit, settings.seed))


def _readable(samples: Samples) -> tuple[Samples, list[str]]:
    kept, problems = readable_part(samples)
    if len(kept) == 0:
        raise InputError(f"None of the {len(samples)} images can be read; the first: {next(iter(problems), 'none')}")
    return kept, problems


def _comparisons(examined: Sequence[Examined], groups: Groups | None) -> list[dict[str, Any]]:
    """Every pair, on the samples that both answered: as they are, and before the background of another class."""
    found = []
    for i, first in enumerate(examined):
        for second in examined[i + 1 :]:
            row: dict[str, Any] = {"first": first.subject.name, "second": second.subject.name}
            for name, a, b in (("as they are", first.right, second.right), ("mixed_other", *_mixed(first, second))):
                both = ~(a.isnan() | b.isnan())
                if bool(both.any()):
                    of = None if groups is None else [g for g, k in zip(groups, both.tolist(), strict=True) if k]
                    row[name] = compare(a[both], b[both], of)._asdict()
            found.append(row)
    return found


def _mixed(*examined: Examined) -> list[Tensor]:
    samples = examined[0].pictures.samples
    labels = [samples.label(i) for i in range(len(samples))]
    return [rights(e.answers.tests["mixed_other"], labels, e.subject.multi_label) for e in examined]


def _name_apart(subjects: Sequence[Subject]) -> None:
    """Two that are called the same get numbers."""
    taken: set[str] = set()
    for subject in subjects:
        name, number = subject.name, 2
        while name in taken:
            name, number = f"{subject.name} ({number})", number + 1
        subject.name = name
        taken.add(name)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("fasterisnet", "torchvision", "numpy", "scipy", "onnxruntime"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
