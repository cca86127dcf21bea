"""The ISNet family: classifiers whose relevance in the background is punished while they train."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fasterisnet.errors import InputError
from fasterisnet.losses import (
    depth_shares,
    heatmap_loss,
    is_multi_label,
    resize_masks,
    total_relevance,
)
from fasterisnet.losses.heatmap import Decay, Foreground
from fasterisnet.lrp import rules
from fasterisnet.lrp.explain import check_inputs, observing, relevance_maps
from fasterisnet.lrp.targets import AllLogits, Target
from fasterisnet.lrp.trace import Trace
from fasterisnet.methods.background import Background
from fasterisnet.methods.depths import found_depths, supervised_depths
from fasterisnet.methods.guided import Guided, Terms, without_autocast
from fasterisnet.methods.processes import mean_of_all
from fasterisnet.methods.ranges import Range, Ranges

Weight = float | Sequence[float] | Callable[[int], float]
Depths = bool | Literal["auto"] | Sequence[str]


class ISNet(Guided):
    """`L = (1-P) L_C + P L_LRP` (paper: heatmapLoss), with maps chosen by the variant.

    heatmap_weight: P, a number, one for each epoch, or a function of the epoch. decay: d of GWRP, or "auto" for one
    that fits the size of the map. background_weight, foreground_weight: w1, w2. e: E. epsilon: the stabiliser of LRP.
    box: the range of the images for zB on the first layer (see `normalised_box`), None for no zB. ranges: C1 and C2,
    from `calibrate`, or one pair for all maps. deep_supervision: False, True (depths found by themselves), names of
    modules, or "auto": those that `ranges` was calibrated for, which are all that the network has maps at. augment:
    changes the images in training. generator: for reproducible draws; see `Method` for those of several processes.
    common: `classification` and `attached_logits`, see `Method`.
    """

    default_weight: ClassVar[float] = 0.7
    default_depths: ClassVar[bool | Literal["auto"]] = "auto"
    rules_used: ClassVar[tuple[str, ...]] = ("epsilon",)
    uses_box: ClassVar[bool] = True
    explainers: ClassVar[tuple[str, ...]] = ("epsilon", "zplus")
    needs_ranges: ClassVar[bool] = True

    def __init__(
        self,
        heatmap_weight: Weight | None = None,
        decay: Decay = "auto",
        background_weight: float = 1.0,
        foreground_weight: float = 1.0,
        e: float = 1.0,
        *,
        epsilon: float = 0.01,
        box: tuple[Any, Any] | None = None,
        ranges: Ranges | tuple[float, float] | None = None,
        deep_supervision: Depths | None = None,
        foreground: Foreground = "hybrid",
        augment: Background | None = None,
        generator: torch.Generator | None = None,
        **common: Any,
    ) -> None:
        super().__init__(augment, **common)
        self.heatmap_weight: Weight = self.default_weight if heatmap_weight is None else heatmap_weight
        self.decay: Decay = decay
        self.background_weight, self.foreground_weight = background_weight, foreground_weight
        self.e = e
        self.epsilon = epsilon
        self.box = box if self.uses_box else None
        self.ranges = ranges
        self.deep_supervision: Depths = self.default_depths if deep_supervision is None else deep_supervision
        self.foreground: Foreground = foreground
        self.generator = generator
        self._check()

    def _check(self) -> None:
        if isinstance(self.heatmap_weight, str) or (
            isinstance(self.heatmap_weight, Sequence) and len(self.heatmap_weight) == 0
        ):
            raise InputError("heatmap_weight (P) takes a number, a list with one number for each epoch, or a function.")
        if not 0 <= self.weight <= 1:
            raise InputError(f"heatmap_weight (P) is {self.weight}; it has to lie between 0 and 1.")
        if self.decay != "auto" and not (isinstance(self.decay, int | float) and 0 <= self.decay <= 1):
            raise InputError(f'decay (d) is {self.decay!r}; it has to lie between 0 and 1, or be "auto".')
        for name in ("background_weight", "foreground_weight", "e"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} is {getattr(self, name)}; it must not be negative.")
        if self.deep_supervision != "auto" and not isinstance(self.deep_supervision, bool | list | tuple):
            raise InputError('deep_supervision takes True, False, "auto" or a list of module names.')
        if self.ranges is not None and not isinstance(self.ranges, Ranges):
            _checked_pair(self.ranges)
        rules.table(self.rules_used[0], self.epsilon)

    # --- what a variant decides ------------------------------------------------------------------------------------

    @abstractmethod
    def targets(self, logits: Tensor) -> list[tuple[str, Target]]:
        """The maps of this variant: (rule, what is explained)."""

    # --- the loss --------------------------------------------------------------------------------------------------

    @property
    def weight(self) -> float:
        """P in the current epoch."""
        if callable(self.heatmap_weight):
            return float(self.heatmap_weight(self.epoch))
        if isinstance(self.heatmap_weight, Sequence):
            return float(self.heatmap_weight[min(self.epoch, len(self.heatmap_weight) - 1)])
        return float(self.heatmap_weight)

    def combine(self, classification: Any, heatmap: Any) -> Any:
        """`(1-P) L_C + P L`."""
        return (1 - self.weight) * classification + self.weight * heatmap

    def set_epoch(self, epoch: int) -> None:
        """Tells the schedule of P which epoch it is."""
        super().set_epoch(epoch)
        self._check()

    def depths(self, model: nn.Module, images: Tensor) -> list[str]:
        """The modules whose output is supervised besides the network input."""
        if self.deep_supervision == "auto":
            if self.ranges is None:
                return found_depths(model, images)
            calibrated = self.ranges.depths if isinstance(self.ranges, Ranges) else ()
            return [depth for depth in calibrated if depth != "input"]
        if self.deep_supervision is True:
            return supervised_depths(model, images)
        return list(self.deep_supervision or ())

    def terms(
        self, model: nn.Module, images: Tensor, labels: Tensor, mask: Tensor, include: Tensor
    ) -> tuple[Tensor, Terms]:
        """`L = w1*L1 + w2*L2` of the maps of this variant."""
        trace = self._trace(model, images)
        with trace.open():
            self._check_labels(trace.logits, labels)
            return trace.logits, self._heatmap_terms(trace, mask, include, model)

    def measure(self, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        """`sum |R|` (sample, map) by depth: what `calibrate` collects. Leaves the model alone."""
        check_inputs(model, images)
        method = copy.copy(self)
        method.ranges = None
        if method.generator is None:  # `observing` puts the random state back, so draws would repeat
            method.generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        with torch.inference_mode(False), observing(model):
            images = images.clone() if images.is_inference() else images
            with without_autocast(images):
                trace = method._trace(model, images)
            with trace.open():
                maps = method._maps(trace, create_graph=False)
        return {depth: total_relevance(m) for depth, m in maps.items()}

    def _trace(self, model: nn.Module, images: Tensor) -> Trace:
        tables = [rules.table(name, self.epsilon) for name in self.rules_used]
        return Trace(model, images, tables, box=self.box, layers=self.depths(model, images))

    def _maps(self, trace: Trace, *, create_graph: bool) -> dict[str, Tensor]:
        """All maps by depth, (sample, map, channel, space...)."""
        found: dict[str, list[Tensor]] = {}
        for rule, target in self.targets(trace.logits):
            maps = relevance_maps(trace, rules.table(rule, self.epsilon), target, create_graph=create_graph)
            stacked = isinstance(target, AllLogits)
            for depth, m in maps.items():
                found.setdefault(depth, []).append(m if stacked else m.unsqueeze(1))
        return {depth: torch.cat(maps, 1) for depth, maps in found.items()}

    def _heatmap_terms(self, trace: Trace, mask: Tensor, include: Tensor, model: nn.Module) -> Terms:
        """L1, L2 and `w1*L1 + w2*L2`, over all depths."""
        if not bool(include.any()):
            if trace.captures:  # others may have masks, and wait
                mean_of_all(trace.logits.new_zeros(1 + len(trace.captures)).detach(), 0, self)
            zero = trace.logits.sum() * 0
            return zero, zero, zero
        return self._terms_of(self._maps(trace, create_graph=torch.is_grad_enabled()), mask, include)

    def _terms_of(
        self, maps: dict[str, Tensor], mask: Tensor, include: Tensor, group: tuple[slice, int] | None = None
    ) -> Terms:
        """`group`: these maps are only some (which, of how many)."""
        settings: dict[str, Any] = {
            "decay": self.decay, "w1": self.background_weight, "w2": self.foreground_weight, "e": self.e,
            "foreground": self.foreground,
        }  # fmt: skip
        losses = []
        for depth, m in maps.items():
            c1, c2 = self._range(depth, *(group or (slice(None), m.shape[1])))
            if m.ndim != mask.ndim + 1:
                raise InputError(
                    f"Layer '{depth}' returns {tuple(m.shape[2:])} a sample, which is not a map that a mask could be "
                    "laid over; name modules in deep_supervision that return (batch, channel, space...)."
                )
            small = mask if depth == "input" else resize_masks(mask.amax(1, keepdim=True), m.shape[3:])
            losses.append(heatmap_loss(m, small, c1, c2, include=include, **settings))
        totals = torch.stack([loss.total for loss in losses])
        ranked = mean_of_all(totals.detach(), int(include.sum()), self) if len(losses) > 1 else totals.detach()
        shares = depth_shares(ranked)
        background = torch.stack([loss.background for loss in losses])
        foreground = torch.stack([loss.foreground for loss in losses])
        return (shares * background).sum(), (shares * foreground).sum(), (shares * totals).sum()

    def _range(self, depth: str, which: slice, total: int) -> tuple[Sequence[float], Sequence[float]]:
        """C1 and C2 of some of the `total` maps at a depth."""
        if self.ranges is None:
            raise InputError(
                f"{type(self).__name__} needs C1 and C2: ranges=fasterisnet.calibrate(method, model, loader), "
                "or a pair ranges=(C1, C2)."
            )
        if not isinstance(self.ranges, Ranges):
            c1, c2 = _checked_pair(self.ranges)
            return ([c1] * total)[which], ([c2] * total)[which]
        found: Range | None = self.ranges.depths.get(depth)
        if found is None:
            raise InputError(f"The calibration has no C1 and C2 for depth '{depth}'; calibrate again for these depths.")
        if len(found.c1) != total:
            raise InputError(
                f"The calibration has C1 and C2 for {len(found.c1)} maps at depth '{depth}', but {type(self).__name__} "
                f"makes {total} with this model; calibrate again with this method and model."
            )
        return found.c1[which], found.c2[which]

    def _check_labels(self, logits: Tensor, labels: Tensor) -> None:
        if not self.multi_label and is_multi_label(logits, labels):
            raise InputError(
                f"{type(self).__name__} explains softmax probabilities, which multi-label tasks do not have; "
                "use Stochastic, Dual or Original."
            )


def _checked_pair(pair: Any) -> tuple[float, float]:
    """C1 and C2 for every depth, as they were given."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and 0 < pair[0] <= pair[1]):
        raise InputError(f"ranges is {pair!r}; give what `calibrate` returned, or a pair (C1, C2), 0 < C1 <= C2.")
    return pair[0], pair[1]
