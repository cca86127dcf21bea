"""Images with masks from a folder or a CSV manifest.

A folder:    DIR/<split>/<class>/name.png (any image format); its mask DIR/masks/<split>/<class>/name.png (or
             name.png.png, where name.jpg is there too), or its boxes DIR/boxes/<split>/<class>/name.xml (Pascal VOC).
             Every folder in DIR but those two is a split.
A manifest:  a CSV with the columns image, split and label; or, for several labels an image, a column `label:NAME` with
             0 or 1 for each class. Optional: mask (path, may be empty), group or patient (or patient_id, subject,
             subject_id), site, slice (of a medical file, from 0), and x, y, w, h (a box). Paths are relative to the
             CSV. Rows with an empty split are left out; rows that repeat an image add their box.
             It may lie in DIR as `manifest.csv` (or `index.csv`), and is used instead of the folders then.
Boxes:       a COCO file (DIR/annotations.json, or any other that is named) gives outlines or boxes to images without
             mask, by `file_name`: a path relative to DIR or the end of one. Those named like the class of the image
             count; if there are none, all do.
Medical:     DICOM (any name) and NIfTI (.nii, .nii.gz) need the extra `medical`. Each slice of a file is a sample, and
             all of them are a group; DICOM's hospital and patient are one too, unless a manifest names the group.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fasterisnet.data.base import BadImageError, Label, Reading, Samples, Source
from fasterisnet.data.boxes import boxes_to_mask, opencv, refine
from fasterisnet.data.listing import NO_TRAIN, Listing, list_data
from fasterisnet.data.manifest import AnyPath, Columns, Record
from fasterisnet.data.pictures import Window, readable
from fasterisnet.data.reader import Reader
from fasterisnet.errors import InputError


class FolderSamples:
    """One split of files, decoded when asked for. Holds plain lists, so worker processes can have a copy."""

    def __init__(
        self,
        records: Sequence[Record],
        labels: Sequence[Label],
        *,
        refine_boxes: bool = False,
        reader: Reader | None = None,
    ) -> None:
        self.records, self.labels, self.refine_boxes = list(records), list(labels), refine_boxes
        self.reader = reader or Reader()

    def __len__(self) -> int:
        return len(self.records)

    def read(self, index: int) -> Reading:
        """The sample as it is stored; boxes come as a mask."""
        record = self.records[index]
        image = self.reader.image(record.image, record.slice)
        return Reading(image, self._mask(record, image), self.labels[index])

    def _mask(self, record: Record, image: Tensor) -> Tensor | None:
        if record.mask is not None:
            mask = self.reader.mask(record.mask, record.slice).clear(record.mask)
            if mask.shape[1:] != image.shape[1:]:
                raise BadImageError(
                    f"{size_mismatch(record, image, mask)}; make the mask anew in the size of the image."
                )
            return mask
        if not record.boxes:
            return None
        try:
            mask = boxes_to_mask(record.boxes, *image.shape[1:])
        except InputError as error:
            raise BadImageError(f"{record.name}: {error}") from error
        outlined = any(box.outline is not None for box in record.boxes)
        return refine(image, mask) if self.refine_boxes and not outlined else mask

    def label(self, index: int) -> Label:
        """Its label."""
        return self.labels[index]

    def name(self, index: int) -> str:
        """The path of its image."""
        return self.records[index].name

    def group(self, index: int) -> str | None:
        """Whom it belongs to."""
        return self.records[index].group

    def source(self, index: int) -> str | None:
        """The hospital it comes from, if known."""
        return self.records[index].site

    def has_mask(self, index: int) -> bool:
        """Whether there is a mask or a box, whatever is in it."""
        return self.records[index].mask is not None or bool(self.records[index].boxes)


def size_mismatch(record: Record, image: Tensor, mask: Tensor) -> str:
    """What to say of a mask that is not as large as its image."""
    sizes = [f"{picture.shape[2]} x {picture.shape[1]}" for picture in (mask, image)]
    return f"{readable(record.mask or '')}: the mask is {sizes[0]}, but {record.name} is {sizes[1]}"


def open_folder(
    path: AnyPath,
    *,
    classes: Sequence[str] | None = None,
    columns: Columns | None = None,
    boxes: AnyPath | None = None,
    refine_boxes: bool = False,
    foreground: Sequence[int] = (),
    window: Window | None = None,
) -> Source:
    """A data set from a folder or a CSV manifest, as described above.

    classes: those of a trained model, in its order; then no train split is needed. boxes: a COCO file. refine_boxes:
    tighten boxes by GrabCut, each time an image is read (tenths of a second; needs OpenCV). foreground, window: see
    `Reader`.
    """
    reader = Reader(tuple(foreground), window)
    return _source(list_data(path, columns=columns, boxes=boxes), classes, refine_boxes, reader)


def _source(listing: Listing, classes: Sequence[str] | None, refine_boxes: bool, reader: Reader) -> Source:
    """The listing as a data set, if nothing keeps it from being one."""
    broken = [finding for finding in listing.broken if classes is None or finding.kind != NO_TRAIN]
    if broken:
        check = f"`fasterisnet data check {readable(listing.root)}` lists all"
        more = f" There are {len(broken) - 1} more problems; {check}." if broken[1:] else ""
        raise InputError(f"{broken[0].message}.{more}")
    names = listing.classes if classes is None else list(classes)
    differing = set(names) ^ set(listing.classes) if listing.multi_label else set(listing.classes) - set(names)
    if differing:
        raise InputError(
            f"{readable(listing.root)}: the data has the classes {', '.join(listing.classes)}; wanted are "
            f"{', '.join(names)}. They differ in {', '.join(sorted(differing))}."
        )
    if refine_boxes:
        opencv()
    place = {name: i for i, name in enumerate(names)}
    splits: dict[str, Samples] = {}
    for split in listing.splits:
        records = [record for record in listing.records if record.split == split]
        labels: list[Label] = [
            tuple(float(name in record.labels) for name in names) if listing.multi_label else place[record.labels[0]]
            for record in records
        ]
        splits[split] = FolderSamples(records, labels, refine_boxes=refine_boxes, reader=reader)
    return Source(names, splits, listing.multi_label)
