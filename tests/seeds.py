"""The random numbers of the tests: FASTERISNET_TEST_SEED=n draws other networks and images, with the same demands."""

from __future__ import annotations

import os

import torch

SEED = int(os.environ.get("FASTERISNET_TEST_SEED", "0"))


def generator(seed: int) -> torch.Generator:
    """Random numbers that tests make networks and images of; not for those that are compared with stored values."""
    return torch.Generator().manual_seed(seed + 1_000_003 * SEED)
