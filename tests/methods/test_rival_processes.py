"""Two processes (gloo) that share a batch unevenly, its masks too, have the gradient of one with every method.

All of it happens in one pair of processes; the tests look at what it left in a folder.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import fasterisnet as fi
from commands import Command
from fasterisnet.losses import has_foreground
from methods.test_rivals import RIVALS
from methods.tester import Residual, filled, labels_for, masks_for, pictures

PROCESSES, SAMPLES = 2, 7


def model(seed: int = 0) -> Residual:
    """Frozen batch norm: statistics of half a batch are not those of the whole."""
    return filled(Residual(width=4).double(), seed).eval()


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Three of the samples have no mask, all of them of the first process."""
    images = pictures(SAMPLES, 2, 9, 8, seed=2)
    masks = masks_for(images, seed=2)
    masks[torch.tensor([0, 2, 4])] = False
    return images, labels_for(images), masks


def made(name: str, share: tuple[int, int] = (0, 1)) -> Any:
    method = RIVALS[name]()
    method.generator, method.share, method.batch = torch.Generator().manual_seed(4), share, SAMPLES
    return method


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=120)
    )
    images, labels, masks = (t[rank::PROCESSES] for t in data())
    samples = PROCESSES * len(images) / SAMPLES
    masked = PROCESSES * int(has_foreground(masks).sum()) / int(has_foreground(data()[2]).sum())
    found: dict[str, Any] = {}
    for name in RIVALS:
        net = model(seed=rank)  # the wrapper gives all processes the first one's parameters
        method = made(name, (rank, PROCESSES))
        step = DistributedDataParallel(fi.Step(net, method))
        parts = step(images, labels, masks)
        method.combine(samples * parts.classification, masked * parts.heatmap).backward()
        found[name] = gradients(net)
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("gloo")
    both = [Command([__file__, str(rank), str(folder)]) for rank in range(PROCESSES)]
    for end in [process.wait() for process in both]:
        assert end.returncode == 0, end.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(PROCESSES)]


@pytest.mark.parametrize("name", RIVALS)
def test_gradients_are_those_of_one_process(processes: list[dict[str, Any]], name: str) -> None:
    net = model()
    parts = made(name).loss(net, *data())
    parts.total.backward()
    wanted = gradients(net)
    size = max(float(g.abs().max()) for g in wanted.values())
    assert size > 1e-3 and parts.without_mask == 3
    for found in processes:
        assert found[name].keys() == wanted.keys()
        for parameter, gradient in wanted.items():
            assert float((found[name][parameter] - gradient).abs().max()) <= 1e-10 * size, parameter


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2])
