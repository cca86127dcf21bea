"""Where a trained network computes."""

from __future__ import annotations

import torch

from fasterisnet.errors import UsageError

ACCELERATORS = ("auto", "cpu", "gpu", "mps")


def chosen_device(accelerator: str = "auto") -> torch.device:
    """A GPU if there is one, or what is asked for."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    wanted = {"auto": ("cuda", "mps", "cpu"), "gpu": ("cuda", "mps"), "mps": ("mps",), "cpu": ("cpu",)}[accelerator]
    found = next((name for name in wanted if there.get(name, True)), None)
    if found is None:
        raise UsageError(f"accelerator '{accelerator}' cannot be had on this machine; auto takes what is there.")
    return torch.device(found)
