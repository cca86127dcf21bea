"""`Reader`: files of every kind as pictures and masks, the same for training, the data check and every command."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor

from fasterisnet.data import medical
from fasterisnet.data.base import BadImageError
from fasterisnet.data.masks import StoredMask, chosen_labels, decode_mask, judged
from fasterisnet.data.pictures import AnyPath, Picture, Window, as_image, decode_picture, read_bytes, readable, shown
from fasterisnet.data.pictures import suffix_of as image_suffix
from fasterisnet.errors import FasterISNetError, InputError

Result = TypeVar("Result")


class NoWindowError(BadImageError):
    """A picture whose values have no black and white of their own."""


@dataclass(frozen=True)
class Reader:
    """foreground: the labels that are the object, none for masks that are black and white. window: what of files with
    more than 8 bits is black and what is white, in their own units, or "auto" for the lowest and the highest value;
    None takes DICOM's own window and all 16 bits of other files.
    """

    foreground: tuple[int, ...] = ()
    window: Window | None = None

    def image(self, path: AnyPath, number: int | None = None) -> Tensor:
        """A picture as uint8 (1 or 3, height, width). number: of the slice, for files that have several."""
        return self.picture(path, number).image

    def picture(self, path: AnyPath, number: int | None = None) -> Picture:
        """`image` with what the data check wants to know."""
        kind = kind_of(path)
        if kind == "dicom":
            return _careful(path, lambda: self._dicom(path, number))
        if kind == "nifti":
            return _careful(path, lambda: self._nifti(path, number))
        return decode_picture(read_bytes(path), path, self.window)

    def mask(self, path: AnyPath, number: int | None = None) -> StoredMask:
        """A mask and how clear it is; `.clear(path)` of it is what can be trained with."""
        kind = kind_of(path)
        if kind == "picture":
            return decode_mask(read_bytes(path), path, self.foreground)
        labels = _careful(path, lambda: (medical.dicom_labels if kind == "dicom" else _nifti_labels)(path, number))
        return chosen_labels(labels, self.foreground) if self.foreground else judged(labels)

    def _dicom(self, path: AnyPath, number: int | None) -> Picture:
        pixels = medical.dicom_pixels(path, number, self.window)
        return Picture(as_image(shown(pixels, self.window if pixels.values.ndim == 2 else None)))

    def _nifti(self, path: AnyPath, number: int | None) -> Picture:
        values, low, high = medical.nifti_values(path, number)
        if values.dtype == np.uint8:
            return Picture(as_image(values))
        if self.window is None:
            raise NoWindowError(
                f"{readable(path)}: has values from {low:g} to {high:g}; --window has to say what of them is black and "
                "white."
            )
        window = (low, high) if self.window == "auto" else self.window
        return Picture(as_image(shown(medical.Pixels(values, low, high), window)))


def read_image(path: AnyPath, window: Window | None = None) -> Tensor:
    """A picture as uint8 (1 or 3, height, width): turned as its EXIF entry says, no alpha, 16 bits scaled to 8."""
    return Reader(window=window).image(path)


def read_mask(path: AnyPath, foreground: tuple[int, ...] = ()) -> Tensor:
    """Foreground as bool (1, height, width); a mask that does not tell what the object is is an error."""
    return Reader(foreground).mask(path).clear(path)


def owner(path: AnyPath) -> medical.Owner:
    """Patient, hospital and number of slices, as far as the header of the file tells."""
    kind = kind_of(path)
    if kind == "dicom":
        return medical.dicom_owner(path)
    return medical.nifti_owner(path) if kind == "nifti" else medical.Owner()


def kind_of(path: AnyPath) -> str:
    """dicom, nifti or picture: by name, and by its first bytes where the name does not tell."""
    name = os.path.basename(os.fspath(path))
    if medical.is_nifti_name(name):
        return "nifti"
    if medical.is_dicom_name(name) or (
        not image_suffix(name) and os.path.isfile(path) and medical.starts_as_dicom(path)
    ):
        return "dicom"
    return "picture"


def is_image_file(path: AnyPath) -> bool:
    """Whether a file holds an image: by its name, or because it begins as DICOM does, which has any name."""
    named = bool(image_suffix(os.path.basename(os.fspath(path))))
    return named or (os.path.isfile(path) and medical.starts_as_dicom(path))


def _nifti_labels(path: AnyPath, number: int | None) -> np.ndarray:
    return medical.nifti_values(path, number)[0]


def _careful(path: AnyPath, work: Callable[[], Result]) -> Result:
    """A damaged file can make the libraries raise nearly anything, after a header that promises nearly anything."""
    if not os.path.isfile(path):
        raise BadImageError(f"{readable(path)}: {'is not a file' if os.path.exists(path) else 'does not exist'}.")
    try:
        return work()
    except BadImageError:
        raise
    except InputError as error:  # a package is missing
        raise InputError(f"{readable(path)}: {error}") from error
    except FasterISNetError:
        raise
    except Exception as error:
        raise BadImageError(f"{readable(path)}: cannot be decoded ({error}).") from error
