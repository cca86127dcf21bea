"""What the options of a run say about its images: where they come from and how they become network input."""

from __future__ import annotations

from fasterisnet.data.base import Source
from fasterisnet.data.preparation import Preparation
from fasterisnet.data.sources import open_source
from fasterisnet.runs.config import Config


def preparation_of(config: Config) -> Preparation:
    """How images become network input in this run."""
    window = tuple(config.window) if isinstance(config.window, list) else config.window
    return Preparation(
        config.size, config.channels, tuple(config.mean), tuple(config.std), config.fit, config.equalise,  # pyright: ignore[reportArgumentType]
        config.augmentation, window,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def source_of(config: Config) -> Source:
    """The data of a run, read as its options say."""
    return open_source(
        config.data, seed=config.seed, refine_boxes=config.refine_boxes or None, foreground=config.foreground or None,
        window=config.window,
    )  # fmt: skip
