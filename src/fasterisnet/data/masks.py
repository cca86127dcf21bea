"""What of a mask file is the object: one reading and one verdict for training, the data check and everybody else.

Two values (0 and 1, 0 and 255) are clear, and soft edges between black and white are cut in the middle. Everything
else, label maps above all, needs to be told which labels are meant; without that it is refused, never guessed.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fasterisnet.data.base import BadImageError
from fasterisnet.data.pictures import SIXTEEN_BITS, AnyPath, decoded, readable

Verdict = Literal["binary", "soft", "labels", "gray"]
CLEAR: tuple[Verdict, ...] = ("binary", "soft")
MIDDLE = 128  # of the scale 0 to 255
_BETWEEN = (64, 192)
_SOFT = 0.1  # of the pixels may lie between black and white
_VOID = 255  # what label maps have for pixels that belong to nothing
_SHOWN = 12
_JPEG = b"\xff\xd8"  # how such a file begins


class AmbiguousMaskError(BadImageError):
    """A mask that does not tell what the object is; `verdict` says why."""

    def __init__(self, message: str, verdict: Verdict = "gray") -> None:
        super().__init__(message)
        self.verdict = verdict


class StoredMask(NamedTuple):
    """Foreground bool (1, height, width), how clear the file is about it, its values, and whether EXIF turned it."""

    foreground: Tensor
    verdict: Verdict
    values: tuple[float, ...] = ()
    turned: bool = False

    def clear(self, path: AnyPath) -> Tensor:
        """The foreground, or an error that says how to make the file or the choice of labels clear."""
        if self.verdict not in CLEAR:
            raise AmbiguousMaskError(f"{readable(path)}: {self.problem}; {self.remedy}.", self.verdict)
        return self.foreground

    @property
    def problem(self) -> str:
        """Why the mask is not clear."""
        labels = self.verdict == "labels"
        return f"is a label map of {listed(self.values)}" if labels else "has values between black and white"

    @property
    def remedy(self) -> str:
        """What makes it clear."""
        return (
            f"say which labels are the object, as in --foreground {self.labels} or DIR?foreground={self.labels}"
            if self.verdict == "labels"
            else "save masks with 0 and 255 only, or choose labels with --foreground"
        )

    @property
    def labels(self) -> str:
        """Those it has besides what belongs to nothing, as `--foreground` takes them."""
        return ",".join(f"{value:g}" for value in self.values if value not in (0, _VOID))


def listed(values: tuple[float, ...]) -> str:
    """The first of the values, for messages."""
    return ", ".join(f"{value:g}" for value in values[:_SHOWN]) + (", ..." if len(values) > _SHOWN else "")


def decode_mask(content: bytes, path: AnyPath, foreground: tuple[int, ...] = ()) -> StoredMask:
    """The mask in a picture. foreground: the labels that are the object; none for masks that are black and white."""
    if foreground:
        labels, turned = decoded(content, path, _labels)
        return chosen_labels(labels, foreground)._replace(turned=turned)
    (brightness, labels), turned = decoded(content, path, lambda p: (_brightness(p), _palette(p)))
    return judged(brightness, labels, lossy=content.startswith(_JPEG))._replace(turned=turned)


def thresholded(content: bytes, path: AnyPath, threshold: int = MIDDLE) -> Tensor:
    """What reaches a threshold, a number on the scale 0 to 255, whatever the values are."""
    return torch.from_numpy(_reached(decoded(content, path, _brightness)[0], threshold))[None]


def chosen_labels(labels: np.ndarray, foreground: tuple[int, ...]) -> StoredMask:
    """The mask of some of the labels; with all that there are, if none of them was chosen."""
    chosen = np.isin(labels, foreground)
    return StoredMask(torch.from_numpy(chosen)[None], "binary", () if chosen.any() else _distinct(labels))


def judged(values: np.ndarray, labels: np.ndarray | None = None, *, lossy: bool = False) -> StoredMask:
    """The mask of brightness values. labels: the numbers behind them in a file with a palette of colours. lossy: a few
    values near black are what was lost of an outline, not labels.
    """
    top = _scale(values)
    foreground = torch.from_numpy(_reached(values, MIDDLE))[None]
    if bool(((values == 0) | (values == top)).all()):
        return StoredMask(foreground, "binary")
    found = _distinct(values if labels is None else labels)
    low, high = (end * top / 255 for end in _BETWEEN)
    small = all(value == int(value) and 0 <= value < _BETWEEN[0] for value in found if value != _VOID)
    if (small and not lossy) or labels is not None:
        return StoredMask(foreground, "labels", found)
    soft = values.max() >= high and ((values >= low) & (values < high)).mean() <= _SOFT
    return StoredMask(foreground, "soft" if soft else "gray", found)


def _scale(values: np.ndarray) -> int:
    """The highest value tells the scale of a file: up to 1, up to 255 or up to 65535."""
    return next((top for top in (1, 255) if values.max() <= top), SIXTEEN_BITS)


def _reached(values: np.ndarray, threshold: int) -> np.ndarray:
    limit = threshold * _scale(values) / 255
    return values >= (limit if values.dtype.kind == "f" else math.ceil(limit))


def _distinct(values: np.ndarray) -> tuple[float, ...]:
    if values.dtype == np.uint8:
        return tuple(map(float, np.flatnonzero(np.bincount(values.ravel(), minlength=256))))
    return tuple(map(float, np.unique(values)))


def _brightness(picture: Image.Image) -> np.ndarray:
    """One value for each pixel. A coloured mask counts by its strongest channel, so that red or blue is like white;
    what is transparent is black, and in a mask of one colour what is opaque is white.
    """
    if picture.mode == "1":
        return np.array(picture).astype(np.uint8)
    if picture.mode == "L":
        return np.array(picture)
    if "A" in picture.getbands():
        *colours, opaque = np.moveaxis(np.array(picture.convert("RGBA")), 2, 0)
        brightness = np.max(colours, axis=0)
        seen = opaque if np.ptp(brightness) == 0 else np.minimum(brightness, opaque)
        return seen if np.ptp(opaque) else brightness
    if not picture.mode.startswith(("I", "F")):
        return np.array(picture.convert("RGB")).max(axis=2)
    values = np.array(picture)
    if not np.isfinite(values).all():
        raise ValueError("it has values that are not numbers")
    return values


def _labels(picture: Image.Image) -> np.ndarray:
    """One label for each pixel: the number in a palette, or the value."""
    if picture.mode == "P":
        return np.array(picture)
    values = _brightness(picture)
    if picture.mode[0] not in "1LIF" and _colourful(picture):
        raise ValueError("it is coloured; --foreground chooses among numbers, of a gray picture or of a palette")
    return values


def _palette(picture: Image.Image) -> np.ndarray | None:
    """The numbers behind colours; None without a palette, or if it has only grays."""
    return np.array(picture) if picture.mode == "P" and _colourful(picture) else None


def _colourful(picture: Image.Image) -> bool:
    return bool(np.ptp(np.array(picture.convert("RGB")), axis=2).any())
