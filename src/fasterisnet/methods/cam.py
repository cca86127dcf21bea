"""Grad-CAM at the last convolutional map of any network, which can be trained through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet.errors import InputError
from fasterisnet.lrp.explain import observing
from fasterisnet.lrp.logits import logits_in
from fasterisnet.lrp.small_maps import SmallMaps
from fasterisnet.lrp.targets import Classes, Target, resolve
from fasterisnet.methods.depths import map_size

TINY = 1e-10
SMOOTH = {3: "linear", 4: "bilinear", 5: "trilinear"}  # by dimensions: signals, images, volumes
_FOUND: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], str]] = WeakKeyDictionary()


def grad_cam(
    model: nn.Module, images: Tensor, target: Target | Classes | None = None, *, layer: str | None = None
) -> Tensor:
    """`relu(sum_k a_k A_k)` of every sample, `a_k` the mean of `d score / d A_k` over space: (sample, 1, h, w).

    target: as in `explain`; None is the highest logit. layer: the module whose output is A (default: `last_map`).
    """
    with torch.inference_mode(False), torch.enable_grad(), observing(model):
        images = images.clone() if images.is_inference() else images.detach()
        logits, maps = logits_and_maps(model, images, layer or last_map(model, images))
        return class_activation(maps, resolve(target)(logits).sum(), create_graph=False).detach()


def class_activation(maps: Tensor, score: Tensor, *, create_graph: bool) -> Tensor:
    """The Grad-CAM of a score. Without `create_graph` the weights of the maps are constants, the maps are not."""
    (gradient,) = torch.autograd.grad(score, maps, create_graph=create_graph, retain_graph=True)
    weights = gradient.flatten(2).mean(2).view(*gradient.shape[:2], *[1] * (maps.ndim - 2))
    return (weights * maps).sum(1, keepdim=True).relu()


def enlarged(cam: Tensor, size: torch.Size | tuple[int, ...]) -> Tensor:
    """At the resolution of the images, smoothly."""
    return F.interpolate(cam, tuple(size), mode=SMOOTH[cam.ndim], align_corners=False)


def normalised(cam: Tensor) -> Tensor:
    """From 0 to 1 in every sample; zero where it is the same everywhere."""
    flat = cam.flatten(1)
    low, high = (flat.amin(1), flat.amax(1))
    shape = (-1, *[1] * (cam.ndim - 1))
    return (cam - low.view(shape)) / (high - low + TINY).view(shape)


def logits_and_maps(model: nn.Module, images: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    """What a module returns in a forward pass, with the logits that come of it."""
    found: list[Tensor] = []

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Tensor:
        if not isinstance(output, Tensor) or output.ndim != images.ndim:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise InputError(f"The module '{layer}' returns {shape}, not maps (batch, channel, height, width).")
        found.append(output)
        return output.clone()  # what follows may overwrite it

    try:
        module = model.get_submodule(layer)
    except AttributeError as error:
        raise InputError(f"cam_layer names '{layer}', which is not a module of the model.") from error
    handle = module.register_forward_hook(hook)
    try:
        with SmallMaps():
            logits = logits_in(model(images.clone()))
    finally:
        handle.remove()
    if len(found) != 1:
        raise InputError(f"The module '{layer}' ran {len(found)} times in a forward pass; name one that runs once.")
    return logits, found[0]


def last_map(model: nn.Module, images: Tensor) -> str:
    """The module that returns the last map (batch, channel, height > 1, width > 1) on the way to the logits."""
    found = _FOUND.setdefault(model, {})
    size = tuple(images.shape[1:])
    if size not in found:
        found[size] = _search(model, images)
    return found[size]


def _search(model: nn.Module, images: Tensor) -> str:
    """Networks that go on for long after their last map (transformers on patches) have none worth the name."""
    outputs: list[tuple[str, Tensor, int]] = []
    runs: dict[str, int] = {}
    layers = 0

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, _inputs: Any, output: Any) -> None:
            nonlocal layers
            layers += any(p is not None for p in module._parameters.values())
            runs[name] = runs.get(name, 0) + 1
            size = map_size(output, images)
            if size is not None and min(size) > 1 and output.requires_grad:
                outputs.append((name, output, layers))

        return record

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        with torch.inference_mode(False), torch.enable_grad(), observing(model):
            logits = logits_in(model(images.detach().clone().requires_grad_()))
            last_first = reversed([found for found in outputs if runs[found[0]] == 1])
            name, before = next(((n, before) for n, output, before in last_first if _leads_to(logits, output)), ("", 0))
    finally:
        for handle in handles:
            handle.remove()
    if layers > 2 * before or not name:
        last = f"after the last one, '{name}', come {layers - before} of {layers} layers" if name else "here are none"
        raise InputError(
            f"Grad-CAM needs maps (batch, channel, height, width) near the end of the network: {last}. Take a "
            "convolutional network, take larger images, or name a module that returns such maps (cam_layer)."
        )
    return name


def _leads_to(logits: Tensor, output: Tensor) -> bool:
    return torch.autograd.grad(logits.sum(), output, retain_graph=True, allow_unused=True)[0] is not None
