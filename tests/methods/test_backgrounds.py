"""Swapped, erased and black backgrounds: pixels, draws, and together with a heatmap loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.backgrounds import grown, uncovered
from fasterisnet.errors import InputError
from methods.tester import SETTINGS, Residual, Settled, filled, labels_for, masks_for, pictures


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scenes(samples: int = 6) -> tuple[Tensor, Tensor]:
    """Objects before one colour each: the number of the picture."""
    images = torch.arange(1, samples + 1).double().view(-1, 1, 1, 1).expand(-1, 2, 16, 16).clone()
    masks = torch.zeros(samples, 1, 16, 16, dtype=torch.bool)
    masks[:, :, 5:11, 4:10] = True
    return torch.where(masks, -images, images), masks


def drawn(method: Any, seed: int = 0) -> Any:
    method.generator = generator(seed)
    return method


def network() -> Residual:
    return filled(Residual(width=3).double()).eval()


# --- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [fi.Standard, fi.MaskedInput, fi.BackgroundSwap, fi.BackgroundErase])
def test_a_batch_of_nothing_is_refused(kind: Any) -> None:
    images, masks = pictures(1, 2, 9, 8)[:0], torch.zeros(0, 1, 9, 8)
    with pytest.raises(InputError, match="empty batches"):
        kind().loss(network(), images, torch.zeros(0, dtype=torch.long), masks)


def test_a_swapped_background_is_that_of_another_picture() -> None:
    images, masks = scenes()
    seen = set()
    for seed in range(40):
        found = drawn(fi.BackgroundSwap(), seed).altered(images, masks)
        assert torch.equal(found.where(masks, 0), images.where(masks, 0))
        colours = found[:, :, 0, 0][:, 0].round().long()
        for i in range(6):
            torch.testing.assert_close(
                found[i].where(~masks[i], colours[i].double()), found[i].new_full((2, 16, 16), float(colours[i]))
            )
        assert bool((colours != torch.arange(1, 7)).all())
        seen |= set(enumerate(colours.tolist()))
    assert len(seen) == 6 * 5  # every picture meets all others


def test_the_donors_object_is_covered() -> None:
    images = pictures(2, 2, 16, 16)
    masks = torch.zeros(2, 1, 16, 16, dtype=torch.bool)
    masks[0, :, 1:5, 1:5] = True
    masks[1, :, 8:13, 8:13] = True
    found = fi.BackgroundSwap().altered(images, masks)
    wanted = torch.where(masks, images, uncovered(images, masks).flip(0))
    assert torch.equal(found, wanted)
    untouched = ~masks & ~grown(masks).flip(0)
    assert torch.equal(found.where(untouched, 0), images.flip(0).where(untouched, 0))


def test_a_feathered_border_shows_object_and_new_background_and_nothing_of_the_old() -> None:
    images, masks = scenes(2)
    found = fi.BackgroundSwap(feather=3).altered(images, masks)
    assert torch.equal(found.where(masks, 0), images.where(masks, 0))
    row = found[0, 0, 7]  # object -1 in columns 4 to 9, then towards the other picture's 2
    assert bool((row[9:14].diff() > 0).all()) and float(row[13:].min()) == 2.0 and -1 < float(row[10]) < 2
    torch.testing.assert_close(row[13:], torch.full_like(row[13:], 2.0))


@pytest.mark.parametrize("fill", ["mean", "noise", "blur"])
def test_erased_backgrounds(fill: Any) -> None:
    images, masks = scenes()
    found = drawn(fi.BackgroundErase(fill)).altered(images, masks)
    assert torch.equal(found.where(masks, 0), images.where(masks, 0))
    outside = found[:, :, ~masks[0, 0]]
    if fill == "mean":
        torch.testing.assert_close(outside, torch.full_like(outside, 3.5))
    elif fill == "noise":
        assert float(outside.amin()) >= 1 and float(outside.amax()) <= 6 and float(outside.std()) > 1
        assert torch.equal(found, drawn(fi.BackgroundErase(fill)).altered(images, masks))
        assert not torch.equal(found, drawn(fi.BackgroundErase(fill), 1).altered(images, masks))
    else:  # of one colour, it stays
        torch.testing.assert_close(outside, images[:, :, ~masks[0, 0]])


@pytest.mark.parametrize("method", [fi.BackgroundSwap(), fi.BackgroundErase(), fi.MaskedInput()], ids=repr)
def test_pictures_without_a_mask_stay_as_they_are_and_lend_nothing(method: Any) -> None:
    images, masks = scenes(4)
    masks[1:3] = False
    found = method.altered(images, masks)
    assert torch.equal(found[1:3], images[1:3])
    assert not torch.equal(found[0], images[0]) and not torch.equal(found[3], images[3])
    if isinstance(method, fi.BackgroundSwap):
        assert found[0, 0, 0, 0] == 4 and found[3, 0, 0, 0] == 1
        assert torch.equal(method.altered(images[:2], masks[:2]), images[:2])  # nobody to swap with
    assert torch.equal(method.altered(images, torch.zeros_like(masks)), images)


# --- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [fi.BackgroundSwap(1), fi.BackgroundErase("noise"), fi.MaskedInput()], ids=repr)
@pytest.mark.parametrize("task", ["classes", "one logit", "several labels"])
def test_plain_classification_of_what_is_seen_in_training(method: Any, task: str) -> None:
    images, masks = pictures(), masks_for(pictures())
    model = filled(Residual(classes=1 if task == "one logit" else 3, width=3).double()).eval()
    labels = labels_for(images) if task == "classes" else torch.tensor([0, 1, 1, 0])
    labels = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]]) if "labels" in task else labels

    def wanted(seen: Tensor) -> Tensor:
        logits = model(seen)
        if task == "classes":
            return F.cross_entropy(logits, labels)
        return F.binary_cross_entropy_with_logits(logits, labels.double().view_as(logits))

    parts = drawn(method).loss(model, images, labels, masks)
    torch.testing.assert_close(parts.total, wanted(drawn(method).altered(images, masks)), rtol=1e-12, atol=0)
    if isinstance(method, fi.MaskedInput):
        torch.testing.assert_close(parts.total, wanted(images * masks), rtol=1e-12, atol=0)
    assert float((parts.total - wanted(images)).detach().abs()) > 1e-6
    with torch.no_grad():  # validation and tests see what is there
        parts = method.loss(model, images, labels, masks)
        torch.testing.assert_close(parts.total, wanted(images), rtol=1e-12, atol=0)
    none = method.loss(model, images, labels)
    torch.testing.assert_close(none.total, wanted(images), rtol=1e-12, atol=0)
    assert none.without_mask == 4


@pytest.mark.parametrize("make", [fi.RRR, fi.GAIN, fi.Energy, lambda **o: Settled(**SETTINGS, **o)])
def test_before_a_heatmap_loss(make: Any) -> None:
    """The loss of a method with `augment` is its loss of the altered images; without gradients of the images."""
    images, masks = pictures(), masks_for(pictures())
    batch, model = labels_for(images), network()
    method = drawn(make(augment=fi.BackgroundSwap(feather=1)))
    seen = drawn(fi.BackgroundSwap(feather=1)).altered(images, masks)
    torch.testing.assert_close(
        method.loss(model, images, batch, masks).total, make().loss(model, seen, batch, masks).total, rtol=1e-10, atol=0
    )
    with torch.no_grad():
        wanted = make().loss(model, images, batch, masks).total
        torch.testing.assert_close(method.loss(model, images, batch, masks).total, wanted, rtol=1e-12, atol=0)


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="feather is -1"):
        fi.BackgroundSwap(-1)
    with pytest.raises(InputError, match="fill is 'red'"):
        fi.BackgroundErase("red")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="augment is 'swap'"):
        fi.Stochastic(augment="swap")  # pyright: ignore[reportArgumentType]
    signals = pictures(2, 2, 24)
    with pytest.raises(InputError, match="have to be pictures"):
        fi.BackgroundSwap().altered(signals, masks_for(signals))
    assert fi.MaskedInput().altered(signals, masks_for(signals)).shape == signals.shape
