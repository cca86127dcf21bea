"""Classifiers by name: torchvision's, timm's, your own, and a small one for demos."""

from fasterisnet.models.factory import build_model, check_trust, model_names, names_code
from fasterisnet.models.small import small_network
from fasterisnet.models.weights import Transfer, load_weights, transfer

__all__ = [
    "Transfer", "build_model", "check_trust", "load_weights", "model_names", "names_code", "small_network", "transfer",
]  # fmt: skip
