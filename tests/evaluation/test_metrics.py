"""Every metric against scikit-learn, torchmetrics or a loop that is the definition."""

from __future__ import annotations

import json
import math
from itertools import combinations
from typing import Any

import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MultilabelAUROC, MultilabelF1Score

import fasterisnet as fi
from fasterisnet.errors import InputError
from fasterisnet.evaluation import background_mass, classification_metrics, evaluate, highest_pixel_inside, metrics
from fasterisnet.evaluation.metrics import binary_auc, confusion_matrix, log_odds, one_versus_one_auc
from fasterisnet.models import small_network


def scored(count: int, classes: int, seed: int = 0, digits: int = 6) -> tuple[Tensor, Tensor]:
    """Logits with some skill, rounded so that ties occur if `digits` is small."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    logits = torch.randn(count, classes, generator=generator, dtype=torch.float64)
    return (logits + 1.2 * F.one_hot(labels, classes)).round(decimals=digits), labels


def names(count: int) -> list[str]:
    return [f"c{i}" for i in range(count)]


def hand_and_till(logits: Tensor, labels: Tensor) -> float:
    """The definition, sample by sample."""
    probability = logits.softmax(1).round(decimals=12)
    pairs = []
    for i, j in combinations(sorted(set(labels.tolist())), 2):
        areas = []
        for one, other in ((i, j), (j, i)):
            a, b = probability[labels == one, one], probability[labels == other, one]
            areas.append(sum(float(x > y) + 0.5 * float(x == y) for x in a for y in b) / (len(a) * len(b)))
        pairs.append(sum(areas) / 2)
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("classes", [2, 3, 7])
def test_against_scikit_learn(classes: int, seed: int) -> None:
    logits, labels = scored(150, classes, seed)
    found = classification_metrics(logits, labels, names(classes))
    truth, predicted = labels.numpy(), logits.argmax(1).numpy()
    assert found["samples"] == 150
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(truth, predicted), abs=1e-12)
    assert found["macro_f1"] == pytest.approx(sk.f1_score(truth, predicted, average="macro"), abs=1e-12)
    assert found["confusion"] == sk.confusion_matrix(truth, predicted).tolist()
    assert found["loss"] == pytest.approx(sk.log_loss(truth, logits.softmax(1).numpy()), abs=1e-9)
    probability = logits.softmax(1).numpy()
    if classes == 2:
        wanted = sk.roc_auc_score(truth, probability[:, 1])
    else:
        wanted = sk.roc_auc_score(truth, probability, multi_class="ovo", average="macro")
    assert found["macro_auc"] == pytest.approx(wanted, abs=1e-12)
    rows = sk.precision_recall_fscore_support(truth, predicted)
    for i, name in enumerate(names(classes)):
        wanted = [float(column[i]) for column in rows]
        row = found["per_class"][name]
        assert [row[key] for key in ("precision", "recall", "f1", "support")] == pytest.approx(wanted)


def test_auc_is_hand_and_tills_with_ties_and_a_class_without_samples() -> None:
    logits, labels = scored(60, 4, digits=0)
    labels[labels == 2] = 0
    assert len(logits[:, 0].unique()) < 10
    assert float(one_versus_one_auc(logits, labels)) == pytest.approx(hand_and_till(logits, labels), abs=1e-12)


def test_auc_ignores_scores_of_absent_classes_in_no_other_way() -> None:
    """Leaving out pairs is not leaving out the column: probabilities stay those of the whole net."""
    logits, labels = scored(80, 3)
    labels[labels == 2] = 1
    found = float(one_versus_one_auc(logits, labels))
    assert found == pytest.approx(hand_and_till(logits, labels), abs=1e-12)
    assert found != pytest.approx(float(one_versus_one_auc(logits[:, :2], labels)), abs=1e-3)


def test_auc_of_very_certain_nets() -> None:
    """Probabilities that round to 1 are no ties: the order of the evidence counts."""
    logits = torch.tensor([[90.0, 0.0], [60.0, 0.0], [50.0, 0.0], [-3.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 1])
    assert len(logits.softmax(1)[:, 0].unique()) == 2
    assert float(one_versus_one_auc(logits, labels)) == 1.0


def test_log_odds() -> None:
    logits = torch.randn(50, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(1)
    torch.testing.assert_close(log_odds(logits), torch.log(p / (1 - p)), rtol=1e-9, atol=1e-9)
    extreme = log_odds(torch.tensor([[800.0, 0.0, -900.0]], dtype=torch.float64))
    torch.testing.assert_close(extreme, torch.tensor([[800.0, -800.0, -1700.0]], dtype=torch.float64))


def test_classes_that_do_not_occur() -> None:
    """Undefined values are null; the F1 counts classes of the truth or the prediction, as scikit-learn does."""
    logits = torch.tensor([[5.0, 0, 0, 0], [5, 0, 0, 0], [0, 5, 0, 0], [5, 0, 0, 0]])
    labels = torch.tensor([0, 0, 2, 2])
    found = classification_metrics(logits, labels, names(4))
    assert found["macro_f1"] == pytest.approx(sk.f1_score(labels, logits.argmax(1), average="macro", zero_division=0))
    assert found["per_class"]["c1"] == {"precision": 0.0, "recall": None, "f1": 0.0, "support": 0}
    assert found["per_class"]["c2"] == {"precision": None, "recall": 0.0, "f1": 0.0, "support": 2}
    assert found["per_class"]["c3"] == {"precision": None, "recall": None, "f1": None, "support": 0}
    assert found["confusion"] == [[2, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]


def test_auc_of_one_class_is_null() -> None:
    found = classification_metrics(torch.rand(4, 3), torch.ones(4, dtype=torch.long), names(3))
    assert found["macro_auc"] is None
    assert '"macro_auc": null' in json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("form", ["integers", "floats", "column"])
@pytest.mark.parametrize("classes", [["healthy", "sick"], ["sick"]])
def test_one_logit(form: str, classes: list[str]) -> None:
    logits, labels = scored(90, 2)
    single = logits[:, 1:] - logits[:, :1]
    given = {"integers": labels, "floats": labels.double(), "column": labels.double().unsqueeze(1)}[form]
    found = classification_metrics(single, given, classes)
    wanted = classification_metrics(logits, labels, ["healthy", "sick"])
    for key in ("accuracy", "macro_f1", "macro_auc", "loss"):
        assert found[key] == pytest.approx(wanted[key], abs=1e-12)
    assert found["confusion"] == wanted["confusion"]
    assert list(found["per_class"].values()) == list(wanted["per_class"].values())
    assert list(found["per_class"])[1] == "sick"


def test_multi_label() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(80, 4, generator=generator) < 0.4).double()
    logits = torch.randn(80, 4, generator=generator, dtype=torch.float64) + labels
    found = classification_metrics(logits, labels, names(4), multi_label=True)
    truth, predicted = labels.int(), (logits > 0).int()
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(truth, predicted))
    assert found["label_accuracy"] == pytest.approx(1 - sk.hamming_loss(truth, predicted))
    assert found["confusion"] == sk.multilabel_confusion_matrix(truth, predicted).tolist()
    assert found["macro_f1"] == pytest.approx(float(MultilabelF1Score(4)(logits.sigmoid(), truth)), abs=1e-6)
    assert found["macro_auc"] == pytest.approx(float(MultilabelAUROC(4)(logits.sigmoid(), truth)), abs=1e-6)
    assert found["loss"] == pytest.approx(float(F.binary_cross_entropy_with_logits(logits, labels)))
    assert found["per_class"]["c2"]["support"] == int(labels[:, 2].sum())
    for i in range(4):
        wanted = sk.roc_auc_score(truth[:, i], logits[:, i])
        assert float(binary_auc(logits[:, i], truth[:, i].bool())) == pytest.approx(wanted, abs=1e-12)


def test_multi_label_leaves_out_labels_without_both_values() -> None:
    labels = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    logits = torch.tensor([[1.0, -1.0], [2.0, -1.0], [3.0, -2.0]])
    found = classification_metrics(logits, labels, names(2), multi_label=True)
    assert found["macro_auc"] == pytest.approx(0.5)
    assert found["macro_f1"] == pytest.approx(0.8)
    assert found["per_class"]["c1"]["f1"] is None


def test_confusion_rows_are_the_truth() -> None:
    assert confusion_matrix(torch.tensor([1, 1, 0]), torch.tensor([0, 0, 1]), 2).tolist() == [[0, 2], [1, 0]]


@pytest.mark.parametrize(
    ("logits", "labels", "options", "message"),
    [
        (torch.rand(3, 4), torch.tensor([0, 1, 2]), {}, "4 outputs, but the data 3 classes"),
        (torch.rand(3, 3), torch.tensor([0, 1, 3]), {}, "they have to be 0 to 2"),
        (torch.rand(3, 3), torch.tensor([0, 1]), {}, "one class for each of 3"),
        (torch.rand(3, 3), torch.tensor([0, 1, 2]), {"multi_label": True}, "do not fit a multi-label task"),
        (torch.rand(3, 3), torch.eye(3), {}, "not one class for each"),
        (torch.full((3, 3), math.nan), torch.tensor([0, 1, 2]), {}, "3 of 3 samples are not finite"),
    ],
)
def test_refusals(logits: Tensor, labels: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        classification_metrics(logits, labels, names(3), **options)


def test_two_classes_of_one_name() -> None:
    with pytest.raises(InputError, match="same name"):
        classification_metrics(torch.rand(2, 2), torch.tensor([0, 1]), ["a", "a"])


# --- evaluate -------------------------------------------------------------------------------------------------------


def batch(count: int = 7, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 3, 12, 12, generator=generator)
    masks = torch.zeros(count, 1, 12, 12, dtype=torch.bool)
    masks[:, :, 3:9, 2:8] = True
    return images, torch.randint(3, (count,), generator=generator), masks


def network(classes: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return small_network(classes, widths=(6, 8))


@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
def test_evaluate_is_the_metrics_of_all_batches_together(box: tuple[float, float] | None) -> None:
    images, labels, masks = batch()
    masks[2] = False
    model = network().eval()
    with torch.no_grad():
        model[-1].bias -= model(images).mean(0)
        assert len(model(images).argmax(1).unique()) > 1
    model.train()
    batches = [tuple(t[a:b] for t in (images, labels, masks)) for a, b in ((0, 3), (3, 7))]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = evaluate(model, batches, names(3), box=box)
    assert all(m.training for m in model.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    model.eval()
    with torch.no_grad():
        logits = model(images)
    wanted = classification_metrics(logits.double(), labels, names(3))
    for key in ("accuracy", "macro_f1", "macro_auc", "loss"):
        assert found[key] == pytest.approx(wanted[key], abs=1e-6)
    assert found["confusion"] == wanted["confusion"] and found["per_class"] == wanted["per_class"]
    maps = fi.explain(model, images, target=logits.argmax(1), box=box).double().abs()
    kept = [0, 1, 3, 4, 5, 6]
    share = [float(maps[i][:, ~masks[i, 0]].sum() / maps[i].sum()) for i in kept]
    assert found["background_mass"] == pytest.approx(sum(share) / 6, rel=1e-4)
    inside = highest_pixel_inside(maps[kept], masks[kept])
    assert found["highest_pixel_inside"] == pytest.approx(float(inside.mean()))
    assert (found["explained"], found["unexplained"]) == (6, 0)
    json.dumps(found, allow_nan=False)


def test_box_matters_to_the_background_mass() -> None:
    found = [evaluate(network(), [batch()], names(3), box=box)["background_mass"] for box in (None, (0.0, 1.0))]
    assert abs(found[0] - found[1]) > 1e-3


@pytest.mark.parametrize("masks", [None, [None] * 7, torch.zeros(7, 1, 12, 12)])
def test_without_masks_attention_is_null(masks: Any) -> None:
    images, labels, _ = batch()
    found = evaluate(network(), [(images, labels, masks)], names(3))
    assert found["background_mass"] is None and found["explained"] == 0


def test_without_attention_nothing_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("explained")

    monkeypatch.setattr("fasterisnet.evaluation.metrics.explain", never)
    found = evaluate(network(), [batch()], names(3), attention=False)
    assert found["background_mass"] is None and found["samples"] == 7
    with pytest.raises(AssertionError):
        evaluate(network(), [batch()], names(3))


def test_one_sample_of_several_is_explained() -> None:
    images, labels, masks = batch(7)
    parts = [(images[:4], labels[:4], masks[:4]), (images[4:], labels[4:], masks[4:])]
    found = evaluate(network(), parts, names(3), share=0.4)
    chosen = [i for i in range(7) if i * 0.6180339887498949 % 1 < 0.4]
    wanted = evaluate(network(), [(images[chosen], labels[chosen], masks[chosen])], names(3))
    for key in ("explained", "background_mass", "highest_pixel_inside"):
        assert found[key] == pytest.approx(wanted[key])
    assert found["explained"] == 3 and found["samples"] == 7


def test_the_explained_share_is_in_step_with_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of labels 0, 1, 2, 0, 1, 2, ... every third sample would be of one class only."""
    seen: list[Tensor] = []
    monkeypatch.setattr(metrics, "_attention", lambda _m, x, *_: seen.append(x[:, 0, 0, 0]) or torch.empty(0, 2))
    images = (torch.arange(300) % 3).float().view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    evaluate(network(), [(images, torch.arange(300) % 3, torch.ones(300, 1, 8, 8))], names(3), share=1 / 3)
    counts = torch.cat(seen).long().bincount(minlength=3)
    assert 98 <= int(counts.sum()) <= 102 and int(counts.min()) > 30


def test_maps_of_nothing_are_counted() -> None:
    """A net whose logits do not depend on the image has no map to speak of."""
    model = network()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    found = evaluate(model, [batch()], names(3))
    assert (found["background_mass"], found["explained"], found["unexplained"]) == (None, 0, 7)


def test_evaluate_multi_label_and_one_logit() -> None:
    images, labels, masks = batch()
    found = evaluate(network(3), [(images, F.one_hot(labels, 3).float(), masks)], names(3), multi_label=True)
    assert found["label_accuracy"] >= found["accuracy"] and 0 < found["background_mass"] < 1
    found = evaluate(network(1), [(images, labels > 0, masks)], ["no", "yes"])
    assert found["samples"] == 7 and sum(map(sum, found["confusion"])) == 7
    maps = fi.explain(network(1).eval(), images)
    assert found["background_mass"] == pytest.approx(float(background_mass(maps, masks).mean()), rel=1e-4)


def test_nothing_to_evaluate() -> None:
    with pytest.raises(InputError, match="no sample"):
        evaluate(network(), [], names(3))


def test_a_model_that_returns_no_logits() -> None:
    with pytest.raises(InputError, match=r"returned \(7, 3, 12, 12\) for 7 images"):
        evaluate(nn.Identity(), [batch()], names(3))
