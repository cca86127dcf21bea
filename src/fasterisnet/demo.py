"""The paper's first experiment in miniature, on one page: digits whose class is given away by a white pixel.

A standard classifier and a Stochastic ISNet learn from the same biased digits. Then the pixel is left as it was
(i.i.d.), removed (o.o.d.) or moved to another digit's place (deceiving).
"""

from __future__ import annotations

import base64
import io
import json
import platform
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasterisnet.benchmark.results import difference
from fasterisnet.data.base import Samples
from fasterisnet.data.sources import open_source
from fasterisnet.errors import UsageError
from fasterisnet.evaluation.attention import background_mass
from fasterisnet.evaluation.overlays import overlay
from fasterisnet.files import write_text
from fasterisnet.lrp.explain import explain
from fasterisnet.runs.card import Card
from fasterisnet.runs.config import Config
from fasterisnet.runs.folder import Run
from fasterisnet.training.console import Watcher
from fasterisnet.training.loop import train

TESTS = {
    "iid": "i.i.d.: pixel as in training",
    "ood": "o.o.d.: no pixel",
    "deceiving": "deceiving: pixel of another digit",
}
COMMON: dict[str, Any] = {
    "preset": "paper", "data": "mnist", "model": "small", "size": 28, "batch": 64, "lr": 0.05,
    "schedule": "onecycle", "zb": False, "calibration_epochs": 1, "calibration_lr": 0.05,
    "workers": 0, "tensorboard": False,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "standard": {"method": "standard", "epochs": 4},
    "isnet": {"method": "stochastic", "epochs": 12, "heatmap_weight": 0.7},
}
NAMES = {"standard": "Standard classifier", "isnet": "Faster ISNet (Stochastic)"}
SHOWN = 6


class _Speaker(Watcher):
    def __init__(self, hear: Callable[[str], None]) -> None:
        self.hear = hear

    def say(self, text: str) -> None:
        self.hear(text)


def run(folder: Path, *, seed: int = 0, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Train both, write summary.json and index.html, and return the summary."""
    begin = time.perf_counter()
    summary: dict[str, dict[str, float]] = {}
    rows = []
    for name, options in RUNS.items():
        out = folder / name
        config = Config.of({**COMMON, **options, "seed": seed, "out": str(out)})
        _make_way(out, config)
        say(f"\n{NAMES[name]}, {config.epochs} epochs")
        start = time.perf_counter()
        trained = train(config, watcher=_Speaker(say))
        seconds = time.perf_counter() - start
        tests = (trained.report or {})["tests"]
        summary[name] = {test: tests[test]["accuracy"] for test in TESTS}
        rows.append({"name": NAMES[name], "seconds": seconds, "epochs": config.epochs, "tests": tests})
    write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    samples = open_source("mnist", seed=seed).split("deceiving")
    runs = [Run(folder / name) for name in RUNS]
    page = _page(rows, _gallery(runs, samples), _speed(runs[0]), time.perf_counter() - begin, _next(folder))
    write_text(folder / "index.html", page)
    for line in _terminal(summary):
        say(line)
    say(f"\nThe page: {folder / 'index.html'}   the numbers: {folder / 'summary.json'}")
    return summary


def _make_way(out: Path, config: Config) -> None:
    """Removes the run of a demo before this one, and nothing else."""
    if not out.exists():
        return
    earlier = Run(out)
    unlike = (
        difference(vars(earlier.config), vars(config), "seed") if earlier.path("config.yaml").is_file() else "no run"
    )
    if unlike is not None and any(out.iterdir()):
        raise UsageError(f"{out} is not the run of an earlier demo, so it is not removed; choose another --out.")
    shutil.rmtree(out)


def _terminal(summary: dict[str, dict[str, float]]) -> list[str]:
    lines = ["", f"{'accuracy':28}{'i.i.d.':>10}{'o.o.d.':>10}{'deceiving':>11}"]
    return lines + [
        f"{NAMES[name]:28}{row['iid']:>10.1%}{row['ood']:>10.1%}{row['deceiving']:>11.1%}"
        for name, row in summary.items()
    ]


def _gallery(runs: list[Run], samples: Samples) -> list[dict[str, Any]]:
    """The same digits, each of another class, seen by both networks."""
    chosen: dict[Any, int] = {}
    for i in range(len(samples)):
        chosen.setdefault(samples.label(i), i)
    readings = [samples.read(chosen[label]) for label in sorted(chosen)[:SHOWN]]
    networks = [run.load_model() for run in runs]
    prepare = networks[0][1].prepare
    prepared = [prepare(r.image, r.mask) for r in readings]
    images, masks = torch.stack([p[0] for p in prepared]), torch.stack([p[1] for p in prepared])
    columns = [
        {"truth": str(r.label), "image": _png(_plain(image)), "views": []}
        for r, image in zip(readings, images, strict=True)
    ]
    for model, card in networks:
        for column, view in zip(columns, _views(model, card, images, masks, readings), strict=True):
            column["views"].append(view)
    return columns


def _views(
    model: torch.nn.Module, card: Card, images: Tensor, masks: Tensor, readings: list[Any]
) -> list[dict[str, Any]]:
    with torch.no_grad():
        decided = model(images).argmax(1)
    maps = explain(model, images, decided, box=card.box)
    outside = background_mass(maps, masks)
    return [
        {
            "picture": _png(overlay(images[i], maps[i], masks[i])),
            "answer": card.classes[int(decided[i])],
            "right": int(decided[i]) == readings[i].label,
            "outside": float(outside[i]),
        }
        for i in range(len(images))
    ]


def _speed(run: Run) -> float:
    """Milliseconds for a batch of 64 in use: the same for both, because both are the same network."""
    model, card = run.load_model()
    batch = torch.rand(64, 3, card.prepare.size, card.prepare.size)
    times = []
    with torch.no_grad():
        for _ in range(12):
            start = time.perf_counter()
            model(batch)
            times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[len(times) // 2]


def _plain(image: Tensor) -> Tensor:
    """An image as 8-bit colours, large enough to see a pixel of it."""
    factor = max(1, 196 // image.shape[-1])
    return (image * 255).round().to(torch.uint8).repeat_interleave(factor, -1).repeat_interleave(factor, -2)


def _png(pixels: Tensor) -> str:
    """A picture inside a page."""
    from torchvision.transforms.v2.functional import to_pil_image

    stream = io.BytesIO()
    to_pil_image(pixels).save(stream, "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _next(folder: Path) -> dict[str, list[str]]:
    """Commands to try after the demo: on its runs, and on the user's pictures."""
    standard, isnet = (shlex.quote(str(folder / name)) for name in RUNS)
    audit = shlex.quote(str(folder / "audit"))
    return {
        "here": [
            f"fasterisnet evaluate {isnet} --split deceiving",
            f"fasterisnet audit {isnet} --against {standard} --data mnist --split deceiving --out {audit}",
        ],
        "yours": [
            "fasterisnet data check DIR",
            "fasterisnet train --data DIR --method stochastic --model resnet18 --out runs/mine",
            "fasterisnet audit runs/mine --data DIR --out audit",
        ],
    }


def _page(
    rows: list[dict[str, Any]],
    gallery: list[dict[str, Any]],
    speed: float,
    seconds: float,
    commands: dict[str, list[str]],
) -> str:
    from jinja2 import Environment, PackageLoader

    template = Environment(loader=PackageLoader("fasterisnet", "pages"), autoescape=True).get_template("demo.html")
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__.split('+')[0]}"
    return template.render(
        rows=rows, tests=TESTS, gallery=gallery, speed=speed, seconds=seconds, machine=machine, commands=commands
    )
