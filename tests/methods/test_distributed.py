"""Two processes (gloo) do what one does: gradients of every method, skipped steps, calibration.

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
from methods.tester import ALL, IDS, Residual, Tester, filled, labels_for, masks_for, pictures

PROCESSES = 2


def model(seed: int = 0) -> Residual:
    """Frozen batch norm: statistics of half a batch are not those of the whole."""
    return filled(Residual(width=4).double(), seed).eval()


def data(samples: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    images = pictures(samples, 2, 9, 8, seed=2)
    return images, labels_for(images), masks_for(images, seed=2)


def alike() -> tuple[Tensor, Tensor, Tensor]:
    """Both processes have nearly the same samples: deep supervision ranks depths by the losses of a process's own."""
    images, labels, masks = data(3)
    others = images + 0.01 * pictures(3, 2, 9, 8, seed=3)
    return torch.cat([images, others]), labels.repeat(2), torch.cat([masks, masks])


class Fault(nn.Module):
    """Multiplies by a number that is not a parameter, so processes may differ in it."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def calibrating(name: str) -> Any:
    return {"Dual": fi.Dual, "Selective, deep": lambda: fi.Selective(deep_supervision=True)}[name]()


def still(parameters: Any) -> torch.optim.Optimizer:
    """Learns nothing, so that one process and two measure the same model."""
    return torch.optim.SGD(parameters, lr=0.0)


def batches() -> list[tuple[Tensor, Tensor]]:
    images, labels, _ = data(24)
    return list(zip(images.split(4), labels.split(4), strict=True))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=120)
    )
    mine = [t.chunk(PROCESSES)[rank] for t in alike()]
    found: dict[str, Any] = {}
    for case, identity in zip(ALL, IDS, strict=True):
        net = model(seed=rank)  # the wrapper gives all processes the first one's parameters
        step = DistributedDataParallel(fi.Step(net, Tester(*case).independent()))
        parts = step(*mine)
        parts.total.backward()
        found[identity] = gradients(net), parts.total.detach()

    mine = [t.chunk(PROCESSES)[rank] for t in data()]
    net, method = nn.Sequential(model(), Fault()), fi.Selective(ranges=(0.3, 0.6))
    net[1].factor = torch.inf if rank == 1 else 1.0
    step = DistributedDataParallel(fi.Step(net, method))
    parts = step(*mine)
    parts.total.backward()
    found["skipped"] = gradients(net), parts.skipped, method.skipped

    for name in ("Dual", "Selective, deep"):
        share = batches()[rank::PROCESSES]
        found[f"ranges of {name}"] = fi.calibrate(calibrating(name), model(), share, epochs=1, optimizer=still)
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("gloo")
    both = [Command([__file__, str(rank), str(folder)]) for rank in range(PROCESSES)]
    for end in [process.wait() for process in both]:
        assert end.returncode == 0, end.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(PROCESSES)]


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    size = max(float(g.abs().max()) for g in wanted.values())
    assert size > 1e-3
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).abs().max()) <= 1e-10 * size, name


@pytest.mark.parametrize(("case", "identity"), list(zip(ALL, IDS, strict=True)), ids=IDS)
def test_gradients_are_those_of_the_whole_batch(
    processes: list[dict[str, Any]], case: tuple[str, bool], identity: str
) -> None:
    net = model()
    total = Tester(*case).independent().loss(net, *alike()).total
    total.backward()
    for found in processes:
        assert_close(found[identity][0], gradients(net))
    mean = torch.stack([found[identity][1] for found in processes]).mean()
    torch.testing.assert_close(mean, total.detach(), rtol=1e-12, atol=0)


def test_a_step_skipped_in_one_process_adds_nothing(processes: list[dict[str, Any]]) -> None:
    """And nobody waits for ever: the others' gradients arrive, halved by the mean over the processes."""
    net = nn.Sequential(model(), Fault())
    mine = [t.chunk(PROCESSES)[0] for t in data()]
    (fi.Selective(ranges=(0.3, 0.6)).loss(net, *mine).total / 2).backward()
    for found, skipped in zip(processes, (False, True), strict=True):
        assert found["skipped"][1:] == (skipped, int(skipped))
        assert_close(found["skipped"][0], gradients(net))


@pytest.mark.parametrize("name", ["Dual", "Selective, deep"])
def test_calibrations_are_merged(processes: list[dict[str, Any]], name: str) -> None:
    """Both processes end with what one measures over all samples, to rounding; half of them give something else."""
    one = fi.calibrate(calibrating(name), model(), batches(), epochs=1, optimizer=still)
    half = fi.calibrate(calibrating(name), model(), batches()[::2], epochs=1, optimizer=still)
    first, second = (found[f"ranges of {name}"] for found in processes)
    assert first == second
    assert list(first.depths) == list(one.depths)
    for depth in one.depths:
        for merged, whole, part in zip(first.depths[depth], one.depths[depth], half.depths[depth], strict=True):
            assert merged == pytest.approx(whole, rel=1e-12)
            assert merged != pytest.approx(part, rel=1e-6)


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2])
