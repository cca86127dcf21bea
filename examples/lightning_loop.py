"""Lightning: `fi.Step` is a whole training step, also where it is distributed; a callback does what a run needs."""

from typing import Any

import lightning as L
import torch
from bars import drawn, network, tell
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fasterisnet as fi


class Classifier(L.LightningModule):
    """C1 and C2 are saved with its weights: they are in the state of `fi.Step`."""

    def __init__(self, model: nn.Module, method: fi.Stochastic) -> None:
        super().__init__()
        self.step = fi.Step(model, method)

    def training_step(self, batch, _index):
        parts = self.step(*batch)
        self.log_dict({"classification": parts.classification, "background": parts.background})
        return parts.total

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class Heatmaps(L.Callback):
    """Calibrates before training, unless a checkpoint has C1 and C2; tells the method the epoch, for schedules of P."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        method = pl_module.step.method
        if method.ranges is None:
            trainer.fit_loop.setup_data()
            method.ranges = fi.calibrate(method, pl_module.step.model, trainer.train_dataloader, epochs=1)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.step.method.set_epoch(trainer.current_epoch)


if __name__ == "__main__":
    L.seed_everything(0)
    model = network()
    loader = DataLoader(TensorDataset(*drawn(320)), batch_size=32, shuffle=True)
    method = fi.Stochastic(heatmap_weight=[0.5, 0.5, *[0.85] * 6])
    quiet: dict[str, Any] = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    trainer = L.Trainer(accelerator="cpu", max_epochs=8, gradient_clip_val=1.0, callbacks=[Heatmaps()], **quiet)
    trainer.fit(Classifier(model, method), loader)
    tell(model.eval())
