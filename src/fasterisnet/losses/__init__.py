"""Losses on relevance: pure functions of heatmaps and masks, and the calibration of their range."""

from fasterisnet.losses.calibration import Range, Ranges, RunningMoments, range_from_moments, total_relevance
from fasterisnet.losses.gwrp import gwrp
from fasterisnet.losses.heatmap import (
    HeatmapLoss,
    HeatmapLossParts,
    background_loss,
    deep_supervision_loss,
    foreground_loss,
    has_foreground,
    heatmap_loss,
    prepare_masks,
    resize_masks,
)

__all__ = [
    "HeatmapLoss",
    "HeatmapLossParts",
    "Range",
    "Ranges",
    "RunningMoments",
    "background_loss",
    "deep_supervision_loss",
    "foreground_loss",
    "gwrp",
    "has_foreground",
    "heatmap_loss",
    "prepare_masks",
    "range_from_moments",
    "resize_masks",
    "total_relevance",
]
