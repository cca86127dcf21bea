"""Marks planted in the background of any data."""

from pathlib import Path

import pytest
import torch

from fasterisnet.data.base import Reading
from fasterisnet.data.planted import PLACES, free_place, marked, planted
from fasterisnet.data.sources import open_source
from fasterisnet.errors import InputError, UsageError
from fasterisnet.runs.fingerprint import changed_data, data_of


class Pictures:
    """Grey pictures of three classes, the object in the middle."""

    def __init__(self, count: int = 30, mask: torch.Tensor | None = None, *, masks: bool = True) -> None:
        self.count, self.masks = count, masks
        middle = torch.zeros(1, 28, 28, dtype=torch.bool)
        middle[:, 8:20, 8:20] = True
        self.mask = middle if mask is None else mask

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> Reading:
        image = torch.full((3, 28, 28), 100, dtype=torch.uint8)
        return Reading(image, self.mask.clone() if self.masks else None, self.label(index))

    def label(self, index: int) -> int:
        return index % 3

    def name(self, index: int) -> str:
        return f"picture {index}"

    def group(self, index: int) -> str | None:
        return None


def source(**options: object):
    from fasterisnet.data.base import Source

    return planted(Source(["a", "b", "c"], {"train": Pictures(**options)}), 0)  # pyright: ignore[reportArgumentType]


def changed(reading: Reading) -> torch.Tensor:
    return (reading.image != 100).any(0)


def test_marks_tell_the_class_and_never_touch_the_object() -> None:
    splits = source().splits
    assert list(splits) == ["train", "val", "val_unbiased", "iid", "ood", "deceiving"]
    places: dict[int, set[bytes]] = {}
    for i in range(len(splits["train"])):
        reading = splits["train"].read(i)
        assert reading.mask is not None
        assert changed(reading).any()
        assert not (changed(reading) & reading.mask[0]).any()
        places.setdefault(int(reading.label), set()).add(changed(reading).numpy().tobytes())  # pyright: ignore[reportArgumentType]
    assert all(len(found) == 1 for found in places.values())
    assert len(set.union(*places.values())) == 3


def test_tests_differ_in_nothing_but_the_mark() -> None:
    splits = source().splits
    for i in range(len(splits["iid"])):
        iid, ood, wrong = (splits[name].read(i) for name in ("iid", "ood", "deceiving"))
        assert not changed(ood).any()
        assert changed(iid).any() and changed(wrong).any()
        assert not torch.equal(iid.image, wrong.image)
        assert iid.label == ood.label == wrong.label
    assert not any(changed(splits["val_unbiased"].read(i)).any() for i in range(len(splits["val_unbiased"])))


def test_nobody_is_in_two_splits() -> None:
    splits = source().splits
    names = [{splits[name].name(i) for i in range(len(splits[name]))} for name in ("train", "val", "ood")]
    assert len(set.union(*names)) == sum(map(len, names)) == 30


@pytest.mark.parametrize("shown", range(20))
def test_a_mark_moves_where_there_is_room(shown: int) -> None:
    mask = torch.ones(1, 40, 30, dtype=torch.bool)
    mask[:, 30:34, 11:16] = False
    image = torch.full((1, 40, 30), 100, dtype=torch.uint8)
    picture = marked(image, mask, shown, 20)
    assert (picture != image).any()
    assert not ((picture != image) & mask).any()


def test_twenty_classes_have_twenty_marks() -> None:
    image, mask = torch.full((1, 64, 64), 100, dtype=torch.uint8), torch.zeros(1, 64, 64, dtype=torch.bool)
    assert len({marked(image, mask, shown, 20).numpy().tobytes() for shown in range(20)}) == 20
    assert PLACES < 20


def test_no_room() -> None:
    assert free_place(torch.ones(1, 9, 9, dtype=torch.bool), 2, (0.0, 0.0)) is None
    with pytest.raises(InputError, match="no room"):
        source(mask=torch.ones(1, 28, 28, dtype=torch.bool))
    with pytest.raises(InputError, match="no mask"):
        source(masks=False)


def test_several_labels_have_no_mark() -> None:
    from fasterisnet.data.base import Source

    with pytest.raises(UsageError, match="several labels"):
        planted(Source(["a", "b"], {"train": Pictures()}, multi_label=True), 0)


def test_a_folder_by_name(tmp_path: Path) -> None:
    from PIL import Image

    for split in ("train", "val", "test"):
        for name in ("cat", "dog"):
            for i in range(4):
                for kind, value in (("", 90), ("masks/", 0)):
                    place = tmp_path / kind / split / name / f"{i}.png"
                    place.parent.mkdir(parents=True, exist_ok=True)
                    picture = Image.new("L", (28, 28), value)
                    if kind:
                        picture.paste(255, (10, 10, 18, 18))
                    picture.save(place)
    plain, biased = open_source(str(tmp_path)), open_source(f"{tmp_path}?bias=mark")
    assert set(plain.splits) == {"train", "val", "test"}
    assert len(biased.split("train")) == len(plain.split("train"))
    before, after = plain.split("train").read(0).image, biased.split("train").read(0).image
    assert 0 < int((before != after).any(0).sum()) < 30
    prints = [data_of(s, str(tmp_path), 1) for s in (plain, biased)]
    assert changed_data(prints[1], prints[1], biased) is None
    assert not torch.equal(prints[0]["splits"]["train"], prints[1]["splits"]["train"])
    with pytest.raises(UsageError, match="mark or none"):
        open_source(f"{tmp_path}?bias=train")
