"""What a run needs before it begins: its method, optimiser and rates, and checks of what can be known to go wrong."""

from __future__ import annotations

import copy
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fasterisnet.data.base import Samples, Source
from fasterisnet.data.loader import check_workers
from fasterisnet.data.pictures import readable
from fasterisnet.data.sources import is_own
from fasterisnet.errors import InputError, UsageError
from fasterisnet.evaluation.causal import MODEL_ERRORS
from fasterisnet.losses import are_chances
from fasterisnet.lrp.logits import logits_in
from fasterisnet.methods import Method, method_class, options_of
from fasterisnet.runs.config import Config, paper_weight
from fasterisnet.runs.inputs import preparation_of
from fasterisnet.runs.values import AUTO


def method_options(config: Config) -> dict[str, Any]:
    """What the options of a run say to methods, by the names that methods know them under."""
    found = {option.metadata["argument"]: getattr(config, option.name) for option in fields(config)}
    found.pop("")
    found |= {"box": preparation_of(config).box if config.zb else None, "maps_at_once": config.maps_at_once or None}
    if config.heatmap_weight is None:
        found["heatmap_weight"] = paper_weight(config.method)
    elif config.heatmap_weight == AUTO:  # the method's own
        found.pop("heatmap_weight")
    return {**found, "augment": _built(config.augmenting, found) if config.augmenting else None}


def build_method(config: Config) -> Method:
    """The method a run asks for; C1 and C2 are still missing."""
    return _built(method_class(config.method), method_options(config))


def _built(kind: type[Method], options: dict[str, Any]) -> Method:
    return kind(**{name: options[name] for name in options_of(kind) if name in options})


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """What updates the weights; momentum is SGD's."""
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), **common)
    return torch.optim.SGD(model.parameters(), momentum=config.momentum, **common)


def learning_rate(config: Config, done: int, total: int) -> float:
    """The rate of the next update: a function of how many are done."""
    share = done / max(total, 1)
    if config.schedule == "cosine":
        return config.lr * (1 + math.cos(math.pi * share)) / 2
    if config.schedule == "onecycle":  # up from 1/25 for the first 30 %, then down to nothing
        rising = share < 0.3
        low, high = (config.lr / 25, config.lr) if rising else (config.lr / 25e4, config.lr)
        part = share / 0.3 if rising else (1 - share) / 0.7
        return low + (high - low) * (1 - math.cos(math.pi * part)) / 2
    return config.lr


def weights_of(config: Config, source: Source, training: Samples) -> torch.Tensor | None:
    """A weight for every class: as given, or samples / (classes * samples of the class), whose mean over samples is 1.

    A function of all the training data, so it is the same in every process.
    """
    if config.class_weights is None:
        return None
    if source.multi_label:
        raise UsageError(
            "class_weights are for classes of which one is true. Where several can be true at once each is an answer "
            "of its own, yes or no, and what is rare is the yes of that answer, not a sample; leave them out."
        )
    if config.class_weights != "balanced":
        if len(config.class_weights) != len(source.classes):
            raise UsageError(
                f"class_weights has {len(config.class_weights)} numbers for {len(source.classes)} classes "
                f"({', '.join(map(readable, source.classes))}); give one for each, in this order."
            )
        return torch.tensor(config.class_weights)
    counts = torch.zeros(len(source.classes))
    for i in range(len(training)):
        label = training.label(i)
        assert isinstance(label, int)
        counts[label] += 1
    return len(training) / (len(counts) * counts)


def check_options(config: Config) -> None:
    """What a new run would be told too late, or never."""
    if config.class_weights == "balanced" and config.sampling == "balanced":
        raise UsageError("class_weights and sampling are both balanced, which would be twice too much; take one.")
    if isinstance(config.heatmap_weight, list) and len(config.heatmap_weight) != config.epochs:
        raise UsageError(
            f"heatmap_weight has {len(config.heatmap_weight)} numbers for {config.epochs} epochs; give one for each."
        )
    check_workers(config.workers)
    folder = Path(config.data)
    if is_own(config.data) and folder.is_dir() and Path(config.out).resolve().is_relative_to(folder.resolve()):
        raise UsageError(f"The run {config.out} would lie inside the data {config.data}; choose an --out elsewhere.")


def check_data(config: Config, source: Source) -> None:
    """What would make a training worthless, before it begins."""
    check_groups(config, source)
    if source.multi_label:
        return
    if len(source.classes) < 2:
        raise InputError(f"The data has one class, '{source.classes[0]}': there is nothing to tell apart.")
    check_classes_of(source.split("train"), source, "image")


def check_classes_of(samples: Samples, source: Source, what: str) -> None:
    """A network cannot learn a class that it never sees."""
    present = {samples.label(i) for i in range(len(samples))}
    missing = [name for i, name in enumerate(source.classes) if i not in present]
    if missing and not source.multi_label:
        names = ", ".join(map(readable, missing))
        raise InputError(f"The split 'train' has no {what} of {names}; `fasterisnet data check` says more.")


def check_groups(config: Config, source: Source) -> None:
    """Nobody (no patient) is trained on and validated or tested with, nor chosen and tested with."""
    chosen = [name for name in ("train", config.validation) if name in source.splits]
    for name in chosen:
        mine = _groups(source.splits[name])
        for other, samples in source.splits.items():
            alike = source.copies.get(name, name) == source.copies.get(other, other)
            both = mine & _groups(samples) if mine and not alike else set()
            if both:
                raise InputError(
                    f"{len(both)} groups or patients are in the splits '{readable(name)}' and '{readable(other)}' at "
                    f"once, among them '{readable(min(both))}'; keep everybody in one of them."
                )


def _groups(samples: Samples) -> set[str]:
    return {group for i in range(len(samples)) if (group := samples.group(i)) is not None}


def check_model(config: Config, model: nn.Module, classes: int) -> None:
    """Whether the network can learn, takes images of this size and has a logit for every class."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"The model {config.model} has no parameter that can be trained; let some require a gradient.")
    try:
        with torch.random.fork_rng(devices=[]):
            preparation_of(config)(torch.zeros(3, 20, 30, dtype=torch.uint8), training=True)
    except RuntimeError as error:
        raise UsageError(f"Pictures cannot be made {config.size} px large ({error}); take a larger --size.") from error
    model.eval()
    images = torch.zeros(1, config.channels, config.size, config.size)
    try:
        with torch.no_grad():
            output = model(images)
    except MODEL_ERRORS as error:
        raise UsageError(
            f"The model {config.model} cannot take images of {config.size} px with {config.channels} channels: {error}"
        ) from error
    logits = logits_in(output)
    if tuple(logits.shape) != (1, classes):
        shape = tuple(logits.shape)
        raise UsageError(f"The model {config.model} has outputs of shape {shape}; it has to be (batch, {classes}).")
    with torch.no_grad():
        if classes > 1 and are_chances(logits) and are_chances(logits_in(model(images + 0.5))):
            raise UsageError(f"The model {config.model} ends with a softmax; the loss needs logits, so leave it out.")
    model.train()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copy.deepcopy(model)(images.repeat(max(1, min(2, config.batch)), 1, 1, 1))
    except MODEL_ERRORS as error:
        raise UsageError(
            f"The model {config.model} cannot learn from images of {config.size} px: {error} Take a larger --size."
        ) from error


def check_method(config: Config, method: Method, model: nn.Module, source: Source) -> list[str]:
    """What the first step after the calibration would find out; returns what the method has to say."""
    if source.multi_label and len(source.classes) > 1 and not method.multi_label:
        raise UsageError(f"{config.method} explains softmax probabilities, which several labels at once do not have.")
    known = dict(model.named_modules())
    for name in config.deep_supervision if isinstance(config.deep_supervision, list) else []:
        if name not in known:
            raise UsageError(f"deep_supervision names '{name}', which is not a module of the model.")
    parameter = next(model.parameters(), torch.zeros(()))
    return method.begin(model, torch.zeros(2, config.channels, config.size, config.size).to(parameter))
