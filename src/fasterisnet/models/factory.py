"""`build_model`: a classifier from its name, as plain as the library that wrote it made it."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fasterisnet.errors import FasterISNetError, InputError, UsageError
from fasterisnet.extras import install
from fasterisnet.models.ag_sononet import ag_sononet, small_ag_sononet
from fasterisnet.models.small import half_resnet18, small_network
from fasterisnet.models.unets import multitask_unet, small_multitask_unet
from fasterisnet.models.weights import COLOURS, convolutions, for_channels, load_weights, transfer

OWN: dict[str, Callable[[int, int], nn.Module]] = {
    "small": small_network,
    "resnet18_half": half_resnet18,
    "ag_sononet": ag_sononet,
    "ag_sononet_small": small_ag_sononet,
    "multitask_unet": multitask_unet,
    "multitask_unet_small": small_multitask_unet,
}
LIBRARIES = ("", "torchvision", "timm")
TRANSFORMERS = "vit_"  # torchvision's that are made for one size of images; their patches are named last
# A second output in training is nothing a method or a metric could use. (`init_weights`: what torchvision does anyway,
# without its warning.)
WITHOUT_AUXILIARY = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


def build_model(
    name: str,
    classes: int,
    *,
    channels: int = 3,
    size: int | None = None,
    pretrained: bool | str = False,
    trust: bool = False,
) -> nn.Module:
    """A classifier with `classes` logits.

    name: a torchvision model (`resnet18`, `torchvision:resnet18`), a timm model (`resnet18d`, `timm:resnet18d`; timm is
    asked when torchvision does not know the name), one of `OWN`, or `package.module:function`. That function is run, if
    `trust` says so; it gets `num_classes`, `channels`, `size` and `pretrained` if it has such arguments. size: pixels
    of a side, for transformers made for one size (the library's if None). pretrained: True for the weights the library
    offers, or the path of a .safetensors or .pt file; the head may differ.
    """
    check_trust(name, trust)
    if classes < 1 or channels < 1:
        raise InputError(f"A classifier needs at least 1 class and 1 channel, not {classes} and {channels}.")
    offered = pretrained is True
    library, bare = _parts(name)
    if bare in OWN and not library:
        model = _own(bare, classes, channels, offered)
    elif library in ("", "torchvision") and bare in _torchvision_names():
        model = _from_torchvision(bare, classes, channels, size, offered)
    elif library in ("", "timm") and _is_timm(bare):
        model = _from_timm(bare, classes, channels, size, offered)
    elif library not in LIBRARIES and all(map(str.isidentifier, [*library.split("."), bare])):
        model = _from_function(library, bare, classes, channels, size, offered)
    else:
        raise UsageError(f"There is no model '{name}'.{_nearest(name)}")
    if isinstance(pretrained, str | os.PathLike):
        _from_file(model, os.fspath(pretrained))
    return model


def names_code(name: str) -> bool:
    """Whether a model is named as code to import, not as one of the libraries' own."""
    return _parts(name)[0] not in LIBRARIES


def check_trust(name: str, trust: bool) -> None:
    """The one gate before a name becomes code: somebody who may run it has to have said so."""
    if names_code(name) and not trust:
        raise UsageError(
            f"The model '{name}' is code that would be imported and called; if you trust it, say --trust (trust=True)."
        )


def _parts(name: str) -> tuple[str, str]:
    """Library, or module to import, and the name in it."""
    library, _, bare = name.rpartition(":")
    return library, bare


def model_names() -> list[str]:
    """Every name `build_model` knows, those of timm with `timm:` in front."""
    return [*OWN, *_torchvision_names(), *(f"timm:{name}" for name in _timm_names())]


def _own(name: str, classes: int, channels: int, pretrained: bool) -> nn.Module:
    if pretrained:
        raise InputError(f"The model '{name}' has no weights to download; give the path of a file, or train it.")
    return OWN[name](classes, channels)


# --- torchvision ----------------------------------------------------------------------------------------------------


def _torchvision_names() -> list[str]:
    models = _needed("torchvision.models")
    return models.list_models(module=models)


def _from_torchvision(name: str, classes: int, channels: int, size: int | None, pretrained: bool) -> nn.Module:
    models = _needed("torchvision.models")
    special: dict[str, Any] = WITHOUT_AUXILIARY.get(name, {})
    if size is not None and name.startswith(TRANSFORMERS):
        _check_patches(name, size, int(name.rpartition("_")[2]))
        special = {"image_size": size}
    model = models.get_model(name, weights=None, num_classes=classes, **special)
    if channels != COLOURS:
        _adapt_first_convolution(model, name, channels)
    if pretrained:
        with _downloading(name):
            taught = models.get_model(name, weights="DEFAULT").state_dict()
        if "image_size" in special:
            vit = importlib.import_module("torchvision.models.vision_transformer")
            taught = vit.interpolate_embeddings(size, int(name.rpartition("_")[2]), taught)
        transfer(model, taught)
    return model


def _check_patches(name: str, size: int, patch: int) -> None:
    if size % patch:
        near = " or ".join(str(n) for n in (size // patch * patch, -(-size // patch) * patch) if n)
        raise UsageError(
            f"'{name}' cuts images into patches of {patch} pixels, and {size} is not a multiple; take --size {near}."
        )


def _adapt_first_convolution(model: nn.Module, name: str, channels: int) -> None:
    found = convolutions(model)
    if not found or found[0][1].in_channels != COLOURS:
        raise InputError(
            f"'{name}' has no first convolution of {COLOURS} channels that could be made one of {channels}."
        )
    path, old = found[0]
    new = nn.Conv2d(
        channels, old.out_channels, old.kernel_size, old.stride, old.padding, old.dilation,  # pyright: ignore[reportArgumentType]
        bias=old.bias is not None, padding_mode=old.padding_mode,
    )  # fmt: skip
    new.weight.data = for_channels(old.weight.data, channels)
    new.bias = old.bias
    parent, _, child = path.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


# --- timm -----------------------------------------------------------------------------------------------------------


def _timm_names() -> list[str]:
    return _needed("timm").list_models()


def _is_timm(name: str) -> bool:
    """Whether timm has the network and, behind a dot, the weights that a name may ask for."""
    timm = _needed("timm")
    architecture, dot, _ = name.partition(".")
    return timm.is_model(architecture) and (not dot or name in timm.list_models(f"{architecture}.*", include_tags=True))


def _from_timm(name: str, classes: int, channels: int, size: int | None, pretrained: bool) -> nn.Module:
    timm = _needed("timm")
    options: dict[str, Any] = {"num_classes": classes, "in_chans": channels}
    with torch.device("meta"):
        patches = getattr(timm.create_model(name, **options), "patch_embed", None)
    made_for = getattr(patches, "img_size", None)
    if size is not None and made_for is not None and tuple(made_for) != (size, size):
        patch: Any = getattr(patches, "patch_size", 1)
        _check_patches(name, size, patch if isinstance(patch, int) else patch[0])
        options["img_size"] = size
    with _downloading(name) if pretrained else nullcontext():
        return timm.create_model(name, pretrained=pretrained, **options)


# --- someone's own --------------------------------------------------------------------------------------------------


def _from_function(
    module: str, function: str, classes: int, channels: int, size: int | None, pretrained: bool
) -> nn.Module:
    where = f"{module}:{function}"
    with _working_directory_last():
        build = _imported(module, function)
        offered: dict[str, Any] = {"num_classes": classes, "channels": channels, "pretrained": pretrained}
        accepted = _accepted(build, offered | ({} if size is None else {"size": size}))
        if pretrained and "pretrained" not in accepted:
            raise InputError(f"'{where}' takes no argument 'pretrained'; give the path of a weights file instead.")
        try:
            model = build(**accepted)
        except TypeError as error:
            raise InputError(f"'{where}' cannot be called with {', '.join(accepted) or 'nothing'}: {error}") from error
        except FasterISNetError:
            raise
        except Exception as error:  # somebody's code
            raise InputError(f"'{where}' failed, {_place_of(error)}.") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"'{where}' returned a {type(model).__name__}; it has to return a torch.nn.Module.")
    return model


def _imported(module: str, function: str) -> Callable[..., Any]:
    where = f"{module}:{function}"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise InputError(f"Importing '{module}' for the model '{where}' failed: {error}") from error
        raise InputError(
            f"There is no module '{error.name}' for the model '{where}'; it is looked for among the installed packages "
            f"and in {os.getcwd()}. Models of libraries are named 'torchvision:NAME' or 'timm:NAME'."
        ) from error
    except (ImportError, ValueError, TypeError) as error:
        raise InputError(f"Importing '{module}' for the model '{where}' failed: {error}") from error
    except Exception as error:  # somebody's code
        raise InputError(f"Importing '{module}' for the model '{where}' failed, {_place_of(error)}.") from error
    build = getattr(found, function, None)
    if build is not None and not callable(build):
        raise InputError(f"'{module}' has no function '{function}'; what is called so is a {type(build).__name__}.")
    if build is None:
        close = difflib.get_close_matches(function, [n for n in dir(found) if not n.startswith("_")])
        hint = f" Near it: {', '.join(close)}." if close else ""
        raise InputError(f"'{module}' has no function '{function}'.{hint}")
    return build


def _place_of(error: Exception) -> str:
    """Where somebody's code raised an error, and which."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"in {last.filename}, line {last.lineno}: {type(error).__name__}: {error}"


def _accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a function has a name for; one with `**kwargs`, as those of torchvision, gets num_classes."""
    parameters = inspect.signature(function).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {p.name for p in parameters if p.kind in by_name}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        names.add("num_classes")
    return {name: value for name, value in offered.items() if name in names}


@contextmanager
def _working_directory_last() -> Iterator[None]:
    """Modules beside the user can be imported, behind the installed ones."""
    here = os.getcwd()
    if here in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


# --- weights and messages -------------------------------------------------------------------------------------------


def _from_file(model: nn.Module, path: str) -> None:
    done = load_weights(model, path)
    if done.left or done.unused:
        warnings.warn(
            f"{path}: {len(done.loaded)} tensors loaded. Not in the file, or of another shape, and therefore as "
            f"initialised: {', '.join(done.left) or 'none'}. Not in the model: {', '.join(done.unused) or 'none'}.",
            stacklevel=3,
        )


@contextmanager
def _downloading(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"The pretrained weights of '{name}' cannot be had ({str(error)[:200]}). Download the file on a machine "
            "that can, and give its path (.safetensors or .pt) as pretrained; or train without."
        ) from error


def _needed(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".", maxsplit=1)[0]
        raise InputError(f"Models by name need the package {package}: {install('train')}.") from error


def _nearest(name: str) -> str:
    library, bare = _parts(name)
    known = {"torchvision": _torchvision_names, "timm": _timm_names}
    names = known[library]() if library in known else sorted({*OWN, *_torchvision_names(), *_timm_names()})
    close = difflib.get_close_matches(bare, names, n=4)
    hint = f" Near it: {', '.join(close)}." if close else ""
    return f"{hint} Names are those of torchvision, of timm, {', '.join(OWN)}, or 'package.module:function'."
