"""Everything a training run can be told: one flat list of options, the same on the command line and in YAML."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fasterisnet.errors import UsageError
from fasterisnet.files import read_file
from fasterisnet.lrp.box import IMAGENET
from fasterisnet.methods import METHODS, Method, method_class, options_of
from fasterisnet.methods.background import FILLS
from fasterisnet.runs.spelling import nearest_option
from fasterisnet.runs.values import (
    AUTO,
    Check,
    automatic,
    depths,
    labels,
    names,
    number,
    numbers,
    one_of,
    pretrained,
    ranges,
    switch,
    text,
    unless_empty,
    weight,
    weights,
    whole,
    window,
)

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed")
LONGEST = 2**20  # bytes of a file of options
# What `lr: auto` is, by optimiser: from random weights, and from weights that were trained before.
RATES = {"adamw": (2e-3, 2e-4), "sgd": (0.1, 0.01)}
# Options under one name; any that is given besides wins. `paper` is also what every run did before an option of it was
# there or got another default, so it is what a file of an older version means where it says nothing.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "optimizer": "sgd", "lr": 1e-3, "momentum": 0.9, "schedule": "constant", "batch": 16, "clip": 1.0,
        "heatmap_weight": None, "decay": 0.9, "background_weight": 1.0, "foreground_weight": 1.0, "zb": True,
        "deep_supervision": False,
        "calibration_epochs": 4, "calibration_batches": 0, "calibration_lr": 1e-3, "statistics_batches": 0,
        "settled": 0.0,
    },
}  # fmt: skip


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
    method: str = _option("stochastic", one_of(*METHODS), "stochastic, dual, background-swap, ...: see docs/methods.md")
    model: str = _option("", text, "name in torchvision or timm, small, package.module:function (resnet50)")
    epochs: int = _option(100, whole(1), "passes over the training data")
    size: int = _option(224, whole(1), "pixels of the square the network sees")
    out: str = _option("", text, "run folder to create (default: runs/METHOD-MODEL)")

    batch: int = _option(16, whole(1), "samples a step, over all processes")
    accumulate: int = _option(1, whole(1), "steps whose gradients are added up before an update", rare=True)
    lr: Any = _option(AUTO, automatic(number()), "learning rate")
    optimizer: str = _option("adamw", one_of("sgd", "adamw"), "adamw or sgd")
    sampling: str = _option(
        "natural",
        one_of("natural", "balanced"),
        "balanced repeats images of rare classes: all are seen alike",
        rare=True,
    )
    class_weights: Any = _option(
        None,
        weights,
        "balanced, or a list: how much a sample of each class counts in the classification loss",
        rare=True,
    )
    momentum: float = _option(0.9, number(0, 1), "momentum of SGD", rare=True)
    weight_decay: float = _option(0.0, number(), "weight decay", rare=True)
    schedule: str = _option("onecycle", one_of("constant", "cosine", "onecycle"), "onecycle, cosine or constant")
    clip: float = _option(1.0, number(), "largest norm of the gradient; 0 for no limit", rare=True)
    early_stopping: int = _option(0, whole(0), "stop after so many epochs without a better validation loss", rare=True)
    validation: str = _option("val", text, "split the best epoch is chosen on", rare=True)
    settled: float = _option(
        0.7, number(0, 1), "share of the epochs after which the best one is chosen, by validation loss", rare=True
    )
    statistics_batches: int = _option(
        50, whole(0), "training batches to measure batch norms on before validation; 0 leaves them", rare=True
    )
    watch: list[str] = _option([], names, "splits whose accuracy is logged after every epoch", rare=True)
    holdout: float = _option(
        0.2, number(0.001, 0.9), "share of train held out if there is no validation split", rare=True
    )

    heatmap_weight: Any = _option(
        AUTO, weight, "P, a number or a list over epochs; null for the paper's", argument="heatmap_weight"
    )
    decay: Any = _option(
        AUTO, automatic(number(0, 1)), "d of GWRP in the background loss; auto: from the size", argument="decay"
    )
    background_weight: float = _option(1.0, number(), "w1", rare=True, argument="background_weight")
    foreground_weight: float = _option(1.0, number(), "w2", rare=True, argument="foreground_weight")
    e: float = _option(1.0, number(1e-12), "E of the background loss", rare=True, argument="e")
    epsilon: float = _option(0.01, number(1e-12), "stabiliser of LRP", rare=True, argument="epsilon")
    mask_share: float = _option(1.0, number(0, 1), "share of the training masks that is used", rare=True)
    zb: bool = _option(False, switch, "zB rule on the first layer", rare=True, argument="box")
    deep_supervision: Any = _option(
        AUTO,
        automatic(depths),
        "supervise hidden maps too: auto, true, false, or module names",
        rare=True,
        argument="deep_supervision",
    )
    maps_at_once: int = _option(
        0, whole(0), "original only: maps in memory together; 0 for all", rare=True, argument="maps_at_once"
    )
    segmenter: str = _option("resnet18", text, "unet-classifier: encoder of its U-Net", rare=True, argument="segmenter")
    segmentation_epochs: int = _option(
        0, whole(0), "unet-classifier: epochs that train its U-Net, of all; 0 for half", rare=True,
        argument="segmentation_epochs",
    )  # fmt: skip
    empty: str = _option(
        "black", one_of("black", "whole"), "unet-classifier: what goes in where no foreground is found", rare=True,
        argument="empty",
    )  # fmt: skip
    segmentation_weight: float = _option(
        0.99, number(0, 1), "multitask-unet: P", rare=True, argument="segmentation_weight"
    )
    penalty: Any = _option(
        None,
        unless_empty(number()),
        "rrr, energy, distillation: weight of what they add (1000, 1, 1)",
        rare=True,
        argument="penalty",
    )
    mining_weight: float = _option(
        1.0, number(), "gain: weight of attention mining", rare=True, argument="mining_weight"
    )
    supervision_weight: float = _option(
        100.0, number(), "gain: weight of the MSE of Grad-CAM and mask", rare=True, argument="supervision_weight"
    )
    mining_score: str = _option(
        "logit",
        one_of("logit", "probability"),
        "gain: what attention mining lowers, logit or probability",
        rare=True,
        argument="mining_score",
    )
    cam_layer: Any = _option(
        None,
        unless_empty(text),
        "gain: module whose maps Grad-CAM takes (default: the last with maps)",
        rare=True,
        argument="cam_layer",
    )
    exact: bool = _option(
        True, switch, "gain: differentiate the weights of Grad-CAM; false: constants", rare=True, argument="exact"
    )
    rule: str = _option(
        "epsilon",
        one_of("epsilon", "zplus", "gamma", "gradient"),
        "energy, distillation: rule of the maps",
        rare=True,
        argument="rule",
    )
    teacher: Any = _option(
        None,
        unless_empty(text),
        "distillation: run folder or weights of the frozen teacher",
        rare=True,
        argument="teacher",
    )
    augment_background: str = _option(
        "none",
        one_of("none", "swap", "erase"),
        "change backgrounds before a heatmap loss: none, swap or erase",
        rare=True,
        argument="augment",
    )
    fill: str = _option("mean", one_of(*FILLS), "erased backgrounds: mean, noise or blur", rare=True, argument="fill")
    feather: int = _option(
        0, whole(0), "changed backgrounds: pixels in which the object goes over into it", rare=True, argument="feather"
    )
    ranges: Any = _option(None, ranges, "C1 and C2: a pair or a calibration.json (default: calibrate)", rare=True)
    calibration_epochs: int = _option(1, whole(0), "plain epochs before C1 and C2 are measured", rare=True)
    calibration_batches: int = _option(
        50, whole(0), "batches of each of these epochs, and of the one to measure; 0 for all", rare=True
    )
    calibration_lr: float = _option(1e-3, number(), "learning rate of the calibration", rare=True)

    pretrained: Any = _option(False, pretrained, "start from the library's weights, a run or a file")
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
    audit: int = _option(
        200, whole(0), "test images of the audit at the end: does the network look at the background? 0 for none",
        rare=True,
    )  # fmt: skip
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
        self.model = self.model or METHODS[self.method].default_model
        if self.lr == AUTO:
            self.lr = method_class(self.method).rate * RATES[self.optimizer][self.pretrained is not False]
        if self.heatmap_weight == AUTO:
            self.heatmap_weight = getattr(method_class(self.method), "default_weight", AUTO)
        if self.deep_supervision == AUTO:
            self.deep_supervision = getattr(method_class(self.method), "default_depths", False)
        self.out = self.out or f"runs/{self.method}-{Path(self.model).name.replace(':', '-')}"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Config:
        """The options of a preset, if one is named, with the others on top."""
        given = dict(values)
        name = given.pop("preset", None)
        if name is not None and name not in PRESETS:
            raise UsageError(f"preset is {reprlib.repr(name)}; it has to be one of {', '.join(PRESETS)}.")
        return cls(**{**(PRESETS[name] if name is not None else {}), **given})

    @classmethod
    def read(cls, path: Path | None, changes: Mapping[str, Any], *, stored: bool = False) -> Config:
        """The options of a YAML file, if any, with changes on top.

        stored: the file is of a run, perhaps of an older version, and what it does not say is what was done then.
        """
        import yaml

        values: Any = {}
        if path is not None:
            import yaml

            try:
                values = yaml.safe_load(read_file(path, LONGEST, pipes=True).decode("utf-8")) or {}
            except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
                raise UsageError(f"{path} cannot be read as YAML: {error}") from error
            if not isinstance(values, dict):
                raise UsageError(f"{path} has to hold options, one `key: value` a line.")
        known = ["preset", *(option.name for option in fields(cls))]
        cleaned = {str(key).replace("-", "_"): value for key, value in values.items()}
        for key in cleaned:
            if key not in known:
                raise UsageError(f"{path} has an unknown option '{key}'{nearest_option(key, known)}")
        if stored:
            return cls.of({**PRESETS["paper"], **cleaned, **changes})
        config = cls.of({**cleaned, **changes})
        config._check_given(set(cleaned), set(changes))
        return config

    def _check_given(self, stored: set[str], written: set[str]) -> None:
        """Options that would change nothing, because the method does not have them, are no mistake to be silent about.

        stored: those of a file, which may be the config.yaml of another run: there the paper's values are no mistake.
        """
        given, paper = stored | written, PRESETS["paper"]
        if "momentum" in given and self.optimizer != "sgd" and self.momentum != paper["momentum"]:
            raise UsageError(f"momentum is {self.momentum}, but {self.optimizer} has none; add --optimizer sgd.")
        taken = options_of(method_class(self.method)) + (options_of(self.augmenting) if self.augmenting else [])
        usual = Config(data=self.data, method=self.method)
        for option in fields(self):
            name, argument, value = option.name, option.metadata["argument"], getattr(self, option.name)
            idle = argument and argument not in taken and name in given
            same = [option.default, getattr(usual, name)]
            if idle and value not in (same if name in written else [*same, paper.get(name, option.default)]):
                raise UsageError(f"{name} is {value!r}, but the method {self.method} has no such option.")

    @property
    def augmenting(self) -> type[Method] | None:
        """What changes backgrounds before the method sees them."""
        return METHODS.get(f"background-{self.augment_background}")

    def write(self) -> str:
        """As YAML."""
        import yaml

        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True, width=110)


def paper_weight(method: str) -> float:
    """P in the paper."""
    return 0.95 if method == "dual" else 0.9
