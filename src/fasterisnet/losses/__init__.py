"""Losses on logits and on relevance: pure functions of tensors, and the calibration of their range."""

from fasterisnet.losses.calibration import RunningMoments, range_from_moments, total_relevance
from fasterisnet.losses.classification import are_chances, classification_loss, is_multi_label
from fasterisnet.losses.gwrp import decay_for, gwrp
from fasterisnet.losses.heatmap import (
    HeatmapLoss,
    HeatmapLossParts,
    background_loss,
    depth_shares,
    foreground_loss,
    heatmap_loss,
)
from fasterisnet.losses.masks import Masks, fitting_masks, gathered_masks, has_foreground, prepare_masks, resize_masks
from fasterisnet.losses.segmentation import intersection_over_union, segmentation_loss

__all__ = [
    "HeatmapLoss", "HeatmapLossParts", "Masks", "RunningMoments", "are_chances", "background_loss",
    "classification_loss", "decay_for", "depth_shares", "fitting_masks", "foreground_loss", "gathered_masks", "gwrp",
    "has_foreground", "heatmap_loss", "intersection_over_union", "is_multi_label", "prepare_masks",
    "range_from_moments", "resize_masks", "segmentation_loss", "total_relevance",
]  # fmt: skip
