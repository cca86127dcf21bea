"""MONAI: dictionary transforms that change image and mask alike, volumes instead of images, a 3-D network.

Needs `pip install monai`.
"""

import torch
from bars import drawn, tell
from monai.data import DataLoader, Dataset  # pyright: ignore[reportMissingImports]
from monai.networks.nets import ResNet  # pyright: ignore[reportMissingImports]
from monai.transforms import (  # pyright: ignore[reportMissingImports]
    Compose,
    EnsureTyped,
    RandFlipd,
    ScaleIntensityRanged,
)
from monai.utils import set_determinism  # pyright: ignore[reportMissingImports]
from torch import nn

import fasterisnet as fi

if __name__ == "__main__":
    set_determinism(0)
    names = ("image", "label", "mask")
    volumes = [dict(zip(names, sample, strict=True)) for sample in zip(*drawn(192, dims=3), strict=True)]
    transforms = Compose(
        [
            EnsureTyped(keys=["image", "mask"]),
            ScaleIntensityRanged(keys="image", a_min=0, a_max=1, b_min=0, b_max=1, clip=True),  # CT: the window
            RandFlipd(keys=["image", "mask"], prob=0.5, spatial_axis=0),
        ]
    )
    loader = DataLoader(Dataset(volumes, transforms), batch_size=16, shuffle=True)
    model = ResNet(
        "basic", [1, 1, 1, 1], [8, 16, 16, 16], spatial_dims=3, n_input_channels=1, conv1_t_size=3, conv1_t_stride=2,
        no_max_pool=True, num_classes=2,
    )  # fmt: skip
    method = fi.Stochastic(heatmap_weight=0.5, box=(0, 1))  # the transforms leave images in [0, 1]
    method.ranges = fi.calibrate(method, model, loader, epochs=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(14):
        for batch in loader:
            loss = method.loss(model, batch["image"], batch["label"], batch["mask"]).total
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    model.eval()
    tell(model, dims=3)
