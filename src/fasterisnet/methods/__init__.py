"""Ways to train a classifier, one interface: `method.loss(model, images, labels, masks) -> Parts`."""

from fasterisnet.methods.base import METHODS, Method, Parts, Standard, Step, method_class, options_of, register_method
from fasterisnet.methods.calibrate import calibrate
from fasterisnet.methods.dual import Dual
from fasterisnet.methods.grad_input import GradInput, SoftmaxGradInput
from fasterisnet.methods.isnet import ISNet
from fasterisnet.methods.multitask_unet import MultitaskUNet
from fasterisnet.methods.original import Original
from fasterisnet.methods.ranges import Range, Ranges
from fasterisnet.methods.selective import Selective
from fasterisnet.methods.stochastic import Stochastic
from fasterisnet.methods.unet_classifier import UNetClassifier

__all__ = [
    "METHODS", "Dual", "GradInput", "ISNet", "Method", "MultitaskUNet", "Original", "Parts", "Range", "Ranges",
    "Selective", "SoftmaxGradInput", "Standard", "Step", "Stochastic", "UNetClassifier", "calibrate", "method_class",
    "options_of", "register_method",
]  # fmt: skip
