"""The original ISNet: a map for every class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fasterisnet.errors import InputError
from fasterisnet.lrp import rules
from fasterisnet.lrp.explain import relevance_maps
from fasterisnet.lrp.targets import AllLogits, Logit, Target
from fasterisnet.lrp.trace import Trace
from fasterisnet.methods.base import register_method
from fasterisnet.methods.isnet import ISNet, Terms


@register_method("original")
class Original(ISNet):
    """One LRP-epsilon map for every class (paper: isnetOriginal).

    maps_at_once: how many maps are in memory together with what their gradients need. Fewer take less memory and, as
    every group goes back through the network on its own, more time; None is all. With fewer, `parts.background` and
    `parts.foreground` are numbers to log; `parts.heatmap` and `parts.total` carry the gradient.
    """

    default_depths = False

    def __init__(self, *args: Any, maps_at_once: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if maps_at_once is not None and maps_at_once < 1:
            raise InputError(f"maps_at_once is {maps_at_once}; it has to be at least 1, or None for all.")
        self.maps_at_once = maps_at_once

    def targets(self, logits: Tensor) -> list[tuple[str, Target]]:
        return [(self.rules_used[0], AllLogits())]

    def _heatmap_terms(self, trace: Trace, mask: Tensor, include: Tensor, model: nn.Module) -> Terms:
        count = trace.logits.shape[1]
        group = self.maps_at_once or count
        if group >= count or not bool(include.any()):
            return super()._heatmap_terms(trace, mask, include, model)
        if trace.captures:
            raise InputError("maps_at_once does not go with deep supervision, which compares the depths over all maps.")
        parameters = [p for p in model.parameters() if p.requires_grad]
        learning = torch.is_grad_enabled() and len(parameters) > 0
        table = rules.table(self.rules_used[0], self.epsilon)
        terms = []
        for start in range(0, count, group):
            classes = range(start, min(start + group, count))
            maps = [relevance_maps(trace, table, Logit(c), create_graph=learning)["input"] for c in classes]
            parts = self._terms_of({"input": torch.stack(maps, 1)}, mask, include, (slice(start, classes.stop), count))
            background, foreground, heatmap = (len(classes) / count * term for term in parts)
            heatmap = _settled(heatmap, parameters) if learning else heatmap
            terms.append(torch.stack([background.detach(), foreground.detach(), heatmap]))
            del maps, parts, heatmap
        background, foreground, heatmap = torch.stack(terms).sum(0)
        return background, foreground, heatmap


def _settled(term: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The same number with the same gradient, which is computed at once so that the graph behind it can go."""
    gradients = torch.autograd.grad(term, parameters, retain_graph=True, allow_unused=True)
    pairs = [(p, g.detach()) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    surrogate = sum(((p * g).sum() for p, g in pairs), start=term.new_zeros(()))
    return term.detach() + (surrogate - surrogate.detach())
