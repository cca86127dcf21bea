"""Processes and devices of a run."""

from __future__ import annotations

import os
import time
from threading import Thread

from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import distributed

from fasterisnet.errors import UsageError
from fasterisnet.training.config import Config

PARENT = "FASTERISNET_PARENT"  # environment variable: the process that started this one


def processes(config: Config) -> tuple[int, int]:
    """Processes on a machine and machines: those that torchrun or SLURM started, or what the options say."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
    if SLURMEnvironment.detect():
        nodes = int(os.environ.get("SLURM_NNODES", "1"))
        return int(os.environ["SLURM_NTASKS"]) // nodes, nodes
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
    fabric = Fabric(
        accelerator=config.accelerator,
        devices=devices,
        num_nodes=nodes,
        precision=config.precision,  # pyright: ignore[reportArgumentType]
        strategy=DDPStrategy() if several else "auto",
    )
    there = distributed.is_available() and distributed.is_initialized()  # a run before this one started the processes
    if several and not there:
        if int(os.environ.get("LOCAL_RANK", "0")) > 0 and PARENT in os.environ:
            Thread(target=_leave_with_parent, args=(int(os.environ[PARENT]),), daemon=True).start()
        os.environ[PARENT] = str(os.getpid())
    fabric.launch()
    if config.precision == "16-mixed" and fabric.device.type != "cuda":
        raise UsageError("16-mixed needs a GPU; on this machine take bf16-mixed.")
    return fabric


def _leave_with_parent(parent: int) -> None:
    """A process that another one started does not wait for hours for one that is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
