"""Two things a user feels: does training wait for its data, and what does a trained network cost in use?

    python benchmarks/everyday.py [--images 192]

Trains ResNet18 on JPEG photographs of noise (500 x 375, seen at 224 px) with two loading processes, and shows the share
of the time training waited for the loader; then the time of the trained network of the run against a bare torchvision
ResNet18, alternating, median.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torchvision
from PIL import Image

from fasterisnet.runs.config import Config
from fasterisnet.training.console import Terminal
from fasterisnet.training.loop import train


def draw(folder: Path, images: int) -> None:
    for i in range(images):
        label, split = ("a", "b")[i % 2], "val" if i % 8 == 7 else "train"
        coarse = torch.rand(1, 3, 24, 32)
        photo = torch.nn.functional.interpolate(coarse, (375, 500), mode="bilinear")[0] + 0.1 * torch.rand(3, 375, 500)
        pixels = (photo.clamp(0, 1) * 255).to(torch.uint8).permute(1, 2, 0).numpy()
        mask = torch.zeros(375, 500, dtype=torch.uint8)
        mask[100:300, 100:400] = 255
        for path, content in (
            (folder / split / label / f"{i}.jpg", pixels),
            (folder / "masks" / split / label / f"{i}.png", mask.numpy()),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(content).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=192)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, Terminal() as watcher:
        draw(Path(place) / "data", options.images)
        config = Config(
            data=f"{place}/data", method="standard", model="resnet18", epochs=2, batch=16, workers=2, out=f"{place}/run"
        )
        run = train(config, watcher=watcher)
        trained, _ = run.load_model()
    bare = torchvision.models.resnet18(num_classes=2).eval()
    images = torch.rand(8, 3, 224, 224)
    times: dict[str, list[float]] = {"trained": [], "bare": []}
    with torch.no_grad():
        for _ in range(40):
            for name, model in (("trained", trained), ("bare", bare)):
                start = time.perf_counter()
                model(images)
                times[name].append(time.perf_counter() - start)
    ratio = statistics.median(times["trained"]) / statistics.median(times["bare"])
    print(f"in use, trained / bare ResNet18: {ratio:.3f} (median of 40 alternating batches of 8)")


if __name__ == "__main__":
    main()
