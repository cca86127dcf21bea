"""How good a trained classifier is, where it looks, and how to show and ship it."""

from fasterisnet.evaluation.attention import (
    background_area,
    background_mass,
    highest_pixel_inside,
    rank_accuracy,
)
from fasterisnet.evaluation.export import export_model
from fasterisnet.evaluation.figures import accuracy_figure, curve_of_f, heatmap_figure, save_figure
from fasterisnet.evaluation.metrics import Metrics, classification_metrics, evaluate
from fasterisnet.evaluation.overlays import overlay

__all__ = [
    "Metrics", "accuracy_figure", "background_area", "background_mass", "classification_metrics", "curve_of_f",
    "evaluate", "export_model", "heatmap_figure", "highest_pixel_inside", "overlay", "rank_accuracy", "save_figure",
]  # fmt: skip
