"""Image and mask files as tensors. Whatever cannot be decoded is named by its path.

Pillow decodes, at about a millisecond for 224 px: torchvision's decoders take half of that, but are deprecated.
"""

from __future__ import annotations

import io
import math
import os
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from fasterisnet.data.base import BadImageError
from fasterisnet.errors import InputError
from fasterisnet.reading import read_file

IMAGE_SUFFIXES = frozenset(".bmp .dib .gif .jfif .jp2 .jpeg .jpg .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split())
# Named, because Pillow also knows formats that are programs (EPS runs Ghostscript).
_FORMATS = ("PNG", "JPEG", "BMP", "DIB", "TIFF", "WEBP", "PPM", "GIF", "JPEG2000")
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIXTEEN_BITS = 65535
LARGEST = 2**31  # bytes of an image file


class StoredMask(NamedTuple):
    """Foreground bool (1, height, width), and whether the file held two values only (0 and 1, or 0 and 255)."""

    foreground: Tensor
    binary: bool


def readable(path: str | os.PathLike[str]) -> str:
    """A path for messages: what cannot be printed (bytes that are not UTF-8, line breaks) becomes an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in os.fspath(path))


def is_image_name(name: str) -> bool:
    """Whether a file of this name should hold an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file that should be an image."""
    try:
        content = read_file(path, LARGEST)
    except InputError as error:
        raise BadImageError(f"{readable(path)}: is not a file of an image's size, or no file.") from error
    except (OSError, ValueError) as error:
        raise BadImageError(f"{readable(path)}: cannot be read ({getattr(error, 'strerror', error)}).") from error
    if not content:
        raise BadImageError(f"{readable(path)}: the file is empty.")
    return content


def read_image(path: str | os.PathLike[str]) -> Tensor:
    """A picture as uint8 (1 or 3, height, width): turned as its EXIF entry says, no alpha, 16 bits scaled to 8."""
    return decode_image(read_bytes(path), path)


def read_mask(path: str | os.PathLike[str], threshold: int = 128) -> Tensor:
    """Foreground as bool (1, height, width); see `decode_mask`."""
    return decode_mask(read_bytes(path), path, threshold).foreground


def decode_image(content: bytes, path: str | os.PathLike[str]) -> Tensor:
    """`read_image` for content that is read already."""
    values = torch.from_numpy(_decoded(content, path, _image_values))
    return values[None] if values.ndim == 2 else values.permute(2, 0, 1).contiguous()


def decode_mask(content: bytes, path: str | os.PathLike[str], threshold: int = 128) -> StoredMask:
    """Foreground is what reaches the threshold, a number on the scale 0 to 255.

    The highest value tells the scale of the file: up to 1, up to 255 or up to 65535. A coloured mask counts by its
    strongest channel, so that pure red or blue is foreground like white.
    """
    values = _decoded(content, path, _mask_values)
    top = next((top for top in (1, 255) if values.max() <= top), _SIXTEEN_BITS)
    binary = bool(((values == 0) | (values == top)).all())
    limit = threshold * top / 255
    foreground = values >= (limit if values.dtype.kind == "f" else math.ceil(limit))
    return StoredMask(torch.from_numpy(foreground)[None], binary)


def _decoded(content: bytes, path: str | os.PathLike[str], values: Callable[[Image.Image], np.ndarray]) -> np.ndarray:
    """The values of a picture, upright. A damaged file can make Pillow raise nearly anything."""
    try:
        picture = Image.open(io.BytesIO(content), formats=_FORMATS)
        picture.load()
        upright = _upright(picture)
        upright.info.pop("transparency", None)
        return values(upright)
    except UnidentifiedImageError as error:
        raise BadImageError(f"{readable(path)}: is not an image in a known format.") from error
    except Exception as error:
        raise BadImageError(f"{readable(path)}: cannot be decoded ({error}).") from error


def _upright(picture: Image.Image) -> Image.Image:
    """Turned as the EXIF orientation says; a damaged EXIF block says nothing."""
    try:
        orientation = picture.getexif().get(ExifTags.Base.Orientation)
    except (SyntaxError, ValueError, KeyError, TypeError, IndexError, OSError, struct.error):
        return picture
    return picture.transpose(_TURNS[orientation]) if orientation in _TURNS else picture


def _image_values(picture: Image.Image) -> np.ndarray:
    """8 bits, (height, width) or (height, width, 3); 16 bits are scaled, and what else it may be cannot be known."""
    if picture.mode in ("L", "RGB"):
        return np.array(picture)
    if picture.mode in ("1", "LA"):
        return np.array(picture.convert("L"))
    if not picture.mode.startswith(("I", "F")):
        return np.array(picture.convert("RGB"))
    values = np.array(picture)
    if values.dtype.kind == "f" or values.min() < 0 or values.max() > _SIXTEEN_BITS:
        raise ValueError("its pixels are fractions or need more than 16 bits; save it with 8 or 16 bits")
    return ((values.astype(np.uint32) * 255 + _SIXTEEN_BITS // 2) // _SIXTEEN_BITS).astype(np.uint8)


def _mask_values(picture: Image.Image) -> np.ndarray:
    """The values as stored, one for each pixel."""
    if picture.mode == "1":
        return np.array(picture).astype(np.uint8)
    if picture.mode in ("L", "LA"):
        return np.array(picture.convert("L"))
    if not picture.mode.startswith(("I", "F")):
        return np.array(picture.convert("RGB")).max(axis=2)
    values = np.array(picture)
    if not np.isfinite(values).all():
        raise ValueError("it has values that are not numbers")
    return values
