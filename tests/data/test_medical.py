"""DICOM, NIfTI and files of 16 bits: the network sees the picture, whatever it was stored in."""

from __future__ import annotations

import gzip
import io
import struct
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
import torch
from PIL import Image
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    RLELossless,
    SecondaryCaptureImageStorage,
)

from fasterisnet.data.base import BadImageError, hold_out
from fasterisnet.data.check import KINDS, check_data
from fasterisnet.data.folder import open_folder
from fasterisnet.data.preparation import Preparation
from fasterisnet.data.reader import Reader, read_image, read_mask
from fasterisnet.data.sources import open_source
from fasterisnet.errors import InputError

RNG = np.random.default_rng(0)
GRAY = RNG.integers(0, 256, (20, 30), dtype=np.uint8)
GRAY[0, :2] = 0, 255
MASK = np.zeros((20, 30), np.uint8)
MASK[5:15, 8:20] = 255


def dicom(path: Path, stored: np.ndarray, bits: int, *, signed: bool = False, **header: Any) -> Path:
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    meta.TransferSyntaxUID = header.pop("syntax", ExplicitVRLittleEndian)
    data = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID, data.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    frames = stored.shape[0] if stored.ndim == 3 and stored.shape[2] != 3 else 0
    data.Rows, data.Columns = stored.shape[1:] if frames else stored.shape[:2]
    if frames:
        data.NumberOfFrames = frames
    colour = stored.ndim == 3 and not frames
    data.SamplesPerPixel = 3 if colour else 1
    data.PhotometricInterpretation = "RGB" if colour else "MONOCHROME2"
    if colour:
        data.PlanarConfiguration = 0
    data.BitsAllocated = 8 if bits <= 8 else 16
    data.BitsStored, data.HighBit, data.PixelRepresentation = bits, bits - 1, int(signed)
    data.PixelData = stored.astype(("<i" if signed else "<u") + str(data.BitsAllocated // 8)).tobytes()
    for name, value in header.items():
        setattr(data, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(path, enforce_file_format=True)
    return path


def picture(path: Path, values: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)
    return path


def scaled(values: np.ndarray, top: int) -> np.ndarray:
    return np.rint(values / 255.0 * top).astype(np.uint16)


def off(image: torch.Tensor, wanted: np.ndarray = GRAY) -> int:
    """How far the gray levels are from what they should be."""
    assert image.dtype == torch.uint8 and image.shape == (1, *wanted.shape)
    return int((image[0].int() - torch.from_numpy(wanted.copy()).int()).abs().max())


# --- the same picture in every kind of file --------------------------------------------------------------------------

CONTAINERS = {
    "png 16 bits": ("png", lambda p, v: picture(p, scaled(v, 65535)), None),
    "png 12 of 16 bits": ("png", lambda p, v: picture(p, scaled(v, 4095)), (0.0, 4095.0)),
    "png 12 of 16 bits, auto": ("png", lambda p, v: picture(p, scaled(v, 4095)), "auto"),
    "tif float": ("tif", lambda p, v: picture(p, (v / 255).astype(np.float32)), (0.0, 1.0)),
    "dicom 8 bits": ("dcm", lambda p, v: dicom(p, v, 8), None),
    "dicom 12 bits": ("dcm", lambda p, v: dicom(p, scaled(v, 4095), 12), None),
    "dicom 16 bits": ("dcm", lambda p, v: dicom(p, scaled(v, 65535), 16), None),
    "dicom inverted": (
        "dcm",
        lambda p, v: dicom(p, scaled(255 - v, 4095), 12, PhotometricInterpretation="MONOCHROME1"),
        None,
    ),
    "dicom with its window": (
        "dcm",
        lambda p, v: dicom(p, scaled(v, 1000) + 500, 16, WindowCenter="1000.5", WindowWidth="1001"),
        None,
    ),
    "dicom in Hounsfield": (
        "dcm",
        lambda p, v: dicom(p, scaled(v, 1400), 12, RescaleSlope="1", RescaleIntercept="-1000"),
        (-1000.0, 400.0),
    ),
    "nifti": ("nii.gz", lambda p, v: nifti(p, scaled(v, 3000).astype(np.int16) - 1000), (-1000.0, 2000.0)),
}


def nifti(path: Path, values: np.ndarray) -> Path:
    """Slices (height, width), or a stack of them, so that each is read as it is given: front up, right on the left."""
    volume = np.moveaxis(np.atleast_3d(values) if values.ndim == 2 else np.moveaxis(values, 0, 2), 0, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(np.ascontiguousarray(volume[::-1, ::-1]), np.eye(4)), path)
    return path


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_folder_gives_the_network_the_same_input(tmp_path: Path, name: str) -> None:
    suffix, write, window = CONTAINERS[name]
    for root, ending in (("plain", "png"), ("other", suffix)):
        for i, label in enumerate(("a", "b")):
            values = GRAY if not i else GRAY[::-1].copy()
            file = tmp_path / root / "train" / label / f"{i}.{ending}"
            file.parent.mkdir(parents=True)
            picture(file, values) if root == "plain" else write(file, values)
            picture(tmp_path / root / "masks" / "train" / label / f"{i}.png", MASK)
    prepare = Preparation(size=16, channels=1)
    plain = open_source(tmp_path / "plain").split("train")
    other = open_source(tmp_path / "other", window=window).split("train")
    for i in range(2):
        (image, mask), (wanted, outline) = (prepare(*split.read(i)[:2]) for split in (other, plain))
        assert (image - wanted).abs().max() <= 1.01 / 255 and torch.equal(mask, outline) and outline.any()


def test_pictures_of_eight_bits_have_no_window(tmp_path: Path) -> None:
    path = picture(tmp_path / "x.png", GRAY)
    for window in ("auto", (0.0, 4095.0)):
        assert off(Reader(window=window).image(path)) == 0


def test_twelve_bits_in_sixteen_are_crushed_and_the_check_says_so(tmp_path: Path) -> None:
    for i, label in enumerate(("a", "b")):
        deep = RNG.integers(0, 4096, (20, 30)).astype(np.uint16)
        picture(tmp_path / "train" / label / f"{i}.png", deep)
        picture(tmp_path / "masks/train" / label / f"{i}.png", MASK)
    report = check_data(tmp_path)
    row = report.found("unused")
    assert row is not None and row.count == 2 and not report.fatal and "17 gray levels" in row.examples[0]
    assert "--window" in row.advice
    for window in ("0,4095", "auto"):
        assert check_data(tmp_path, window=window).rows == []
        image = open_source(f"{tmp_path}?window={window}").split("train").read(0).image
        assert len(image.unique()) > 200
    picture(tmp_path / "train/a/0.png", scaled(GRAY, 65535))
    assert check_data(tmp_path).rows == []


@pytest.mark.parametrize("window", ["4,1", "1", "a,b", "1,2,3", "nan,1", "0,inf"])
def test_windows_that_are_none(tmp_path: Path, window: str) -> None:
    with pytest.raises(InputError, match="low,high"):
        open_source(tmp_path, window=window)


# --- DICOM -----------------------------------------------------------------------------------------------------------


def test_the_windows_of_dicom(tmp_path: Path) -> None:
    ramp = np.tile(np.arange(0, 2000, 100, dtype=np.uint16)[:, None], (1, 30))
    exact = dicom(tmp_path / "e.dcm", ramp, 12, WindowCenter="1000", WindowWidth="1000", VOILUTFunction="LINEAR_EXACT")
    wanted = np.rint(np.clip((ramp - 500.0) / 1000, 0, 1) * 255).astype(np.uint8)
    assert off(read_image(exact), wanted) == 0
    several = dicom(tmp_path / "s.dcm", ramp, 12, WindowCenter=["1000.5", "7"], WindowWidth=["1001", "3"])
    assert off(read_image(several), wanted) == 0
    curve = dicom(tmp_path / "c.dcm", ramp, 12, WindowCenter="1000", WindowWidth="400", VOILUTFunction="SIGMOID")
    assert off(read_image(curve), np.rint(255 / (1 + np.exp(-4 * (ramp - 1000.0) / 400))).astype(np.uint8)) == 0
    with pytest.raises(BadImageError, match="width 0"):
        read_image(dicom(tmp_path / "z.dcm", ramp, 12, WindowCenter="1", WindowWidth="0"))
    item = Dataset()
    item.LUTDescriptor, item.LUTData = [4096, 0, 16], [min(65535, 40 * i) for i in range(4096)]
    item["LUTDescriptor"].VR = item["LUTData"].VR = "US"
    table = dicom(tmp_path / "t.dcm", ramp, 12, VOILUTSequence=[item])
    assert off(read_image(table), np.rint(np.minimum(ramp * 40.0, 65535) / 257).astype(np.uint8)) == 0


def test_signed_padded_and_coloured_dicom(tmp_path: Path) -> None:
    signed = dicom(tmp_path / "s.dcm", scaled(GRAY, 4095).astype(np.int32) - 2048, 12, signed=True)
    assert off(read_image(signed)) == 0
    padded = scaled(GRAY, 1000).astype(np.int32)
    padded[10:] = -2000
    file = dicom(tmp_path / "p.dcm", padded, 16, signed=True, PixelPaddingValue=-2000)
    assert off(read_image(file, "auto"), np.where(padded == -2000, 0, GRAY).astype(np.uint8)) == 0
    colour = RNG.integers(0, 256, (20, 30, 3), dtype=np.uint8)
    image = read_image(dicom(tmp_path / "c.dcm", colour, 8), "auto")
    assert torch.equal(image, torch.from_numpy(colour.transpose(2, 0, 1).copy()))


def test_packed_dicom(tmp_path: Path) -> None:
    """Run lengths and JPEG 2000, as archives keep them; nothing is lost in either."""
    path = dicom(tmp_path / "r.dcm", scaled(GRAY, 4095), 12)
    data = pydicom.dcmread(path)
    data.compress(RLELossless)
    data.save_as(path)
    assert off(read_image(path)) == 0
    content = io.BytesIO()
    Image.fromarray(GRAY).save(content, "JPEG2000", irreversible=False, no_jp2=True)
    data = pydicom.dcmread(dicom(tmp_path / "j.dcm", GRAY, 8))
    data.PixelData = encapsulate([content.getvalue()])
    data["PixelData"].VR, data["PixelData"].is_undefined_length = "OB", True
    data.file_meta.TransferSyntaxUID = JPEG2000Lossless
    data.save_as(tmp_path / "j.dcm")
    assert off(read_image(tmp_path / "j.dcm")) == 0


def test_patient_and_hospital_are_groups(tmp_path: Path) -> None:
    """Files without a suffix are DICOM too; one patient is never divided, also if the number occurs elsewhere."""
    for i in range(8):
        header = {"PatientID": f"{i % 4}", "InstitutionName": "North" if i < 4 else "South"}
        dicom(tmp_path / "train" / "ab"[i % 2] / f"1.2.840.{i}", GRAY, 8, **header)
        picture(tmp_path / "masks/train" / "ab"[i % 2] / f"1.2.840.{i}.png", MASK)
    train: Any = open_folder(tmp_path).split("train")
    assert len(train) == 8 and all(train.has_mask(i) for i in range(8))
    assert {train.group(i) for i in range(8)} == {f"{site} / {i}" for site in ("North", "South") for i in range(4)}
    assert {train.source(i) for i in range(8)} == {"North", "South"}
    assert [row.problem for row in check_data(tmp_path).rows] == [KINDS["two classes"].problem]
    dicom(tmp_path / "val/a/1", GRAY[::-1], 8, PatientID="0", InstitutionName="North")
    report = check_data(tmp_path)
    row = report.found("group")
    assert row is not None and row.examples[0].startswith("North / 0: ") and report.fatal


def test_a_class_of_one_hospital_is_found(tmp_path: Path) -> None:
    lines = ["image,split,label,site"]
    for i in range(6):
        picture(tmp_path / f"{i}.png", RNG.integers(0, 256, (20, 30), dtype=np.uint8))
        lines.append(f"{i}.png,train,{'ab'[i % 2]},{'North' if i % 2 or i == 4 else 'South'}")
    (tmp_path / "manifest.csv").write_text("\n".join(lines))
    row = check_data(tmp_path).found("one site")
    assert row is not None and row.count == 1 and row.examples == ["b: every image of train is from North"]


def test_dicom_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    sound = dicom(tmp_path / "x.dcm", GRAY, 8)
    cut = tmp_path / "cut.dcm"
    cut.write_bytes(sound.read_bytes()[:-200])
    text = tmp_path / "text.dcm"
    text.write_text("no picture")
    big = dicom(tmp_path / "big.dcm", GRAY, 8, NumberOfFrames=2**30)
    packed = dicom(tmp_path / "packed.dcm", GRAY, 8, syntax=DeflatedExplicitVRLittleEndian)
    for path in (cut, text, big, packed):
        with pytest.raises(BadImageError, match=path.name):
            read_image(path)
    for i, path in enumerate((sound, cut, text, big, packed)):
        folder = tmp_path / "data/train" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / path.name).write_bytes(path.read_bytes())
    report = check_data(tmp_path / "data")
    row = report.found("image")
    assert row is not None and row.count == 4 and report.images == 5


# --- NIfTI -----------------------------------------------------------------------------------------------------------


def test_slices_of_a_volume_are_samples_and_belong_together(tmp_path: Path) -> None:
    stacks = RNG.integers(-1000, 1000, (4, 3, 20, 30)).astype(np.int16)
    outlines = np.zeros((3, 20, 30), np.int16)
    outlines[1, 2:9, 3:8], outlines[2, 4:6, 20:25] = 1, 2
    for i, stack in enumerate(stacks):
        nifti(tmp_path / "train" / "ab"[i % 2] / f"{i}.nii", stack)
        nifti(tmp_path / "masks/train" / "ab"[i % 2] / f"{i}.nii.gz", outlines)
    source = open_source(tmp_path, window="-1000,1000", foreground="1,2")
    train: Any = source.split("train")
    assert len(train) == 12 and train.name(1).endswith("0.nii, slice 1")
    for number in range(3):
        image, mask, label = train.read(number)
        wanted = np.rint((stacks[0, number] + 1000.0) / 2000 * 255).astype(np.uint8)
        assert off(image, wanted) == 0 and label == 0
        assert mask is not None and torch.equal(mask[0], torch.from_numpy(outlines[number] > 0))
    parts = hold_out(train, 0.5, 0)
    groups = [{part.group(i) for i in range(len(part))} for part in parts]
    assert len(groups[0] | groups[1]) == 4 and not groups[0] & groups[1]
    with pytest.raises(BadImageError, match="label map of 0, 1, 2"):
        read_mask(nifti(tmp_path / "all.nii", np.arange(3, dtype=np.int16).repeat(200).reshape(20, 30)))
    with pytest.raises(BadImageError, match=r"from -999 to 999; .*--window"):
        open_source(tmp_path).split("train").read(0)
    with pytest.raises(BadImageError, match="3 slices"):
        read_image(tmp_path / "train/a/0.nii", "auto")


def test_a_table_names_slices(tmp_path: Path) -> None:
    stack = RNG.integers(0, 256, (3, 20, 30)).astype(np.uint8)
    nifti(tmp_path / "v.nii.gz", stack)
    dicom(tmp_path / "d.dcm", stack, 8)
    rows = ["v.nii.gz,train,a,2", "d.dcm,train,b,1", "v.nii.gz,test,a,9", "d.dcm,val,b,"]
    (tmp_path / "m.csv").write_text("\n".join(["image,split,label,slice", *rows]))
    source = open_source(tmp_path / "m.csv")
    train = source.split("train")
    assert off(train.read(0).image, stack[2]) == 0 and off(train.read(1).image, stack[1]) == 0
    assert len(source.split("val")) == 3
    with pytest.raises(BadImageError, match="no slice 9"):
        source.split("test").read(0)


def test_volumes_are_turned_alike(tmp_path: Path) -> None:
    """The same body, stored with other axes first and other directions."""
    stack = RNG.integers(0, 256, (3, 20, 30)).astype(np.uint8)
    plain = nibabel.load(nifti(tmp_path / "a.nii", stack))
    turned = plain.as_reoriented(np.array([[2, -1], [0, 1], [1, -1]]))
    nibabel.save(turned, tmp_path / "b.nii")
    assert turned.shape != plain.shape
    for number in range(3):
        assert torch.equal(*(Reader().image(tmp_path / name, number) for name in ("a.nii", "b.nii")))


def test_a_damaged_volume_is_named(tmp_path: Path) -> None:
    whole = nifti(tmp_path / "a.nii.gz", np.tile(GRAY, (3, 1, 1))).read_bytes()
    far, large = (bytearray(gzip.decompress(whole)) for _ in range(2))
    far[108:112] = struct.pack("<f", 2e9)
    large[40:56] = struct.pack("<8h", 3, 32767, 32767, 32767, 1, 1, 1, 1)
    damaged = {"cut.nii.gz": whole[:200], "text.nii": b"no volume", "empty.nii": b"", "far.nii": far, "big.nii": large}
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadImageError, match=name):
            Reader().image(tmp_path / name, 0)


@pytest.mark.parametrize(("file", "package"), [("x.dcm", "pydicom"), ("x.nii", "nibabel")])
def test_without_the_extra_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, package: str
) -> None:
    for label in "ab":
        (tmp_path / "train" / label).mkdir(parents=True)
        (tmp_path / "train" / label / file).write_bytes(b"x")
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(InputError, match=rf"{package}.*\[medical\]"):
        open_source(tmp_path)
    assert check_data(tmp_path).found("cannot be opened") is not None
