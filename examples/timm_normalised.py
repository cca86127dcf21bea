"""A network of timm with the normalisation it was made for: the box that images live in follows from it."""

import timm.data
import torch
from bars import drawn, tell
from torch import Tensor, nn

import fasterisnet as fi

torch.manual_seed(0)
model = fi.create_model("timm:test_resnet", num_classes=2)
config = timm.data.resolve_model_data_config(model)
mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))


def normalised(images: Tensor) -> Tensor:
    return (images - mean) / std


batches = [
    (normalised(images), labels, masks)
    for images, labels, masks in zip(*(tensor.split(32) for tensor in drawn(320)), strict=True)
]
method = fi.Stochastic(heatmap_weight=0.7, box=fi.normalised_box(config["mean"], config["std"]))
method.ranges = fi.calibrate(method, model, batches, epochs=1)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=5 * len(batches))
for _ in range(5):
    for images, labels, masks in batches:
        loss = method.loss(model, images, labels, masks).total
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
model.eval()
tell(lambda images: model(normalised(images)))
