"""How long a training step takes, against the number of classes.

    python benchmarks/classes.py [--rounds 10] [--report]

ResNet18, 16 images of 28 pixels. Methods and numbers of classes take turns; a step of more than two seconds is measured
once. Medians go to results/classes/classes.csv, and from that file come the plot and the slopes of log(seconds) over
log(classes). --report: only the plot and the slopes.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import platform
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch
import torchvision

import fasterisnet as fi
from fasterisnet.evaluation.figures import save_figure, times_figure
from fasterisnet.files import write_text
from fasterisnet.methods.base import Method

COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
LONG = 2.0  # seconds
FOLDER = Path("results/classes")
METHODS: dict[str, Method] = {
    "Standard": fi.Standard(),
    "Stochastic": fi.Stochastic(ranges=(1.0, 5.0)),
    "Selective": fi.Selective(ranges=(1.0, 5.0)),
    "Dual": fi.Dual(ranges=(1.0, 5.0)),
    "Original": fi.Original(ranges=(1.0, 5.0), maps_at_once=50),
}
Times = dict[str, dict[int, float]]


def measured(counts: tuple[int, ...], rounds: int) -> Times:
    """Median seconds of a step of every method with every number of classes, all taking turns; long steps run once."""
    images, masks = torch.rand(16, 3, 28, 28), torch.zeros(16, 1, 28, 28)
    masks[..., 7:21, 7:21] = 1
    torch.manual_seed(0)
    models = {count: torchvision.models.resnet18(num_classes=count).train() for count in counts}
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for i in range(rounds + 1):
        for count, model in models.items():
            labels = torch.zeros(16) if count == 1 else torch.arange(16) % count
            for name, method in METHODS.items():
                found = times[name, count]
                if i and found[0] > LONG:
                    continue
                start = time.perf_counter()
                method.loss(model, images, labels, masks).total.backward()
                found.append(time.perf_counter() - start)
                model.zero_grad()
        print(f"round {i} of {rounds}", flush=True)
    return {
        name: {count: statistics.median(times[name, count][1:] or times[name, count]) for count in counts}
        for name in METHODS
    }


def slope(times: dict[int, float]) -> float:
    """Of the line through the points (log classes, log seconds) with the least squared error."""
    return statistics.linear_regression([math.log(c) for c in times], [math.log(s) for s in times.values()]).slope


def written(times: Times) -> str:
    stream = io.StringIO()
    lines = csv.writer(stream, lineterminator="\n")
    lines.writerow(["method", "classes", "seconds"])
    lines.writerows([name, count, f"{s:.5f}"] for name, values in times.items() for count, s in values.items())
    return stream.getvalue()


def read(path: Path) -> Times:
    found: Times = defaultdict(dict)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["method"]][int(row["classes"])] = float(row["seconds"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    path = FOLDER / "classes.csv"
    if not options.report:
        fi.keep_memory()
        print(f"torch {torch.__version__.split('+')[0]}, {platform.machine()}, {torch.get_num_threads()} threads")
        write_text(path, written(measured(COUNTS, options.rounds)))
    times = read(path)
    slopes = {name: slope(values) for name, values in times.items()}
    save_figure(times_figure(times, slopes), path.with_suffix(".png"))
    for name, value in slopes.items():
        print(f"{name}: slope {value:.3f}")


if __name__ == "__main__":
    main()
