"""Attention rollout: how much of each patch reaches the class token of a transformer, over all its layers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fasterisnet.errors import InputError
from fasterisnet.evaluation.attention import evaluating

MULTIHEAD = inspect.signature(F.multi_head_attention_forward)
SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)
Arguments = tuple[Any, ...]


class Attentions(TorchFunctionMode):
    """Notes the attention of every layer, (sample, head, token, token), however it is computed.

    Seen are `scaled_dot_product_attention`, PyTorch's `MultiheadAttention`, and a softmax over square maps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Arguments = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is F.multi_head_attention_forward:
            values = MULTIHEAD.bind(*args, **given).arguments
            wanted = values.get("need_weights", True)
            output, weights = func(**{**values, "need_weights": True, "average_attn_weights": False})
            self.found.append(weights)
            return output, (weights.mean(1) if wanted else None)
        result = func(*args, **given)
        if func is F.scaled_dot_product_attention:
            self.found.append(_weights(*args, **given))
        elif func in SOFTMAX and isinstance(result, Tensor) and result.ndim == 4 and result.shape[2] == result.shape[3]:
            self.found.append(result)
        return result


def _weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What `scaled_dot_product_attention` weighs values with."""
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1)


@torch.no_grad()
def rollout(model: nn.Module, images: Tensor) -> Tensor:
    """Attention rollout (Abnar and Zuidema, 2020), shaped like the images; the same for every class.

    `A = (mean over heads + 1)/2` of every layer, multiplied; of the product the row of the class token or, in a network
    that has none, the mean over all. Every pixel of a patch, and every channel of a pixel, has its share.
    """
    with evaluating(model), Attentions() as seen:
        model(images)
    flow = _flow(seen.found, len(images), type(model).__name__)
    grid = _grid(model, images)
    extra = flow.shape[-1] - grid[0] * grid[1]
    if extra < 0:
        raise InputError(f"{flow.shape[-1]} tokens are fewer than the {grid[0]} x {grid[1]} patches of the images.")
    rows = flow[:, 0] if extra else flow.mean(1)
    patches = rows[:, extra:].view(-1, 1, *grid).to(images)
    scale = [side // count for side, count in zip(images.shape[2:], grid, strict=True)]
    maps = patches.repeat_interleave(scale[0], 2).repeat_interleave(scale[1], 3) / math.prod(scale)
    return (maps / images.shape[1]).expand_as(images).contiguous()


def _flow(found: list[Tensor], samples: int, name: str) -> Tensor:
    """The product over the layers, the last one leftmost."""
    shapes = {tuple(weights.shape[i] for i in (0, 2, 3)) for weights in found if weights.ndim == 4}
    if not found:
        raise InputError(f"Attention rollout needs a transformer; in {name} no attention was seen.")
    if len(shapes) != 1 or next(iter(shapes))[0] != samples or any(weights.ndim != 4 for weights in found):
        raise InputError(
            f"Attention rollout needs layers that all attend over the same tokens; those of {name} do not (windows, or "
            "patches that are merged)."
        )
    alone = flow = torch.eye(found[0].shape[-1], dtype=torch.float64)
    for weights in found:
        flow = (weights.cpu().double().mean(1) + alone) / 2 @ flow
    return flow


def _grid(model: nn.Module, images: Tensor) -> tuple[int, int]:
    """Rows and columns of patches: what the convolution that cuts them out makes of the images."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == module.stride != (1, 1):
            height, width = (side // patch for side, patch in zip(images.shape[2:], module.stride, strict=True))
            return height, width
    raise InputError(
        f"How the tokens of {type(model).__name__} lie on the image cannot be told: no convolution cuts patches out."
    )
