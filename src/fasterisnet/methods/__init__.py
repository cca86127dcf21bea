"""Ways to train a classifier, one interface: `method.loss(model, images, labels, masks) -> Parts`."""

from fasterisnet.methods.background import Background, BackgroundErase, BackgroundSwap, MaskedInput
from fasterisnet.methods.base import METHODS, Method, Parts, Standard, Step, method_class, options_of, register_method
from fasterisnet.methods.calibrate import calibrate
from fasterisnet.methods.distillation import Distillation
from fasterisnet.methods.dual import Dual
from fasterisnet.methods.energy import Energy
from fasterisnet.methods.gain import GAIN
from fasterisnet.methods.grad_input import GradInput, SoftmaxGradInput
from fasterisnet.methods.guided import Guided
from fasterisnet.methods.isnet import ISNet
from fasterisnet.methods.multitask_unet import MultitaskUNet
from fasterisnet.methods.original import Original
from fasterisnet.methods.ranges import Range, Ranges
from fasterisnet.methods.rrr import RRR
from fasterisnet.methods.selective import Selective
from fasterisnet.methods.stochastic import Stochastic
from fasterisnet.methods.unet_classifier import UNetClassifier

__all__ = [
    "GAIN", "METHODS", "RRR", "Background", "BackgroundErase", "BackgroundSwap", "Distillation", "Dual", "Energy",
    "GradInput", "Guided", "ISNet", "MaskedInput", "Method", "MultitaskUNet", "Original", "Parts", "Range", "Ranges",
    "Selective", "SoftmaxGradInput", "Standard", "Step", "Stochastic", "UNetClassifier", "calibrate", "method_class",
    "options_of", "register_method",
]  # fmt: skip
