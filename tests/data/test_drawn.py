"""The drawn pictures: what is in them, and that a small network can learn both the shape and the mark."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet.data.base import Samples, Source
from fasterisnet.data.drawn import SHAPES, drawn_source
from fasterisnet.errors import InputError


def stacked(samples: Samples) -> tuple[Tensor, Tensor, Tensor]:
    images, masks, labels = zip(*(samples.read(i) for i in range(len(samples))), strict=True)
    return torch.stack(images), torch.stack(masks), torch.tensor(labels)


def test_sizes_types_and_splits() -> None:
    source = drawn_source(classes=4, size=40, per_class=12)
    assert len(source.classes) == 4
    sizes = {"train": 48, "val": 16, "val_unbiased": 16, "iid": 16, "ood": 16, "deceiving": 16}
    assert {name: len(samples) for name, samples in source.splits.items()} == sizes
    for name, samples in source.splits.items():
        images, masks, labels = stacked(samples)
        assert images.dtype == torch.uint8 and images.shape == (sizes[name], 3, 40, 40)
        assert masks.dtype == torch.bool and masks.shape == (sizes[name], 1, 40, 40)
        assert torch.bincount(labels).tolist() == [sizes[name] // 4] * 4
        assert labels.tolist() == [samples.label(i) for i in range(len(samples))]
        share = masks.float().mean((1, 2, 3))
        assert float(share.min()) > 0.01 and float(share.max()) < 0.6


@pytest.mark.parametrize(("classes", "size"), [(2, 16), (3, 32), (8, 32), (8, 16), (8, 64)])
def test_the_mark_tells_the_class_lies_in_the_background_and_is_all_that_differs(classes: int, size: int) -> None:
    source = drawn_source(classes=classes, size=size, per_class=9)
    plain, masks, labels = stacked(source.split("ood"))
    side = size // 10
    for name, shift in (("iid", 0), ("deceiving", 1)):
        marked, marked_masks, _ = stacked(source.split(name))
        assert torch.equal(marked_masks, masks)
        for before, after, mask, label in zip(plain, marked, masks, labels.tolist(), strict=True):
            left = (label + shift) % classes * (side + 1)
            wanted = before.clone()
            wanted[:, :side, left : left + side] = 255
            assert left + side <= size
            assert torch.equal(after, wanted)
            assert not mask[:, :side].any()


def test_the_training_bias_can_be_left_out() -> None:
    biased, plain = drawn_source(), drawn_source(training_bias=False)
    assert torch.equal(stacked(plain.split("val"))[0], stacked(biased.split("val_unbiased"))[0])
    assert not torch.equal(stacked(plain.split("train"))[0], stacked(biased.split("train"))[0])
    assert torch.equal(stacked(plain.split("iid"))[0], stacked(biased.split("iid"))[0])


def test_the_seed_decides_on_training_pictures_alone() -> None:
    first, again, other = drawn_source(per_class=6), drawn_source(per_class=6), drawn_source(per_class=6, seed=1)
    for name in first.splits:
        images = stacked(first.split(name))[0]
        assert torch.equal(images, stacked(again.split(name))[0])
        trained = name in ("train", "val", "val_unbiased")
        assert torch.equal(images, stacked(other.split(name))[0]) != trained
    parts = [stacked(s.split(n))[0] for s in (first, other) for n in ("train", "val_unbiased", "ood")]
    pictures = {image.numpy().tobytes() for part in parts[:3] + parts[3:5] for image in part}
    assert len(pictures) == 2 * (18 + 6) + 6


def test_shapes_differ_and_splits_pickle() -> None:
    source = drawn_source(classes=len(SHAPES), per_class=3)
    grid = torch.linspace(-1, 1, 41)
    areas = [shape(grid.view(1, -1).expand(41, 41), grid.view(-1, 1).expand(41, 41)) for shape in SHAPES.values()]
    overlap = [float((a & b).sum() / (a | b).sum()) for i, a in enumerate(areas) for b in areas[:i]]
    assert max(overlap) < 0.9
    samples = source.split("iid")
    assert torch.equal(stacked(pickle.loads(pickle.dumps(samples)))[0], stacked(samples)[0])


@pytest.mark.parametrize("wrong", [{"classes": 1}, {"classes": 99}, {"size": 8}, {"per_class": 0}])
def test_what_cannot_be_drawn_is_said(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match=str(next(iter(wrong.values())))):
        drawn_source(**wrong)


def trained(source: Source) -> dict[str, float]:
    """Accuracies on the tests of a small network trained for a few seconds."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, len(source.classes)))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    images, _, labels = stacked(source.split("train"))
    for _ in range(12):
        for chosen in torch.randperm(len(labels)).split(20):
            optimizer.zero_grad()
            F.cross_entropy(model(images[chosen] / 255), labels[chosen]).backward()
            optimizer.step()
    model.eval()
    tests = {name: stacked(source.split(name)) for name in ("iid", "ood", "deceiving")}
    return {name: float((model(x / 255).argmax(1) == y).float().mean()) for name, (x, _, y) in tests.items()}


def test_the_shape_can_be_learned_and_the_mark_is_the_easier_way() -> None:
    fair, cheat = trained(drawn_source(training_bias=False)), trained(drawn_source())
    assert fair["ood"] > 0.85
    assert cheat["iid"] > 0.95
    assert cheat["deceiving"] < cheat["iid"] - 0.3
