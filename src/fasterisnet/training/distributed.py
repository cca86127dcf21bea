"""Where a run computes: its processes and devices, its share of them, and the random numbers of each step."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, distributed, nn

from fasterisnet.data.preparation import random_stream
from fasterisnet.errors import FasterISNetError, UsageError
from fasterisnet.losses import has_foreground
from fasterisnet.methods import Method, method_class
from fasterisnet.models import names_code
from fasterisnet.runs.config import Config

# What random numbers are drawn for; with the seed, the epoch and the step they decide everything.
WEIGHTS, CALIBRATION, TRAINING, VALIDATION, MASKS, SAMPLING, STATISTICS = range(7)


class Place:
    """One process of a run among all of them."""

    def __init__(self, fabric: Fabric, config: Config) -> None:
        self.fabric, self.config = fabric, config
        self.share = (fabric.global_rank, fabric.world_size)

    def moved(self, images: Tensor, labels: Tensor, masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A batch on the device, in the memory format of the run."""
        if self.config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        images, labels, masks = self.fabric.to_device((images, labels, masks))
        return images, labels, masks

    def added(self, sums: Tensor) -> Tensor:
        """Over all processes."""
        if self.share[1] == 1:
            return sums  # also because not every device has float64
        total = self.fabric.all_reduce(sums.to(self.fabric.device), reduce_op="sum")
        assert isinstance(total, Tensor)
        return total.cpu()

    def gathered(self, sums: Tensor) -> Tensor:
        """A row from each process."""
        if self.share[1] == 1:
            return sums.view(1, -1)
        mine = sums.to(self.fabric.device)
        rows = [torch.empty_like(mine) for _ in range(self.share[1])]
        distributed.all_gather(rows, mine)
        return torch.stack(rows).view(self.share[1], -1).cpu()

    def largest(self, *numbers: int) -> list[int]:
        """Of each number, the largest among all processes: what one of them wants, all do."""
        if self.share[1] == 1:
            return list(numbers)
        found = self.fabric.all_reduce(torch.tensor(numbers, device=self.fabric.device), reduce_op="max")
        assert isinstance(found, Tensor)
        return found.tolist()

    def shares(self, masks: Tensor) -> tuple[float, float]:
        """Of the samples and of the masked samples that this process has, in units of an equal share."""
        processes = self.share[1]
        if processes == 1:
            return 1.0, 1.0
        mine = torch.tensor([len(masks), int(has_foreground(masks).sum())], dtype=torch.float64)
        samples, masked = (mine * processes / self.added(mine).clamp(min=1)).tolist()
        return samples, masked

    def agree(self, model: nn.Module) -> None:
        """Every process takes the batch statistics of the first, whose network is the one that is saved."""
        if self.share[1] > 1:
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, 0)

    def draws(self, method: Method, whole: int, among: int) -> None:
        """Tells a method that draws which part of a batch it sees: that of this process, one of `among`."""
        method.share, method.batch = (self.share[0], among), whole

    def seed(self, method: Method, *numbers: int) -> None:
        """The purpose and what else counts: PyTorch's own numbers differ between processes, the method's do not."""
        torch.manual_seed(random_stream(self.config.seed, *numbers, self.share[0]))
        if method.generator is not None:
            method.generator.manual_seed(random_stream(self.config.seed, *numbers))


PARENT = "FASTERISNET_PARENT"  # environment variable: the process that started this one
SRUN = ("SLURM_STEP_NUM_TASKS", "SLURM_SRUN_COMM_HOST")  # environment variables that srun alone sets
CAUSE = "fasterisnet/cause"  # where in the store of the processes the first one to fail says why
NOTICED = Event()
GRACE = 10.0  # seconds in which a process has to notice itself that another one is gone


class LostProcessError(FasterISNetError, RuntimeError):
    """Another process of the run has failed or died."""


def resume_hint(config: Config) -> str:
    """How to go on, to be pasted into a shell."""
    trust = " --trust" if names_code(config.model) else ""
    return f"go on with: fasterisnet train --resume {shlex.quote(config.out)}{trust}"


def processes(config: Config) -> tuple[int, int]:
    """Processes on a machine and machines: those that torchrun or SLURM started, or what the options say."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
    if SLURMEnvironment.detect():
        tasks, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ.get("SLURM_NNODES", "1"))
        if tasks > 1 and not any(name in os.environ for name in SRUN):
            raise UsageError(
                f"SLURM gave this job {tasks} tasks, but one process was started; write `srun fasterisnet ...`, or ask "
                "for one task (unset SLURM_NTASKS) and give --devices."
            )
        return tasks // nodes, nodes
    return config.devices, config.nodes


def is_first_process() -> bool:
    """Whether this process is the one of a run that writes and speaks; also true of a run with one process."""
    return getattr(rank_zero_only, "rank", 0) == 0


def start_fabric(config: Config) -> Fabric:
    """Processes and devices; DDP for more than one, whoever started them."""
    devices, nodes = processes(config)
    several = devices * nodes > 1
    if config.batch < devices * nodes:
        raise UsageError(
            f"batch is {config.batch}, fewer samples than the {devices * nodes} processes that share them."
        )
    try:
        fabric = Fabric(
            accelerator=config.accelerator,
            devices=devices,
            num_nodes=nodes,
            precision=config.precision,  # pyright: ignore[reportArgumentType]
            strategy=_Strategy(config) if several else "auto",
        )
    except (MisconfigurationException, RuntimeError, ValueError) as error:
        raise UsageError(
            f"{devices} x accelerator '{config.accelerator}' cannot be had on this machine: {error}"
        ) from error
    there = distributed.is_available() and distributed.is_initialized()  # a run before this one started the processes
    if several and not there:
        if int(os.environ.get("LOCAL_RANK", "0")) > 0 and PARENT in os.environ:
            Thread(target=_leave_with_parent, args=(int(os.environ[PARENT]),), daemon=True).start()
        os.environ[PARENT] = str(os.getpid())
    try:
        fabric.launch()
    except (distributed.DistError, RuntimeError) as error:
        if isinstance(error, FasterISNetError):
            raise
        port = os.environ.get("MASTER_PORT", "")
        raise FasterISNetError(
            f"The processes could not be brought together at port {port or 'unknown'}: {_first_line(error)} If the "
            "port is in use, set the environment variable MASTER_PORT to another one."
        ) from error
    if config.precision == "16-mixed" and fabric.device.type != "cuda":
        raise UsageError("16-mixed needs a GPU; on this machine take bf16-mixed.")
    return fabric


# --- when one of several processes fails -----------------------------------------------------------------------------


@contextmanager
def all_in_one_boat(fabric: Fabric, config: Config) -> Iterator[None]:
    """The first process to fail says why; the others end with its words instead of those of a broken connection."""
    if fabric.world_size == 1:
        yield
        return
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if isinstance(error, FasterISNetError | OSError) or not _is_connection(error):
            _tell(f"{error}" if isinstance(error, FasterISNetError) else f"{type(error).__name__}: {error}")
            raise
        raise LostProcessError(_lost(fabric, config)) from error


def _lost(fabric: Fabric, config: Config) -> str:
    """Which process is gone, and why, as far as it can still be known."""
    NOTICED.set()
    procs = getattr(fabric.strategy.launcher, "procs", [])
    _wait(procs, GRACE / 2)
    return _sentence(procs, config)


def _sentence(procs: list[subprocess.Popen[Any]], config: Config) -> str:
    ends = {rank: proc.poll() for rank, proc in enumerate(procs, start=1) if proc.poll() not in (None, 0)}
    killed = [f"process {rank} was killed (signal {-code})" for rank, code in ends.items() if code and code < 0]
    failed = [f"process {rank} ended with code {code}" for rank, code in ends.items() if code and code > 0]
    cause = _told()
    which = ", ".join(killed) or (cause or "").removesuffix(".") or ", ".join(failed) or "the connection broke"
    return f"A process of this run is lost: {which}. All others were ended; {resume_hint(config)}"


def _is_connection(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, distributed.DistError) or any(word in text for word in ("gloo", "nccl", "connection"))


def _tell(text: str) -> None:
    """Leaves the cause where the first process looks for it."""
    try:
        store = distributed.distributed_c10d._get_default_store()
        store.compare_set(CAUSE, "", text)
    except (RuntimeError, ValueError):
        return  # the first process is gone, so nobody will look


def _told() -> str | None:
    try:
        store = distributed.distributed_c10d._get_default_store()
        return store.get(CAUSE).decode() if store.check([CAUSE]) else None
    except (RuntimeError, ValueError):
        return None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _wait(procs: list[subprocess.Popen[Any]], seconds: float) -> None:
    """Until one of the processes has ended badly."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not any(proc.poll() for proc in procs):
        time.sleep(0.1)


class _Strategy(DDPStrategy):
    """DDP whose first process ends with a sentence, not by a signal, when another one dies."""

    def __init__(self, config: Config) -> None:
        super().__init__(find_unused_parameters=method_class(config.method).idle)
        self.config = config

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes, self.config)


class _Launcher(_SubprocessScriptLauncher):
    def __init__(self, environment: Any, processes: int, nodes: int, config: Config) -> None:
        super().__init__(environment, processes, nodes)
        self.config = config

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Starts the other processes and an eye on them."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            Thread(target=_watch, args=(self.procs, self.config), daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


def _watch(procs: list[subprocess.Popen[Any]], config: Config) -> None:
    """Ends this process if another has died and the loop has not noticed it: it may wait for that one for ever."""
    while any(proc.poll() is None for proc in procs) and not any(proc.poll() for proc in procs):
        time.sleep(0.5)
    if any(proc.poll() for proc in procs):
        noticed = NOTICED.wait(GRACE)
        time.sleep(6 * GRACE if noticed else 0)
        for proc in procs:
            proc.kill()
        sys.stderr.write(f"fasterisnet: {_sentence(procs, config)}\n")
        sys.stderr.flush()
        os._exit(1)


def _leave_with_parent(parent: int) -> None:
    """A process that another one started does not wait for hours for one that is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
