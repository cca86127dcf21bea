"""From stored samples to network input: image and mask stay together, randomness belongs to (epoch, index)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fasterisnet.data.base import Label, Reading, Samples, Subset, balanced, hold_out
from fasterisnet.data.preparation import Augmentation, Preparation, Prepared, random_stream
from fasterisnet.errors import InputError

AUGMENTATIONS: tuple[Any, ...] = get_args(Augmentation)


class Drawn:
    """A white blob in every image, its mask, and labels and groups as given."""

    def __init__(
        self, labels: Sequence[Label], groups: Sequence[str | None] | None = None, size: tuple[int, int] = (60, 80)
    ) -> None:
        self.labels, self.size = list(labels), size
        self.groups = list(groups) if groups is not None else [None] * len(self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Reading:
        mask = blob(*self.size, shift=index % 7)
        return Reading((mask * 255).to(torch.uint8), mask, self.labels[index])

    def label(self, index: int) -> Label:
        return self.labels[index]

    def name(self, index: int) -> str:
        return f"drawn {index}"

    def group(self, index: int) -> str | None:
        return self.groups[index]


def blob(height: int, width: int, shift: int = 0) -> Tensor:
    """An ellipse with a bar to one side: no flip, turn or shift leaves it as it was."""
    rows, columns = torch.meshgrid(torch.arange(height) / height, torch.arange(width) / width, indexing="ij")
    ellipse = ((rows - 0.45) / 0.2) ** 2 + ((columns - 0.4 - shift / 100) / 0.15) ** 2 < 1
    bar = (rows > 0.35) & (rows < 0.5) & (columns > 0.4) & (columns < 0.75)
    return (ellipse | bar)[None]


def shrunk(area: Tensor) -> Tensor:
    """Without the pixels at its edge."""
    return -F.max_pool2d(-area.float()[None], 3, 1, 1)[0] > 0.5


def aligned(image: Tensor, mask: Tensor) -> bool:
    """Whether mask and white part agree but for the pixels at the edge, where resampling may differ."""
    inside, outside = shrunk(image[:1] > 0.999), shrunk(image[:1] < 0.001)
    return bool(inside.any()) and bool(mask[inside].all()) and not bool(mask[outside].any())


# Geometry ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
@pytest.mark.parametrize("fit", ["stretch", "pad"])
@pytest.mark.parametrize("size", [(60, 80), (200, 120), (64, 64)])
def test_image_and_mask_change_together(augmentation: Augmentation, fit: Any, size: tuple[int, int]) -> None:
    preparation = Preparation(64, augmentation=augmentation, fit=fit)
    mask = blob(*size)
    image = (mask * 255).to(torch.uint8).expand(3, -1, -1)
    torch.manual_seed(0)
    seen = set()
    for _ in range(12):
        prepared, outline = preparation(image, mask, training=True)
        assert prepared.shape == (3, 64, 64) and prepared.dtype == torch.float32
        assert outline.shape == (1, 64, 64) and outline.dtype == torch.bool
        assert aligned(prepared, outline)
        seen.add(outline.numpy().tobytes())
    assert len(seen) == {"none": 1, "flip": 2}.get(augmentation, 12)


def test_the_test_of_alignment_can_fail() -> None:
    prepared, outline = Preparation(64)((blob(60, 80) * 255).to(torch.uint8), blob(60, 80))
    assert aligned(prepared, outline)
    assert not aligned(prepared, outline.flip(-1)) and not aligned(prepared, outline.roll(3, -1))
    assert not aligned(prepared, outline.roll(2, -2)) and not aligned(prepared, torch.zeros_like(outline))


@pytest.mark.parametrize("source", [(16, 16), (31, 47), (256, 256), (512, 384)])
def test_resizing_does_not_move_the_mask(source: tuple[int, int]) -> None:
    mask = blob(*source)
    prepared, outline = Preparation(32)((mask * 255).to(torch.uint8), mask)
    places = torch.stack(torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij"))
    centres = [(places * weight).sum((1, 2)) / weight.sum() for weight in (prepared[:1], outline.float())]
    assert (centres[0] - centres[1]).abs().max() < 0.4


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
def test_nothing_is_random_but_in_training(augmentation: Augmentation) -> None:
    preparation = Preparation(64, augmentation=augmentation)
    image = (blob(60, 80) * 255).to(torch.uint8)
    plain = Preparation(64)(image, blob(60, 80))
    for seed in range(4):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        for got, wanted in zip(preparation(image, blob(60, 80)), plain, strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(torch.get_rng_state(), state)


def test_pad_keeps_the_shape_and_centres_it() -> None:
    image = torch.full((1, 4, 8), 255, dtype=torch.uint8)
    mask = torch.ones(1, 4, 8, dtype=torch.bool)
    wanted = torch.zeros(8, 8)
    wanted[2:6] = 1
    for picture, outline, expected in ((image, mask, wanted), (image.mT, mask.mT, wanted.T)):
        prepared, changed = Preparation(8, 1, fit="pad")(picture, outline)
        assert torch.equal(prepared[0], expected) and torch.equal(changed[0], expected > 0)
    prepared, changed = Preparation(16, 1, fit="pad")(image, mask)
    assert torch.equal(changed[0], wanted.repeat_interleave(2, 0).repeat_interleave(2, 1) > 0)
    assert bool((prepared[0, 5:11] == 1).all()) and not bool(prepared[0, [0, 1, 2, 13, 14, 15]].any())


def test_stretch_fills_the_square() -> None:
    prepared, mask = Preparation(8, 1)(
        torch.full((1, 4, 6), 255, dtype=torch.uint8), torch.ones(1, 4, 6, dtype=torch.bool)
    )
    assert bool((prepared == 1).all()) and bool(mask.all())


def test_xray_shifts_and_turns_as_far_as_the_paper_says() -> None:
    """A dot in the centre moves by up to 28 of 224 px; a line through it turns by up to 40 degrees."""
    image = torch.zeros(1, 224, 224, dtype=torch.uint8)
    image[0, 108:116, 92:132] = 255
    image[0, 108:116, 120:132] = 128
    preparation = Preparation(224, 1, augmentation="xray")
    torch.manual_seed(1)
    shifts, angles, flips = [], [], Counter()
    for _ in range(60):
        prepared = preparation(image, None, training=True)[0][0]
        points = (prepared > 0.25).nonzero().double()
        centre = points.mean(0)
        shifts.append(centre - 111.5)
        bright, dim = (
            (prepared > 0.75).nonzero().double().mean(0),
            ((prepared > 0.3) & (prepared < 0.7)).nonzero().double().mean(0),
        )
        rise, run = (dim - bright).tolist()
        flips[run > 0] += 1
        angles.append(abs(torch.tensor(rise / abs(run)).atan().rad2deg().item()))
    furthest = torch.stack(shifts).abs().amax(0)
    assert bool((furthest <= 28.6).all()) and bool((furthest > 20).all())
    assert 30 < max(angles) < 42
    assert min(flips.values()) > 15


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "std"), [((), ()), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5, 0.1, 0.9), (0.5, 2.0, 0.01))]
)
def test_the_box_is_the_range_of_the_network_input(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    preparation = Preparation(8, mean=mean, std=std)
    low, high = (torch.as_tensor(edge, dtype=torch.float32).expand(3) for edge in preparation.box)
    for value, edge in ((0, low), (255, high)):
        prepared, _ = preparation(torch.full((3, 8, 8), value, dtype=torch.uint8))
        torch.testing.assert_close(prepared, edge[:, None, None].expand(3, 8, 8), rtol=1e-6, atol=1e-6)
    noise = torch.randint(0, 256, (3, 40, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for augmentation in AUGMENTATIONS:
        prepared, _ = Preparation(32, mean=mean, std=std, augmentation=augmentation)(noise, training=True)
        assert bool((prepared.amin((1, 2)) >= low - 1e-5).all()) and bool((prepared.amax((1, 2)) <= high + 1e-5).all())


def test_channels() -> None:
    gray = torch.arange(64, dtype=torch.uint8).view(1, 8, 8)
    assert torch.equal(Preparation(8, 3)(gray)[0], (gray / 255).expand(3, -1, -1))
    colour = torch.stack([gray[0], gray[0] * 2, gray[0] * 3])
    wanted = (0.2989 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]) / 255
    torch.testing.assert_close(Preparation(8, 1)(colour)[0][0], wanted, rtol=0, atol=2e-3)


def test_no_mask_is_an_empty_one() -> None:
    for augmentation in AUGMENTATIONS:
        _, mask = Preparation(16, augmentation=augmentation)(torch.zeros(3, 20, 10, dtype=torch.uint8), training=True)
        assert mask.shape == (1, 16, 16) and mask.dtype == torch.bool and not bool(mask.any())


def test_equalising_spreads_the_values_and_leaves_the_mask() -> None:
    dull = torch.randint(100, 120, (1, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    prepared, mask = Preparation(32, 1, equalise=True)(dull, blob(32, 32))
    assert prepared.min() == 0 and prepared.max() == 1 and torch.equal(mask, blob(32, 32))
    order = dull.flatten().argsort()
    assert bool((prepared.flatten()[order].diff() >= 0).all())


def test_a_preparation_survives_json() -> None:
    preparation = Preparation(96, 1, (0.5,), (0.25,), "pad", True, "xray")
    assert Preparation.from_dict(json.loads(json.dumps(preparation.to_dict()))) == preparation


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"channels": 2},
        {"mean": (0.5,)},
        {"mean": (0.5,), "std": (0.5,)},
        {"mean": (0.5,) * 3, "std": (0.5, 0.5, 0.0)},
        {"fit": "cut"},
        {"augmentation": "flips"},
    ],
)
def test_wrong_preparations_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Preparation(**wrong)


# Randomness ----------------------------------------------------------------------------------------------------------


def prepared(augmentation: Augmentation = "xray", seed: int = 3, training: bool = True) -> Prepared:
    return Prepared(Drawn([0, 1] * 5), Preparation(32, augmentation=augmentation), seed=seed, training=training)


KEYS = [(epoch, index) for epoch in range(3) for index in range(10)]


@pytest.mark.parametrize("augmentation", ["flip", "crop", "xray"])
def test_a_sample_depends_on_epoch_and_index_only(augmentation: Augmentation) -> None:
    wanted = {key: prepared(augmentation)[key] for key in KEYS}
    again = prepared(augmentation)
    torch.manual_seed(99)
    for key in reversed(KEYS):
        torch.rand(3)
        for got, expected in zip(again[key], wanted[key], strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_batches_change_nothing(workers: int) -> None:
    data = prepared()
    wanted = {key: data[key] for key in KEYS}
    order = [KEYS[i] for i in torch.randperm(len(KEYS), generator=torch.Generator().manual_seed(0))]
    torch.manual_seed(7)
    loader: DataLoader[Any] = DataLoader(data, batch_size=4, sampler=order, num_workers=workers)
    got = [torch.cat(parts) for parts in zip(*loader, strict=True)]
    for i, key in enumerate(order):
        for part, expected in zip(got, wanted[key], strict=True):
            assert torch.equal(part[i], expected)


def test_samples_epochs_and_seeds_differ() -> None:
    same = Prepared(Drawn([0] * 14), Preparation(32, augmentation="xray"), seed=3, training=True)
    pictures = [
        same[0, 0],
        same[0, 7],
        same[1, 0],
        same[7, 0],
        Prepared(same.samples, same.preparation, seed=4, training=True)[0, 0],
    ]
    assert len({outline.numpy().tobytes() for _, _, outline in pictures}) == 5
    seeds = {
        random_stream(*numbers) for numbers in [(s, e, i) for s in range(10) for e in range(10) for i in range(50)]
    }
    assert len(seeds) == 5000 and all(0 <= seed < 2**63 for seed in seeds)
    assert random_stream(1, 2) != random_stream(2, 1) and random_stream(-1) != random_stream(1)


def test_the_random_state_of_others_is_left_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(4)
    torch.manual_seed(5)
    prepared()[1, 2]
    assert torch.equal(torch.rand(4), wanted)


def test_the_random_state_of_the_gpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    prepared()[1, 2]
    assert not seeded


def test_labels_and_plain_numbers() -> None:
    data = Prepared(Drawn([2, 0]), Preparation(16))
    image, label, mask = data[1]
    assert label.dtype == torch.int64 and label.item() == 0 and len(data) == 2
    assert torch.equal(image, data[0, 1][0]) and mask.dtype == torch.bool
    several = Prepared(Drawn([(1.0, 0.0, 1.0)]), Preparation(16))[0][1]
    assert several.dtype == torch.float32 and several.tolist() == [1, 0, 1]


# Holding out ---------------------------------------------------------------------------------------------------------


def parts(samples: Samples, share: float, seed: int = 0) -> tuple[set[int], set[int]]:
    kept, held = hold_out(samples, share, seed)
    assert not set(kept.chosen) & set(held.chosen)
    assert set(kept.chosen) | set(held.chosen) == set(range(len(samples))) and len(kept) + len(held) == len(samples)
    return set(kept.chosen), set(held.chosen)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_every_class_gives_its_share(share: float) -> None:
    labels = [0] * 200 + [1] * 40 + [2] * 20
    _, held = parts(Drawn(labels), share)
    counts = Counter(labels[i] for i in held)
    assert counts == {label: round(share * number) for label, number in Counter(labels).items()}


def test_which_are_held_depends_on_the_seed_alone() -> None:
    samples = Drawn([0, 1] * 50)
    torch.manual_seed(1)
    first = parts(samples, 0.2)
    torch.manual_seed(2)
    assert parts(samples, 0.2) == first and parts(samples, 0.2, seed=1) != first


@pytest.mark.parametrize("seed", range(5))
def test_a_group_is_never_in_both_parts(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = [str(g) if g else None for g in torch.randint(0, 30, (300,), generator=generator).tolist()]
    labels = torch.randint(0, 3, (300,), generator=generator).tolist()
    kept, held = parts(Drawn(labels, groups), 0.2, seed)
    assert not ({groups[i] for i in kept} & {groups[i] for i in held}) - {None}
    assert 0.1 < len(held) / 300 < 0.3


def test_the_only_group_of_a_class_is_kept_for_training() -> None:
    samples = Drawn([0] * 20 + [1] * 6, [None] * 20 + ["p"] * 6)
    for share in (0.2, 0.5, 0.8):
        kept, _ = parts(samples, share)
        assert set(range(20, 26)) <= kept


@pytest.mark.parametrize(("number", "share"), [(2, 0.8), (4, 0.9), (10, 0.96)])
def test_every_class_is_still_trained(number: int, share: float) -> None:
    kept, _ = parts(Drawn([0] * 100 + [1] * number), share)
    assert any(i >= 100 for i in kept)


def test_labels_of_several_classes_can_be_held_out() -> None:
    labels = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)] * 20
    _, held = parts(Drawn(labels), 0.2)
    assert Counter(labels[i] for i in held) == dict.fromkeys(labels[:3], 4)


def test_a_subset_hands_on_what_it_has() -> None:
    samples = Drawn([5, 6, 7], ["a", None, "c"])
    subset = Subset(samples, [2, 0])
    assert [subset.label(i) for i in (0, 1)] == [7, 5] and [subset.group(i) for i in (0, 1)] == ["c", "a"]
    assert subset.name(0) == "drawn 2" and torch.equal(subset.read(0).image, samples.read(2).image) and len(subset) == 2


@pytest.mark.parametrize(
    ("number", "share", "words"),
    [(10, 0.0, "between 0 and 1"), (10, 1.0, "between"), (1, 0.3, "add a 'val' split"), (0, 0.3, "too few")],
)
def test_impossible_shares_are_refused(number: int, share: float, words: str) -> None:
    with pytest.raises(InputError, match=words):
        hold_out(Drawn([0] * number), share, 0)


def test_balanced_samples_have_every_class_equally_often() -> None:
    labels = [0] * 7 + [1] * 3 + [2]
    samples = Drawn(labels)
    found = balanced(samples, 5)
    assert [sum(found.label(i) == label for i in range(len(found))) for label in range(3)] == [7, 7, 7]
    times = [found.chosen.count(i) for i in range(len(labels))]
    assert times[:7] == [1] * 7 and sorted(times[7:10]) == [2, 2, 3] and times[10] == 7
    assert found.chosen == balanced(samples, 5).chosen
    assert len({tuple(balanced(samples, seed).chosen) for seed in range(9)}) > 1
