"""How good a trained classifier is, where it looks, and how to show and ship it."""

from fasterisnet.evaluation.attention import (
    Change,
    background_mass,
    change_when_background_erased,
    change_when_background_swapped,
    highest_pixel_inside,
)
from fasterisnet.evaluation.export import export_model
from fasterisnet.evaluation.figures import accuracy_figure, curve_of_f, heatmap_figure, overlay, save_figure
from fasterisnet.evaluation.metrics import Metrics, classification_metrics, evaluate

__all__ = [
    "Change", "Metrics", "accuracy_figure", "background_mass", "change_when_background_erased",
    "change_when_background_swapped", "classification_metrics", "curve_of_f", "evaluate", "export_model",
    "heatmap_figure", "highest_pixel_inside", "overlay", "save_figure",
]  # fmt: skip
