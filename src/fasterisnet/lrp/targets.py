"""What is explained: one number per sample made of its logits. Relevance starts from there.

Any callable `logits (batch, classes) -> (batch,)` is a target; these are the named ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fasterisnet.errors import InputError

Classes = int | Tensor | Sequence[int]
Target = Callable[[Tensor], Tensor]


def chosen(logits: Tensor, classes: Classes) -> Tensor:
    """Class indices, one a sample, checked against the logits."""
    count = logits.shape[1]
    try:
        index = torch.as_tensor(classes, device=logits.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"Classes are {classes!r:.60}; give an integer, or one for each sample.") from error
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise InputError(f"Classes have to be integers; they are {index.dtype}.")
    if index.ndim == 0:
        index = index.expand(logits.shape[0])
    if index.shape != logits.shape[:1]:
        raise InputError(
            f"Target classes have shape {tuple(index.shape)} for {logits.shape[0]} images; "
            "give one integer, or one for each sample."
        )
    if bool(((index < 0) | (index >= count)).any()):
        wrong = int(index[(index < 0) | (index >= count)][0])
        raise InputError(f"Target class {wrong} is out of range: the model has {count} outputs, 0 to {count - 1}.")
    return index.long()


class _OfClasses:
    """Targets that name classes: equal when they name the same ones."""

    classes: Classes

    def _key(self) -> tuple[object, ...]:
        classes = self.classes.tolist() if isinstance(self.classes, Tensor) else self.classes
        classes = list(classes) if isinstance(classes, Sequence) else classes
        return type(self), tuple(classes) if isinstance(classes, list) else classes, getattr(self, "mu", None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OfClasses) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def _pick(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(1, index.unsqueeze(1)).squeeze(1)


@dataclass(frozen=True, eq=False)
class Logit(_OfClasses):
    """The logit of a class: one for all samples, or one each."""

    classes: Classes

    def __call__(self, logits: Tensor) -> Tensor:
        return _pick(logits, chosen(logits, self.classes))


@dataclass(frozen=True)
class Joint:
    """All logits at once, each started at its own value."""

    def __call__(self, logits: Tensor) -> Tensor:
        return logits.sum(1)


@dataclass(frozen=True)
class Highest:
    """Each sample's highest logit."""

    def __call__(self, logits: Tensor) -> Tensor:
        return _pick(logits, logits.argmax(1))


@dataclass(frozen=True)
class Lowest:
    """Each sample's lowest logit."""

    def __call__(self, logits: Tensor) -> Tensor:
        return _pick(logits, logits.argmin(1))


@dataclass(frozen=True, eq=False)
class Probability(_OfClasses):
    """The softmax probability of a class (of a single logit: the sigmoid)."""

    classes: Classes

    def __call__(self, logits: Tensor) -> Tensor:
        index = chosen(logits, self.classes)
        return _pick(logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(1), index)


@dataclass(frozen=True, eq=False)
class Eta(_OfClasses):
    """`eta_c = ln(P_c + mu) - ln(1 - P_c + mu)`: the log odds of a class, bounded by mu (paper: nFrac, boundEta)."""

    classes: Classes
    mu: float = 0.01

    def __post_init__(self) -> None:
        if not (isinstance(self.mu, int | float) and 0 <= self.mu < math.inf):
            raise InputError(f"mu is {self.mu}; it has to be zero or a positive number.")

    def __call__(self, logits: Tensor) -> Tensor:
        index = chosen(logits, self.classes)
        if logits.shape[1] == 1:
            log_p = torch.nn.functional.logsigmoid(logits[:, 0])
            log_rest = torch.nn.functional.logsigmoid(-logits[:, 0])
        else:
            others = logits.scatter(1, index.unsqueeze(1), -math.inf).logsumexp(1)
            both = logits.logsumexp(1)
            log_p, log_rest = _pick(logits, index) - both, others - both
        if self.mu == 0:
            return log_p - log_rest
        return torch.log(log_p.exp() + self.mu) - torch.log(log_rest.exp() + self.mu)


@dataclass(frozen=True)
class EtaOfLowest:
    """Eta of each sample's lowest logit: what the Selective ISNet explains."""

    mu: float = 0.01

    def __post_init__(self) -> None:
        Eta(0, self.mu)  # refuses a mu that cannot be

    def __call__(self, logits: Tensor) -> Tensor:
        return Eta(logits.detach().argmin(1), self.mu)(logits)


@dataclass(frozen=True)
class AllLogits:
    """Every logit, one map each."""

    def __call__(self, logits: Tensor) -> Tensor:
        return logits


def resolve(target: Target | Classes | None) -> Target:
    """None: the highest logit. An integer or a tensor of classes: those logits. A callable: itself."""
    if target is None:
        return Highest()
    if isinstance(target, int | Tensor | list | tuple) or hasattr(target, "__array__"):  # numpy's integers and arrays
        return Logit(torch.as_tensor(target) if hasattr(target, "__array__") else target)  # type: ignore[arg-type]
    if callable(target) and not isinstance(target, type):
        return target
    kind = type(target).__name__
    raise InputError(f"target is {target!r} ({kind}); give None, a class (int), a tensor of classes or a callable.")
