"""The samples of a run: examined before it begins, then what is trained on, validates and is watched."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import torch

from fasterisnet.data import check
from fasterisnet.data.base import FewerMasks, Samples, balanced, hold_out, present, readable_part
from fasterisnet.data.loader import Loader
from fasterisnet.data.preparation import Preparation, random_stream
from fasterisnet.errors import InputError, UsageError
from fasterisnet.methods import method_class
from fasterisnet.runs.config import Config
from fasterisnet.runs.inputs import source_of
from fasterisnet.training.distributed import MASKS, SAMPLING, Place
from fasterisnet.training.setup import check_classes_of, check_data


class Splits:
    """The data of a run and its loaders; `bad` says which images could not be read."""

    def __init__(self, place: Place, preparation: Preparation, say: Callable[[str], None]) -> None:
        config = place.config
        self.place, self.preparation, self.say = place, preparation, say
        self.source = source_of(config)
        check_data(config, self.source)
        self.bad: list[str] = []
        training, validation = self._parts()
        watched = {name: self.source.split(name) for name in config.watch}
        if config.on_bad_image == "skip":
            training, validation = self._readable(training), self._readable(validation)
            watched = {name: readable_part(samples, config.workers)[0] for name, samples in watched.items()}
        check_classes_of(training, self.source, "image that is left to learn from")
        if config.mask_share < 1:
            training = FewerMasks(training, config.mask_share, random_stream(config.seed, MASKS))
        self.training_samples = len(training)
        self.samples = {"train": training, config.validation: validation}
        if config.sampling == "balanced":
            training = balanced(training, random_stream(config.seed, SAMPLING))
        self.training = self._loader("train", training, training=True)
        self.validation = self._loader(config.validation, validation)
        self.watched = {name: self._loader(name, samples) for name, samples in watched.items()}

    def _parts(self) -> tuple[Samples, Samples]:
        config, source = self.place.config, self.source
        training = source.split("train")
        if config.validation in source.splits:
            return training, source.split(config.validation)
        if config.validation != "val":
            source.split(config.validation)
        self.say(f"The data has no split 'val': {config.holdout:.0%} of 'train' is held out for validation.")
        return hold_out(training, config.holdout, config.seed)

    def _readable(self, samples: Samples) -> Samples:
        good, problems = readable_part(samples, self.place.config.workers)
        for text in problems:
            self.say(f"Skipped: {text}")
        self.bad += problems
        lost = present(samples, len(self.source.classes)) - present(good, len(self.source.classes))
        if lost:
            names = ", ".join(self.source.classes[i] for i in sorted(lost))
            raise InputError(f"No image of {names} can be read, so there is nothing left to skip to: {problems[0]}")
        return good

    def _loader(self, name: str, samples: Samples, *, training: bool = False) -> Loader:
        config = self.place.config
        return Loader(
            samples, self.preparation, config.batch, name=name, seed=config.seed, training=training,
            workers=config.workers, timeout=config.loader_timeout, share=self.place.share,
            pin=self.place.fabric.device.type == "cuda",
            dtype=torch.float64 if config.precision == "64-true" else torch.float32,
        )  # fmt: skip


SKIPPED = ("image", "mask", "missing", "size", "box")  # what `on_bad_image: skip` leaves out


def examine_data(config: Config, say: Callable[[str], None]) -> check.Report:
    """The data check, before a new run: what is fatal ends it, and a heatmap method needs masks it can use.

    Files of the user's own are all read. With `on_bad_image: skip` those that cannot be used are no reason to end.
    """
    report = check.check_data(
        config.data, foreground=config.foreground, window=config.window, workers=max(config.workers, 1),
        seed=config.seed, decode=False,
    )  # fmt: skip
    skipped = {check.KINDS[kind].problem for kind in SKIPPED} if config.on_bad_image == "skip" else set()
    fatal = [row for row in report.rows if row.severity == "fatal" and row.problem not in skipped]
    if fatal:
        count = sum(row.count for row in fatal)
        more = f" There are {count - 1:,} more problems; {_listing(config)} lists all." if count > 1 else ""
        raise InputError(f"{fatal[0].examples[0]}. {fatal[0].advice}{more}")
    if method_class(config.method).needs_masks:
        _check_masks(config, report, say)
    warned = [f"{row.problem} ({row.count:,})" for row in report.rows if row.severity == "warning"]
    if warned:
        say(f"The data check warns of {', '.join(warned)}; {_listing(config)} says more.")
    return report


def _check_masks(config: Config, report: check.Report, say: Callable[[str], None]) -> None:
    usable, images = report.masks.get("train", 0), report.splits.get("train", 0)
    rows = [row for kind in ("no mask", "empty", "full") if (row := report.found(kind))]
    example = f" One of them ({rows[0].problem}): {rows[0].examples[0]}." if rows else ""
    advice = f"{example} Give masks, or train with --method standard; {_listing(config)} says more."
    if not usable:
        raise InputError(
            f"The method {config.method} needs to know where the object is, but none of the {images:,} training images "
            f"has a mask that can be used.{advice}"
        )
    if config.mask_share == 0:
        raise UsageError(f"mask_share is 0, so the method {config.method} would use no mask; take --method standard.")
    if usable < images / 2 and not config.allow_missing_masks:
        raise UsageError(
            f"Only {usable:,} of {images:,} training images ({usable / images:.0%}) have a mask that can be used; if "
            f"the method {config.method} is meant for so few, say --allow-missing-masks.{advice}"
        )
    used = f", and {config.mask_share:.0%} of them are used (mask_share)" if config.mask_share < 1 else ""
    say(f"Masks: {usable:,} of {images:,} training images ({usable / images:.0%}) have one{used}.")


def _listing(config: Config) -> str:
    """The command that says everything about the data."""
    words = ["fasterisnet", "data", "check", config.data]
    words += ["--foreground", ",".join(map(str, config.foreground))] if config.foreground else []
    if config.window is not None:
        words += ["--window", config.window if isinstance(config.window, str) else "{:g},{:g}".format(*config.window)]
    return f"`{shlex.join(words)}`"
