"""AG-Sononet: a VGG-16-like body whose maps of two scales are gated by its last one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet.models.vgg import vgg_blocks, vgg_widths


class AttentionGate(nn.Module):
    """Additive attention: `a = psi(ReLU(W_x x + W_g g))`, shifted and scaled so that its least is 0 and its sum 1.

    g is the gating map, enlarged to the size of x.
    """

    def __init__(self, channels: int, gating: int) -> None:
        super().__init__()
        self.seen = nn.Conv2d(channels, channels, 1, bias=False)
        self.gate = nn.Conv2d(gating, channels, 1)
        self.score = nn.Conv2d(channels, 1, 1)

    def attention(self, maps: Tensor, gating: Tensor) -> Tensor:
        """One weight for every pixel of the maps, (sample, 1, height, width)."""
        gate = F.interpolate(self.gate(gating), maps.shape[2:], mode="bilinear", align_corners=False)
        scores = self.score(F.relu(self.seen(maps) + gate))
        shifted = scores - scores.amin((2, 3), keepdim=True) + 1e-6
        return shifted / shifted.sum((2, 3), keepdim=True)

    def forward(self, maps: Tensor, gating: Tensor) -> Tensor:
        """The gated maps, pooled: (sample, channel)."""
        return (maps * self.attention(maps, gating)).sum((2, 3))


class AGSononet(nn.Module):
    """Five blocks of convolutions with batch norm, pooling between them; the third and fourth are gated by the fifth.

    The logits are linear in the gated, pooled maps and the mean of the last one. width: channels of the first block.
    """

    def __init__(self, classes: int, channels: int = 3, *, width: int = 64) -> None:
        super().__init__()
        widths = vgg_widths(width)
        self.blocks = vgg_blocks(channels, widths)
        self.gates = nn.ModuleList(AttentionGate(n, widths[4]) for n in widths[2:4])
        self.head = nn.Linear(sum(widths[2:]), classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        maps: list[Tensor] = []
        for block in self.blocks:
            maps.append(block(F.max_pool2d(maps[-1], 2) if maps else images))
        gated = [gate(seen, maps[4]) for gate, seen in zip(self.gates, maps[2:4], strict=True)]
        return self.head(torch.cat([*gated, maps[4].mean((2, 3))], 1))


def ag_sononet(classes: int, channels: int) -> nn.Module:
    """With VGG-16's widths."""
    return AGSononet(classes, channels)


def small_ag_sononet(classes: int, channels: int) -> nn.Module:
    """A quarter as wide."""
    return AGSononet(classes, channels, width=16)
