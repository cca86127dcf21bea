"""The paper's first experiment in miniature: digits whose class is given away by a white pixel in the top row.

A standard classifier and a Stochastic ISNet learn from the same 4,000 biased digits. Then the pixel is left as it was
(i.i.d.), removed (o.o.d.) or moved (deceiving). Writes runs/demo/summary.json and runs/demo/heatmaps.png.
"""

import json
import time
from pathlib import Path

import matplotlib as mpl
import torch
from torch import nn

import fasterisnet as fi
from fasterisnet.data.mnist import Bias, Digits, load_digits

EPOCHS, BATCH, RATE = {"standard": 4, "isnet": 12}, 64, 0.05
TESTS: dict[str, Bias] = {"iid": "train", "ood": "none", "deceiving": "deceiving"}


def network() -> nn.Sequential:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    layers = [*block(3, 24), *block(24, 24), nn.MaxPool2d(2), *block(24, 48), *block(48, 48), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, *block(48, 96), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def train(model: nn.Module, method, digits: Digits, masks: torch.Tensor, epochs: int) -> float:
    start = time.perf_counter()
    images, optimizer = digits.network_input(), sgd(model.parameters())
    steps = epochs * -(-len(digits) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for epoch in range(epochs):
        total = 0.0
        for chosen in torch.randperm(len(digits)).split(BATCH):
            parts = method.loss(model.train(), images[chosen], digits.labels[chosen], masks[chosen])
            optimizer.zero_grad()
            parts.total.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += parts.total.item() * len(chosen) / len(digits)
        print(f"  epoch {epoch + 1} of {epochs}, loss {total:.3f}, {time.perf_counter() - start:.0f} s")
    return time.perf_counter() - start


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    return (model.eval()(digits.network_input()).argmax(1) == digits.labels).double().mean().item()


def picture(models: dict[str, nn.Module], digits: Digits, path: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1 + len(models), 6, figsize=(9, 4.8), layout="constrained")
    for column, axis in enumerate(axes[0]):
        axis.imshow(digits.images[column, 0], cmap="gray")
        axis.set_title(f"a {int(digits.labels[column])}")
    for row, (name, model) in zip(axes[1:], models.items(), strict=True):
        maps = fi.explain(model.eval(), digits.network_input()[:6], target=digits.labels[:6], box=(0, 1)).sum(1)
        for axis, heatmap in zip(row, maps, strict=True):
            bound = heatmap.abs().max()
            axis.imshow(heatmap, cmap="bwr", vmin=-bound, vmax=bound)
        row[0].set_ylabel(name)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.suptitle("Where the evidence for the true digit lies: red for, blue against")
    figure.savefig(path, dpi=120)


def main() -> None:
    fi.keep_memory()
    torch.manual_seed(0)
    training, test = load_digits()
    biased, masks = training.biased("train"), training.masks()
    models, summary = {}, {}
    for name in ("standard", "isnet"):
        print(f"Training the {name} classifier on {len(biased)} biased digits")
        model = network()
        method = fi.Standard() if name == "standard" else fi.Stochastic(0.7, box=None)
        if isinstance(method, fi.Stochastic):
            batches = list(zip(biased.network_input().split(BATCH), biased.labels.split(BATCH), strict=True))
            method.ranges = fi.calibrate(method, model, batches, epochs=1, optimizer=sgd)
        seconds = train(model, method, biased, masks, EPOCHS[name])
        summary[name] = {key: accuracy(model, test.biased(bias)) for key, bias in TESTS.items()}
        models[f"{name}\n({seconds:.0f} s)"] = model
    folder = Path("runs/demo")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2))
    picture(models, test.biased("deceiving"), folder / "heatmaps.png")
    print(f"\n{'accuracy':12} {'i.i.d.':>8} {'o.o.d.':>8} {'deceiving':>10}")
    for name, row in summary.items():
        print(f"{name:12} {row['iid']:8.3f} {row['ood']:8.3f} {row['deceiving']:10.3f}")
    print(f"Heatmaps: {folder / 'heatmaps.png'}")


if __name__ == "__main__":
    main()
