"""The heatmap loss `L = w1*L1 + w2*L2`: little relevance in the background, a natural amount in the foreground.

Heatmaps are laid out (sample, map, channel, space...), with any number of spatial dimensions; masks are
(sample, space...) or (sample, channel, space...), 1 = foreground and 0 = background.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from fasterisnet.errors import InputError
from fasterisnet.losses.gwrp import decay_for, full_precision, gwrp
from fasterisnet.losses.masks import prepare_masks

Bound = float | Sequence[float] | Tensor
Foreground = Literal["hybrid", "square"]
Decay = float | Literal["auto"]
EPSILON = 1e-10


class HeatmapLossParts(NamedTuple):
    """L, L1 and L2 averaged over the samples, and the same per sample (averaged over the maps)."""

    total: Tensor
    background: Tensor
    foreground: Tensor
    total_per_sample: Tensor
    background_per_sample: Tensor
    foreground_per_sample: Tensor


@full_precision
def background_loss(heatmaps: Tensor, masks: Tensor, decay: Decay = 0.9, e: float = 1.0) -> Tensor:
    """L1 per (sample, map): `mean over channels of -ln(1 - x/(x+E))`, x = GWRP of the normalised background.

    decay: d, or "auto" for one that fits the size of the map, see `decay_for`.
    """
    mask = _aligned(masks, heatmaps)
    absolute = heatmaps.abs()
    return _background(absolute, mask, _foreground_relevance(absolute, mask), decay, e)


@full_precision
def foreground_loss(heatmaps: Tensor, masks: Tensor, c1: Bound, c2: Bound, foreground: Foreground = "hybrid") -> Tensor:
    """L2 per (sample, map), f(s) of the paper (newLoss): zero while the foreground relevance lies in [C1, C2].

    C1 and C2 may differ between maps.
    """
    return _foreground(_foreground_relevance(heatmaps.abs(), _aligned(masks, heatmaps)), c1, c2, foreground)


@full_precision
def heatmap_loss(
    heatmaps: Tensor,
    masks: Tensor,
    c1: Bound,
    c2: Bound,
    *,
    decay: Decay = 0.9,
    w1: float = 1.0,
    w2: float = 1.0,
    e: float = 1.0,
    foreground: Foreground = "hybrid",
    include: Tensor | None = None,
) -> HeatmapLossParts:
    """`L = w1*L1 + w2*L2` (paper: HLoss) of the samples chosen by `include`, see `has_foreground`; 0 of none."""
    mask = _aligned(masks, heatmaps)
    if include is not None:
        if include.dtype != torch.bool or include.shape != heatmaps.shape[:1]:
            raise InputError(
                f"`include` must hold one bool for each of the {heatmaps.shape[0]} samples, "
                f"but it is {include.dtype} of shape {tuple(include.shape)}; `has_foreground(masks)` makes one."
            )
        if not bool(include.all()):
            include = include.to(heatmaps.device)
            heatmaps, mask = heatmaps[include], mask[include]
    absolute = heatmaps.abs()
    s = _foreground_relevance(absolute, mask)
    l1 = _background(absolute, mask, s, decay, e).mean(1)
    l2 = _foreground(s, c1, c2, foreground).mean(1)
    per_sample = (w1 * l1 + w2 * l2, l1, l2)
    total, background, foreground_mean = (values.sum() / max(len(values), 1) for values in per_sample)
    return HeatmapLossParts(total, background, foreground_mean, *per_sample)


def depth_shares(losses: Tensor, decay: float = 0.7) -> Tensor:
    """LDS, LRP Deep Supervision: the weight of every depth's loss (depth,). GWRP: the worst depth counts most."""
    ranked = decay ** torch.arange(len(losses), dtype=losses.dtype, device=losses.device)
    return torch.empty_like(losses).scatter_(0, losses.argsort(descending=True), ranked / ranked.sum())


class HeatmapLoss(nn.Module):
    """`heatmap_loss` with its settings; it has no state to train or save (`Ranges` keeps C1 and C2)."""

    def __init__(
        self,
        c1: Bound,
        c2: Bound,
        *,
        decay: Decay = 0.9,
        w1: float = 1.0,
        w2: float = 1.0,
        e: float = 1.0,
        foreground: Foreground = "hybrid",
    ) -> None:
        super().__init__()
        self.c1, self.c2 = c1, c2
        self.decay: Decay = decay
        self.w1, self.w2, self.e = w1, w2, e
        self.foreground: Foreground = foreground

    def forward(self, heatmaps: Tensor, masks: Tensor, include: Tensor | None = None) -> HeatmapLossParts:
        """Compute the loss and its parts; see `heatmap_loss`."""
        return heatmap_loss(
            heatmaps,
            masks,
            self.c1,
            self.c2,
            decay=self.decay,
            w1=self.w1,
            w2=self.w2,
            e=self.e,
            foreground=self.foreground,
            include=include,
        )

    def extra_repr(self) -> str:
        """Show the settings when printed."""
        names = ("c1", "c2", "decay", "w1", "w2", "e", "foreground")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def _aligned(masks: Tensor, heatmaps: Tensor) -> Tensor:
    """Check both and return the mask as numbers (sample, 1, channel or 1, space...) that multiply the heatmaps."""
    if heatmaps.ndim < 4:
        raise InputError(
            f"Heatmaps must be laid out (sample, map, channel, space...), but they have shape "
            f"{tuple(heatmaps.shape)}; add the missing dimension with `heatmaps.unsqueeze(1)`."
        )
    mask = prepare_masks(masks, heatmaps.shape[3:])
    if mask.shape[1] > 1 and mask.shape[1] != heatmaps.shape[2] and bool((mask == mask[:, :1]).all()):
        mask = mask[:, :1]
    if mask.shape[0] != heatmaps.shape[0] or mask.shape[1] not in (1, heatmaps.shape[2]):
        raise InputError(
            f"Heatmaps of {heatmaps.shape[0]} samples and {heatmaps.shape[2]} channels need masks of as many samples "
            f"and of 1 or {heatmaps.shape[2]} channels, but the masks have shape {tuple(masks.shape)}."
        )
    return mask.unsqueeze(1).to(heatmaps)


def _foreground_relevance(absolute: Tensor, mask: Tensor) -> Tensor:
    """`s = sum(|R| * mask)` over channel and space, per (sample, map)."""
    return (absolute * mask).flatten(2).sum(-1)


def _background(absolute: Tensor, mask: Tensor, s: Tensor, decay: Decay, e: float) -> Tensor:
    """`-ln(1 - min(x/(x+E), 1 - 1e-7))`, written `ln(1 + x/E)` with the same cap, which keeps its digits at large x.

    `x = GWRP(n * (1 - mask))` with `n = |R| / (m + 1e-10)` and m the mean foreground relevance. Scaling commutes
    with ranking, so the pooled value is divided instead of every pixel.
    """
    if not e > 0:
        raise InputError(f"E in the background loss must be positive, but it is {e}.")
    channels_per_mask = absolute.shape[2] // mask.shape[2]
    m = s / (channels_per_mask * mask.flatten(1).sum(-1, keepdim=True) + EPSILON)
    x = _pooled_background(absolute.flatten(3), mask.flatten(3) == 0, decay) / (m + EPSILON).unsqueeze(-1)
    cap = -math.log(1 - torch.tensor(1 - 1e-7, dtype=x.dtype).item())
    return torch.log1p(x / e).clamp(max=cap).mean(-1)


def _pooled_background(absolute: Tensor, outside: Tensor, decay: Decay) -> Tensor:
    """GWRP of `|R|` outside the mask per (sample, map, channel); what lies inside counts as zero and is not ranked."""
    n = absolute.shape[-1]
    kept = int(outside.sum(-1).max()) if outside.shape[2] == 1 and len(outside) else n
    if 0 < kept < 0.9 * n:
        outside, where = outside.to(torch.uint8).topk(kept)
        absolute = absolute.gather(-1, where.expand(*absolute.shape[:-1], kept))
    return gwrp(absolute * outside, decay_for(n) if decay == "auto" else decay, size=n)


def _foreground(s: Tensor, c1: Bound, c2: Bound, foreground: Foreground) -> Tensor:
    """f(s) of the paper (eq. newLoss) or the first paper's square version, both zero for `C1 <= s <= C2`.

    Below C1: `(C1-s)^2/C1^2`. Above C2: `(C2-s)^2/C1^2`, which "hybrid" continues from C2+C1 on by `1+s-(C2+C1)`.
    """
    low, high = (torch.as_tensor(bound, dtype=s.dtype, device=s.device) for bound in (c1, c2))
    for bound in (low, high):
        if bound.ndim > 1 or bound.numel() not in (1, s.shape[1]):
            raise InputError(
                f"C1 and C2 must be one number or one per map ({s.shape[1]}), but have shape {tuple(bound.shape)}."
            )
    if not bool(((low > 0) & (high >= low) & high.isfinite()).all()):
        raise InputError(f"C1 and C2 must be finite with 0 < C1 <= C2, but C1 is {c1} and C2 is {c2}.")
    below, above = torch.relu(low - s) / low, torch.relu(s - high)
    if foreground == "square":
        return below.square() + (above / low).square()
    if foreground == "hybrid":
        near = torch.where(above <= low, above, low)
        return below.square() + (near / low).square() + torch.relu(above - low)
    raise InputError(f'The foreground loss is "hybrid" or "square", but {foreground!r} was asked for.')
