"""DICOM and NIfTI files (extra `medical`): gray values with their meaning, slices, patient and hospital."""

from __future__ import annotations

import gzip
import os
import warnings
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from fasterisnet.errors import InputError
from fasterisnet.extras import install

AnyPath = str | os.PathLike[str]
DICOM_SUFFIXES = (".dcm", ".dicom")
NIFTI_SUFFIXES = (".nii", ".nii.gz")
MOST_PIXELS, MOST_SLICES = 2**31, 2**14  # of a file; a header that claims more is damaged or means harm
_MAGIC_AT, _MAGIC = 128, b"DICM"
_LONGEST, _FARTHEST = 540, 2**24  # of a NIfTI header, and where the values begin behind what else may be told
_DEFLATED = "1.2.840.10008.1.2.1.99"


class Pixels(NamedTuple):
    """Values (height, width) or (height, width, 3), the range they are shown in, padding, and whether low is white."""

    values: np.ndarray
    low: float
    high: float
    padding: np.ndarray | None = None
    inverted: bool = False


class Owner(NamedTuple):
    """Whose picture a file is, where it was made and how many slices it has; None for what it does not tell."""

    patient: str | None = None
    site: str | None = None
    slices: int = 1


def is_dicom_name(name: str) -> bool:
    """Whether a file of this name should be DICOM."""
    return name.lower().endswith(DICOM_SUFFIXES)


def is_nifti_name(name: str) -> bool:
    """Whether a file of this name should be NIfTI."""
    return name.lower().endswith(NIFTI_SUFFIXES)


def starts_as_dicom(path: AnyPath) -> bool:
    """Whether the first bytes of a file are those of DICOM; many such files have no suffix, or seem to have one."""
    try:
        with open(path, "rb") as file:
            return file.read(_MAGIC_AT + len(_MAGIC))[_MAGIC_AT:] == _MAGIC
    except OSError:
        return False


def pydicom() -> ModuleType:
    """The package that reads DICOM."""
    try:
        import pydicom
    except ImportError as error:
        raise InputError(f"DICOM files need the package pydicom: {install('medical')}") from error
    return pydicom


def nibabel() -> ModuleType:
    """The package that reads NIfTI."""
    try:
        import nibabel
    except ImportError as error:
        raise InputError(f"NIfTI files need the package nibabel: {install('medical')}") from error
    return nibabel


# --- DICOM -----------------------------------------------------------------------------------------------------------


def dicom_owner(path: AnyPath) -> Owner:
    """Patient, hospital and slices as the header has them; of a file that cannot be read, nothing is known."""
    library = pydicom()
    tags = ["PatientID", "InstitutionName", "NumberOfFrames"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not os.path.isfile(path):
                return Owner()
            _refuse_deflated(path)
            header = library.dcmread(path, stop_before_pixels=True, specific_tags=tags)
            patient, site = (str(header.get(tag) or "").strip() or None for tag in tags[:2])
            slices = int(header.get(tags[2]) or 1)
            return Owner(patient, site, slices if 1 <= slices <= MOST_SLICES else 1)
    except Exception:  # noqa: BLE001  a damaged header raises anything; reading the picture tells what is wrong
        return Owner()


def dicom_pixels(path: AnyPath, index: int | None, window: Any) -> Pixels:
    """The values of a slice in the units of the file (for CT, Hounsfield). window: None for the file's own."""
    data, stored = _dicom(path, index)
    if data.PhotometricInterpretation not in ("MONOCHROME1", "MONOCHROME2"):
        return _colours(data, stored)
    from pydicom.pixels import apply_modality_lut

    padding = stored == int(data.PixelPaddingValue) if "PixelPaddingValue" in data else None
    bits, signed = int(data.BitsStored), bool(data.get("PixelRepresentation", 0))
    ends = np.array([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if signed else [0, 2**bits - 1])
    values = apply_modality_lut(stored, data).astype(np.float64)
    if "ModalityLUTSequence" in data:
        ends = np.array([0, 2 ** int(data.ModalityLUTSequence[0].LUTDescriptor[2]) - 1])
    else:
        ends = ends * float(data.get("RescaleSlope", None) or 1) + float(data.get("RescaleIntercept", None) or 0)
    low, high = float(ends.min()), float(ends.max())
    if window is None:
        values, low, high = _own_window(data, values, low, high)
    shape = str(data.get("PresentationLUTShape", "") or "")
    inverted = shape == "INVERSE" if shape else data.PhotometricInterpretation == "MONOCHROME1"
    return Pixels(values, low, high, padding, inverted)


def dicom_labels(path: AnyPath, index: int | None) -> np.ndarray:
    """The values of a slice as stored."""
    return _dicom(path, index)[1]


def _dicom(path: AnyPath, index: int | None) -> tuple[Any, np.ndarray]:
    library = pydicom()
    from pydicom.pixels import pixel_array

    _refuse_deflated(path)
    data = library.dcmread(path)
    slices = int(data.get("NumberOfFrames", None) or 1)
    if slices > MOST_SLICES or int(data.Rows) * int(data.Columns) * slices > MOST_PIXELS:
        raise ValueError("its header claims more pixels than a picture can have")
    return data, pixel_array(data, index=_chosen(index, slices))


def _refuse_deflated(path: AnyPath) -> None:
    """Such a file can unpack to any size."""
    from pydicom.filereader import read_file_meta_info

    if str(read_file_meta_info(path).get("TransferSyntaxUID", "")) == _DEFLATED:
        raise ValueError("it is deflated as a whole; save it with another transfer syntax")


def _own_window(data: Any, values: np.ndarray, low: float, high: float) -> tuple[np.ndarray, float, float]:
    """What the file says it should be shown in: a window, a table, or else all it can hold (DICOM PS3.3, C.11.2)."""
    centre, width = (_first(data.get(tag)) for tag in ("WindowCenter", "WindowWidth"))
    function = str(data.get("VOILUTFunction", "") or "LINEAR")
    if centre is not None and width is not None:
        if width <= 0 or (function == "LINEAR" and width <= 1):
            raise ValueError(f"its window has the width {width:g}; give one with --window low,high or auto")
        if function == "SIGMOID":
            return 1 / (1 + np.exp(np.clip(-4 * (values - centre) / width, -700, 700))), 0.0, 1.0
        if function == "LINEAR_EXACT":
            return values, centre - width / 2, centre + width / 2
        return values, centre - 0.5 - (width - 1) / 2, centre - 0.5 + (width - 1) / 2
    if "VOILUTSequence" in data:
        from pydicom.pixels import apply_voi

        table = data.VOILUTSequence[0].LUTDescriptor
        return apply_voi(values.astype(np.int64), data).astype(np.float64), 0.0, 2.0 ** int(table[2]) - 1
    return values, low, high


def _first(value: Any) -> float | None:
    """A number of the header, or the first of several."""
    value = value[0] if hasattr(value, "__len__") and not isinstance(value, str) and len(value) else value
    return None if value is None or str(value) == "" else float(value)


def _colours(data: Any, stored: np.ndarray) -> Pixels:
    if data.PhotometricInterpretation == "PALETTE COLOR":
        from pydicom.pixels import apply_color_lut

        stored = apply_color_lut(stored, data)
        return Pixels(stored[..., :3], 0.0, float(np.iinfo(stored.dtype).max))
    if stored.ndim != 3 or stored.shape[2] != 3:
        raise ValueError(f"its photometric interpretation is {data.PhotometricInterpretation}")
    return Pixels(stored, 0.0, 2.0 ** int(data.BitsStored) - 1)


# --- NIfTI -----------------------------------------------------------------------------------------------------------


def nifti_owner(path: AnyPath) -> Owner:
    """How many slices there are; NIfTI does not tell whose."""
    nibabel()
    if not os.path.isfile(path):
        return Owner()
    try:
        return Owner(slices=_slices(_opened(path).shape))
    except Exception:  # noqa: BLE001  a damaged header raises anything; reading the picture tells what is wrong
        return Owner()


def nifti_values(path: AnyPath, index: int | None) -> tuple[np.ndarray, float, float]:
    """A slice (height, width), across the body's long axis, front up, the patient's right on the left (a file of two
    dimensions has no such axes and stays as it is); and the lowest and highest value of the whole file.
    """
    nibabel()
    volume, low, high = _volume(os.fspath(path), os.stat(path).st_mtime_ns)
    number = _chosen(index, _slices(volume.shape))
    cut = volume[:, :, None] if volume.ndim == 2 else volume[::-1, ::-1].reshape(*volume.shape[:2], -1)
    return np.ascontiguousarray(cut[:, :, number].T), low, high


def _opened(path: AnyPath) -> Any:
    library = nibabel()
    name = os.fspath(path)
    with gzip.open(name) if name.lower().endswith(".gz") else open(name, "rb") as file:
        start = file.read(_LONGEST)
    size = next((n for n in (348, 540) if start[:4] in (n.to_bytes(4, "little"), n.to_bytes(4, "big"))), 0)
    if not size or len(start) < size:
        raise ValueError("it is not a NIfTI file")
    header = (library.Nifti1Header if size == 348 else library.Nifti2Header)(start[:size], check=False)
    if not 0 <= float(header["vox_offset"]) <= _FARTHEST:
        raise ValueError("its header claims that the values begin far behind it")
    image = library.load(path)
    if not isinstance(image, library.Nifti1Image | library.Nifti2Image) or len(image.shape) < 2:
        raise ValueError("it is not a NIfTI picture")
    pixels, slices = (np.prod(np.array(part, dtype=np.float64)) for part in (image.shape, image.shape[2:]))
    if pixels > MOST_PIXELS or slices > MOST_SLICES or min(image.shape) < 1:
        raise ValueError(f"its header claims the shape {tuple(image.shape)}")
    return image


@lru_cache(maxsize=2)
def _volume(path: str, changed: int) -> tuple[np.ndarray, float, float]:
    """A whole file, upright; the last two are kept, because slices are often read one after the other."""
    del changed
    image = _opened(path)
    values = np.asarray((nibabel().as_closest_canonical(image) if len(image.shape) > 2 else image).dataobj)
    if values.dtype.kind not in "biuf" or not np.isfinite(values).all():
        raise ValueError("it holds colours, or values that are not numbers")
    return values, float(values.min()), float(values.max())


def _slices(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape[2:]))


def _chosen(index: int | None, slices: int) -> int:
    if index is None and slices > 1:
        raise ValueError(f"it has {slices} slices; name one in the column 'slice' of a table")
    if not 0 <= (index or 0) < slices:
        raise ValueError(f"there is no slice {index}, counted from 0; it has {slices}")
    return index or 0
