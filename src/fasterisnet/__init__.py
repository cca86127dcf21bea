"""Image classifiers that ignore the background, by training their LRP heatmaps."""

from fasterisnet import targets
from fasterisnet.errors import FasterISNetError, RuleWarning
from fasterisnet.losses import Ranges
from fasterisnet.memory import keep_memory
from fasterisnet.methods import (
    Dual,
    GradInput,
    Original,
    Parts,
    Selective,
    SoftmaxGradInput,
    Standard,
    Step,
    Stochastic,
    calibrate,
    normalised_box,
)
from fasterisnet.relevance.check import check
from fasterisnet.relevance.explain import explain

__all__ = [
    "Dual", "FasterISNetError", "GradInput", "Original", "Parts", "Ranges", "RuleWarning", "Selective",
    "SoftmaxGradInput", "Standard", "Step", "Stochastic", "calibrate", "check", "explain", "keep_memory",
    "normalised_box", "targets",
]  # fmt: skip
