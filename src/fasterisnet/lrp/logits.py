"""What a network is given and answers: plain tensors, whatever came with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def logits_in(output: Any) -> Tensor:
    """The logits in the output of a network: a tensor, or an object (as of HuggingFace) that holds one."""
    return plain(getattr(output, "logits", output))


def plain(value: Any) -> Any:
    """A tensor without what a subclass (MONAI's MetaTensor, torchvision's tv_tensors) adds; others as they are."""
    return value.as_subclass(Tensor) if isinstance(value, Tensor) and type(value) is not Tensor else value
