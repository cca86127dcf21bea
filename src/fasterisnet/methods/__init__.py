"""Ways to train a classifier, one interface: `method.loss(model, images, labels, masks) -> Parts`."""

from fasterisnet.methods.base import Parts, Standard, Step
from fasterisnet.methods.calibrate import calibrate
from fasterisnet.methods.dual import Dual
from fasterisnet.methods.grad_input import GradInput, SoftmaxGradInput
from fasterisnet.methods.isnet import ISNet, normalised_box
from fasterisnet.methods.original import Original
from fasterisnet.methods.selective import Selective
from fasterisnet.methods.stochastic import Stochastic

__all__ = [
    "Dual", "GradInput", "ISNet", "Original", "Parts", "Selective", "SoftmaxGradInput", "Standard", "Step",
    "Stochastic", "calibrate", "normalised_box",
]  # fmt: skip
