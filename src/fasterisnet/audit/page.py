"""The audit as one page: no script, no network, every picture inside; readable on a telephone and in the dark."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fasterisnet.audit.verdict import BOUND, FREE, TOLERANCE
from fasterisnet.data.base import Label, Samples
from fasterisnet.data.preparation import Preparation
from fasterisnet.evaluation.alterations import TESTS, altered
from fasterisnet.evaluation.attention import decisions
from fasterisnet.evaluation.causal import MODEL_ERRORS
from fasterisnet.evaluation.explainers import heatmaps
from fasterisnet.evaluation.overlays import overlay, with_outline

if TYPE_CHECKING:
    from fasterisnet.audit.examination import Examined

ROOM = 3_500_000  # characters of pictures; rows of the gallery that do not fit are left out
SHARP = 30_000  # bytes; larger pictures are photographs, and JPEG is good enough for them


def page(content: dict[str, Any], examined: Sequence[Examined], samples: Samples, shown: int) -> str:
    """audit.html, from what audit.json holds and a few pictures."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("fasterisnet", "pages"), autoescape=True)
    environment.filters |= {"share": _share, "range": _range, "plain": _plain}
    gallery, left_out = _fitting(_gallery(examined, samples, content["classes"], shown))
    bounds = [round(100 * bound) for bound in (TOLERANCE, FREE, BOUND)]
    return environment.get_template("audit.html").render(
        audit=content, models=content["models"], gallery=gallery, left_out=left_out, tests=TESTS, bounds=bounds
    )


# --- pictures --------------------------------------------------------------------------------------------------------


def _gallery(examined: Sequence[Examined], samples: Samples, classes: list[str], shown: int) -> list[dict[str, Any]]:
    """The samples whose maps lie most in the background (by the map that does so most), the worst first."""
    rows = []
    for number in _worst(examined, shown):
        first = examined[0]
        donor = first.answers.donors["other"][number]
        image, mask = first.pictures([number])
        row = {
            "name": samples.name(number),
            "truth": _named(samples.label(number), classes),
            "picture": _encoded(with_outline(_viewable(image, first.subject.prepare)[0], mask[0])),
            "swapped": None,
            "lender": _named(samples.label(donor), classes) if donor >= 0 else None,
            "views": [_view(e, number, donor, classes) for e in examined],
        }
        if donor >= 0:
            changed = altered("mixed_other", image, mask, first.pictures([donor]), first.palette)
            row["swapped"] = _encoded(with_outline(_viewable(changed, first.subject.prepare)[0], mask[0]))
        rows.append(row)
    return rows


def _worst(examined: Sequence[Examined], shown: int) -> list[int]:
    masses = [next(iter(e.mass.values())) for e in examined if e.mass]
    if not masses:  # no maps: those whose outputs a background moves most
        masses = [(e.answers.tests["mixed_other"] - e.answers.original).norm(dim=1) for e in examined]
    worst = torch.stack(masses).nan_to_num(-1).amax(0)
    order = worst.argsort(descending=True, stable=True)[:shown]
    return [int(i) for i in order if worst[i] >= 0]


def _view(examined: Examined, number: int, donor: int, classes: list[str]) -> dict[str, Any]:
    """One network's map and answers."""
    subject, logits = examined.subject, examined.answers.original[number]
    changed = examined.answers.tests["mixed_other"][number] if donor >= 0 else None
    name = next(iter(examined.mass), None)
    mass = float(examined.mass[name][number]) if name is not None else torch.nan
    return {
        "name": subject.name,
        "map": _map(examined, number, name),
        "answer": _answer(logits, classes, subject.multi_label),
        "swapped": None if changed is None else _answer(changed, classes, subject.multi_label),
        "changed": changed is not None and _said(logits, classes, subject) != _said(changed, classes, subject),
        "mass": None if math.isnan(mass) else mass,
    }


def _map(examined: Examined, number: int, explainer: str | None) -> str | None:
    model = examined.subject.model
    if model is None or explainer is None:
        return None
    images, masks = examined.pictures([number])
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        maps = heatmaps(explainer, model, images.to(device), box=examined.subject.box).detach().cpu()
    except MODEL_ERRORS:
        return None
    return _encoded(overlay(_viewable(images, examined.subject.prepare)[0], maps[0].nan_to_num(0, 0, 0), masks[0]))


def _fitting(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    kept, size = [], 0
    for row in rows:
        pictures = [row["picture"], row["swapped"], *(view["map"] for view in row["views"])]
        size += sum(len(p) for p in pictures if p)
        if size > ROOM and kept:
            break
        kept.append(row)
    return kept, len(rows) - len(kept)


def _encoded(pixels: Tensor) -> str:
    """A picture as part of the page."""
    from torchvision.transforms.v2.functional import to_pil_image

    picture = to_pil_image(pixels)
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=True)
    kind = "png"
    if stream.tell() > SHARP:
        stream, kind = io.BytesIO(), "jpeg"
        picture.save(stream, "JPEG", quality=85)
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"


def _viewable(images: Tensor, prepare: Preparation) -> Tensor:
    """Network input back in [0, 1]."""
    if not prepare.mean:
        return images.clamp(0, 1)
    shape = (1, -1, 1, 1)
    return (images * torch.tensor(prepare.std).view(shape) + torch.tensor(prepare.mean).view(shape)).clamp(0, 1)


# --- words -----------------------------------------------------------------------------------------------------------


def _named(label: Label, classes: list[str]) -> str:
    if isinstance(label, tuple):
        return ", ".join(name for name, there in zip(classes, label, strict=True) if there) or "none of the classes"
    return classes[label]


def _said(logits: Tensor, classes: list[str], subject: Any) -> str:
    if not bool(logits.isfinite().all()):
        return ""
    found = decisions(logits[None], subject.multi_label)[0]
    return _named(tuple(found.tolist()) if subject.multi_label else int(found), classes)


def _answer(logits: Tensor, classes: list[str], multi_label: bool) -> str:
    """What is said, and how surely."""
    if not bool(logits.isfinite().all()):
        return "no answer"
    if multi_label:
        return _named(tuple((logits > 0).tolist()), classes)
    two = torch.stack([torch.zeros_like(logits[0]), logits[0]]) if len(logits) == 1 else logits
    certainty, found = two.softmax(0).max(0)
    return f"{classes[int(found)]} ({100 * float(certainty):.0f} %)"


def _share(estimate: dict[str, Any] | None) -> str:
    """A share in percent."""
    value = _value(estimate)
    return "–" if value is None else f"{_digits(value)} %"


def _range(estimate: dict[str, Any] | None) -> str:
    """Its interval."""
    if estimate is None or estimate["low"] is None:
        return ""
    return f"{_digits(estimate['low'])} to {_digits(estimate['high'])}"


def _plain(value: float | dict[str, Any] | None) -> str:
    """A number that is no share."""
    found = _value(value) if isinstance(value, dict) else value
    return "–" if found is None else f"{found:.3g}"


def _value(estimate: dict[str, Any] | None) -> float | None:
    if estimate is None:
        return None
    return estimate["mean"] if estimate["value"] is None else estimate["value"]


def _digits(value: float) -> str:
    text = f"{100 * value:.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")
