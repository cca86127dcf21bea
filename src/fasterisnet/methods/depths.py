"""Where LRP Deep Supervision looks: at the input of the stages of a network and of its head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fasterisnet.errors import InputError
from fasterisnet.lrp.explain import observing


@dataclass
class Run:
    """A module's run in a forward pass: how many there were, when it ended, the size of what it returned."""

    name: str
    count: int = 0
    end: int = 0
    size: tuple[int, ...] | None = None


_FOUND: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], list[str]]] = WeakKeyDictionary()


def supervised_depths(model: nn.Module, images: Tensor) -> list[str]:
    """Names of the modules whose outputs LRP Deep Supervision adds to the network input.

    They are the input of the first stage (a part with several layers), the outputs after which the resolution drops,
    and the input of the head. For a ResNet: maxpool, layer1, layer2, layer3, layer4.
    """
    found = found_depths(model, images)
    if not found:
        raise InputError(
            "No module of this model returns maps with the aspect ratio of the images, so there is nothing to "
            "supervise by default; name modules in deep_supervision=[...]."
        )
    return found


def found_depths(model: nn.Module, images: Tensor) -> list[str]:
    """The same, or none if no module returns maps."""
    found = _FOUND.setdefault(model, {})
    size = tuple(images.shape[1:])
    if size not in found:
        found[size] = _search(model, images)
    return found[size]


def _search(model: nn.Module, images: Tensor) -> list[str]:
    runs = _runs(model, images)
    spine = _spine(model, "", runs)
    spine = _shrinking([name for name in spine if runs[name].size is not None], runs)
    if not spine:
        return []
    modules = dict(model.named_modules())
    stages = [i for i, name in enumerate(spine) if _layers_in(modules[name]) > 1]
    first = stages[0] if stages else 0
    chosen = {len(spine) - 1, *([first - 1] if first > 0 else [])}
    for i in range(first, len(spine) - 1):
        before, after = runs[spine[i]].size, runs[spine[i + 1]].size
        assert before is not None and after is not None
        if max(after) < max(before):
            chosen.add(i)
    return [spine[i] for i in sorted(chosen)]


def _shrinking(names: list[str], runs: dict[str, Run]) -> list[str]:
    """Without modules that enlarge the map again: a pool before the head may repeat values to reach its size."""
    kept: list[str] = []
    smallest = float("inf")
    for name in names:
        size = runs[name].size
        if size is not None and max(size) <= smallest:
            kept.append(name)
            smallest = max(size)
    return kept


def _runs(model: nn.Module, images: Tensor) -> dict[str, Run]:
    modules = list(model.named_modules(remove_duplicate=False))
    runs = {name: Run(name) for name, _ in modules}
    clock = iter(range(10**9))

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, _inputs: Any, output: Any) -> None:
            run = runs[name]
            run.count, run.end = run.count + 1, next(clock)
            run.size = map_size(output, images, has_layers=_layers_in(module) > 0) if run.count == 1 else None

        return record

    handles = [module.register_forward_hook(hook(name)) for name, module in modules if name]
    try:
        with observing(model), torch.no_grad():
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return runs


def map_size(output: Any, images: Tensor, *, has_layers: bool = False) -> tuple[int, ...] | None:
    """The spatial size of a map; None for anything that is not one (tokens, pooled vectors, channels-last maps)."""
    if not isinstance(output, Tensor) or output.ndim != images.ndim or output.shape[0] != images.shape[0]:
        return None
    size, full = tuple(output.shape[2:]), tuple(images.shape[2:])
    if any(s > f for s, f in zip(size, full, strict=True)) or (max(size) == 1 and not has_layers):
        return None
    shrinkage = [f / s for s, f in zip(size, full, strict=True)]
    wrong = any(abs(shrinkage[0] / other - 1) > 0.5 for other in shrinkage[1:])
    return None if wrong else size


def _spine(module: nn.Module, prefix: str, runs: dict[str, Run]) -> list[str]:
    """The children in the order they ended; one that lowers the resolution more than once is opened in its place."""
    names = [f"{prefix}{name}" for name, _ in module.named_children()]
    spine: list[str] = []
    ran = [n for n in names if runs[n].count == 1 or (runs[n].count == 0 and _end(n, runs) >= 0)]
    for name in sorted(ran, key=lambda n: _end(n, runs)):
        child = module.get_submodule(name.removeprefix(prefix))
        sizes = {runs[f"{name}.{n}"].size for n, _ in child.named_children() if runs[f"{name}.{n}"].count == 1}
        if len(sizes - {None}) > 2 or runs[name].count == 0:
            spine += _spine(child, f"{name}.", runs)
        else:
            spine.append(name)
    return spine


def _end(name: str, runs: dict[str, Run]) -> int:
    """When the module ended; a mere list of modules ends with its last member."""
    if runs[name].count:
        return runs[name].end
    return max((run.end for n, run in runs.items() if n.startswith(f"{name}.") and run.count), default=-1)


def _layers_in(module: nn.Module) -> int:
    """Convolutions in a module, whatever their class."""
    return sum(isinstance(w := getattr(m, "weight", None), Tensor) and w.ndim > 2 for m in module.modules())
