"""Where a run computes: its device, its share of the processes, and the random numbers of each step."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from fasterisnet.data.preparing import random_stream
from fasterisnet.losses import has_foreground
from fasterisnet.methods import ISNet, Stochastic
from fasterisnet.methods.base import Method
from fasterisnet.training.config import Config

# What random numbers are drawn for; with the seed, the epoch and the step they decide everything.
WEIGHTS, CALIBRATION, TRAINING, VALIDATION, MASKS, SAMPLING = range(6)


class Place:
    """One process of a run among all of them."""

    def __init__(self, fabric: Fabric, config: Config) -> None:
        self.fabric, self.config = fabric, config
        self.share = (fabric.global_rank, fabric.world_size)

    def moved(self, images: Tensor, labels: Tensor, masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A batch on the device, in the memory format of the run."""
        if self.config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        images, labels, masks = self.fabric.to_device((images, labels, masks))
        return images, labels, masks

    def added(self, sums: Tensor) -> Tensor:
        """Over all processes."""
        total = self.fabric.all_reduce(sums.to(self.fabric.device), reduce_op="sum")
        assert isinstance(total, Tensor)
        return total.cpu()

    def shares(self, masks: Tensor) -> tuple[float, float]:
        """Of the samples and of the masked samples that this process has, in units of an equal share."""
        processes = self.share[1]
        if processes == 1:
            return 1.0, 1.0
        mine = torch.tensor([len(masks), int(has_foreground(masks).sum())], dtype=torch.float64)
        samples, masked = (mine * processes / self.added(mine).clamp(min=1)).tolist()
        return samples, masked

    def agree(self, model: nn.Module) -> None:
        """Every process takes the batch statistics of the first, whose network is the one that is saved."""
        if self.share[1] > 1:
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, 0)

    def draws(self, method: Method, whole: int, among: int) -> None:
        """Tells a method that draws which part of a batch it sees: that of this process, one of `among`."""
        if isinstance(method, ISNet):
            method.share = (self.share[0], among)
        if isinstance(method, Stochastic):
            method.batch = whole

    def seed(self, method: Method, *numbers: int) -> None:
        """The purpose and what else counts: PyTorch's own numbers differ between processes, the method's do not."""
        torch.manual_seed(random_stream(self.config.seed, *numbers, self.share[0]))
        if isinstance(method, ISNet) and method.generator is not None:
            method.generator.manual_seed(random_stream(self.config.seed, *numbers))
