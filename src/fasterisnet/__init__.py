"""Image classifiers that ignore the background, by training their LRP heatmaps."""

import warnings

with warnings.catch_warnings():  # that NumPy is not there is no news to whoever did not install it
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    import torch  # noqa: F401

from fasterisnet import targets
from fasterisnet.adapters import LRP, create_model, figure, overlay
from fasterisnet.errors import FasterISNetError, RuleWarning
from fasterisnet.lrp.box import normalised_box
from fasterisnet.lrp.check import check
from fasterisnet.lrp.explain import explain
from fasterisnet.lrp.record import recording
from fasterisnet.lrp.rules import RuleTable
from fasterisnet.lrp.trace import relevance
from fasterisnet.memory import keep_memory
from fasterisnet.methods import (
    GAIN,
    RRR,
    BackgroundErase,
    BackgroundSwap,
    Distillation,
    Dual,
    Energy,
    GradInput,
    MaskedInput,
    Original,
    Parts,
    Selective,
    SoftmaxGradInput,
    Standard,
    Step,
    Stochastic,
    calibrate,
)
from fasterisnet.methods.ranges import Ranges

__version__ = "0.1.0"

__all__ = [
    "GAIN", "LRP", "RRR", "BackgroundErase", "BackgroundSwap", "Distillation", "Dual", "Energy", "FasterISNetError",
    "GradInput", "MaskedInput", "Original", "Parts", "Ranges", "RuleTable", "RuleWarning", "Selective",
    "SoftmaxGradInput", "Standard", "Step", "Stochastic", "calibrate", "check", "create_model", "explain", "figure",
    "keep_memory", "normalised_box", "overlay", "recording", "relevance", "targets",
]  # fmt: skip
