"""Everything a training run can be told: one flat list of options, the same on the command line and in YAML."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fasterisnet.errors import UsageError
from fasterisnet.files import read_file
from fasterisnet.methods import METHODS

Check = Callable[[Any], Any]
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed")
MOST = 2**53  # of anything that is counted
LONGEST = 2**20  # bytes of a file of options
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


# --- kinds of values: each takes what YAML made of a text and returns what the run uses, or raises ValueError ---------


def text(value: Any) -> str:
    """Any text."""
    if isinstance(value, bool | list | dict) or value is None:
        raise ValueError("a text")
    return str(value)


def one_of(*choices: str) -> Check:
    """One of a few words."""

    def check(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return value

    check.choices = choices  # pyright: ignore[reportFunctionMemberAccess]
    return check


def whole(least: int) -> Check:
    """A whole number."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise ValueError(f"a whole number, {least} or more")
        return value

    return check


def number(low: float = 0.0, high: float = float("inf")) -> Check:
    """A number in a range; YAML takes 1e-3 for a text."""

    def check(value: Any) -> float:
        try:
            found = float(value) if not isinstance(value, bool) else None
        except (TypeError, ValueError, OverflowError):
            found = None
        if found is None or not low <= found <= high or math.isinf(found):
            raise ValueError(
                f"a number from {low:g} to {high:g}" if high < float("inf") else f"a number from {low:g} on"
            )
        return found

    return check


def switch(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def numbers(value: Any) -> list[float]:
    """A list of numbers."""
    try:
        found = [float(v) for v in (value.split(",") if isinstance(value, str) else value)]
        if not all(map(math.isfinite, found)):
            raise ValueError
        return found
    except (TypeError, ValueError, OverflowError):
        raise ValueError("a list of numbers, like [0.485, 0.456, 0.406]") from None


def weight(value: Any) -> float | list[float] | None:
    """P: a number, one for each epoch, or nothing for the paper's."""
    if value is None:
        return None
    try:
        found = numbers(value) if isinstance(value, list) else number(0, 1)(value)
        if isinstance(found, list) and not (found and all(0 <= v <= 1 for v in found)):
            raise ValueError
    except ValueError:
        raise ValueError("a number from 0 to 1, or a list with one for each epoch") from None
    return found


def depths(value: Any) -> bool | list[str]:
    """True, false or names of modules."""
    if isinstance(value, bool):
        return value
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return value
    raise ValueError("true, false or a list of module names")


def names(value: Any) -> list[str]:
    """A list of names."""
    found = value.split(",") if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(v, str) for v in found):
        raise ValueError("a list of names")
    return found


def ranges(value: Any) -> str | list[float] | None:
    """A file of an earlier calibration, a pair (C1, C2), or nothing for a calibration of this run's own."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 2 and 0 < number()(value[0]) <= number()(value[1]):
        return [float(v) for v in value]
    raise ValueError("a calibration.json, or a pair [C1, C2] with 0 < C1 <= C2")


def weights(value: Any) -> str | list[float] | None:
    """The word balanced, a weight for each class, or nothing."""
    if value is None or value == "balanced":
        return value
    try:
        found = numbers(value)
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise ValueError("balanced, or a list with a number above 0 for each class") from None
    return found


def labels(value: Any) -> list[int]:
    """Numbers of labels."""
    if value in (None, "", []):
        return []
    from fasterisnet.data.sources import read_foreground

    try:
        return list(read_foreground(value))
    except (TypeError, ValueError):
        raise ValueError("the numbers of labels, like 1,2") from None


def window(value: Any) -> str | list[float] | None:
    """Two numbers, auto or nothing."""
    if value is None:
        return None
    from fasterisnet.data.sources import read_window

    try:
        found = read_window(value)
    except (TypeError, ValueError):
        raise ValueError("low,high with low below high, or auto") from None
    return found if isinstance(found, str) else list(found)


def pretrained(value: Any) -> bool | str:
    """True, false or a file."""
    if isinstance(value, bool | str):
        return value
    raise ValueError("true, false or a .safetensors or .pt file")


def _option(default: Any, check: Check, explanation: str, *, rare: bool = False, argument: str = "") -> Any:
    """rare: not shown in the command's short help. argument: what a method that takes this option calls it."""
    metadata = {"check": check, "help": explanation, "rare": rare, "argument": argument}
    return field(default_factory=lambda: list(default), metadata=metadata) if isinstance(default, list) else field(
        default=default, metadata=metadata
    )  # fmt: skip


@dataclass
class Config:
    """A training run."""

    data: str = _option("", text, "folder, CSV, mnist[:DIR], dogs:DIR, xray:DIR or drawn")
    method: str = _option("stochastic", one_of(*METHODS), ", ".join(METHODS))
    model: str = _option("resnet50", text, "name in torchvision or timm, small, or package.module:function")
    epochs: int = _option(100, whole(1), "passes over the training data")
    size: int = _option(224, whole(1), "pixels of the square the network sees")
    out: str = _option("", text, "run folder to create (default: runs/METHOD-MODEL)")

    batch: int = _option(16, whole(1), "samples a step, over all processes")
    accumulate: int = _option(1, whole(1), "steps whose gradients are added up before an update", rare=True)
    lr: float = _option(1e-3, number(), "learning rate")
    optimizer: str = _option("sgd", one_of("sgd", "adamw"), "sgd or adamw", rare=True)
    sampling: str = _option(
        "natural",
        one_of("natural", "balanced"),
        "balanced repeats images of rare classes: all are seen alike",
        rare=True,
    )
    class_weights: Any = _option(
        None, weights, "balanced, or a list: how much a sample of each class counts in the classification loss", rare=True
    )
    momentum: float = _option(0.9, number(0, 1), "momentum of SGD", rare=True)
    weight_decay: float = _option(0.0, number(), "weight decay", rare=True)
    schedule: str = _option("constant", one_of("constant", "cosine", "onecycle"), "constant, cosine or onecycle")
    clip: float = _option(1.0, number(), "largest norm of the gradient; 0 for no limit", rare=True)
    early_stopping: int = _option(0, whole(0), "stop after so many epochs without a better validation loss", rare=True)
    validation: str = _option("val", text, "split the best epoch is chosen on", rare=True)
    watch: list[str] = _option([], names, "splits whose accuracy is logged after every epoch", rare=True)
    holdout: float = _option(
        0.2, number(0.001, 0.9), "share of train held out if there is no validation split", rare=True
    )

    heatmap_weight: Any = _option(None, weight, "P, a number or a list over epochs (the paper's)", argument="heatmap_weight")
    decay: float = _option(0.9, number(0, 1), "d of GWRP in the background loss", argument="decay")
    background_weight: float = _option(1.0, number(), "w1", rare=True, argument="background_weight")
    foreground_weight: float = _option(1.0, number(), "w2", rare=True, argument="foreground_weight")
    e: float = _option(1.0, number(1e-12), "E of the background loss", rare=True, argument="e")
    epsilon: float = _option(0.01, number(1e-12), "stabiliser of LRP", rare=True, argument="epsilon")
    mask_share: float = _option(1.0, number(0, 1), "share of the training masks that is used", rare=True)
    zb: bool = _option(True, switch, "zB rule on the first layer", rare=True, argument="box")
    deep_supervision: Any = _option(False, depths, "supervise hidden maps too: true, or module names", argument="deep_supervision")
    maps_at_once: int = _option(0, whole(0), "original only: maps in memory together; 0 for all", rare=True, argument="maps_at_once")
    ranges: Any = _option(None, ranges, "C1 and C2: a pair or a calibration.json (default: calibrate)", rare=True)
    calibration_epochs: int = _option(4, whole(0), "plain epochs before C1 and C2 are measured", rare=True)
    calibration_batches: int = _option(
        0, whole(0), "batches of each of these epochs, and of the one to measure; 0 for all", rare=True
    )
    calibration_lr: float = _option(1e-3, number(), "learning rate of the calibration", rare=True)

    pretrained: Any = _option(False, pretrained, "start from the library's weights, or from a file")
    channels: int = _option(3, whole(1), "of the images the network sees: 3, or 1", rare=True)
    mean: list[float] = _option([], numbers, "normalisation; ImageNet's if pretrained, otherwise none", rare=True)
    std: list[float] = _option([], numbers, "normalisation", rare=True)
    fit: str = _option("stretch", one_of("stretch", "pad"), "images that are not square: stretch or pad", rare=True)
    equalise: bool = _option(False, switch, "histogram equalisation", rare=True)
    augmentation: str = _option("none", one_of("none", "flip", "crop", "xray"), "none, flip, crop or xray")
    foreground: list[int] = _option([], labels, "labels that are the object, if masks are label maps: 1,2")
    window: Any = _option(None, window, "what of more than 8 bits is black and white: low,high or auto", rare=True)
    allow_missing_masks: bool = _option(
        False, switch, "train with a heatmap method though more than half of the masks are missing", rare=True
    )
    refine_boxes: bool = _option(False, switch, "GrabCut inside boxes given instead of masks", rare=True)
    on_bad_image: str = _option(
        "stop", one_of("stop", "skip"), "an image that cannot be read: stop, or skip it", rare=True
    )

    seed: int = _option(0, whole(0), "of everything random")
    workers: int = _option(2, whole(0), "processes that load images", rare=True)
    loader_timeout: float = _option(600.0, number(), "seconds a batch may take to load; 0 for ever", rare=True)
    precision: str = _option("32-true", one_of(*PRECISIONS), "32-true, 64-true, bf16-mixed or 16-mixed")
    accelerator: str = _option("auto", one_of("auto", "cpu", "gpu", "mps"), "auto, cpu, gpu or mps", rare=True)
    devices: int = _option(1, whole(1), "processes on this machine (DDP if more than one)")
    nodes: int = _option(1, whole(1), "machines", rare=True)
    channels_last: bool = _option(False, switch, "memory layout that is faster on many processors", rare=True)
    checkpoint_every: int = _option(
        0, whole(0), "updates between saved states, besides one after every epoch", rare=True
    )
    checkpoint_minutes: float = _option(
        10.0, number(), "minutes of training after which the state is saved, too; 0 for never", rare=True
    )
    explained: int = _option(
        0, whole(0), "samples of each test, about, whose maps are measured for the report; 0 for all", rare=True
    )
    tensorboard: bool = _option(True, switch, "write logs for TensorBoard", rare=True)

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            try:
                setattr(self, option.name, option.metadata["check"](value))
            except ValueError as error:
                raise UsageError(f"{option.name} is {reprlib.repr(value)}; it has to be {error}.") from None
        if not self.data:
            raise UsageError("data is missing: name a folder, a CSV manifest, or mnist, dogs:DIR, xray:DIR or drawn.")
        if self.channels not in (1, 3):
            raise UsageError(f"channels is {self.channels}; it has to be 3 or 1.")
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, self.channels):
            raise UsageError(f"mean and std need {self.channels} numbers each, or none.")
        if self.pretrained is True and not self.mean and self.channels == 3:
            self.mean, self.std = (list(values) for values in IMAGENET)
        self.out = self.out or f"runs/{self.method}-{Path(self.model).name.replace(':', '-')}"

    @classmethod
    def read(cls, path: Path | None, changes: Mapping[str, Any]) -> Config:
        """The options of a YAML file, if any, with changes on top."""
        values: Any = {}
        if path is not None:
            import yaml

            try:
                values = yaml.safe_load(read_file(path, LONGEST, pipes=True).decode("utf-8")) or {}
            except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
                raise UsageError(f"{path} cannot be read as YAML: {error}") from error
            if not isinstance(values, dict):
                raise UsageError(f"{path} has to hold options, one `key: value` a line.")
        known = [option.name for option in fields(cls)]
        cleaned = {str(key).replace("-", "_"): value for key, value in values.items()}
        for key in cleaned:
            if key not in known:
                raise UsageError(f"{path} has an unknown option '{key}'{nearest(key, known)}")
        return cls(**{**cleaned, **changes})

    def write(self) -> str:
        """As YAML."""
        import yaml

        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True, width=110)


def nearest(word: str, known: list[str]) -> str:
    """How an error about an unknown word ends."""
    close = difflib.get_close_matches(word, known, 1, 0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; there are: {', '.join(known)}."
