"""The same as plain_loop.py with Lightning: `fi.Step` is a whole training step, also where it is distributed."""

from typing import Any

import lightning as L
import torch
from torch import nn

import fasterisnet as fi


def drawn(count: int, lie: int = 0):
    labels, masks = torch.arange(count) % 2, torch.zeros(count, 1, 16, 16)
    for mask, label, (y, x) in zip(masks, labels, torch.randint(3, 7, (count, 2)).tolist(), strict=True):
        (mask[0].T if label else mask[0])[y + 2 : y + 5, x : x + 7] = 1
    images = (0.6 * masks + 0.2 * torch.rand(masks.shape)).repeat(1, 3, 1, 1)
    images[torch.arange(count), :, 0, 4 + 8 * (labels ^ lie)] = 1  # the pixel; it lies in the deceiving test
    return images, labels, masks


class Classifier(L.LightningModule):
    def __init__(self, model: nn.Module, method: fi.Stochastic) -> None:
        super().__init__()
        self.step = fi.Step(model, method)

    def training_step(self, batch, _index):
        return self.step(*batch).total

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


if __name__ == "__main__":
    L.seed_everything(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU()),
        *(nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(24 * 8 * 8, 2)),
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*drawn(512)), batch_size=32, shuffle=True)
    method = fi.Stochastic(heatmap_weight=0.85, box=None)
    method.ranges = fi.calibrate(method, model, loader, epochs=1)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=10, gradient_clip_val=1.0, **quiet)
    trainer.fit(Classifier(model, method), loader)
    for name, lie in (("i.i.d.", 0), ("deceiving", 1)):
        images, labels, _ = drawn(400, lie)
        print(f"{name}: {(model.eval()(images).argmax(1) == labels).float().mean():.3f}")
