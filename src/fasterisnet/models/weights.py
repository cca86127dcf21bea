"""Weights of another model or of a local file: what fits is taken over, what does not is reported."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fasterisnet.errors import InputError
from fasterisnet.extras import install

WRAPPERS = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "model.", "backbone.")
BEST = "best.safetensors"  # of a run folder
COLOURS = 3
# torchvision's DenseNet files are older than its DenseNet: `denselayer1.norm.1` is now `denselayer1.norm1`.
OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12])\.")


class Transfer(NamedTuple):
    """What happened to the tensors: loaded, left in the model as they were, of no use in the source."""

    loaded: list[str]
    left: list[str]
    unused: list[str]


def load_weights(model: nn.Module, path: str | Path) -> Transfer:
    """Loads every tensor of a .safetensors or .pt file that fits the model by name and shape; the head may differ.

    Of a run folder its best epoch is taken. A first convolution for another number of channels is adapted. Files of
    other kinds, and files that hold more than tensors, are refused.
    """
    file = Path(path) / BEST if Path(path).is_dir() else Path(path)
    done = transfer(model, _read(file))
    if not done.loaded:
        raise InputError(
            f"None of the {len(done.unused)} tensors of {file} fits the model by name and shape; they are of another "
            f"architecture. The file has {_some(done.unused)}; the model has {_some(done.left)}."
        )
    return done


def transfer(model: nn.Module, tensors: Mapping[str, Tensor]) -> Transfer:
    """Copies the tensors that fit the model by name and shape into it."""
    own = model.state_dict()
    opening = next((f"{name}.weight" for name, _ in convolutions(model)), None)
    fitting = {}
    for name, tensor in tensors.items():
        wanted = own[name].shape if name in own else None
        if name == opening and wanted is not None and _differs_in_channels(tensor.shape, wanted):
            tensor = for_channels(tensor, wanted[1])  # noqa: PLW2901
        if tensor.shape == wanted:
            fitting[name] = tensor
    model.load_state_dict(fitting, strict=False)
    return Transfer(
        list(fitting), [name for name in own if name not in fitting], [name for name in tensors if name not in fitting]
    )


def convolutions(model: nn.Module) -> list[tuple[str, nn.Conv2d]]:
    """The 2d convolutions by name, the network's first one first."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]


def for_channels(weight: Tensor, channels: int) -> Tensor:
    """The filters of a first convolution for another number of channels, with the same answer to a grey image."""
    shared = weight.sum(1, keepdim=True) / channels
    return shared.repeat(1, channels, 1, 1)


def _differs_in_channels(one: torch.Size, other: torch.Size) -> bool:
    return len(one) == len(other) == 4 and one[0] == other[0] and one[2:] == other[2:] and one[1] != other[1]


def _read(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, without the wrapping that training programs put around them."""
    if not file.is_file():
        raise InputError(f"{file} is not a file; weights come from a .safetensors or .pt file, or from a run folder.")
    found = _safetensors(file) if file.suffix == ".safetensors" else _pickled_tensors(file)
    for wrapper in WRAPPERS:
        if isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    if not tensors:
        raise InputError(f"{file} holds no tensors by name; save it with torch.save(model.state_dict(), ...).")
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return {OLD_DENSENET.sub(r"\1\2.", name): value for name, value in tensors.items()}


def _safetensors(file: Path) -> dict[str, Any]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise InputError(f"Reading {file} needs the package safetensors: {install('train')}.") from error
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} cannot be read as safetensors; it may be cut off: {error}") from error


def _pickled_tensors(file: Path) -> dict[str, Any]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{file} is refused: it is damaged, or holds more than tensors and would run code when loaded. "
            "Save the weights alone, with torch.save(model.state_dict(), ...) or as safetensors."
        ) from error
    except Exception as error:  # torch raises many kinds for files that are something else
        raise InputError(f"{file} cannot be read as PyTorch weights; it may be cut off: {str(error)[:200]}") from error
    if not isinstance(found, Mapping):
        raise InputError(f"{file} holds a {type(found).__name__}, not tensors by name (a state_dict).")
    return dict(found)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
