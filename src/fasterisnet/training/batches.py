"""Which samples a step sees: a function of seed, epoch and step alone, so that a run can go on anywhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from fasterisnet.data.base import BadImageError, Samples
from fasterisnet.data.preparing import Key, Preparation, Prepared, random_stream
from fasterisnet.errors import InputError

Sample = tuple[Tensor, Tensor, Tensor]
Batch = tuple[Tensor, Tensor, Tensor]
LEAST = 2  # batch norm cannot learn from one sample


class Batches(Sampler[list[Key]]):
    """The batches of an epoch. Of every batch this process takes `batch[rank::processes]`.

    A last batch that would leave a process with fewer than two samples is left out.
    """

    def __init__(self, samples: int, size: int, *, seed: int, shuffle: bool, share: tuple[int, int] = (0, 1)) -> None:
        self.samples, self.size, self.seed, self.shuffle = samples, size, seed, shuffle
        self.rank, self.processes = share
        self.epoch = self.start = 0

    def count(self) -> int:
        """Batches in a whole epoch."""
        full, rest = divmod(self.samples, self.size)
        useful = rest >= (LEAST * self.processes if self.shuffle else 1)
        return full + useful

    def __len__(self) -> int:
        return self.count() - self.start

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.epoch
        order = torch.arange(self.samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(random_stream(self.seed, epoch, 1))
            order = torch.randperm(self.samples, generator=generator)
        for i in range(self.start, self.count()):
            mine = order[i * self.size : (i + 1) * self.size][self.rank :: self.processes]
            if len(mine):
                yield [(epoch, index) for index in mine.tolist()]


class Loader:
    """Batches of a split, loaded by worker processes; counts the seconds that training had to wait for it."""

    def __init__(
        self,
        samples: Samples,
        preparation: Preparation,
        size: int,
        *,
        seed: int = 0,
        training: bool = False,
        workers: int = 0,
        share: tuple[int, int] = (0, 1),
        pin: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.batches = Batches(len(samples), size, seed=seed, shuffle=training, share=share)
        if self.batches.count() == 0:
            raise InputError(f"{len(samples)} samples are too few for a batch.")
        self._loader: DataLoader[Any] = DataLoader(
            _Careful(Prepared(samples, preparation, seed=seed, training=training)),
            batch_sampler=self.batches,
            num_workers=workers,
            persistent_workers=training and workers > 0,
            pin_memory=pin,
            worker_init_fn=_one_thread if workers else None,
            collate_fn=_batch,
        )
        self.dtype = dtype
        self.waited = 0.0

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on."""
        self.batches.epoch, self.batches.start = epoch, start
        iterator = iter(self._loader)
        while True:
            begin = time.perf_counter()
            batch = next(iterator, None)
            self.waited += time.perf_counter() - begin
            if batch is None:
                return
            if isinstance(batch, BadImageError):
                raise batch
            images, labels, masks = batch
            yield images.to(self.dtype), labels, masks


class Epochs:
    """A loader as something to iterate over again and again, an epoch, or its first batches, each time."""

    def __init__(self, loader: Loader, batches: int | None = None) -> None:
        self.loader = loader
        self.batches = batches
        self.next = 0

    def __iter__(self) -> Iterator[Batch]:
        self.next += 1
        return islice(self.loader.epoch(self.next - 1), self.batches)


class _Careful(Dataset[Any]):
    """Gives back the error of a file that cannot be read, which would leave a worker process as a long traceback."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared

    def __getitem__(self, key: Key) -> Sample | BadImageError:
        try:
            return self.prepared[key]
        except BadImageError as error:
            return error


def _batch(samples: list[Sample | BadImageError]) -> Batch | BadImageError:
    return next((s for s in samples if isinstance(s, BadImageError)), None) or default_collate(samples)


def _one_thread(_worker: int) -> None:
    torch.set_num_threads(1)
