"""What a traced operation remembers so that relevance can be sent from its output to its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fasterisnet.errors import RuleError

if TYPE_CHECKING:
    from fasterisnet.relevance.linear_operations import Linear
    from fasterisnet.relevance.rules import RuleTable

# A rule's answer for one operation: G for some of its sources, and G for the ordinary derivative to go on with.
NATIVE = None
Share = tuple[Tensor | None, Tensor]


@dataclass
class State:
    """Shared by all operations of a trace: the rules of the relevance pass that is under way, if one is."""

    table: RuleTable | None = None
    box: tuple[Tensor, Tensor] | None = None

    @property
    def active(self) -> bool:
        return self.table is not None


class Operation:
    """One call the network made. `kind` picks its rule; `sources` are the activations relevance may be sent to."""

    kind = "?"

    def __init__(self, state: State, name: str, *sources: Tensor) -> None:
        self.state = state
        self.name = name
        self.sources: tuple[Tensor, ...] = sources
        self.y: Tensor | None = None
        self._version = 0
        self.is_output = False
        self.fused_into = ""

    def keep(self, y: Tensor) -> None:
        """Remembers the output, for rules that need `R_y = y * G_y`."""
        self.y, self._version = y, y._version

    def value(self) -> Tensor:
        """The output, computed again if the network has overwritten it since."""
        if self.y is None or self.y._version != self._version:
            return self.recompute()
        return self.y

    def recompute(self) -> Tensor:
        raise RuleError(f"The output of '{self.name}' was overwritten in place; explain a model without that step.")

    @property
    def unit(self) -> tuple[Linear | None, Norm | None]:
        """The linear operation, and the batch norm behind it, that this operation is fused with."""
        return None, None

    def propagate(self, G: Tensor, y: Tensor | None = None) -> tuple[Tensor | None, list[Tensor | None]]:
        """Applies the rule of the pass under way. Returns G for the ordinary derivative and for every source."""
        table = self.state.table
        assert table is not None
        native: Tensor | None = None
        grads: list[Tensor | None] = [None] * len(self.sources)
        for source, grad in table.apply(self, G, y):
            if source is NATIVE:
                native = grad
            else:
                position = next(i for i, s in enumerate(self.sources) if s is source)
                before = grads[position]
                grads[position] = grad if before is None else before + grad
        return native, grads

    def replace(self, old: Tensor, new: Tensor) -> None:
        """`old` is about to be overwritten in place; `new` keeps its value."""
        self.sources = tuple(new if s is old else s for s in self.sources)
        for key, item in vars(self).items():
            if item is old and key != "y":
                setattr(self, key, new)

    def forget(self) -> None:
        """Drops every tensor: no relevance pass follows. (A tensor, its history and its operation form a cycle.)"""
        for key, item in list(vars(self).items()):
            if isinstance(item, Tensor | Operation) or key in ("sources", "function", "path"):
                setattr(self, key, None if key != "sources" else ())


class Norm(Operation):
    """A normalisation, seen as `y = scale * x + shift` with its statistics constant.

    `centred` lists the dimensions whose mean is subtracted as part of the operation (layer norm); batch norm has none.
    """

    kind = "norm"

    def __init__(
        self,
        state: State,
        name: str,
        x: Tensor,
        scale: Tensor,
        shift: Tensor | None,
        recompute: Callable[[], Tensor],
        *,
        linear: Linear | None = None,
        centred: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        sources = (x,) if linear is None else (x, linear.x)
        super().__init__(state, name, *sources)
        self.x: Tensor = x
        self.scale: Tensor = scale
        self.shift = shift
        self.linear = linear
        self.per_channel = centred is None
        self.centred = centred
        self.function = recompute

    @property
    def unit(self) -> tuple[Linear | None, Norm | None]:
        return self.linear, self

    def recompute(self) -> Tensor:
        return self.function()

    @property
    def full_scale(self) -> Tensor:
        """The scale, shaped to be multiplied with x."""
        return along_channels(self.scale, self.x) if self.per_channel else self.scale

    @property
    def full_shift(self) -> Tensor | float:
        if self.shift is None:
            return 0.0
        return along_channels(self.shift, self.x) if self.per_channel else self.shift


class Activation(Operation):
    """`y = f(x)`, element by element. `rectifier`: f is ReLU."""

    kind = "activation"

    def __init__(
        self,
        state: State,
        name: str,
        x: Tensor,
        before: Operation | None,
        function: Callable[[Tensor], Tensor] | None,
    ) -> None:
        linear, norm = (None, None) if before is None else before.unit
        sources = [x] if function is not None else []
        for operation in (norm, linear):
            if operation is not None and not any(operation.x is s for s in sources):
                sources.append(operation.x)
        super().__init__(state, name, *sources)
        self.x = x if function is not None else None
        self.linear, self.norm = linear, norm
        self.function = function
        self.keep_norm_apart = False

    @property
    def rectifier(self) -> bool:
        return self.function is None

    @property
    def unit(self) -> tuple[Linear | None, Norm | None]:
        return self.linear, self.norm

    def recompute(self) -> Tensor:
        assert self.function is not None and self.x is not None
        return self.function(self.x)


class Sum(Operation):
    """`y = a + b`; b may be a constant."""

    kind = "sum"

    def __init__(self, state: State, name: str, a: Tensor, b: Tensor | float, b_is_source: bool) -> None:
        super().__init__(state, name, *((a, b) if b_is_source and isinstance(b, Tensor) else (a,)))
        self.a: Tensor = a
        self.b: Tensor | float = b
        self.b_is_source = b_is_source

    def recompute(self) -> Tensor:
        return self.a + self.b


class Pool(Operation):
    """A linear operation without parameters whose weights are never negative: mean, average pooling, upsampling."""

    kind = "pool"

    def __init__(self, state: State, name: str, x: Tensor, function: Callable[[Tensor], Tensor], signed: bool) -> None:
        super().__init__(state, name)
        self.x: Tensor = x
        self.function: Callable[[Tensor], Tensor] = function
        self.signed = signed

    def recompute(self) -> Tensor:
        return self.function(self.x)


class Matmul(Operation):
    """`a @ b`, both activations."""

    kind = "matmul"

    def __init__(self, state: State, name: str, a: Tensor, b: Tensor, weights: Tensor | None) -> None:
        super().__init__(state, name, a, b)
        self.a: Tensor = a
        self.b: Tensor = b
        self.weights = weights

    def recompute(self) -> Tensor:
        return self.a @ self.b


class Operand(Operation):
    """One factor of a product: takes half of the relevance ("half"), none ("constant"), or what x >= 0 lets pass."""

    def __init__(self, state: State, name: str, kind: str, x: Tensor | None = None) -> None:
        super().__init__(state, name)
        self.kind = kind
        self.x = x


def along_channels(vector: Tensor, like: Tensor) -> Tensor:
    """A vector with one number a channel, shaped to be multiplied with `like`."""
    return vector.view(-1, *[1] * (like.ndim - 2))
