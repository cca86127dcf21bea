"""Boxes as masks: every pixel touched, cut at the border; COCO and VOC files; GrabCut."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools import mask as mask_tools

from fasterisnet.data.boxes import Box, Runs, boxes_of, boxes_to_mask, read_coco, read_voc, refine
from fasterisnet.errors import InputError

NAN = float("nan")


def pixels(mask: torch.Tensor) -> set[tuple[int, int]]:
    """(x, y) of the foreground."""
    return {(int(x), int(y)) for _, y, x in mask.nonzero()}


def test_whole_numbers_are_exactly_their_pixels() -> None:
    mask = boxes_to_mask([Box(2, 1, 3, 2)], 5, 8)
    assert mask.shape == (1, 5, 8) and mask.dtype == torch.bool
    assert pixels(mask) == {(x, y) for x in (2, 3, 4) for y in (1, 2)}


@pytest.mark.parametrize(
    "box", [Box(0.5, 1.2, 3.1, 0.4), Box(-2, -3, 5.5, 4.01), Box(5, 2, 100, 100), Box(6.9, 3.9, 0.2, 0.2)]
)
def test_every_pixel_a_box_touches_belongs_to_the_mask(box: Box) -> None:
    height, width = 5, 8
    touched = {
        (x, y)
        for x in range(width)
        for y in range(height)
        if x < box.x + box.width and x + 1 > box.x and y < box.y + box.height and y + 1 > box.y
    }
    assert touched and pixels(boxes_to_mask([box], height, width)) == touched


def test_several_boxes_are_a_union() -> None:
    first, second = Box(0, 0, 2, 2), Box(1, 1, 3, 1)
    both = boxes_to_mask([first, second], 4, 4)
    assert torch.equal(both, boxes_to_mask([first], 4, 4) | boxes_to_mask([second], 4, 4))


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([], "no box"),
        ([Box(1, 1, 0, 2)], "empty"),
        ([Box(1, 1, 2, -1)], "empty"),
        ([Box(1, NAN, 2, 1)], "empty"),
        ([Box(1, 1, float("inf"), 1)], "empty"),
        ([Box(0, 0, 1, 1), Box(8, 0, 1, 1)], "outside the image of 8 x 5"),
        ([Box(0, -3, 2, 3)], "outside"),
    ],
)
def test_boxes_without_a_pixel_are_refused(boxes: list[Box], words: str) -> None:
    with pytest.raises(InputError, match=words):
        boxes_to_mask(boxes, 5, 8)


def test_boxes_of_the_class_are_preferred() -> None:
    cat, dog = Box(0, 0, 1, 1, "cat"), Box(1, 1, 1, 1, "dog")
    assert boxes_of([cat, dog], ("dog",)) == (dog,)
    assert boxes_of([cat, dog], ("bird",)) == (cat, dog)
    assert boxes_of([], ("bird",)) == ()


def coco(**changes: Any) -> dict[str, Any]:
    content = {
        "images": [{"id": 7, "file_name": "a.png"}, {"id": 8, "file_name": "b.png"}],
        "annotations": [
            {"image_id": 7, "bbox": [1, 2, 3, 4.5], "category_id": 2},
            {"image_id": 7, "bbox": [0, 0, 1, 1]},
        ],
        "categories": [{"id": 2, "name": "cat"}],
    }
    return {**content, **changes}


def test_coco(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(coco()))
    assert read_coco(path) == {"a.png": [Box(1, 2, 3, 4.5, "cat"), Box(0, 0, 1, 1, "")], "b.png": []}


def test_outlines_of_a_coco_file_are_drawn(tmp_path: Path) -> None:
    """Polygons, run lengths as numbers and as text; each shape is known beforehand."""
    square, stripe, corner = (np.zeros((6, 8), bool) for _ in range(3))
    square[1:4, 2:5], stripe[:, 3], corner[4:, 6:] = True, True, True
    runs = [*(6 * 3, 6), 6 * 4]
    packed = mask_tools.encode(np.asfortranarray(corner.astype(np.uint8)))
    segmentations: list[Any] = [
        [[2, 1, 5, 1, 5, 4, 2, 4]],
        {"size": [6, 8], "counts": runs},
        {"size": [6, 8], "counts": packed["counts"].decode()},
        [[2, 1, 5, 1, 5, 4, 2, 4], [6, 4, 8, 4, 8, 6, 6, 6]],
        [],
    ]
    wanted = [square, stripe, corner, square | corner, np.ones((6, 8), bool)]
    path = tmp_path / "c.json"
    for i, (segmentation, shape) in enumerate(zip(segmentations, wanted, strict=True)):
        annotation = {"image_id": 7, "segmentation": segmentation, **({"bbox": [0, 0, 8, 6]} if i % 2 == 0 else {})}
        path.write_text(json.dumps(coco(annotations=[annotation])))
        mask = boxes_to_mask(read_coco(path)["a.png"], 6, 8)
        assert torch.equal(mask[0], torch.from_numpy(shape)), segmentation


def test_run_lengths_as_text_are_the_same_as_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "c.json"
    for density in (0.02, 0.5, 0.9):
        shape = rng.random((37, 51)) < density
        text = mask_tools.encode(np.asfortranarray(shape.astype(np.uint8)))["counts"].decode()
        segmentation = {"size": [37, 51], "counts": text}
        path.write_text(json.dumps(coco(annotations=[{"image_id": 7, "segmentation": segmentation}])))
        assert torch.equal(boxes_to_mask(read_coco(path)["a.png"], 37, 51)[0], torch.from_numpy(shape))


@pytest.mark.parametrize(
    "segmentation",
    [
        [[1, 2, 3, 4]],
        [[1, 2, 3, 4, 5, "6"]],
        [[1, 2, 3, 4, 5, 1e999]],
        [[1, 2, 3, 4, 5, 6, 7]],
        "text",
        {"size": [6, 8]},
        {"size": [6, 8], "counts": [3, 4]},
        {"size": [6, 8], "counts": [-3, 51]},
        {"size": [6, 8], "counts": "???"},
        {"size": [6, 8], "counts": "o" * 100_000},
        {"size": [10**9, 10**9], "counts": [10**18]},
    ],
)
def test_outlines_that_are_none(tmp_path: Path, segmentation: Any) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(coco(annotations=[{"image_id": 7, "bbox": [0, 0, 1, 1], "segmentation": segmentation}])))
    with pytest.raises(InputError, match="annotation 0 has a segmentation that is neither"):
        read_coco(path)


def test_outlines_that_do_not_fit_the_image() -> None:
    with pytest.raises(InputError, match="is 8 x 6, but the image is 6 x 8"):
        boxes_to_mask([Box(0, 0, 1, 1, "", Runs(6, 8, b"`1"))], 8, 6)
    with pytest.raises(InputError, match="far outside the image"):
        boxes_to_mask([Box(0, 0, 1, 1, "", ((0.0, 0.0, 1e9, 0.0, 1.0, 1.0),))], 8, 6)


def test_outlines_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.json"
    monkeypatch.setitem(sys.modules, "pycocotools.mask", None)
    path.write_text(json.dumps(coco()))
    assert len(read_coco(path)["a.png"]) == 2
    path.write_text(json.dumps(coco(annotations=[{"image_id": 7, "segmentation": [[0, 0, 1, 0, 1, 1]]}])))
    with pytest.raises(InputError, match=r"\[coco\]"):
        read_coco(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[1, 2]", "no COCO file"),
        ('{"images": 3}', "no COCO file"),
        (json.dumps(coco(images=[{"id": 1}])), "entry 0 of 'images' needs id and file_name"),
        (json.dumps(coco(annotations=[3])), "entry 0 of 'annotations'"),
        (json.dumps(coco(annotations=[{"image_id": 9, "bbox": [1, 2, 3, 4]}])), "annotation 0 belongs to image 9"),
        (json.dumps(coco(annotations=[{"image_id": 7, "bbox": [1, 2, 3]}])), "four numbers"),
        (json.dumps(coco(annotations=[{"image_id": 7, "bbox": [1, 2, 3, "4"]}])), "four numbers"),
        (json.dumps(coco(annotations=[{"image_id": 7, "bbox": None}])), "four numbers"),
    ],
)
def test_broken_coco_files_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        read_coco(path)
    assert str(caught.value).startswith(str(path))


def voc(*corners: tuple[str, int, int, int, int]) -> str:
    things = "".join(
        f"<object><name>{name}</name><bndbox><xmin>{a}</xmin><ymin>{b}</ymin><xmax>{c}</xmax><ymax>{d}</ymax></bndbox></object>"
        for name, a, b, c, d in corners
    )
    return f"<annotation><filename>x.jpg</filename>{things}</annotation>"


def test_voc_counts_from_one_and_includes_both_corners(tmp_path: Path) -> None:
    path = tmp_path / "x.xml"
    path.write_text(voc(("cat", 1, 1, 2, 3), ("dog", 4, 2, 4, 2)))
    cat, dog = read_voc(path)
    assert (cat.name, dog.name) == ("cat", "dog")
    assert pixels(boxes_to_mask([cat], 5, 5)) == {(x, y) for x in (0, 1) for y in (0, 1, 2)}
    assert pixels(boxes_to_mask([dog], 5, 5)) == {(3, 1)}


@pytest.mark.parametrize(
    "text", ["", "<annotation><object>", "<a><object><bndbox/></object></a>", voc(("x", 1, 2, 3, 4))[:-40]]
)
def test_broken_voc_files_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.xml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_voc(path)
    assert str(caught.value).startswith(str(path))


def test_refining_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(InputError, match="opencv-python-headless"):
        refine(torch.zeros(3, 6, 6, dtype=torch.uint8), boxes_to_mask([Box(1, 1, 3, 3)], 6, 6))


def scene() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A noisy red disc on blue, its pixels, and a box around it."""
    rows, columns = torch.meshgrid(torch.arange(40), torch.arange(50), indexing="ij")
    disc = (rows - 20) ** 2 + (columns - 24) ** 2 < 100
    image = torch.where(disc, torch.tensor([220, 30, 20])[:, None, None], torch.tensor([20, 40, 200])[:, None, None])
    image = image + torch.randint(-15, 15, image.shape, generator=torch.Generator().manual_seed(0))
    return image.to(torch.uint8), disc[None], boxes_to_mask([Box(9, 5, 30, 30)], 40, 50)


def fake_opencv(found: Any) -> SimpleNamespace:
    """Has the constants of OpenCV, checks what it is given, and finds what it is told to."""

    def grab_cut(picture: Any, labels: Any, rectangle: Any, a: Any, b: Any, rounds: int, mode: int) -> None:
        assert picture.dtype == np.uint8 and picture.shape == (40, 50, 3) and picture.flags["C_CONTIGUOUS"]
        assert picture[0, 0, 0] > 150 and picture[20, 24, 2] > 150  # blue comes first
        assert a.shape == b.shape == (1, 65) and a.dtype == np.float64 and rectangle is None and mode == 1
        assert set(np.unique(labels)) == {0, 3}
        labels[:] = np.where(found & (labels == 3), 3, np.where(labels == 3, 2, 0))

    return SimpleNamespace(
        GC_BGD=0, GC_FGD=1, GC_PR_BGD=2, GC_PR_FGD=3, GC_INIT_WITH_MASK=1, setRNGSeed=int, grabCut=grab_cut
    )


def test_refined_is_what_grabcut_takes_for_foreground(monkeypatch: pytest.MonkeyPatch) -> None:
    image, disc, box = scene()
    monkeypatch.setitem(sys.modules, "cv2", fake_opencv(disc[0].numpy()))
    assert torch.equal(refine(image, box), disc)


def test_the_box_stays_if_grabcut_finds_nothing_or_has_nothing_to_learn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    image, disc, box = scene()
    monkeypatch.setitem(sys.modules, "cv2", fake_opencv(np.zeros((40, 50), bool)))
    assert torch.equal(refine(image, box), box)
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace())
    assert bool(refine(image, torch.ones_like(disc)).all())


def test_real_grabcut_finds_the_disc() -> None:
    pytest.importorskip("cv2")
    image, disc, box = scene()
    found = refine(image, box)
    assert (found & disc).sum() / (found | disc).sum() > 0.95
    assert torch.equal(found, refine(image, box))
    assert refine(image[:1], box).shape == box.shape
