"""Batch norms measured anew before a network is judged: the running averages of training lag behind its weights."""

from __future__ import annotations

from itertools import islice

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fasterisnet.data.loader import Loader
from fasterisnet.methods import Method
from fasterisnet.training.distributed import STATISTICS, Place


def measure_statistics(place: Place, method: Method, model: nn.Module, loader: Loader, epoch: int) -> None:
    """Running mean and variance of every batch norm become their averages over the first batches of an epoch.

    All other layers, dropout among them, work as they will when the network is used. Every process sees its part of the
    batches, and all end with the average of all. What was there before has no influence, so a run that was stopped in
    between does the same again.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None and not _frozen(m)]
    if not norms or not place.config.statistics_batches:
        return
    model.eval()
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain average
        norm.train()
    place.seed(method, STATISTICS, epoch)
    measured = 0
    with torch.no_grad(), place.fabric.autocast():
        for batch in islice(loader.epoch(epoch), place.config.statistics_batches):
            images, *_ = place.moved(*batch)
            if len(images):
                method.outputs(model, images)
                measured += 1
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
    if place.share[1] > 1:
        _average(place, norms, measured)


def _frozen(norm: nn.Module) -> bool:
    """A norm that is not trained keeps what it has."""
    parameters = list(norm.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _average(place: Place, norms: list[_BatchNorm], measured: int) -> None:
    """Over all processes, by how many batches each has seen."""
    total = float(place.added(torch.tensor(float(measured))))
    for norm in norms:
        for statistic in (norm.running_mean, norm.running_var):
            assert statistic is not None
            statistic.copy_(place.added(statistic * (measured / total)))
