"""Boxes where there are no masks: read from COCO and Pascal VOC files, turned into masks, tightened by GrabCut."""

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

from fasterisnet.data.decoding import readable
from fasterisnet.errors import InputError

GRABCUT_ROUNDS = 5
GRABCUT_LEAST = 5  # pixels on either side, one for each part of its colour models
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


class Box(NamedTuple):
    """Left and upper edge, width and height in pixels; the name of what is in it, if known."""

    x: float
    y: float
    width: float
    height: float
    name: str = ""


def boxes_to_mask(boxes: Sequence[Box], height: int, width: int) -> Tensor:
    """True, in a mask bool (1, height, width), for every pixel that a box touches; boxes are cut at the border."""
    if not boxes:
        raise InputError("There is no box to make a mask of.")
    mask = torch.zeros(1, height, width, dtype=torch.bool)
    for box in boxes:
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


def read_coco(path: str | os.PathLike[str]) -> dict[str, list[Box]]:
    """The boxes of a COCO file by the file name of their image; images without annotation have an empty list."""
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{readable(path)}: cannot be read as JSON ({error}).") from error
    images = _entries(path, content, "images", ("id", "file_name"))
    annotations = _entries(path, content, "annotations", ("image_id", "bbox"))
    categories = _entries(path, content, "categories", ("id", "name")) if "categories" in content else []
    name_of = {str(category["id"]): str(category["name"]) for category in categories}
    file_of = {str(image["id"]): str(image["file_name"]) for image in images}
    found: dict[str, list[Box]] = {file: [] for file in file_of.values()}
    for number, annotation in enumerate(annotations):
        where = f"{readable(path)}: annotation {number}"
        if str(annotation["image_id"]) not in file_of:
            raise InputError(f"{where} belongs to image {annotation['image_id']}, which 'images' does not list.")
        edges = annotation["bbox"]
        if not isinstance(edges, list) or len(edges) != 4 or not all(type(edge) in (int, float) for edge in edges):
            raise InputError(f"{where} needs a bbox of four numbers [x, y, width, height], not {edges!r:.60}.")
        name = name_of.get(str(annotation.get("category_id")), "")
        found[file_of[str(annotation["image_id"])]].append(Box(*map(float, edges), name=name))
    return found


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
            "Refining boxes by GrabCut needs OpenCV: install the package 'opencv-python-headless', "
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
