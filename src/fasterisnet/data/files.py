"""Files of a data set, read from its folder or, where they were not unpacked, in place from a tar archive in it."""

from __future__ import annotations

import csv
import io
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from fasterisnet.data.base import BadImageError
from fasterisnet.data.masks import thresholded
from fasterisnet.data.pictures import LARGEST, decode_image, readable
from fasterisnet.errors import InputError
from fasterisnet.files import read_file


class Member(NamedTuple):
    """Where in an archive a file lies."""

    archive: Path
    start: int
    size: int


class Files:
    """The files of a folder. Without a folder `images` in it, uncompressed tar archives in it are looked into.

    Every reading opens the file anew, so there is no handle that processes or threads could share, and it pickles.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InputError(f"{readable(self.folder)}: is not a folder; give the one that holds the data.")
        unpacked = any((self.folder / name).is_dir() for name in ("images", "Images"))
        self.members = {} if unpacked else _members(sorted(self.folder.glob("*.tar")), self.folder)

    def __contains__(self, name: str) -> bool:
        return name in self.members or (self.folder / name).is_file()

    def where(self, name: str) -> str:
        """The path of a file, or of its archive and the member, for messages."""
        member = self.members.get(name)
        return readable(self.folder / name if member is None else f"{member.archive}, member {name}")

    def require(self, names: Iterable[str]) -> None:
        """Raises an error when one of these files is absent: better now than in the middle of a training."""
        absent = [name for name in names if name not in self]
        if absent:
            more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
            raise InputError(f"{self.where(absent[0])}{more}: is missing; fetch or unpack the data again.")

    def read(self, name: str) -> bytes:
        """The content of a file."""
        member = self.members.get(name)
        try:
            if member is None:
                return read_file(self.folder / name, LARGEST)
            with member.archive.open("rb") as file:
                file.seek(member.start)
                content = file.read(member.size)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadImageError(f"{self.where(name)}: cannot be read ({reason}).") from error
        if len(content) < member.size:
            raise BadImageError(f"{self.where(name)}: is cut off; fetch the archive again.")
        return content

    def image(self, name: str) -> Tensor:
        """An image as uint8 (1 or 3, height, width)."""
        return decode_image(self.read(name), self.where(name))

    def mask(self, name: str, image: Tensor) -> Tensor:
        """The mask of an image as bool (1, height, width); what is half white or more counts."""
        mask = thresholded(self.read(name), self.where(name))
        if mask.shape[1:] != image.shape[1:]:
            height, width = mask.shape[1:]
            raise BadImageError(
                f"{self.where(name)}: the mask has {width} x {height} pixels, its image {image.shape[2]} x "
                f"{image.shape[1]}; they have to agree."
            )
        return mask

    def table(self, name: str, columns: Sequence[str]) -> list[dict[str, str]]:
        """The rows of a CSV file that has at least these columns."""
        where = self.where(name)
        if name not in self:
            raise InputError(f"{where}: is missing; the data cannot be read without it.")
        try:
            text = self.read(name).decode("utf-8-sig")
            reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
            rows, header = list(reader), reader.fieldnames or []
        except (UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"{where}: cannot be read as a CSV file ({error}).") from error
        absent = [column for column in columns if column not in header]
        if absent:
            raise InputError(f"{where}: lacks the column {', '.join(absent)}; it needs {', '.join(columns)}.")
        for number, row in enumerate(rows, start=1):
            if any(row[column] is None for column in columns):
                raise InputError(f"{where}: row {number} is shorter than the header.")
        return rows


def _members(archives: Sequence[Path], folder: Path) -> dict[str, Member]:
    """The files in the archives that were not unpacked into the folder."""
    members: dict[str, Member] = {}
    for archive in archives:
        try:
            with tarfile.open(archive, "r:") as opened:
                for entry in opened:
                    name = entry.name.removeprefix("./")
                    if entry.isreg() and not (folder / name).is_file():
                        members.setdefault(name, Member(archive, entry.offset_data, entry.size))
        except (tarfile.TarError, OSError, EOFError) as error:
            reason = f"cannot be read as an uncompressed tar archive ({error})"
            raise InputError(f"{readable(archive)}: {reason}; fetch it again or unpack it.") from error
    return members
