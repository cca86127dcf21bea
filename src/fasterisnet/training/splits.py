"""The samples of a run: what is trained on, what validates, what is watched."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fasterisnet.data.base import FewerMasks, Samples, balanced, hold_out, present, readable_part
from fasterisnet.data.preparing import Preparation, random_stream
from fasterisnet.errors import InputError
from fasterisnet.training.batches import Loader
from fasterisnet.training.checks import check_classes_of, check_data
from fasterisnet.training.method import source_of
from fasterisnet.training.placing import MASKS, SAMPLING, Place


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
            check_classes_of(training, self.source, "readable image")
            watched = {name: readable_part(samples, config.workers)[0] for name, samples in watched.items()}
        if config.mask_share < 1:
            training = FewerMasks(training, config.mask_share, random_stream(config.seed, MASKS))
        self.training_samples = len(training)
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
