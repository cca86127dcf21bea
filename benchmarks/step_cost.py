"""What a training step with heatmaps costs, in plain training steps of the same network.

    python benchmarks/step_cost.py [--rounds 5] [--backbones resnet18,resnet50] [--channels-last] [--rows NAME NAME ...]

Every kind of step gets a process of its own, in which it alternates with the plain step (so that one kind does not
work in the heap another left behind); the table shows the median time and its ratio to the median plain step of that
process, and the growth of resident memory in the first step. Freed memory is kept (`keep_memory`), for plain steps too.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.losses import heatmap_loss
from fasterisnet.lrp import rules
from fasterisnet.lrp.explain import explain, relevance_maps
from fasterisnet.lrp.small_maps import SmallMaps
from fasterisnet.lrp.targets import Joint, Logit, Target
from fasterisnet.lrp.trace import Trace
from fasterisnet.methods import ISNet

BACKBONES = {"resnet18": (128, 28), "resnet50": (4, 224), "densenet121": (4, 224)}
RESNET_LAYERS = ["maxpool", "layer1", "layer2", "layer3", "layer4"]
LAYERS = {
    "resnet18": RESNET_LAYERS,
    "resnet50": RESNET_LAYERS,
    "densenet121": ["features.pool0", *[f"features.transition{i}" for i in (1, 2, 3)], "features.norm5"],
}
Batch = tuple[Tensor, Tensor, Tensor]
Step = Callable[[str, nn.Module, Batch], None]


def plain(_name: str, model: nn.Module, batch: Batch) -> None:
    fi.Standard().loss(model, *batch).total.backward()


def with_maps(
    model: nn.Module, batch: Batch, wanted: list[tuple[str, Target]], layers: list[str] | None = None
) -> None:
    images, labels, masks = batch
    tables = {name: rules.table(name) for name, _ in wanted}
    trace = Trace(model, images, list(tables.values()), layers=layers or ())
    with trace.open():
        maps = [relevance_maps(trace, tables[name], target, create_graph=True) for name, target in wanted]
        loss = 0.3 * F.cross_entropy(trace.logits, labels)
    for depth in maps[0]:
        loss = loss + 0.7 * heatmap_loss(torch.stack([m[depth] for m in maps], 1), masks, 1.0, 5.0, decay=0.9).total
    loss.backward()


def one_map(_name: str, model: nn.Module, batch: Batch) -> None:
    with_maps(model, batch, [("epsilon", Logit(batch[1]))])


def deep(name: str, model: nn.Module, batch: Batch) -> None:
    with_maps(model, batch, [("epsilon", Logit(batch[1]))], LAYERS[name])


def dual(_name: str, model: nn.Module, batch: Batch) -> None:
    with_maps(model, batch, [("epsilon", Joint()), ("zplus", Joint())])


def several(count: int) -> Step:
    def step(_name: str, model: nn.Module, batch: Batch) -> None:
        with_maps(model, batch, [("epsilon", Logit(c)) for c in range(count)])

    return step


def trained_by(method: ISNet) -> Step:
    """A step of a method, zB and all."""

    def step(_name: str, model: nn.Module, batch: Batch) -> None:
        method.loss(model, *batch).total.backward()

    return step


def loss_alone(_name: str, _model: nn.Module, batch: Batch) -> None:
    maps = batch[0].unsqueeze(1).clone().requires_grad_()
    heatmap_loss(maps, batch[2], 1.0, 5.0, decay=0.999).total.backward()


def input_gradient(_name: str, model: nn.Module, batch: Batch) -> None:
    images = batch[0].clone().requires_grad_()
    with SmallMaps():
        logits = model(images)
    torch.autograd.grad(logits.amax(1).sum(), images)


def explanation(_name: str, model: nn.Module, batch: Batch) -> None:
    explain(model, batch[0])


STEPS: dict[str, Step] = {
    "plain step": plain,
    "one epsilon map": one_map,
    "with deep supervision": deep,
    "epsilon + z+": dual,
    "3 maps": several(3),
    "10 maps": several(10),
    "Selective": trained_by(fi.Selective(0.7, 0.999, ranges=(1.0, 5.0))),
    "Stochastic": trained_by(fi.Stochastic(0.7, 0.999, ranges=(1.0, 5.0))),
    "Stochastic, deep supervision": trained_by(fi.Stochastic(0.7, 0.999, ranges=(1.0, 5.0), deep_supervision=True)),
    "Dual": trained_by(fi.Dual(0.7, 0.999, ranges=(1.0, 5.0))),
    "Original, 10 classes": trained_by(fi.Original(0.7, 0.999, ranges=(1.0, 5.0))),
    "heatmap loss alone, d = 0.999": loss_alone,
    "forward + input gradient": input_gradient,
    "explain only": explanation,
}
BASES = {"explain only": "forward + input gradient"}


def prepare(name: str, channels_last: bool) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    size, pixels = BACKBONES[name]
    model = torchvision.models.get_model(name, num_classes=10).train()
    images = torch.rand(size, 3, pixels, pixels)
    masks = torch.zeros(size, 1, pixels, pixels)
    masks[..., pixels // 4 : -pixels // 4, pixels // 4 : -pixels // 4] = 1
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    return model, (images, torch.randint(10, (size,)), masks.bool())


def _status(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return float(line.split()[1]) / 1024


def growth(step: Callable[[], None]) -> float | None:
    """Peak growth of resident memory in a step, in MB (Linux only)."""
    marks = Path("/proc/self/clear_refs")
    if not marks.exists():
        step()
        return None
    before = _status("VmRSS")
    marks.write_text("5")
    step()
    return _status("VmHWM") - before


def measure(name: str, kind: str, rounds: int, channels_last: bool, answer: multiprocessing.Queue[Any]) -> None:
    """Memory of one step, then median seconds of the base and of the kind itself, taking turns."""
    warnings.simplefilter("ignore")
    model, batch = prepare(name, channels_last)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    memory = growth(lambda: STEPS[kind](name, model, batch))
    fi.keep_memory()
    base = BASES.get(kind, "plain step")
    times: dict[str, list[float]] = {base: [], kind: []}
    for i in range(rounds + 1):
        for turn, measured in times.items():
            model.zero_grad(set_to_none=True)
            gc.collect()
            start = time.perf_counter()
            STEPS[turn](name, model, batch)
            if i:
                measured.append(time.perf_counter() - start)
    answer.put((statistics.median(times[base]), statistics.median(times[kind]), memory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backbones", default=",".join(BACKBONES))
    parser.add_argument("--rows", nargs="+", default=list(STEPS), choices=list(STEPS), metavar="NAME")
    parser.add_argument("--channels-last", action="store_true")
    options = parser.parse_args()
    print(
        f"torch {torch.__version__.split('+')[0]}, {platform.machine()}, {torch.get_num_threads()} threads, "
        f"median of {options.rounds} rounds, {'channels last' if options.channels_last else 'contiguous'}"
    )
    print("| backbone, batch, px | step | seconds | ratio | peak memory growth, MB |\n" + "| --- " * 5 + "|")
    context = multiprocessing.get_context("spawn")
    for name in options.backbones.split(","):
        size, pixels = BACKBONES[name]
        for kind in options.rows:
            answer = context.Queue()
            process = context.Process(target=measure, args=(name, kind, options.rounds, options.channels_last, answer))
            process.start()
            base, seconds, memory = answer.get()
            process.join()
            of = f" of {BASES[kind]}" if kind in BASES else ""
            grown = "" if memory is None else f"{memory:.0f}"
            print(
                f"| {name}, {size}, {pixels} | {kind} | {seconds:.3f} | {seconds / base:.2f}{of} | {grown} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
