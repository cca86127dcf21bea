"""HuggingFace's Trainer: a module whose forward returns the loss is all that it asks for.

Needs `pip install transformers accelerate`.
"""

import tempfile

import torch
from bars import drawn, tell
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (  # pyright: ignore[reportMissingImports]
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
)

import fasterisnet as fi


class Guided(nn.Module):
    """The model and its method; whole training steps happen in its forward, as distributed training needs it."""

    def __init__(self, model: nn.Module, method: fi.Stochastic) -> None:
        super().__init__()
        self.step = fi.Step(model, method)

    def forward(self, pixel_values: Tensor, labels: Tensor, masks: Tensor) -> dict[str, Tensor]:
        parts = self.step(pixel_values, labels, masks)
        return {"loss": parts.total, "logits": parts.logits}


class Bars(Dataset):
    def __init__(self, count: int) -> None:
        self.images, self.labels, self.masks = drawn(count)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[i], "labels": self.labels[i], "masks": self.masks[i]}


if __name__ == "__main__":
    torch.manual_seed(0)
    small = ResNetConfig(embedding_size=12, hidden_sizes=[12, 24], depths=[1, 1], layer_type="basic", num_labels=2)
    model = ResNetForImageClassification(small)
    data = Bars(320)
    method = fi.Stochastic(heatmap_weight=0.9)
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    method.ranges = fi.calibrate(method, model, loader, epochs=1, keys=("pixel_values", "labels"))
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, per_device_train_batch_size=32, num_train_epochs=12, learning_rate=5e-3, max_grad_norm=1.0, seed=0,
            remove_unused_columns=False, report_to=[], save_strategy="epoch", save_total_limit=1, disable_tqdm=True,
            logging_strategy="no", use_cpu=True, dataloader_pin_memory=False,
        )  # fmt: skip
        Trainer(Guided(model, method), options, train_dataset=data).train()
    model.eval()
    tell(lambda images: model(images).logits)
