"""Learning rates."""

from __future__ import annotations

import math

from fasterisnet.training.config import Config


def learning_rate(config: Config, done: int, total: int) -> float:
    """The rate of the next update: a function of how many are done."""
    share = done / max(total, 1)
    if config.schedule == "cosine":
        return config.lr * (1 + math.cos(math.pi * share)) / 2
    if config.schedule == "onecycle":  # up from 1/25 for the first 30 %, then down to nothing
        rising = share < 0.3
        low, high = (config.lr / 25, config.lr) if rising else (config.lr / 25e4, config.lr)
        part = share / 0.3 if rising else (1 - share) / 0.7
        return low + (high - low) * (1 - math.cos(math.pi * part)) / 2
    return config.lr
