"""Which samples a step sees: a function of seed, epoch and step alone, so that a run can go on anywhere."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import count, islice
from multiprocessing import connection, forkserver
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from fasterisnet.data.base import BadImageError, Samples
from fasterisnet.data.pictures import readable
from fasterisnet.data.preparation import Key, Preparation, Prepared, random_stream
from fasterisnet.errors import FasterISNetError, InputError, UsageError

Sample = tuple[Tensor, Tensor, Tensor]
Batch = tuple[Tensor, Tensor, Tensor]
LEAST = 2  # batch norm cannot learn from one sample
PATIENCE = 600.0  # seconds a batch may take to load
MOMENT = 2.0  # seconds after which one looks whether somebody is still at work
SAFE_PATH = "PYTHONSAFEPATH"
SLOW, DIED = "DataLoader timed out", "DataLoader worker"  # how PyTorch begins what it says of them
CROWD = 64  # loading processes that any machine is trusted with


class LoadingError(FasterISNetError, RuntimeError):
    """A process that loads images has died, or takes too long."""


class Batches(Sampler[list[Key]]):
    """The batches of an epoch. Of every batch this process takes `batch[rank::processes]`.

    In training a last batch of a single sample is left out. One that would leave a process with fewer than two is
    shared among fewer processes; the others get an empty list. So the batches do not depend on the processes.
    """

    def __init__(self, samples: int, size: int, *, seed: int, shuffle: bool, share: tuple[int, int] = (0, 1)) -> None:
        self.samples, self.size, self.seed, self.shuffle = samples, size, seed, shuffle
        self.rank, self.processes = share
        self.epoch = self.start = 0

    def count(self) -> int:
        """Batches in a whole epoch."""
        full, rest = divmod(self.samples, self.size)
        return full + (rest >= (LEAST if self.shuffle else 1))

    def shared(self, number: int) -> tuple[int, int]:
        """How many samples a batch has over all processes, and among how many of these it is shared."""
        whole = min(self.size, self.samples - number * self.size)
        few = self.shuffle and whole < min(self.size, LEAST * self.processes)
        return whole, whole // LEAST if few else self.processes

    def __len__(self) -> int:
        return self.count() - self.start

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.epoch
        order = torch.arange(self.samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(random_stream(self.seed, epoch, 1))
            order = torch.randperm(self.samples, generator=generator)
        for i in range(self.start, self.count()):
            among = self.shared(i)[1]
            batch = order[i * self.size : (i + 1) * self.size]
            mine = batch[self.rank :: among] if self.rank < among else batch[:0]
            if len(mine) or self.shuffle:
                yield [(epoch, index) for index in mine.tolist()]


class Loader:
    """Batches of a split, loaded by worker processes; counts the seconds that training had to wait for it.

    Workers come from a server process of their own: forked from this one, which has threads, a worker could inherit a
    lock that nobody will ever release. They stay from epoch to epoch, and leave with the process they work for.
    """

    def __init__(
        self,
        samples: Samples,
        preparation: Preparation,
        size: int,
        *,
        name: str = "",
        seed: int = 0,
        training: bool = False,
        workers: int = 0,
        share: tuple[int, int] = (0, 1),
        pin: bool = False,
        dtype: torch.dtype = torch.float32,
        timeout: float = PATIENCE,
    ) -> None:
        self.batches = Batches(len(samples), size, seed=seed, shuffle=training, share=share)
        if self.batches.count() == 0:
            raise InputError(f"{len(samples)} samples are too few for a batch.")
        check_workers(workers)
        self._loader: DataLoader[Any] = DataLoader(
            _Careful(Prepared(samples, preparation, seed=seed, training=training)),
            batch_sampler=self.batches,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context=_server() if workers else None,
            timeout=timeout if workers else 0,
            pin_memory=pin,
            worker_init_fn=_begin if workers else None,
            collate_fn=_Collate(preparation),
        )
        self.name, self.dtype, self.timeout = name, dtype, timeout
        self.waited = 0.0
        self.heard: Callable[[int, int], None] | None = None  # told how many batches of an epoch are done

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on."""
        self.batches.epoch, self.batches.start = epoch, start
        iterator = None
        for done in count(start):
            if self.heard is not None:
                self.heard(done, self.batches.count())
            begin = time.perf_counter()
            starting = self._loader.num_workers > 0 and self._loader._iterator is None
            try:
                iterator = iterator or self._begun()
                batch = next(iterator, None)
            except RuntimeError as error:
                problem = self._problem(iterator or self._loader._iterator, str(error))
                if problem is None:
                    raise
                raise problem from error
            self.waited += 0 if starting else time.perf_counter() - begin
            if batch is None:
                return
            if isinstance(batch, BadImageError):
                raise batch
            images, labels, masks = batch
            yield images.to(self.dtype), labels, masks

    def _begun(self) -> Any:
        """PyTorch looks after its workers only when it has waited in vain, so it waits for moments: for a batch, and
        at the beginning of an epoch for workers that stayed from the one before.
        """
        iterator: Any = iter(self._loader)
        if self._loader.num_workers:
            iterator._try_get_data = _watched(weakref.ref(iterator), self.timeout or math.inf)
        return iterator

    def _problem(self, iterator: Any, text: str) -> LoadingError | None:
        """What PyTorch says of workers that died or hang, in the words of the run; those that hang are ended."""
        died, slow = text.startswith(DIED), text.startswith(SLOW)
        if iterator is None or not (died or slow):
            return None
        gone = [f"{i} (process {w.pid})" for i, w in enumerate(iterator._workers) if died and not w.is_alive()]
        asked = iterator._task_info.get(iterator._rcvd_idx, (0,))[0]
        which = ", ".join(gone) or f"{asked} (process {iterator._workers[asked].pid})"
        for worker in iterator._workers:
            worker.kill()
        what = "died; it may have run out of memory" if died else f"sent no batch for {self.timeout:g} s"
        return LoadingError(
            f"Loading the split '{readable(self.name)}' failed in process {self.batches.rank} of "
            f"{self.batches.processes}: worker {which} {what}. Fewer workers or another loader_timeout may help."
        )


def _watched(iterator: weakref.ref[Any], limit: float) -> Callable[..., tuple[bool, Any]]:
    """A look into the queue of results that ends when there is one, a worker has died or the time is up."""

    def look(_timeout: float = 0.0) -> tuple[bool, Any]:
        begin = time.monotonic()
        this: Any = iterator()
        while True:
            try:
                found = type(this)._try_get_data(this, min(limit, MOMENT))
            except (ConnectionError, EOFError, FileNotFoundError) as error:  # while it handed over a batch
                connection.wait([worker.sentinel for worker in this._workers], MOMENT)
                raise RuntimeError(f"{DIED} left in the middle of a batch: {error}") from error
            if found[0] or time.monotonic() - begin >= limit:
                return found

    return look


def check_workers(workers: int) -> None:
    """More processes than a machine can run are a slip of the keyboard."""
    most = max(CROWD, 4 * (os.cpu_count() or 1))
    if workers > most:
        raise UsageError(f"workers is {workers}, but this machine should not run more than {most} of them.")


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

    def __getstate__(self) -> bytes:
        """As bytes: images in memory would otherwise move to /dev/shm, which is small in many containers."""
        return pickle.dumps(self.prepared)

    def __setstate__(self, state: bytes) -> None:
        self.prepared = pickle.loads(state)


class _Collate:
    """A batch of samples, or the first error among them; a process may have no sample of a batch."""

    def __init__(self, preparation: Preparation) -> None:
        self.channels, self.size = preparation.channels, preparation.size

    def __call__(self, samples: list[Sample | BadImageError]) -> Batch | BadImageError:
        if not samples:
            square = (self.size, self.size)
            masks = torch.zeros(0, 1, *square, dtype=torch.bool)
            return torch.zeros(0, self.channels, *square), torch.zeros(0, dtype=torch.long), masks
        return next((s for s in samples if isinstance(s, BadImageError)), None) or default_collate(samples)


def _server() -> Any:
    """Where workers come from. What they import is imported there, once for all of them.

    Python would look for it in the working directory first, where anybody's files may lie.
    """
    if not hasattr(os, "fork"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        forkserver.ensure_running()
    finally:
        del os.environ[SAFE_PATH]
        os.environ.update({} if before is None else {SAFE_PATH: before})
    return context


def _begin(_worker: int) -> None:
    """In a worker, before its first sample."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # threads that are begun later inherit it
        Thread(target=_leave_if_told, daemon=True).start()
    Thread(target=_leave_with_parent, daemon=True).start()


def _leave_if_told() -> None:
    """SIGTERM from the process it works for ends a worker; one that all processes of a job get is that one's affair."""
    parent = multiprocessing.parent_process()
    while parent is not None:
        if signal.sigwaitinfo({signal.SIGTERM}).si_pid == parent.pid:
            os._exit(1)


def _leave_with_parent() -> None:
    """The server lives as long as its workers do, so a worker has to notice itself that nobody waits for it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
