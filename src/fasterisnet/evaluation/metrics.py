"""How good a classifier is, from its logits: accuracy, F1, Hand and Till's AUC, confusion; and where it looked.

What has no value (an AUC with one class only, the precision of a class never predicted) is None, `null` in JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fasterisnet.errors import InputError
from fasterisnet.evaluation.attention import background_mass, decisions, evaluating, highest_pixel_inside, logits_of
from fasterisnet.losses import has_foreground, prepare_masks
from fasterisnet.losses.classification import classification_loss
from fasterisnet.losses.masks import gathered_masks
from fasterisnet.losses.segmentation import intersection_over_union
from fasterisnet.lrp.explain import explain
from fasterisnet.models.unets import Segmenting

# Multiples of it fall evenly into [0, 1), in step with no order that samples may have.
GOLDEN = 0.6180339887498949
Metrics = dict[str, Any]
"""What `evaluate` returns, ready for JSON.

samples, loss (mean cross entropy), accuracy, macro_f1, macro_auc; confusion (rows: truth, columns: prediction);
per_class (precision, recall, f1, support by name); background_mass and highest_pixel_inside, means over the `explained`
samples (those with a mask), `unexplained` if their map is zero or not finite. A multi-label task has `accuracy` for
samples with every label right, `label_accuracy` for single labels, and in `confusion` for each label
[[true negatives, false positives], [false negatives, true positives]]. Of a network that draws masks: `iou`, the mean
intersection over union, and `empty_foreground`, the samples in which it found nothing.
"""


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor, Any]],
    classes: Sequence[str],
    *,
    multi_label: bool = False,
    box: tuple[Any, Any] | None = None,
    attention: bool = True,
    share: float = 1.0,
    device: torch.device | str | None = None,
) -> Metrics:
    """All metrics of a model over batches (images, labels, masks), in evaluation mode; masks may be None or empty.

    box: what the images live in, for zB in the maps. attention: whether to explain the predicted logits as well, which
    takes a few times as long; share: how much of the samples, spread over them. device: the model's own if None.
    """
    device = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    model.to(device)
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    looked: list[Tensor] = []
    drawn: list[Tensor] = []
    met = 0
    with evaluating(model):
        for images, truth, masks in batches:
            shown = images.to(device)
            with torch.no_grad():
                logits.append(logits_of(model, shown).cpu().double())
                drawn += [_drawn(model, shown, masks)] if isinstance(model, Segmenting) else []
            labels.append(truth.cpu())
            if attention:
                chosen = (torch.arange(met, met + len(shown)).double() * GOLDEN % 1 < share).to(device)
                met += len(shown)
                looked.append(_attention(model, shown[chosen], gathered_masks(masks, shown)[chosen], box))
    if not logits:
        raise InputError("There is nothing to evaluate: the batches hold no sample.")
    found = classification_metrics(torch.cat(logits), torch.cat(labels), classes, multi_label=multi_label)
    found |= _segmented(torch.cat(drawn)) if drawn else {}
    return found | _looked(torch.cat(looked) if looked else torch.empty(0, 2))


def _drawn(model: Segmenting, images: Tensor, masks: Any) -> Tensor:
    """(sample, 2): intersection over union, NaN without a mask, and whether no foreground was found."""
    mask = prepare_masks(gathered_masks(masks, images), images.shape[2:]).any(1).cpu()
    inside = model.foreground(images).cpu()
    overlap = intersection_over_union(inside, mask).masked_fill(~has_foreground(mask), torch.nan)
    return torch.stack([overlap, (~has_foreground(inside)).float()], 1).cpu().double()


def _segmented(drawn: Tensor) -> Metrics:
    return {"iou": _number(drawn[:, 0].nanmean()), "empty_foreground": int(drawn[:, 1].sum())}


def classification_metrics(
    logits: Tensor, labels: Tensor, classes: Sequence[str], *, multi_label: bool = False
) -> Metrics:
    """The metrics of `evaluate` that need no images."""
    logits, labels, names = _checked(logits, labels, classes, multi_label)
    common = {"samples": len(logits), "loss": _number(classification_loss(logits, labels))}
    if multi_label:
        return common | _multi_label(logits, labels >= 0.5, names)
    predicted = decisions(logits)
    truth = (labels.reshape(-1) >= 0.5 if logits.shape[1] == 1 else labels.reshape(-1)).long()
    confusion = confusion_matrix(predicted, truth, len(names))
    scores = torch.cat([torch.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits
    per_class = _per_class(confusion.diagonal(), confusion.sum(0), confusion.sum(1), names)
    return common | {
        "accuracy": _number((predicted == truth).double().mean()),
        "macro_f1": _macro_f1(per_class),
        "macro_auc": _number(one_versus_one_auc(scores, truth)),
        "confusion": confusion.tolist(),
        "per_class": per_class,
    }


def confusion_matrix(predicted: Tensor, truth: Tensor, count: int) -> Tensor:
    """How many samples of each class (row) were taken for each class (column)."""
    return torch.bincount(truth * count + predicted, minlength=count * count).view(count, count)


def one_versus_one_auc(logits: Tensor, truth: Tensor) -> Tensor:
    """Hand and Till's M: the mean over pairs of classes of `(A(i|j) + A(j|i)) / 2`, ranked by probability.

    A(i|j) is the chance that a sample of i has a higher P_i than a sample of j. Pairs with a class that no sample
    belongs to are left out; NaN if none is left.
    """
    count = logits.shape[1]
    odds = log_odds(logits.double()).round(decimals=9)  # ties that rounding broke are ties
    sizes = torch.bincount(truth, minlength=count)
    areas = torch.full((count, count), torch.nan, dtype=torch.float64)
    for i in range(count):
        if sizes[i] > 0:
            beaten = share_above(odds[:, i], odds[truth == i, i])
            areas[i] = torch.zeros(count, dtype=torch.float64).index_add_(0, truth, beaten) / sizes
    pairs = (areas + areas.T)[~torch.eye(count, dtype=torch.bool)] / 2
    return pairs.nanmean()


def binary_auc(scores: Tensor, truth: Tensor) -> Tensor:
    """The chance that a positive sample has a higher score than a negative one; NaN if either kind is missing."""
    return share_above(scores[~truth].double(), scores[truth].double()).mean()


def log_odds(logits: Tensor) -> Tensor:
    """`ln(P_c / (1 - P_c))`: ranks as P_c does, without the ties that rounding makes of probabilities near 1."""
    if logits.shape[1] < 2:
        return logits
    top = logits.argmax(1, keepdim=True)
    log_p = logits.log_softmax(1)
    others = logits.scatter(1, top, -math.inf).logsumexp(1, keepdim=True)
    return (log_p - torch.log1p(-log_p.exp())).scatter(1, top, logits.gather(1, top) - others)


def share_above(scores: Tensor, reference: Tensor) -> Tensor:
    """For each score the share of the reference above it, equals counted half."""
    ordered, scores = reference.sort().values, scores.contiguous()
    below = torch.searchsorted(ordered, scores) + torch.searchsorted(ordered, scores, right=True)
    return 1 - below.double() / (2 * len(ordered))


def _multi_label(logits: Tensor, truth: Tensor, names: Sequence[str]) -> Metrics:
    predicted = decisions(logits, multi_label=True)
    right, hit = predicted == truth, (predicted & truth).sum(0)
    said, present = predicted.sum(0), truth.sum(0)
    areas = torch.stack([binary_auc(scores, true) for scores, true in zip(logits.T, truth.T, strict=True)])
    per_class = _per_class(hit, said, present, names)
    table = torch.stack([len(truth) - said - present + hit, said - hit, present - hit, hit], 1).view(-1, 2, 2)
    return {
        "accuracy": _number(right.all(1).double().mean()),
        "label_accuracy": _number(right.double().mean()),
        "macro_f1": _macro_f1(per_class),
        "macro_auc": _number(areas.nanmean()),
        "confusion": table.tolist(),
        "per_class": per_class,
    }


def _per_class(hit: Tensor, said: Tensor, present: Tensor, names: Sequence[str]) -> dict[str, Metrics]:
    """From counts by class: rightly predicted, predicted, there."""
    hits = hit.double()
    values = zip(names, hits / said, hits / present, 2 * hits / (said + present), present, strict=True)
    return {
        name: {"precision": _number(p), "recall": _number(r), "f1": _number(f), "support": int(n)}
        for name, p, r, f, n in values
    }


def _macro_f1(per_class: dict[str, Metrics]) -> float | None:
    """The mean over the classes that occur in truth or prediction."""
    known = [row["f1"] for row in per_class.values() if row["f1"] is not None]
    return sum(known) / len(known) if known else None


def _attention(model: nn.Module, images: Tensor, masks: Tensor, box: tuple[Any, Any] | None) -> Tensor:
    """Background mass and whether the highest pixel is inside, for the samples that have a mask."""
    known = has_foreground(masks)
    if not bool(known.any()):
        return torch.empty(0, 2, dtype=torch.float64)
    maps, masks = explain(model, images[known], box=box), masks[known]
    return torch.stack([background_mass(maps, masks), highest_pixel_inside(maps, masks)], 1)


def _looked(values: Tensor) -> Metrics:
    valid = values[~values.isnan().any(1)]
    mass, inside = valid.mean(0) if len(valid) else (torch.tensor(torch.nan),) * 2
    return {
        "background_mass": _number(mass),
        "highest_pixel_inside": _number(inside),
        "explained": len(valid),
        "unexplained": len(values) - len(valid),
    }


def _checked(
    logits: Tensor, labels: Tensor, classes: Sequence[str], multi_label: bool
) -> tuple[Tensor, Tensor, Sequence[str]]:
    """Logits, labels and names that fit each other; a single logit stands between two classes."""
    columns, names = logits.shape[1], list(classes)
    if columns == 1 and not multi_label and len(names) == 1:
        names = [f"not {names[0]}", names[0]]
    if len(names) != (2 if columns == 1 and not multi_label else columns):
        raise InputError(f"The model has {columns} outputs, but the data {len(names)} classes: {', '.join(names[:8])}.")
    if len(set(names)) < len(names):
        raise InputError(f"Two classes have the same name: {', '.join(names[:8])}.")
    if multi_label and labels.shape != logits.shape:
        raise InputError(f"Labels of shape {tuple(labels.shape)} do not fit a multi-label task of {columns} classes.")
    if not multi_label and labels.numel() != len(logits):
        raise InputError(f"Labels of shape {tuple(labels.shape)} are not one class for each of {len(logits)} samples.")
    if not bool(logits.isfinite().all()):
        bad = int((~logits.isfinite()).any(1).sum())
        raise InputError(f"The logits of {bad} of {len(logits)} samples are not finite; the weights are damaged.")
    return logits, labels, names


def _number(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
