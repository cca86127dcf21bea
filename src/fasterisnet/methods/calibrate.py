"""C1 and C2 for a method: how much relevance a plain classifier of the same architecture has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from fasterisnet.errors import InputError
from fasterisnet.losses import RunningMoments
from fasterisnet.lrp.explain import check_inputs
from fasterisnet.lrp.logits import plain
from fasterisnet.methods.base import Standard, Step, zero_loss
from fasterisnet.methods.isnet import ISNet
from fasterisnet.methods.ranges import Ranges

Progress = Callable[[int, int, float], None]


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimiser of the paper."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def calibrate(
    method: ISNet,
    model: nn.Module,
    loader: Iterable[Any],
    epochs: int = 4,
    *,
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = sgd,
    clip: float | None = 1.0,
    keys: tuple[str, str] = ("image", "label"),
    progress: Progress | None = None,
) -> Ranges:
    """Trains a copy of the model plainly for `epochs`, then measures `sum |R|` of every sample during one more.

    loader: batches (images, labels, ...), gone through `epochs + 1` times; dictionaries hold the two under `keys`.
    progress(epoch, step, loss) is called after every step. In a distributed run every process trains on its own
    batches, of which some may be empty, and what they measured is merged exactly.
    The model and the method are left as they are; give the result to the method as `ranges`. Keep the learning rate
    low: a classifier that grew certain on biased data saturates eta, and Selective would get a range far too small.

    Example:
        >>> method = Stochastic()
        >>> method.ranges = calibrate(method, model, loader)
    """
    if not isinstance(method, ISNet):
        raise InputError(f"{type(method).__name__} has no C1 and C2, so there is nothing to calibrate.")
    if not isinstance(epochs, int) or epochs < 0:
        raise InputError(f"epochs is {epochs!r}; it has to be a whole number, 0 or more.")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    model, method = copy.deepcopy(model).train(), copy.deepcopy(method)
    spread = distributed.is_available() and distributed.is_initialized()
    step = _Plain(model, Standard(classification=method.classification))
    trained = DistributedDataParallel(step) if spread else step
    together = method.share != (0, 1)
    steps = optimizer(model.parameters())
    moments: dict[str, RunningMoments] = {}
    for epoch in range(epochs + 1):
        count = 0
        for count, batch in enumerate(_batches(loader), start=1):
            images, labels = (part.to(device) for part in _parts(batch, keys))
            if len(images):
                check_inputs(model, images)
            share = _shared(method, len(images), together) if spread else 1.0
            if epoch == epochs and len(images):
                for depth, totals in method.measure(model, images).items():
                    moments.setdefault(depth, RunningMoments()).update(totals)
            loss = trained(images, labels) * share
            steps.zero_grad()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            steps.step()
            if progress is not None:
                progress(epoch, count, float(loss.detach()))
        if count == 0:
            again = (
                " any more: it is gone through several times, which a generator cannot be. Give a list" if epoch else ""
            )
            raise InputError(f"The loader gave no batch{again}; calibration needs the training data.")
    return Ranges.from_moments(_merged(moments) if spread else moments)


def _batches(loader: Any) -> Iterable[Any]:
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise InputError(f"loader is a {type(loader).__name__}; it has to give batches (images, labels, ...).")
    return loader


def _parts(batch: Any, keys: tuple[str, str]) -> tuple[Tensor, Tensor]:
    """Images and labels of a batch."""
    if isinstance(batch, Mapping):
        missing = [key for key in keys if key not in batch]
        if missing:
            raise InputError(
                f"A batch has no '{missing[0]}', only {', '.join(map(str, batch))}; name its images and labels with "
                "keys=(images, labels)."
            )
        found = [batch[key] for key in keys]
    else:
        found = list(batch[:2]) if isinstance(batch, list | tuple) else [batch]
    images, labels = [*map(plain, found), None, None][:2]
    if not isinstance(images, Tensor) or not isinstance(labels, Tensor):
        kinds = ", ".join(type(part).__name__ for part in found)
        raise InputError(f"A batch holds {kinds}; it has to begin with two tensors, images and labels.")
    if images.ndim < 2 or labels.shape[:1] != images.shape[:1]:
        raise InputError(
            f"A batch has images of shape {tuple(images.shape)} and labels of shape {tuple(labels.shape)}; it needs a "
            "label for each image. A data set of single samples goes into a DataLoader first."
        )
    return images, labels


class _Plain(Step):
    """The classification loss alone, also of an empty batch."""

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return super().forward(images, labels).total if len(images) else zero_loss(self.model)


def _shared(method: ISNet, samples: int, together: bool) -> float:
    """The weight of this process's mean in the batch of all; those that draw together are told of the whole."""
    counts: list[int] = [0] * distributed.get_world_size()
    distributed.all_gather_object(counts, samples)
    if together:
        method.share = (method.share[0], sum(map(bool, counts)))
        method.batch = sum(counts)
    return samples * len(counts) / max(sum(counts), 1)


def _merged(moments: dict[str, RunningMoments]) -> dict[str, RunningMoments]:
    everyone: list[dict[str, RunningMoments] | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, moments)
    merged: dict[str, RunningMoments] = {}
    for part in everyone:
        for depth, measured in (part or {}).items():
            merged.setdefault(depth, RunningMoments()).merge(measured)
    return merged
