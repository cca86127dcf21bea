"""Ways to train a classifier, one interface: `method.loss(model, images, labels, masks) -> Parts`."""

from fasterisnet.methods.base import Parts, Standard, Step
from fasterisnet.methods.calibrate import calibrate
from fasterisnet.methods.isnet import (
    Dual,
    GradInput,
    ISNet,
    Original,
    Selective,
    SoftmaxGradInput,
    Stochastic,
    normalised_box,
)

__all__ = [
    "Dual", "GradInput", "ISNet", "Original", "Parts", "Selective", "SoftmaxGradInput", "Standard", "Step",
    "Stochastic", "calibrate", "normalised_box",
]  # fmt: skip
