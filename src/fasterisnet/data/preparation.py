"""From stored samples to what a network sees: image and mask change together, and zB knows the normalisation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from fasterisnet.data.base import Samples
from fasterisnet.data.pictures import Window
from fasterisnet.errors import InputError
from fasterisnet.lrp.box import normalised_box

Augmentation = Literal["none", "flip", "crop", "xray"]
Fit = Literal["stretch", "pad"]
Key = tuple[int, int]  # epoch and index of a sample


@dataclass(frozen=True)
class Preparation:
    """How images become network input. Saved with the weights, so that a trained model is fed as it was trained.

    size: of the square the network sees. channels: 1 or 3. mean, std: after scaling to [0, 1]; empty for none. fit:
    "stretch" to the square or "pad" to it. equalise: histogram equalisation. augmentation (training only): "flip",
    "crop" (a random part of the image, and flip) or "xray" (the paper's: shift by 28 of 224 px, turn by 40 degrees,
    flip). window: how files of more than 8 bits were read; see `Reader`.
    """

    size: int = 224
    channels: int = 3
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    fit: Fit = "stretch"
    equalise: bool = False
    augmentation: Augmentation = "none"
    window: Window | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or self.channels not in (1, 3):
            raise InputError(
                f"Images have to be 1 px or larger with 1 or 3 channels, not {self.size} px, {self.channels}."
            )
        if (
            len(self.mean) != len(self.std)
            or len(self.mean) not in (0, self.channels)
            or not all(s > 0 for s in self.std)
        ):
            raise InputError(f"mean and std need {self.channels} numbers each (std above 0), or none.")
        if self.fit not in ("stretch", "pad"):
            raise InputError(f"fit is {self.fit!r}; it has to be 'stretch' or 'pad'.")
        if self.augmentation not in ("none", "flip", "crop", "xray"):
            raise InputError(f"augmentation is {self.augmentation!r}; it has to be none, flip, crop or xray.")

    @property
    def box(self) -> tuple[Any, Any]:
        """What zB has to know: the lowest and highest value a network input can have."""
        return normalised_box(self.mean, self.std) if self.mean else (0.0, 1.0)

    def __call__(self, image: Tensor, mask: Tensor | None = None, *, training: bool = False) -> tuple[Tensor, Tensor]:
        """Image float (channel, size, size) and mask bool (1, size, size); an empty mask stands for none."""
        if mask is None:
            mask = torch.zeros(1, *image.shape[-2:], dtype=torch.bool)
        # As a second image the mask is resampled like the first; `tv_tensors.Mask` would shift it by half a pixel.
        picture, outline = tv_tensors.Image(image), tv_tensors.Image(mask.to(torch.uint8) * 255)
        if self.equalise:
            picture = v2.functional.equalize(picture)
        for step in self._steps(image.shape[-2], image.shape[-1], training):
            picture, outline = step(picture, outline)
        out = torch.as_tensor(picture).to(torch.float32).div_(255)
        out = out.expand(self.channels, -1, -1) if out.shape[0] == 1 else out
        out = v2.functional.rgb_to_grayscale(out) if self.channels == 1 and out.shape[0] == 3 else out
        if self.mean:
            out = v2.functional.normalize(out, list(self.mean), list(self.std))
        return out.contiguous(), torch.as_tensor(outline) >= 128

    def _steps(self, height: int, width: int, training: bool) -> list[v2.Transform]:
        square = [self.size, self.size]
        steps: list[v2.Transform] = []
        if self.augmentation == "crop" and training:
            return [v2.RandomResizedCrop(square, (0.5, 1.0), antialias=True), v2.RandomHorizontalFlip()]
        if self.fit == "pad" and height != width:
            side = max(height, width)
            left, top = (side - width) // 2, (side - height) // 2
            steps.append(v2.Pad([left, top, side - width - left, side - height - top]))
        if height != self.size or width != self.size:
            steps.append(v2.Resize(square, antialias=True))
        if self.augmentation == "xray" and training:
            steps.append(
                v2.RandomAffine([-40, 40], translate=(0.125, 0.125), interpolation=v2.InterpolationMode.BILINEAR)
            )
        if self.augmentation in ("flip", "xray") and training:
            steps.append(v2.RandomHorizontalFlip())
        return steps

    def to_dict(self) -> dict[str, Any]:
        """For JSON and YAML."""
        found = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return {key: value for key, value in found.items() if key != "window" or value is not None}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preparation:
        """Back from `to_dict`."""
        known = {field.name for field in fields(cls)}
        found: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known}
        return cls(**found)


def random_stream(*numbers: int) -> int:
    """A seed of its own for every combination of numbers: randomness without a state that could get lost."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 29)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 32
    return state >> 1


class Prepared(Dataset):
    """A split as a network sees it: image, label, mask.

    Asked for by (epoch, index): what is random in a sample depends on the seed, the epoch and the index, never on the
    worker that loads it or on what was loaded before.
    """

    def __init__(self, samples: Samples, preparation: Preparation, *, seed: int = 0, training: bool = False) -> None:
        self.samples, self.preparation = samples, preparation
        self.seed, self.training = seed, training

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: int | Key) -> tuple[Tensor, Tensor, Tensor]:
        epoch, index = key if isinstance(key, tuple) else (0, key)
        image, mask, label = self.samples.read(index)
        random = self.training and self.preparation.augmentation != "none"
        with torch.random.fork_rng(devices=[], enabled=random):
            if random:
                torch.default_generator.manual_seed(random_stream(self.seed, epoch, index))
            prepared, outline = self.preparation(image, mask, training=self.training)
        return prepared, torch.tensor(label), outline
