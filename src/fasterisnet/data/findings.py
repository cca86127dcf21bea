"""What the data check finds: in the lists of a data set, and in its files."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from fasterisnet.data.base import Samples
from fasterisnet.data.boxes import boxes_to_mask
from fasterisnet.data.folder import size_mismatch
from fasterisnet.data.listing import BOXES, MASKS, Finding, Listing, looked_for
from fasterisnet.data.manifest import Record
from fasterisnet.data.masks import CLEAR, listed
from fasterisnet.data.pictures import SIXTEEN_BITS, Picture, pages_of, read_bytes, readable, stem_of
from fasterisnet.data.reader import NoWindowError, Reader, is_image_file, kind_of
from fasterisnet.errors import InputError

AT_ONCE = 4096
_MISNAMED = {"training": "train", "trainval": "train", "valid": "val", "validation": "val", "dev": "val"}
_MASK_OF = re.compile(r"(.+)[ _.-](?:mask|masks|seg|segmentation)", re.IGNORECASE | re.DOTALL)
_USED = 2**14  # values that data of 16 bits should reach
_FRAMED, _MANY = 0.2, 10  # share of at least so many masks that have the whole border as the object


@dataclass
class Counts:
    """What is counted on the way: the images that have a usable mask, of each split, and of each class of train."""

    masks: Counter[str] = field(default_factory=Counter)
    of_class: Counter[str] = field(default_factory=Counter)


# --- lists -----------------------------------------------------------------------------------------------------------


def about_lists(listing: Listing) -> Iterator[Finding]:
    """What can be seen without opening an image."""
    yield from _about_names(listing)
    if len(listing.classes) == 1 and not listing.multi_label:
        yield Finding(
            "one class", f"{readable(listing.root)}: every image is of class '{readable(listing.classes[0])}'"
        )
    present: dict[str, set[str]] = defaultdict(set)
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    labels: dict[str, tuple[str, ...]] = {}
    seen: set[tuple[str, str]] = set()
    for record in listing.records:
        present[record.split].update(record.labels)
        if record.group is not None:
            groups[record.group].setdefault(record.split, record.name)
        if labels.setdefault(record.name, record.labels) != record.labels:
            both = " and ".join(readable(", ".join(names)) for names in (labels[record.name], record.labels))
            yield Finding("two labels", f"{record.name}: is {both}")
        elif (record.name, record.split) in seen:
            yield Finding("repeated", f"{record.name}: is listed again in {readable(record.split)}")
        seen.add((record.name, record.split))
    for split, names in present.items():
        for name in listing.classes:
            if name not in names:
                kind = "not trained" if split == "train" else "not tested"
                yield Finding(kind, f"{readable(split)}: has no image of class '{readable(name)}'")
    for group, images in groups.items():
        if len(images) > 1:
            places = " and ".join(f"{image} ({readable(split)})" for split, image in list(images.items())[:2])
            kind = "group" if "train" in images or "val" in images else "group of tests"
            yield Finding(kind, f"{readable(group)}: {places}")
    yield from _about_sites(listing)
    yield from _unused(listing)
    yield from _shared(listing)
    yield from _masks_among(listing)


def _about_sites(listing: Listing) -> Iterator[Finding]:
    """Classes that are learned from one hospital while others are not: what a network may read instead."""
    sites: dict[str, set[str | None]] = defaultdict(set)
    for record in listing.records:
        if record.split == "train":
            for name in record.labels:
                sites[name].add(record.site)
    if len(set().union(*sites.values()) - {None}) < 2:
        return
    for name, found in sorted(sites.items()):
        if len(found) == 1 and None not in found:
            yield Finding("one site", f"{readable(name)}: every image of train is from {readable(str(*found))}")


def _shared(listing: Listing) -> Iterator[Finding]:
    """Images of one name and two suffixes: in folders they get the same mask. What a manifest names is meant."""
    if not listing.from_folders:
        return
    first: dict[str, str] = {}
    for record in listing.records:
        if record.mask is not None and first.setdefault(record.mask, record.image) != record.image:
            both = f"{readable(first[record.mask])} and {readable(record.image)}"
            yield Finding("shared", f"{readable(record.mask)}: is the mask of {both}")


def _masks_among(listing: Listing) -> Iterator[Finding]:
    """Files named like the mask of an image beside them, which would be trained on as images."""
    stems = {stem_of(record.image) for record in listing.records}
    for record in listing.records:
        found = _MASK_OF.fullmatch(stem_of(record.image))
        if found and found[1] in stems:
            yield Finding("among", f"{record.name}: is named like a mask of the image beside it")


def _about_names(listing: Listing) -> Iterator[Finding]:
    """Names that look like a slip of the keyboard."""
    for split in listing.splits:
        plain = split.strip().lower()
        meant = _MISNAMED.get(plain, plain)
        if split not in ("train", "val") and meant in ("train", "val"):
            yield Finding("split name", f"{readable(split)}: is it '{meant}'?")
    spelled: dict[str, str] = {}
    for name in listing.classes:
        other = spelled.setdefault(_spoken(name), name)
        if other != name:
            yield Finding("class name", f"{readable(other)}: there is also '{readable(name)}'")


def _spoken(name: str) -> str:
    """The same for names that are told apart by their spelling alone: Cat and cat, 1 and 1.0."""
    try:
        return str(float(name))
    except ValueError:
        return " ".join(name.replace("_", " ").replace("-", " ").casefold().split())


def _unused(listing: Listing) -> Iterator[Finding]:
    """Masks and box files in the folder that belong to no image. What a manifest does not name is not asked for."""
    if not listing.from_folders:
        return
    used = {record.mask for record in listing.records}
    stems = {stem_of(os.path.relpath(record.image, listing.root)) for record in listing.records}
    for part in (MASKS, BOXES):
        top = os.path.join(listing.root, part)
        for folder, folders, files in os.walk(top):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                path = os.path.join(folder, name)
                known = path in used if part == MASKS else os.path.splitext(os.path.relpath(path, top))[0] in stems
                wanted = is_image_file(path) if part == MASKS else name.lower().endswith(".xml")
                if wanted and not known and not name.startswith("."):
                    yield Finding("mask without image", f"{readable(path)}: there is no image of this name")


# --- files -----------------------------------------------------------------------------------------------------------


class Examined(NamedTuple):
    """What is found in one sample, what tells its picture from others, whether its mask can be used, the highest
    value of a file of 16 bits, and whether the mask's whole border is the object (None without an outline).
    """

    findings: list[Finding]
    digest: bytes | None = None
    usable: bool = False
    top: int | None = None
    framed: bool | None = None


def about_files(listing: Listing, reader: Reader, workers: int, counts: Counts, examples: int) -> Iterator[Finding]:
    """What shows only when every file is decoded. examples: so many missing masks are looked for under other names."""
    tops: dict[str, int] = {}
    absent = 0
    framed: dict[bool, list[str]] = {True: [], False: []}
    for record, examined in _examined(listing, lambda i: _examine(listing.records[i], reader), workers, counts):
        for finding in examined.findings:
            if finding.kind == "no mask" and absent < examples:
                absent += 1
                yield Finding("no mask", f"{finding.message}: {looked_for(listing, record)}")
            else:
                yield finding
        if examined.top is not None:
            tops[record.name] = examined.top
        if examined.framed is not None:
            framed[examined.framed].append(readable(record.mask or ""))
    masks = sum(map(len, framed.values()))
    if masks >= _MANY and len(framed[True]) >= _FRAMED * masks:
        yield Finding(
            "inverted",
            f"{framed[True][0]}: its border is white all around, as in {len(framed[True]):,} of {masks:,} masks",
        )
    if tops and max(tops.values()) < _USED:
        for name, top in tops.items():
            yield Finding("unused", f"{name}: {top} of {SIXTEEN_BITS}, so {_levels(top)} gray levels are left of it")


def about_samples(
    listing: Listing, places: Sequence[tuple[Samples, int]], workers: int, counts: Counts
) -> Iterator[Finding]:
    """What shows when every sample of a data set known by name is read."""
    for _, examined in _examined(listing, lambda i: _examine_sample(*places[i]), workers, counts):
        yield from examined.findings


def about_classes(counts: Counts) -> Iterator[Finding]:
    """Classes that have no mask to learn from while others have: their background may go on giving them away."""
    if any(counts.of_class.values()):
        for name, masks in sorted(counts.of_class.items()):
            if not masks:
                yield Finding("unmasked", f"{readable(name)}: no image of train has a mask that can be used")


def _examined(
    listing: Listing, work: Callable[[int], Examined], workers: int, counts: Counts
) -> Iterator[tuple[Record, Examined]]:
    """Every record with what was found in it, by several threads, in order."""
    first: dict[bytes, dict[str, Record]] = defaultdict(dict)
    with warnings.catch_warnings(), ThreadPoolExecutor(workers) as pool:
        warnings.simplefilter("ignore")  # Pillow's, of files that it can read nevertheless
        for start in range(0, len(listing.records), AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, len(listing.records)))
            for i, examined in zip(numbers, pool.map(work, numbers), strict=True):
                record = listing.records[i]
                counts.masks[record.split] += examined.usable
                if record.split == "train":
                    counts.of_class.update(dict.fromkeys(record.labels, int(examined.usable)))
                if examined.digest is not None:
                    examined.findings.extend(_again(record, first[examined.digest]))
                    first[examined.digest].setdefault(record.split, record)
                yield record, examined


def _again(record: Record, earlier: dict[str, Record]) -> Iterator[Finding]:
    """The same picture met before: in another split, or in this one as another class."""
    within = earlier.get(record.split)
    if within is not None and within.name != record.name and within.labels != record.labels:
        yield Finding("two classes", f"{record.name}: the same as {within.name}")
    # Tests of a data set known by name are often the same pictures, and meant to be.
    others = [
        r for split, r in earlier.items() if split != record.split and (r.name != record.name or split == "train")
    ]
    if others:
        yield Finding("duplicate", f"{record.name}: the same as {others[0].name}")


def _examine(record: Record, reader: Reader) -> Examined:
    """One image and its mask."""
    findings: list[Finding] = []
    picture: Picture | None = None
    digest: bytes | None = None
    problem = _no_file(record.image, "image")
    if problem is not None:
        findings.append(problem)
    else:
        try:
            picture = reader.picture(record.image, record.slice)
            plain = kind_of(record.image) == "picture"
            content = read_bytes(record.image) if plain else picture.image.numpy().tobytes()
            digest, pages = _digest(content), pages_of(content) if plain else 1
            if pages > 1:
                findings.append(Finding("pages", f"{record.name}: holds {pages} pictures"))
        except InputError as error:
            kind = "window" if isinstance(error, NoWindowError) else "image"
            findings.append(Finding(kind, str(error).removesuffix(".")))
    usable, framed = False, None
    if record.mask is not None:
        found, usable, framed = _examine_mask(record, reader, picture)
        findings += found
    elif not record.boxes:
        findings.append(Finding("no mask", record.name))
    elif picture is not None:
        try:
            found = _extent(boxes_to_mask(record.boxes, *picture.image.shape[1:]), record.name)
            findings, usable = findings + found, not found
        except InputError as error:
            findings.append(Finding("box", f"{record.name}: {error}".removesuffix(".")))
    return Examined(findings, digest, usable and picture is not None, picture.top if picture else None, framed)


def _examine_mask(record: Record, reader: Reader, picture: Picture | None) -> tuple[list[Finding], bool, bool | None]:
    """What is wrong with a mask, whether it can be used, and whether its whole border is the object."""
    path = record.mask or ""
    name = record.named(path)
    problem = _no_file(path, "mask")
    if problem is not None:
        return [problem], False, None
    try:
        mask = reader.mask(path, record.slice)
    except InputError as error:
        return [Finding("mask", str(error).removesuffix("."))], False, None
    findings: list[Finding] = []
    if mask.verdict in CLEAR:
        labels = f": none of its labels {listed(mask.values)} is chosen" if reader.foreground else ""
        findings += _extent(mask.foreground, name, labels)
    usable = mask.verdict in CLEAR and not findings
    if mask.verdict == "soft":
        findings.append(Finding("soft", f"{name}: has values between black and white"))
    elif mask.verdict != "binary":
        all_of_them = f" (all but the background: --foreground {mask.labels})" if mask.verdict == "labels" else ""
        findings.append(Finding(mask.verdict, f"{name}: {mask.problem}{all_of_them}"))
    framed = _framed(mask.foreground) if usable else None
    if picture is None:
        return findings, usable, framed
    if picture.image.shape[1:] != mask.foreground.shape[1:]:
        return [*findings, Finding("size", size_mismatch(record, picture.image, mask.foreground))], False, framed
    if picture.turned and not mask.turned:
        findings.append(Finding("turned", f"{record.name}: its EXIF entry turns it, and {readable(path)} has none"))
    return findings, usable, framed


def _framed(mask: Tensor) -> bool:
    """Whether every pixel of the border is the object."""
    return all(bool(side.all()) for side in (mask[:, 0], mask[:, -1], mask[:, :, 0], mask[:, :, -1]))


def _examine_sample(samples: Samples, index: int) -> Examined:
    """One sample of a data set known by name."""
    name = readable(samples.name(index))
    try:
        image, mask, _ = samples.read(index)
    except InputError as error:
        return Examined([Finding("image", str(error).removesuffix("."))])
    findings = [Finding("no mask", name)] if mask is None else _extent(mask, name)
    return Examined(findings, _digest(image.contiguous().numpy().tobytes()), usable=not findings)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _no_file(path: str, kind: str) -> Finding | None:
    """What is no file (a pipe, say) is left alone."""
    if os.path.isfile(path):
        return None
    there = os.path.exists(path)
    return Finding(kind if there else "missing", f"{readable(path)}: {'is not a file' if there else 'does not exist'}")


def _extent(mask: Tensor, name: str, why_empty: str = "") -> list[Finding]:
    """Whether there is both foreground and background."""
    if not mask.any():
        return [Finding("empty", name + why_empty)]
    return [Finding("full", name)] if mask.all() else []


def _levels(top: int) -> int:
    return round(top * 255 / SIXTEEN_BITS) + 1
