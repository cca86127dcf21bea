"""Any PyTorch loop makes an ISNet: bars, lying or standing, and a bright pixel that gives the answer away."""

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


torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU()),
    *(nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(24 * 8 * 8, 2)),
)
batches = list(zip(*(tensor.split(32) for tensor in drawn(512)), strict=True))
method = fi.Stochastic(heatmap_weight=0.85, box=None)
method.ranges = fi.calibrate(method, model, batches, epochs=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for _ in range(10):
    for images, labels, masks in batches:
        loss = method.loss(model, images, labels, masks).total
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
for name, lie in (("i.i.d.", 0), ("deceiving", 1)):
    images, labels, _ = drawn(400, lie)
    print(f"{name}: {(model.eval()(images).argmax(1) == labels).float().mean():.3f}")
