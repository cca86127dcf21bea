"""What a network answers: a tensor, or an object (as of HuggingFace) that holds one."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def logits_in(output: Any) -> Tensor:
    """The logits in the output of a network."""
    return getattr(output, "logits", output)
