"""Image and mask files as tensors. Whatever cannot be decoded is named by its path.

Pillow decodes, at about a millisecond for 224 px: torchvision's decoders take half of that, but are deprecated.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from fasterisnet.data.base import BadImageError
from fasterisnet.data.medical import DICOM_SUFFIXES, NIFTI_SUFFIXES, Pixels
from fasterisnet.errors import InputError
from fasterisnet.files import read_file, readable

AnyPath = str | os.PathLike[str]
Window = tuple[float, float] | Literal["auto"]

IMAGE_SUFFIXES = frozenset(".bmp .dib .gif .jfif .jp2 .jpeg .jpg .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split())
# Named, because Pillow also knows formats that are programs (EPS runs Ghostscript).
_FORMATS = ("PNG", "JPEG", "BMP", "DIB", "TIFF", "WEBP", "PPM", "GIF", "JPEG2000")
_OF_SEVERAL = ("TIFF", "GIF", "WEBP", "PNG")
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIXTEEN_BITS = 65535
Result = TypeVar("Result")
LARGEST = 2**31  # bytes of an image file


class Picture(NamedTuple):
    """A picture as uint8 (1 or 3, height, width); the highest value of a file of 16 bits that was scaled as a whole;
    whether an EXIF entry turned it without changing its size.
    """

    image: Tensor
    top: int | None = None
    turned: bool = False


def suffix_of(name: str) -> str:
    """The suffix of a file that should hold an image, as it is written; empty for other names."""
    known = next((suffix for suffix in (*NIFTI_SUFFIXES, *DICOM_SUFFIXES) if name.lower().endswith(suffix)), None)
    if known is not None:
        return name[len(name) - len(known) :]
    suffix = os.path.splitext(name)[1]
    return suffix if suffix.lower() in IMAGE_SUFFIXES else ""


def is_image_name(name: str) -> bool:
    """Whether a file of this name should hold an image."""
    return bool(suffix_of(name))


def stem_of(name: str) -> str:
    """A name without the suffix of an image."""
    return name.removesuffix(suffix_of(name))


def read_bytes(path: AnyPath) -> bytes:
    """The content of a file that should be an image. What is no file (a pipe, a device) could go on for ever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise BadImageError(f"{readable(path)}: is not a file.")
    try:
        content = read_file(path, LARGEST)
    except InputError as error:
        raise BadImageError(f"{readable(path)}: is not a file of an image's size, or no file.") from error
    except (OSError, ValueError) as error:
        raise BadImageError(f"{readable(path)}: cannot be read ({getattr(error, 'strerror', error)}).") from error
    if not content:
        raise BadImageError(f"{readable(path)}: the file is empty.")
    return content


def decode_image(content: bytes, path: AnyPath) -> Tensor:
    """A picture as uint8 (1 or 3, height, width): turned as its EXIF entry says, no alpha, 16 bits scaled to 8."""
    return decode_picture(content, path).image


def decode_picture(content: bytes, path: AnyPath, window: Window | None = None) -> Picture:
    """`decode_image` with what the data check wants to know. window: what of more than 8 bits is shown."""
    (values, top), turned = decoded(content, path, lambda picture: _image_values(picture, window))
    return Picture(as_image(values), top, turned)


def as_image(values: np.ndarray) -> Tensor:
    """Pixels (height, width) or (height, width, 3) as a tensor with its channels first."""
    image = torch.from_numpy(values)
    return image[None] if image.ndim == 2 else image.permute(2, 0, 1).contiguous()


def shown(pixels: Pixels, window: Window | None) -> np.ndarray:
    """Values as 8 bits: low is black, high is white, beyond is cut; "auto" takes the lowest and the highest value."""
    values, low, high = pixels.values, pixels.low, pixels.high
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError("it has values that are not numbers")
    inside = values if pixels.padding is None or pixels.padding.all() else values[~pixels.padding]
    if window is not None:
        low, high = (float(inside.min()), float(inside.max())) if window == "auto" else window
    scaled = (values - low) / (high - low) if high > low else np.zeros(values.shape)
    result = np.rint(np.clip(scaled, 0, 1) * 255).astype(np.uint8)
    result = 255 - result if pixels.inverted else result
    return result if pixels.padding is None else np.where(pixels.padding, np.uint8(0), result)


def decoded(content: bytes, path: AnyPath, work: Callable[[Image.Image], Result]) -> tuple[Result, bool]:
    """What a function makes of a picture that stands upright, and whether it had to be turned for that to another of
    the same size. A damaged file can make Pillow raise nearly anything.
    """
    try:
        picture = Image.open(io.BytesIO(content), formats=_FORMATS)
        picture.load()
        upright = _upright(picture)
        upright.info.pop("transparency", None)
        return work(upright), upright is not picture and upright.size == picture.size
    except UnidentifiedImageError as error:
        raise BadImageError(f"{readable(path)}: is not an image in a known format.") from error
    except Exception as error:
        raise BadImageError(f"{readable(path)}: cannot be decoded ({error}).") from error


def pages_of(content: bytes) -> int:
    """How many pictures a file holds, of which the first is read; a JPEG's others are previews of the same."""
    try:
        with Image.open(io.BytesIO(content), formats=_OF_SEVERAL) as picture:
            return int(getattr(picture, "n_frames", 1))
    except Exception:  # noqa: BLE001  what cannot be opened so is no such file; a damaged one is named by its reader
        return 1


def _upright(picture: Image.Image) -> Image.Image:
    """Turned as the EXIF orientation says; a damaged EXIF block says nothing."""
    try:
        orientation = picture.getexif().get(ExifTags.Base.Orientation)
    except (SyntaxError, ValueError, KeyError, TypeError, IndexError, OSError, struct.error):
        return picture
    return picture.transpose(_TURNS[orientation]) if orientation in _TURNS else picture


def _image_values(picture: Image.Image, window: Window | None) -> tuple[np.ndarray, int | None]:
    """8 bits, (height, width) or (height, width, 3); without a window 16 bits are scaled as a whole, and the highest
    value is returned too.
    """
    if picture.mode in ("L", "RGB"):
        return np.array(picture), None
    if picture.mode in ("1", "LA"):
        return np.array(picture.convert("L")), None
    if not picture.mode.startswith(("I", "F")):
        return np.array(picture.convert("RGB")), None
    values = np.array(picture)
    if window is not None:
        return shown(Pixels(values, 0, SIXTEEN_BITS), window), None
    if values.dtype.kind == "f" or values.min() < 0 or values.max() > SIXTEEN_BITS:
        raise ValueError(
            "its pixels are fractions or need more than 16 bits; say what is black and what is white with "
            "--window low,high or auto, or save it with 8 or 16 bits"
        )
    scaled = ((values.astype(np.uint32) * 255 + SIXTEEN_BITS // 2) // SIXTEEN_BITS).astype(np.uint8)
    return scaled, int(values.max())
