"""Changed pictures, pixel by pixel; and the answers of networks that are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evaluation.scenes import constant_network, corner_reader, object_reader, random_network, scenes
from fasterisnet.backgrounds import Palette, fill_in, grown, has_background, palette_of
from fasterisnet.errors import InputError
from fasterisnet.evaluation.alterations import TESTS, altered, boxes_around, partners
from fasterisnet.evaluation.causal import Causal, ask, careful, judge
from fasterisnet.evaluation.explainers import EXPLAINERS, heatmaps


def examined(model: Any, images: Tensor, masks: Tensor, labels: list[int], **options: Any) -> Causal:
    answers = ask(
        model, lambda numbers: (images[numbers], masks[numbers]), labels, palette_of(images, masks),
        has_background(masks).tolist(), batch=32,
    )  # fmt: skip
    return judge(answers, labels, **options)


# --- pictures --------------------------------------------------------------------------------------------------------


def test_what_is_known_stays_and_the_rest_is_like_it() -> None:
    images = torch.rand(2, 3, 13, 10)
    known = torch.ones(2, 1, 13, 10, dtype=torch.bool)
    known[:, :, 4:9, 2:7] = False
    filled = fill_in(images, known)
    assert torch.equal(filled.where(known, 0), images.where(known, 0))
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    assert bool(((filled >= low) & (filled <= high)).all())
    even = fill_in(torch.full((1, 1, 9, 9), 0.7).where(known[:1, :, :9, :9], 0.0), known[:1, :, :9, :9])
    torch.testing.assert_close(even, torch.full((1, 1, 9, 9), 0.7))


def test_a_hole_takes_the_colour_of_its_side() -> None:
    images = torch.zeros(1, 1, 16, 16)
    images[..., 8:] = 1
    known = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    known[..., 6:10, 1:3] = False
    known[..., 6:10, 13:15] = False
    filled = fill_in(images, known)
    assert float(filled[..., 1:3].max()) < 0.1 and float(filled[..., 13:15].min()) > 0.9


def test_boxes_and_margins() -> None:
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    mask[0, 0, 2, 3] = mask[0, 0, 5, 6] = True
    box = boxes_around(mask)
    wanted = torch.zeros_like(mask)
    wanted[0, 0, 2:6, 3:7] = True
    assert torch.equal(box, wanted)
    assert int(grown(mask).sum()) == 18
    assert not bool(boxes_around(torch.zeros_like(mask)).any())


def test_who_lends_a_background() -> None:
    labels = [0, 0, 0, 1, 1, 2, 1]
    usable = [True, True, False, True, True, True, True]
    found = partners(labels, usable)
    for i, label in enumerate(labels):
        same, other, any_ = found["same"][i], found["other"][i], found["random"][i]
        if not usable[i]:
            assert (same, other, any_) == (-1, -1, -1)
            continue
        assert all(usable[j] and j != i for j in (other, any_))
        assert labels[other] != label
        assert same == -1 if label == 2 else same != i and labels[same] == label and usable[same]
    assert partners([0, 0], [True, True])["other"] == [-1, -1]
    assert len({tuple(partners(labels, usable, seed=s)["other"]) for s in range(5)}) > 1


def test_random_partners_are_of_every_class_alike() -> None:
    labels = [0] * 300 + [1] * 30
    found = [labels[j] for j in partners(labels, [True] * 330)["random"]]
    assert 0.4 < sum(found) / 330 < 0.6


def pair() -> tuple[Tensor, Tensor, Palette]:
    images, masks, _ = scenes(2)
    return images, masks, palette_of(images, masks)


@pytest.mark.parametrize("name", ["mixed_same", "background_mean", "background_blur", "background_noise"])
def test_the_object_is_left_alone_when_its_background_changes(name: str) -> None:
    images, masks, palette = pair()
    changed = altered(name, images, masks, (images.flip(0), masks), palette, [0, 1])
    assert torch.equal(changed.where(masks, 0), images.where(masks, 0))
    outside = ~masks.expand_as(images)
    assert float((changed != images)[outside].double().mean()) > 0.9


def test_a_borrowed_background_comes_without_its_object() -> None:
    images, masks, palette = pair()
    moved, moved_masks = images.roll(3, -1), masks.roll(3, -1)
    changed = altered("mixed_other", images, masks, (moved.flip(0), moved_masks), palette)
    hidden = grown(moved_masks) & ~masks
    assert float(changed.where(hidden, 0).max()) < 0.5 < float(moved.where(hidden, 0).max())
    kept = ~grown(moved_masks) & ~masks
    assert torch.equal(changed.where(kept, 0), moved.flip(0).where(kept, 0))


def test_an_erased_object_leaves_the_background_and_nothing_of_it_in_its_place() -> None:
    images, masks, palette = pair()
    changed = altered("object_erased", images, masks, (images, masks), palette)
    box = boxes_around(grown(masks))
    assert torch.equal(changed.where(~box, 0), images.where(~box, 0))
    torch.testing.assert_close(changed.where(box, 0), palette.mean.where(box, 0).expand_as(changed))
    other = altered("object_erased_other", images, masks, (images.flip(0), masks), palette)
    assert torch.equal(other.where(~box, 0), images.flip(0).where(~box, 0))
    assert torch.equal(other.where(box, 0), changed.where(box, 0))


def test_noise_belongs_to_the_sample_and_has_the_colours_of_backgrounds() -> None:
    images, masks, palette = pair()
    together = altered("background_noise", images, masks, (images, masks), palette, [4, 9])
    alone = altered("background_noise", images[1:], masks[1:], (images[1:], masks[1:]), palette, [9])
    assert torch.equal(together[1:], alone)
    colours = together.where(~masks, palette.mean)
    assert bool(((colours >= palette.low) & (colours <= palette.high)).all())


def test_a_picture_full_of_object_has_no_background() -> None:
    masks = torch.ones(3, 1, 8, 8, dtype=torch.bool)
    masks[1, :, :4] = False
    masks[2] = False
    assert has_background(masks).tolist() == [False, True, False]


# --- networks that are known -----------------------------------------------------------------------------------------


def test_a_network_that_reads_a_corner() -> None:
    found = examined(corner_reader(), *scenes())
    other = found.effects["mixed_other"]
    assert other.changed is not None and other.changed.value == 1
    assert other.follows_background is not None and other.follows_background.value == 1
    assert other.accuracy is not None and other.accuracy.value == 0
    erased = found.effects["object_erased"]
    assert erased.accuracy is not None and erased.accuracy.value == 1
    assert erased.logits is not None and erased.logits.value == 0
    assert found.pull is not None and found.pull.value == 1
    assert found.influence is not None and found.influence.value == 1
    assert found.background_gap is not None and found.background_gap.low > 0.4
    same = found.effects["mixed_same"]
    assert same.changed is not None and same.changed.value == 0
    assert found.chance == pytest.approx(1 / 3)


def test_a_network_that_cannot_see_the_background() -> None:
    found = examined(object_reader(), *scenes())
    for name in ("mixed_same", "mixed_random", "mixed_other", "background_mean", "background_blur", "background_noise"):
        effect = found.effects[name]
        assert effect.samples == 90
        assert effect.accuracy is not None and effect.accuracy.value == 1
        for number in (effect.changed, effect.logits, effect.probability, effect.lost):
            assert number is not None and number.value == 0
    swapped = found.effects["object_swapped"]
    assert swapped.follows_object is not None and swapped.follows_object.value == 1
    erased = found.effects["object_erased"]
    assert erased.accuracy is not None and erased.accuracy.value is not None and erased.accuracy.value < 0.4
    assert found.pull is not None and found.pull.value == 0
    assert found.influence is not None and found.influence.value == 0
    assert found.background_gap is not None and found.background_gap.value == 0


def test_a_network_that_says_always_the_same() -> None:
    found = examined(constant_network(), *scenes())
    assert found.influence is None and found.object_moves is not None and found.object_moves.value == 0
    assert found.original is not None and found.original.value == found.chance == pytest.approx(1 / 3)


def test_a_random_network_is_moved_by_both() -> None:
    found = examined(random_network(), *scenes())
    assert found.influence is not None and 0.2 < found.influence.low < found.influence.high < 0.95


def test_one_logit_and_several_labels() -> None:
    images, masks, labels = scenes()
    corner = corner_reader()
    two = [min(label, 1) for label in labels]
    single = examined(lambda x: corner(x)[:, 1:].amax(1, True) - corner(x)[:, :1], images, masks, two)
    assert single.effects["mixed_other"].changed is not None and single.effects["mixed_other"].changed.value == 1
    tuples = [tuple(float(label == c) for c in range(3)) for label in labels]
    several = examined(lambda x: corner(x) - 8, images, masks, tuples, multi_label=True)
    assert several.original is not None and several.original.value == 1
    assert several.effects["mixed_other"].changed is not None and several.effects["mixed_other"].changed.value == 1


def test_groups_widen_the_intervals() -> None:
    images, masks, labels = scenes(90, told=False)
    alone = examined(random_network(), images, masks, labels)
    grouped = examined(random_network(), images, masks, labels, groups=[f"patient {i % 6}" for i in range(90)])
    one, other = alone.effects["mixed_other"].accuracy, grouped.effects["mixed_other"].accuracy
    assert one is not None and other is not None
    assert one.value == other.value and other.sd > one.sd


def test_a_conflict_is_judged_on_images_that_were_right() -> None:
    """Of the constant network those of class 0: it stays with the object, as it stays with anything."""
    effect = examined(constant_network(), *scenes()).effects["mixed_other"]
    assert effect.follows_object is not None and effect.follows_object.value == 1
    assert effect.follows_background is not None and effect.follows_background.value == 0


def test_samples_without_mask_are_shown_as_they_are_only() -> None:
    images, masks, labels = scenes(30)
    masks[:10] = False
    found = examined(object_reader(), images, masks, labels)
    assert found.effects["mixed_other"].samples == 20
    assert found.original is not None and found.original.value == 1
    nothing = examined(object_reader(), images, torch.zeros_like(masks), labels)
    assert nothing.effects["mixed_other"].changed is None and nothing.influence is None


def test_a_network_that_fails_on_some_images() -> None:
    def failing(images: Tensor) -> Tensor:
        if float(images.max()) > 5:
            raise RuntimeError("too bright")
        return object_reader()(images).where(images.amin((1, 2, 3))[:, None] >= 0, torch.nan)

    images, masks, labels = scenes(12)
    images[3] += 10
    images[7] -= 10
    logits, problems = careful(failing, images)
    assert problems == {3: "RuntimeError: too bright", 7: "its logits are not finite numbers"}
    assert logits.isnan().any(1).nonzero()[:, 0].tolist() == [3, 7] and logits.shape == (12, 3)
    answers = ask(
        failing, lambda n: (images[n], masks[n]), labels, palette_of(images[:3], masks[:3]), [True] * 12, batch=5
    )
    assert answers.problems.keys() == {3, 7}
    assert judge(answers, labels).original is not None
    with pytest.raises(InputError, match=r"not \(sample, class\)"):
        careful(lambda x: x, images)


def test_every_test_is_told_of() -> None:
    images, masks, palette = pair()
    for name in TESTS:
        assert altered(name, images, masks, (images, masks), palette, [0, 1]).shape == images.shape
    with pytest.raises(InputError, match="no test 'mean'"):
        altered("mean", images, masks, (images, masks), palette)


# --- explainers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in EXPLAINERS if name not in ("gradcam", "rollout")])
def test_every_explainer_sees_what_a_linear_network_sees(name: str) -> None:
    images, masks, _ = scenes(6)
    for model, inside in ((object_reader(), True), (corner_reader(), False)):
        maps = heatmaps(name, model, images)
        assert maps.shape == images.shape
        if name != "occlusion":
            area = masks if inside else torch.zeros_like(masks).index_fill_(2, torch.tensor([0, 1]), True)
            assert float(maps.where(~area, 0).abs().max()) == 0
        assert bool((maps.abs().sum((1, 2, 3)) > 0).all())
        strongest = maps.abs().sum(1).flatten(1).argmax(1)
        assert bool(masks.flatten(1).gather(1, strongest[:, None]).all()) == inside


def test_grad_cam_sees_what_a_network_with_maps_sees() -> None:
    """One that asks for bright places: they are where its map is. A linear network has no maps."""
    images = torch.full((2, 3, 16, 16), 0.1)
    images[:, :, 8:12, 4:8] = 1.0
    network = nn.Sequential(nn.AvgPool2d(4), nn.Conv2d(3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with torch.no_grad():
        network[1].weight.copy_(torch.tensor([1.0, -1.0]).view(2, 1, 1, 1).expand(2, 3, 1, 1))
        network[1].bias.copy_(torch.tensor([-1.0, 0.0]))
    maps = heatmaps("gradcam", network, images)
    assert maps.shape == images.shape
    assert maps.abs().sum(1).flatten(1).argmax(1).tolist() == [9 * 16 + 5] * 2
    assert float(maps[..., 14:, :].abs().max()) == 0
    with pytest.raises(InputError, match="Grad-CAM needs maps"):
        heatmaps("gradcam", object_reader(), scenes(6)[0])


def test_integrated_gradients_add_up() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Softplus(), nn.Flatten(), nn.LazyLinear(3)).double()
    images = torch.rand(4, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        logits, at_zero = model(images), model(torch.zeros_like(images))
    decided = logits.argmax(1, keepdim=True)
    wanted = (logits - at_zero).gather(1, decided)[:, 0]
    torch.testing.assert_close(heatmaps("integrated", model, images).sum((1, 2, 3)), wanted, rtol=1e-3, atol=1e-4)
