"""What all methods share: one call that turns a batch into a loss, the parts it is made of, and their registry."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fasterisnet.errors import InputError, UsageError
from fasterisnet.losses import Masks, are_chances, classification_loss
from fasterisnet.lrp.logits import logits_in, plain
from fasterisnet.lrp.small_maps import SmallMaps
from fasterisnet.methods.ranges import decoded, encoded

Loss = Callable[[Tensor, Tensor], Tensor]
HALF = (torch.float16, torch.bfloat16)
WITHOUT_EFFECT = ("generator", "attached_logits")  # options of a method that leave its loss as it is


@dataclass
class Parts:
    """A loss and what it is made of. `total` is what is trained; the others can be logged, or trained on their own.

    heatmap: what the method adds to the classification loss, before it is weighted. without_mask: samples that took
    part in the classification loss only. skipped: the step has no meaning because relevance was not finite; `total` is
    then zero. logits: for metrics; detached, unless the method was made with `attached_logits=True`. counts: sums over
    the batch for the log, called `Method.counts`.

    Example:
        >>> parts = method.loss(model, images, labels, masks)
        >>> parts.total.backward()
    """

    total: Tensor
    classification: Tensor
    background: Tensor
    foreground: Tensor
    heatmap: Tensor
    samples: int
    without_mask: int = 0
    skipped: bool = False
    logits: Tensor = field(repr=False, default_factory=lambda: torch.empty(0))
    counts: Tensor = field(repr=False, default_factory=lambda: torch.empty(0))


class Method(ABC):
    """A way to train a classifier.

    needs_masks: without masks it would be another method. needs_ranges: it needs C1 and C2, see `calibrate`.
    multi_label: it knows what to do when several classes are true at once. generator: for reproducible draws. share:
    (rank, processes) of a process that takes `batch[rank::processes]`, so that all draw what one would. batch: samples
    of the present batch over all of them; None if each has as many as this one. explainers: of an audit's explainers
    (see `evaluation.explainers`) those whose maps it optimises, so that they may look better than the network is.
    classification: a loss of one's own instead of cross entropy, `(logits, labels) -> mean over the batch`: with class
    weights, focal, with label smoothing. attached_logits: `parts.logits` keep their gradient, for a further loss.

    A method that is a network, or trains in stages, has more to say. default_model: what it trains if nothing else is
    named. shaping: options that decide what the network is; they are kept with its weights. idle: parts of the network
    take no part in some steps. counts: names of `Parts.counts`. rate: the share of the usual learning rate that suits
    it.

    Example:
        >>> method = Stochastic(heatmap_weight=0.7, ranges=ranges)
        >>> parts = method.loss(model, images, labels, masks)
        >>> parts.total.backward()
    """

    name: ClassVar[str] = ""
    needs_masks: ClassVar[bool] = False
    needs_ranges: ClassVar[bool] = False
    multi_label: ClassVar[bool] = True
    rate: ClassVar[float] = 1.0
    default_model: ClassVar[str] = "resnet50"
    shaping: ClassVar[tuple[str, ...]] = ()
    idle: ClassVar[bool] = False
    counts: ClassVar[tuple[str, ...]] = ()
    explainers: ClassVar[tuple[str, ...]] = ()

    epoch: int = 0
    generator: torch.Generator | None = None
    share: tuple[int, int] = (0, 1)
    batch: int | None = None
    classification: Loss | None = None
    attached_logits: bool = False
    _seen: bool = False

    def __init__(self, *, classification: Loss | None = None, attached_logits: bool = False) -> None:
        if classification is not None and not callable(classification):
            raise InputError(f"classification is {classification!r}; it has to be a function of logits and labels.")
        self.classification, self.attached_logits = classification, attached_logits

    @abstractmethod
    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, masks: Masks = None) -> Parts:
        """The loss of one batch, differentiable for every parameter of the model."""

    def begin(self, model: nn.Module, images: Tensor) -> list[str]:
        """Before a run: finds out what the first step would, with images as it will see them; returns what to say."""
        return []

    def combine(self, classification: Any, heatmap: Any) -> Any:
        """The total: how what the method adds is weighted against the classification loss."""
        return classification

    def classify(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The classification loss."""
        if self.classification is None:
            self._expect_logits(logits)
            return classification_loss(logits, labels)
        loss = self.classification(logits.float() if logits.dtype in HALF else logits, labels)
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"classification returned {found}; it has to return one number, the mean over the batch.")
        return loss

    def _expect_logits(self, outputs: Tensor) -> None:
        """Refuses a network that ends with a softmax. Looks once: now and then logits are like chances by chance."""
        if not self._seen and outputs.ndim == 2 and outputs.shape[1] > 1 and are_chances(outputs.detach()):
            raise InputError(
                "The model returned probabilities (no output is negative, and those of each image sum to 1), so it "
                "ends with a softmax; the loss needs logits, so leave it out, or give a loss for probabilities as "
                "classification=."
            )
        self._seen = True

    def shown(self, logits: Tensor) -> Tensor:
        """Logits as `parts` holds them."""
        return logits if self.attached_logits else logits.detach()

    def set_epoch(self, epoch: int) -> None:
        """Tells schedules where training is."""
        self.epoch = epoch

    def drawn(self, draw: Callable[..., Tensor], samples: int, *shape: int) -> Tensor:
        """Random numbers for each of this process's samples: its part of what one process would draw for all.

        draw: a function such as `torch.rand`, called with a shape.
        """
        device = "cpu" if self.generator is None else self.generator.device
        rank, processes = self.share
        whole = samples * processes if self.batch is None else self.batch
        return draw((whole, *shape), generator=self.generator, device=device)[rank::processes]

    # --- methods that are a network, or train in stages ------------------------------------------------------------

    @classmethod
    def network(cls, model: nn.Module, channels: int, size: int, **shape: Any) -> nn.Module:
        """What is trained, made of the model that was asked for; shape: the options called `shaping`."""
        return model

    def outputs(self, model: nn.Module, images: Tensor) -> Any:
        """What the network computes in a step, all of it."""
        return model(images)

    def plan(self, epochs: int) -> list[int]:
        """Told how long a run is, the epochs before which a new stage begins.

        A stage has a schedule of rates and a best epoch of its own; the next one goes on from that.
        """
        return []

    def epoch_begins(self, model: nn.Module) -> None:  # noqa: B027  most have nothing to prepare
        """Before an epoch, in training or not."""

    def measured(self, model: nn.Module, sums: Mapping[str, float]) -> dict[str, float]:
        """What the log says besides losses and accuracy, of sums over samples."""
        return {}

    def epoch_ends(self, model: nn.Module, row: Mapping[str, float]) -> str:
        """After an epoch was validated; returns what is worth saying of it."""
        return ""

    def score(self, row: Mapping[str, float]) -> float:
        """What the best epoch of a stage has least of."""
        return row["val_loss"]

    def __repr__(self) -> str:
        """Everything that makes its loss, as it was given."""
        values = {key: getattr(self, key, None) for key in options_of(type(self)) if key not in WITHOUT_EFFECT}
        shown = [f"{key}={getattr(v, '__qualname__', repr(v))}" for key, v in values.items() if v is not None]
        return f"{type(self).__name__}({', '.join(shown)})"


METHODS: dict[str, type[Method]] = {}
Kind = TypeVar("Kind", bound=type[Method])


def register_method(name: str) -> Callable[[Kind], Kind]:
    """Gives a class the name that configurations and the command line use.

    The arguments of its constructor are the options it takes; the first line of its docstring is its help.
    """

    def register(kind: Kind) -> Kind:
        kind.name = name
        METHODS[name] = kind
        return kind

    return register


def method_class(name: str) -> type[Method]:
    """The method that has a name."""
    if name not in METHODS:
        raise UsageError(f"There is no method '{name}'; there are: {', '.join(METHODS)}.")
    return METHODS[name]


def options_of(kind: type[Method]) -> list[str]:
    """The names of a method's options: what its constructor takes, and those it passes its arguments on to."""
    found: dict[str, None] = {}
    for ancestor in kind.__mro__:
        constructor = vars(ancestor).get("__init__")
        if constructor is None or ancestor is object:
            continue
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        found |= {p.name: None for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return list(found)


class Step(nn.Module):
    """A model and its method as one module: its forward is the whole training step, as distributed training needs it.

    Wrap this, not the model, in DistributedDataParallel: relevance passes must happen inside the wrapped forward.
    C1 and C2 of the method travel in its `state_dict`.

    Example:
        >>> step = Step(model, Stochastic(ranges=ranges))
        >>> step(images, labels, masks).total.backward()
    """

    def __init__(self, model: nn.Module, method: Method) -> None:
        super().__init__()
        self.model = model
        self.method = method

    def forward(self, images: Tensor, labels: Tensor, masks: Masks = None) -> Parts:
        return self.method.loss(self.model, images, labels, masks)

    def get_extra_state(self) -> Tensor:
        """C1 and C2 as bytes, which every file format of tensors can hold; none without them."""
        return encoded(getattr(self.method, "ranges", None))

    def set_extra_state(self, state: Tensor) -> None:
        """Back from `get_extra_state`; a method that has C1 and C2 keeps them if the state has none."""
        ranges = decoded(state)
        if ranges is not None and self.method.needs_ranges:
            self.method.ranges = ranges  # pyright: ignore[reportAttributeAccessIssue]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """States from before C1 and C2 were in them are complete."""
        state_dict.setdefault(f"{prefix}_extra_state", encoded(None))
        super()._load_from_state_dict(state_dict, prefix, *others)


def zero_loss(model: nn.Module) -> Tensor:
    """What a process without samples adds to the gradient: nothing, but every parameter takes part in it."""
    zeros = [p.sum() * 0 for p in model.parameters() if p.requires_grad]
    return torch.stack(zeros).nan_to_num().sum() if zeros else torch.zeros(())


@register_method("standard")
class Standard(Method):
    """The plain classifier: cross entropy, masks ignored.

    Example:
        >>> Standard().loss(model, images, labels).total.backward()
    """

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, masks: Masks = None) -> Parts:
        """The classification loss alone."""
        with SmallMaps():
            logits = logits_in(model(plain(images)))
        loss = self.classify(logits, plain(labels))
        zero = loss.detach() * 0
        return Parts(loss, loss, zero, zero, zero, samples=len(images), logits=self.shown(logits))
