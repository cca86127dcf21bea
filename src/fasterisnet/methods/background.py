"""Other backgrounds in training: swapped with another image's, erased, or black. Alone, or before a heatmap loss."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet.backgrounds import blurred, has_background, painted, palette_of, uncovered
from fasterisnet.errors import InputError
from fasterisnet.losses import Masks, fitting_masks, has_foreground
from fasterisnet.lrp.logits import plain
from fasterisnet.methods.base import Method, Parts, Standard, register_method
from fasterisnet.methods.processes import exchanged, together

Fill = Literal["mean", "noise", "blur"]
FILLS: tuple[Fill, ...] = ("mean", "noise", "blur")


class Background(Method):
    """Plain cross entropy on images whose background was changed; in training only, and only where there is a mask."""

    needs_masks: ClassVar[bool] = True

    @abstractmethod
    def altered(self, images: Tensor, mask: Tensor, draws: Method | None = None) -> Tensor:
        """The images as training sees them. draws: the method whose random numbers, and share of the batch, it is."""

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, masks: Masks = None) -> Parts:
        """The classification loss: of altered images in training, of the images as they are without gradients."""
        images = plain(images)
        if len(images) == 0:
            raise InputError("The batch has no image; leave empty batches out.")
        mask = fitting_masks(masks, images)
        seen = self.altered(images, mask) if torch.is_grad_enabled() else images
        standard = Standard(classification=self.classification, attached_logits=self.attached_logits)
        parts = standard.loss(model, seen, labels)
        parts.without_mask = int((~has_foreground(mask)).sum())
        return parts


@register_method("masked-input")
class MaskedInput(Background):
    """The background is set to zero in training; a test sees images as they are."""

    def altered(self, images: Tensor, mask: Tensor, draws: Method | None = None) -> Tensor:
        """`x * mask`; images without a mask stay as they are."""
        keep = mask | ~has_foreground(mask).view(-1, *[1] * (mask.ndim - 1))
        return images * keep


class Painted(Background):
    """The objects before other backgrounds. feather: pixels around them in which one goes over into the other."""

    def __init__(self, feather: int = 0, **common: Any) -> None:
        super().__init__(**common)
        if isinstance(feather, bool) or not isinstance(feather, int) or feather < 0:
            raise InputError(f"feather is {feather!r}; it has to be a number of pixels, 0 or more.")
        self.feather = feather

    @abstractmethod
    def grounds(self, whole: Tensor, masks: Tensor, mine: Tensor, draws: Method) -> tuple[Tensor, Tensor]:
        """For the samples `mine` of the whole batch: other backgrounds, and one bool each, whether there is one."""

    def altered(self, images: Tensor, mask: Tensor, draws: Method | None = None) -> Tensor:
        """`mask * x + (1 - mask) * background`, where the image has a mask and something around it."""
        if images.ndim != 4:
            raise InputError(
                f"Backgrounds of images of shape {tuple(images.shape)} cannot be exchanged; they have to be pictures, "
                "(batch, channel, height, width). MaskedInput takes any."
            )
        draws = draws or self
        mask = mask.any(1, keepdim=True)
        with torch.no_grad():
            whole, masks, mine = whole_batch(images.detach(), mask, draws)
            ground, found = self.grounds(whole, masks, mine, draws)
            changed = painted(images, mask, ground, self.feather)
            return torch.where((found & has_background(mask)).view(-1, 1, 1, 1), changed, images)


@register_method("background-swap")
class BackgroundSwap(Painted):
    """Every image gets the background of another one of its batch, drawn at random."""

    def grounds(self, whole: Tensor, masks: Tensor, mine: Tensor, draws: Method) -> tuple[Tensor, Tensor]:
        """Of another image with a mask, whose object is covered with what is around it."""
        known = has_background(masks)
        usable, itself = known.nonzero()[:, 0], known[mine]
        others = len(usable) - itself.long()
        chance = draws.drawn(torch.rand, len(mine)).to(whole.device)
        number = torch.minimum((chance * others).long(), others - 1).clamp(min=0)
        number = number + (itself & (number >= torch.searchsorted(usable, mine)))
        donors = torch.where(others > 0, F.pad(usable, (0, 1))[number.clamp(max=len(usable))], mine)
        return uncovered(whole[donors], masks[donors]), others > 0


@register_method("background-erase")
class BackgroundErase(Painted):
    """Every image's background is erased: the mean colour of all backgrounds of the batch, noise, or blurred."""

    def __init__(self, fill: Fill = "mean", feather: int = 0, **common: Any) -> None:
        super().__init__(feather, **common)
        if fill not in FILLS:
            raise InputError(f"fill is {fill!r}; it has to be one of {', '.join(FILLS)}.")
        self.fill: Fill = fill

    def grounds(self, whole: Tensor, masks: Tensor, mine: Tensor, draws: Method) -> tuple[Tensor, Tensor]:
        """noise: of the mean and spread of the backgrounds' colours; blur: 8 x 8 colours of the image's own."""
        found = torch.ones_like(mine, dtype=torch.bool)
        if self.fill == "blur":
            return blurred(whole[mine], masks[mine]), found
        known = has_background(masks)
        palette = palette_of(whole[known], masks[known]) if bool(known.any()) else palette_of(whole, masks)
        if self.fill == "mean":
            return palette.mean.expand_as(whole[mine]), found
        noise = draws.drawn(torch.randn, len(mine), *whole.shape[1:]).to(whole)
        return (palette.mean + palette.sd * noise).clamp(palette.low, palette.high), found


def whole_batch(images: Tensor, mask: Tensor, draws: Method) -> tuple[Tensor, Tensor, Tensor]:
    """Images and masks of all processes that share a batch, in the order of one process; which of them are this one's.

    Every process tells the others; one that has no part of the batch has nothing to do with it.
    """
    rank, processes = draws.share[0], together(draws)
    if processes == 1:
        return images, mask, torch.arange(len(images), device=images.device)
    count = len(images) * processes if draws.batch is None else draws.batch
    mine = torch.cat([images, mask.to(images)], 1)
    parts = exchanged(mine, draws, [len(range(other, count, processes)) for other in range(processes)])
    whole = mine.new_empty(count, *mine.shape[1:])
    for other, part in enumerate(parts):
        whole[other::processes] = part
    return whole[:, :-1], whole[:, -1:] > 0.5, torch.arange(rank, count, processes, device=images.device)
