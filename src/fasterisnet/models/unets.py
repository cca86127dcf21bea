"""Networks that draw the mask of the foreground as well: a U-Net before a classifier, and one with a head of its own.

What both share is `foreground(images)`: a bool for every pixel, (sample, 1, height, width).
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet.errors import InputError
from fasterisnet.extras import install
from fasterisnet.models.vgg import vgg_blocks, vgg_widths

DECODER = (256, 128, 64, 32, 16)
DEEPEST = len(DECODER)


@runtime_checkable
class Segmenting(Protocol):
    """A classifier that can say what it takes for the foreground."""

    def foreground(self, images: Tensor) -> Tensor:
        """The pixels that are foreground."""
        ...


@runtime_checkable
class Multitasking(Segmenting, Protocol):
    """A classifier that draws masks in the same pass."""

    def both(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (sample, class) and (sample, 1, height, width)."""
        ...


class PaddedUNet(nn.Module):
    """A segmenter for images of any size: they are padded to what it takes, and its output is cut back."""

    def __init__(self, unet: nn.Module, multiple: int) -> None:
        super().__init__()
        self.unet, self.multiple = unet, multiple

    def forward(self, images: Tensor) -> Tensor:
        """Logits (sample, 1, height, width)."""
        height, width = images.shape[2:]
        return self.unet(padded(images, self.multiple))[..., :height, :width]


class SegmentedClassifier(nn.Module):
    """A classifier that sees the foreground alone: what the segmenter leaves below the threshold is set to zero.

    whole: an image without any foreground goes in as it is, not black. A part whose parameters are all frozen stays in
    evaluation mode.
    """

    threshold: Tensor

    def __init__(self, segmenter: nn.Module, classifier: nn.Module, *, whole: bool = False) -> None:
        super().__init__()
        self.segmenter, self.classifier, self.whole = segmenter, classifier, whole
        self.register_buffer("threshold", torch.tensor(0.5))

    def train(self, mode: bool = True) -> SegmentedClassifier:
        """Training mode for what is trained."""
        super().train(mode)
        for part in (self.segmenter, self.classifier):
            if not any(parameter.requires_grad for parameter in part.parameters()):
                part.eval()
        return self

    def forward(self, images: Tensor) -> Any:
        """What the classifier says of the foreground."""
        return self.classifier(self.masked(images, self.foreground(images)))

    def foreground(self, images: Tensor) -> Tensor:
        """The pixels that are foreground."""
        with torch.no_grad():
            return self.above(self.segmenter(images))

    def above(self, drawn: Tensor) -> Tensor:
        """The pixels whose logits are above the threshold."""
        return drawn.sigmoid() > self.threshold

    def masked(self, images: Tensor, inside: Tensor) -> Tensor:
        """Images with a background of zero."""
        if self.whole:
            inside = inside | ~inside.flatten(1).any(1).view(-1, 1, 1, 1)
        return images * inside.to(images.dtype)


class MultitaskUNet(nn.Module):
    """VGG-16's body with batch norm, a U-Net's decoder behind it, and VGG-16's head on the bottleneck.

    width: channels of the first block (VGG-16: 64). depth: blocks, each ending in a pooling. dense: neurons of the two
    layers before the last one.
    """

    def __init__(self, classes: int, channels: int = 3, *, width: int = 64, depth: int = 5, dense: int = 4096) -> None:
        super().__init__()
        needed("segmentation_models_pytorch")
        from segmentation_models_pytorch.base import SegmentationHead
        from segmentation_models_pytorch.decoders.unet.decoder import UnetDecoder

        widths, decoder = vgg_widths(width, depth), [n * width // 64 or 1 for n in DECODER[DEEPEST - depth :]]
        outputs = [*widths, widths[-1]]
        self.multiple = 2**depth
        self.encoder = vgg_blocks(channels, widths)
        self.decoder = UnetDecoder(outputs, decoder, depth)
        self.mask = SegmentationHead(decoder[-1], 1)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(7), nn.Flatten(),
            nn.Linear(widths[-1] * 49, dense), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(dense, dense), nn.ReLU(), nn.Dropout(0.5), nn.Linear(dense, classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        """The logits of the classes; nothing is drawn."""
        return self.head(self._encoded(images)[-1])

    def both(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the classes and of the pixels."""
        features = self._encoded(images)
        height, width = images.shape[2:]
        return self.head(features[-1]), self.mask(self.decoder(features))[..., :height, :width]

    def _encoded(self, images: Tensor) -> list[Tensor]:
        """The maps of each block, and the last ones pooled: the bottleneck."""
        maps, last = [], padded(images, self.multiple)
        for block in self.encoder:
            maps.append(block(last))
            last = F.max_pool2d(maps[-1], 2)
        return [*maps, last]

    def foreground(self, images: Tensor) -> Tensor:
        """The pixels that are more likely foreground than not."""
        return self.both(images)[1] > 0


def multitask_unet(classes: int, channels: int) -> nn.Module:
    """As the paper has it."""
    return MultitaskUNet(classes, channels)


def small_multitask_unet(classes: int, channels: int) -> nn.Module:
    """For small images."""
    return MultitaskUNet(classes, channels, width=16, depth=3, dense=64)


def unet(encoder: str, channels: int, size: int) -> nn.Module:
    """A U-Net with an encoder of segmentation-models-pytorch, as deep as leaves a bottleneck of four pixels or more."""
    library = needed("segmentation_models_pytorch")
    if encoder not in library.encoders.get_encoder_names():
        raise InputError(
            f"There is no encoder '{encoder}' for the segmenter; names are those of segmentation-models-pytorch, like "
            "resnet18, resnet34, vgg16_bn or mobilenet_v2."
        )
    depth = min(max(size.bit_length() - 3, 2), DEEPEST)
    network = library.Unet(
        encoder, encoder_depth=depth, encoder_weights=None, decoder_channels=DECODER[DEEPEST - depth :],
        in_channels=channels, classes=1,
    )  # fmt: skip
    _without_idle_parts(network.encoder, torch.zeros(1, channels, 64, 64))
    return PaddedUNet(network, 2**depth)


def padded(images: Tensor, multiple: int) -> Tensor:
    """Zeros at the right and below, so that both sides are multiples of a number."""
    height, width = images.shape[2:]
    missing = (0, -width % multiple, 0, -height % multiple)
    return F.pad(images, missing) if any(missing) else images


def needed(package: str) -> Any:
    """A package, or a sentence about how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InputError(f"This network needs the package {package.replace('_', '-')}: {install('train')}.") from error


def _without_idle_parts(encoder: nn.Module, images: Tensor) -> None:
    """An encoder of less depth keeps its last stages, which nothing runs through: they go."""
    total = torch.stack([f.sum() for f in encoder.eval()(images) if f.requires_grad]).sum()
    used = torch.autograd.grad(total, list(encoder.parameters()), allow_unused=True)
    idle = {id(p) for p, gradient in zip(encoder.parameters(), used, strict=True) if gradient is None}
    _prune(encoder.train(), idle)


def _prune(module: nn.Module, idle: set[int]) -> None:
    for name, child in list(module.named_children()):
        own = [id(parameter) for parameter in child.parameters()]
        if own and idle.issuperset(own):
            setattr(module, name, nn.Identity())
        elif own:
            _prune(child, idle)
