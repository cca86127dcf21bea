"""Boxes and outlines where there are no masks: read from COCO and Pascal VOC files, turned into masks; boxes can be
tightened by GrabCut.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import torch
from torch import Tensor

from fasterisnet.data.pictures import readable
from fasterisnet.errors import InputError
from fasterisnet.extras import install

GRABCUT_ROUNDS = 5
GRABCUT_LEAST = 5  # pixels on either side, one for each part of its colour models
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


class Runs(NamedTuple):
    """A run-length mask as COCO packs it: column by column, background first."""

    height: int
    width: int
    counts: bytes


Polygons = tuple[tuple[float, ...], ...]  # x and y by turns


class Box(NamedTuple):
    """Left and upper edge, width and height in pixels; the name of what is in it, and its outline, if known."""

    x: float
    y: float
    width: float
    height: float
    name: str = ""
    outline: Polygons | Runs | None = None


def boxes_to_mask(boxes: Sequence[Box], height: int, width: int) -> Tensor:
    """True, in a mask bool (1, height, width), for every pixel that a box touches, or that is inside its outline if it
    has one; boxes are cut at the border.
    """
    if not boxes:
        raise InputError("There is no box to make a mask of.")
    mask = torch.zeros(1, height, width, dtype=torch.bool)
    for box in boxes:
        if box.outline is not None:
            mask[0] |= torch.from_numpy(_inside(box.outline, height, width))
            continue
        edges = f"x={box.x:g}, y={box.y:g}, w={box.width:g}, h={box.height:g}"
        if not all(map(math.isfinite, box[:4])) or box.width <= 0 or box.height <= 0:
            raise InputError(f"The box {edges} is empty; width and height have to be above 0.")
        left, right = max(math.floor(box.x), 0), min(math.ceil(box.x + box.width), width)
        top, bottom = max(math.floor(box.y), 0), min(math.ceil(box.y + box.height), height)
        if left >= right or top >= bottom:
            raise InputError(f"The box {edges} lies outside the image of {width} x {height} pixels.")
        mask[0, top:bottom, left:right] = True
    return mask


def boxes_of(boxes: Sequence[Box], names: Collection[str]) -> tuple[Box, ...]:
    """The boxes named like one of the sample's classes, or all of them if none is."""
    return tuple(box for box in boxes if box.name in names) or tuple(boxes)


def pycocotools() -> ModuleType:
    """The package that draws COCO's outlines."""
    try:
        import pycocotools.mask
    except ImportError as error:
        raise InputError(f"Outlines of a COCO file need pycocotools: {install('coco')}") from error
    return pycocotools.mask


def _inside(outline: Polygons | Runs, height: int, width: int) -> np.ndarray:
    """The pixels inside an outline, bool (height, width)."""
    library = pycocotools()
    if isinstance(outline, Runs):
        if (outline.height, outline.width) != (height, width):
            sizes = f"{outline.width} x {outline.height}, but the image is {width} x {height}"
            raise InputError(f"The run-length mask is {sizes}.")
        packed: Any = [{"size": [height, width], "counts": outline.counts}]
    else:
        # Drawing takes memory for every pixel of an edge, so corners far away are an error, not a wish.
        for x, y in ((x, y) for polygon in outline for x, y in zip(polygon[::2], polygon[1::2], strict=True)):
            if not (-width <= x <= 2 * width and -height <= y <= 2 * height):
                raise InputError(f"The polygon's corner {x:g}, {y:g} is far outside the image of {width} x {height}.")
        packed = library.frPyObjects([list(polygon) for polygon in outline], height, width)
    try:
        return library.decode(packed).any(axis=2)
    except (ValueError, RuntimeError) as error:
        raise InputError(f"The outline cannot be drawn ({error}).") from error


def read_coco(path: str | os.PathLike[str]) -> dict[str, list[Box]]:
    """The boxes and outlines (polygons or run lengths) of a COCO file by the file name of their image; images without
    annotation have an empty list.
    """
    _require_file(path)
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{readable(path)}: cannot be read as JSON ({error}).") from error
    images = _entries(path, content, "images", ("id", "file_name"))
    annotations = _entries(path, content, "annotations", ("image_id",))
    categories = _entries(path, content, "categories", ("id", "name")) if "categories" in content else []
    name_of = {str(category["id"]): str(category["name"]) for category in categories}
    file_of = {str(image["id"]): str(image["file_name"]) for image in images}
    found: dict[str, list[Box]] = {file: [] for file in file_of.values()}
    for number, annotation in enumerate(annotations):
        where = f"{readable(path)}: annotation {number}"
        if str(annotation["image_id"]) not in file_of:
            raise InputError(f"{where} belongs to image {annotation['image_id']}, which 'images' does not list.")
        outline = _outline(annotation.get("segmentation"), where)
        if outline is None and "bbox" not in annotation:
            raise InputError(f"{where} needs a bbox or a segmentation.")
        edges = annotation.get("bbox", [0, 0, 0, 0])
        if not isinstance(edges, list) or len(edges) != 4 or not all(type(edge) in (int, float) for edge in edges):
            raise InputError(f"{where} needs a bbox of four numbers [x, y, width, height], not {edges!r:.60}.")
        name = name_of.get(str(annotation.get("category_id")), "")
        found[file_of[str(annotation["image_id"])]].append(Box(*map(float, edges), name=name, outline=outline))
    return found


def _require_file(path: str | os.PathLike[str]) -> None:
    """A pipe or a device could go on for ever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"{readable(path)}: is not a file.")


def _outline(stored: Any, where: str) -> Polygons | Runs | None:
    """An outline as COCO writes it; None where there is none."""
    if not stored:
        return None
    pycocotools()
    if isinstance(stored, list) and all(_is_polygon(polygon) for polygon in stored):
        return tuple(tuple(map(float, polygon)) for polygon in stored)
    runs: dict[str, Any] = stored if isinstance(stored, dict) else {}
    size = runs.get("size")
    if isinstance(size, list) and len(size) == 2 and all(type(side) is int and 0 < side <= 65535 for side in size):
        counts = runs.get("counts")
        if isinstance(counts, str) and counts.isascii():
            counts = _unpacked(counts)
        if (
            isinstance(counts, list)
            and all(type(run) is int and run >= 0 for run in counts)
            and (sum(counts) == size[0] * size[1])
        ):
            packed = pycocotools().frPyObjects({"size": size, "counts": counts}, *size)
            return Runs(size[0], size[1], packed["counts"])
    raise InputError(
        f"{where} has a segmentation that is neither polygons (lists of x, y, x, y, ...) nor run lengths with size and "
        f"counts that fill it: {stored!r:.60}."
    )


def _is_polygon(stored: Any) -> bool:
    return (
        isinstance(stored, list)
        and len(stored) >= 6
        and len(stored) % 2 == 0
        and all(type(edge) in (int, float) and math.isfinite(edge) for edge in stored)
    )


def _unpacked(text: str) -> list[int]:
    """The run lengths in COCO's text, five bits a character, from the third on as differences; they are checked before
    anything is drawn with them.
    """
    runs: list[int] = []
    value = shift = 0
    for character in text:
        code = ord(character) - 48
        value |= (code & 31) << shift
        shift += 5
        if shift > 60:
            return []
        if not code & 32:
            value -= (1 << shift) if code & 16 else 0
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return runs


def _entries(path: str | os.PathLike[str], content: Any, key: str, needed: tuple[str, ...]) -> list[dict[str, Any]]:
    """One of the lists a COCO file consists of, known to have the needed keys in every entry."""
    entries = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise InputError(f"{readable(path)}: is no COCO file: it needs the lists 'images' and 'annotations'.")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or any(name not in entry for name in needed):
            raise InputError(f"{readable(path)}: entry {number} of '{key}' needs {' and '.join(needed)}.")
    return entries


def read_voc(path: str | os.PathLike[str]) -> list[Box]:
    """The boxes of a Pascal VOC file. Its corners count pixels from 1, and both belong to the box."""
    _require_file(path)
    try:
        root = ElementTree.fromstring(Path(path).read_bytes())
    except (OSError, ElementTree.ParseError, ValueError, LookupError) as error:
        raise InputError(f"{readable(path)}: cannot be read as XML ({error}).") from error
    boxes = []
    for thing in root.iter("object"):
        try:
            left, top, right, bottom = (float(thing.findtext(f"bndbox/{key}", "")) for key in _CORNERS)
        except ValueError as error:
            raise InputError(
                f"{readable(path)}: every object needs a bndbox with the numbers {', '.join(_CORNERS)}."
            ) from error
        name = (thing.findtext("name") or "").strip()
        boxes.append(Box(left - 1, top - 1, right - left + 1, bottom - top + 1, name))
    return boxes


def opencv() -> ModuleType:
    """OpenCV, which only GrabCut needs."""
    try:
        import cv2  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(
            f"Refining boxes by GrabCut needs OpenCV (opencv-python-headless): {install('boxes')}, "
            "or leave refine_boxes off."
        ) from error
    return cv2


def refine(image: Tensor, box_mask: Tensor) -> Tensor:
    """The part of the boxes that GrabCut takes for foreground; the boxes themselves if that is nothing, or if there are
    too few pixels in or around them to learn from.

    image: uint8 (1 or 3, height, width). The same image and boxes always give the same mask.
    """
    cv2 = opencv()
    inside = int(box_mask.sum())
    if min(inside, box_mask.numel() - inside) < GRABCUT_LEAST:
        return box_mask
    picture = np.ascontiguousarray(image.expand(3, -1, -1).flip(0).permute(1, 2, 0).numpy())
    labels = np.where(box_mask[0].numpy(), cv2.GC_PR_FGD, cv2.GC_BGD).astype(np.uint8)
    background, foreground = np.zeros((1, 65)), np.zeros((1, 65))
    cv2.setRNGSeed(0)
    cv2.grabCut(picture, labels, None, background, foreground, GRABCUT_ROUNDS, cv2.GC_INIT_WITH_MASK)
    refined = torch.from_numpy((labels == cv2.GC_FGD) | (labels == cv2.GC_PR_FGD))[None]
    return refined if bool(refined.any()) else box_mask
