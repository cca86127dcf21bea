"""Running a network once, as it is, so that relevance can be sent back through it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fasterisnet.errors import InputError
from fasterisnet.lrp import rules
from fasterisnet.lrp.box import check_inside
from fasterisnet.lrp.kinds import Edge, Node
from fasterisnet.lrp.logits import plain
from fasterisnet.lrp.record import Recorder
from fasterisnet.lrp.rules import Rules, RuleTable
from fasterisnet.lrp.small_maps import SmallMaps
from fasterisnet.lrp.walk import Log, Walk, edge_of

Box = tuple[Any, Any]


def relevance(
    score: Tensor,
    inputs: Tensor | Sequence[Tensor],
    rule: str | RuleTable = "epsilon",
    epsilon: float = 0.01,
    box: Box | None = None,
    create_graph: bool = False,
    strict: bool = False,
) -> Any:
    """Relevance of `inputs` for a score, from a forward pass that has already happened: LRP's `torch.autograd.grad`.

    Every map is `R = x * G` (paper: RG, R0).

    Args:
        score: what is explained, one number a sample; several are added up. Whatever makes it of the last tensor that
            has more than one dimension is the score's, with its derivative, and no part of the network.
        inputs: the images, or any tensors on the way from them to the score. They must have required a gradient
            before the forward pass.
        rule: "epsilon", "zplus", "gamma", "gradient" or a `RuleTable`. z+ and gamma read values that autograd does not
            keep of every network; if one is missing the error says so: use `explain`, or run the forward pass inside
            `with recording():`.
        epsilon: the stabiliser.
        box: (low, high) that the first of the inputs lives in, numbers or one a channel, for zB on the first layer.
        create_graph: the maps can be trained through.
        strict: an operation without a rule is an error instead of a warning.

    Returns:
        A map shaped like each input: a tensor for a tensor, a tuple for a sequence.

    Example:
        >>> images = images.requires_grad_()
        >>> logits = model(images)
        >>> maps = relevance(logits[range(len(images)), labels], images)
    """
    several = not isinstance(inputs, Tensor)
    if several and (not isinstance(inputs, list | tuple) or not inputs):
        raise InputError(f"inputs is {inputs!r:.60}; it has to be a tensor, or a list of them.")
    values = [plain(t) for t in (inputs if several else [inputs])]
    for name, t in [("score", score), *[("inputs", t) for t in values]]:
        if not isinstance(t, Tensor) or not t.requires_grad:
            raise InputError(
                f"{name}: needs a tensor with a history, got {t!r:.60}. Call images.requires_grad_() before the "
                "forward pass, and run it without torch.no_grad()."
            )
    table = rules.table(rule, epsilon)
    ends = [edge_of(t) for t in values]
    bounds = None if box is None else (*box_of(box, values[0]), values[0].detach())
    walk = Walk(table, ends, log=Log(strict), box=bounds, create_graph=create_graph, scores=True)
    found = walk.run(edge_of(score), torch.ones_like(score))
    for end, t in zip(ends, values, strict=True):
        if end not in found:
            raise InputError(
                f"The score does not depend on the input of shape {tuple(t.shape)} in a differentiable way."
            )
    with torch.set_grad_enabled(create_graph):
        maps = tuple(_map(found[end], t) for end, t in zip(ends, values, strict=True))
    return maps if several else maps[0]


def _map(flow: Mapping[str, Tensor], value: Tensor) -> Tensor:
    """`R = x * G`, and what came as relevance."""
    parts = [t if form in ("R", "B") else t * value for form, t in flow.items()]
    return sum(parts[1:], parts[0]).to(value.dtype) if parts else torch.zeros_like(value)


class Trace:
    """One forward pass of a network, open for any number of relevance passes; close it when they are done.

    tables: the rules that will be asked for. box: zB will be asked for. layers: modules, or their names, whose
    relevance is wanted.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        tables: Sequence[Rules],
        *,
        box: Box | None = None,
        layers: Sequence[str | nn.Module] = (),
        strict: bool = False,
    ) -> None:
        self.model, self.log = getattr(model, "_orig_mod", model), Log(strict)
        images = plain(images)
        self.bounds = None if box is None else (*box_of(box, images), images.detach())
        self.root_is_users = images.requires_grad
        self.root = images if self.root_is_users else images.detach().requires_grad_()
        self.names = {module: name for name, module in self.model.named_modules()}
        self.wanted = self._named(layers)
        self.captures: dict[str, tuple[Tensor, Edge]] = {}  # outputs of the wanted modules: value, place
        self._spans: list[tuple[int, int, str]] = []
        values = any(not isinstance(t, RuleTable) or t.needs_values for t in tables)
        if values and any(type(module).__name__ == "RecursiveScriptModule" for module in self.names):
            self.log.announce(
                "torch.jit.script", "", "optimises its operations out of sight; explain the model it was made of."
            )
        self.recorder = Recorder(values or box is not None)
        self.logits = self._run()

    def _named(self, layers: Any) -> list[str]:
        if isinstance(layers, str):
            raise InputError(f"layers is the string '{layers}'; give a list of module names, ['{layers}'].")
        known = set(self.names.values())
        found = [self.names.get(layer, repr(layer)[:40]) if isinstance(layer, nn.Module) else layer for layer in layers]
        for name in found:
            if not isinstance(name, str):
                raise InputError(f"layers holds {name!r}; it has to be a list of module names.")
            if name not in known:
                close = [m for m in known if m.endswith(name.split(".")[-1])][:3]
                hint = f" Did you mean {' or '.join(sorted(close))}?" if close else ""
                hint = hint or " model.named_modules() lists the names."
                raise InputError(f"layers names '{name}', which is not a module of the model.{hint}")
        return found

    # --- the forward pass ------------------------------------------------------------------------------------------

    def _run(self) -> Tensor:
        with ExitStack() as stack:
            for module, name in self.names.items():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                stack.callback(module.register_forward_pre_hook(self._enter(name)).remove)
                stack.callback(module.register_forward_hook(self._leave(name)).remove)
            stack.enter_context(torch.enable_grad())
            if "torch._dynamo" in sys.modules:  # only then has anything been compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(SmallMaps())
            stack.enter_context(self.recorder)
            try:
                output = self.model(self.root.clone())  # a copy, which the model may overwrite
            except (RuntimeError, ValueError) as error:
                if self.root.ndim != 3:
                    raise
                raise InputError(
                    f"The model cannot take images of shape {tuple(self.root.shape)}: {error} If that is one image, "
                    "(channels, height, width), give a batch of one: images.unsqueeze(0)."
                ) from error
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            raise InputError(
                f"The model returned {type(output).__name__}; it has to return a tensor (batch, classes) or an object "
                "with such a tensor as .logits. Wrap the model so that it does."
            )
        if logits.ndim != 2 or logits.shape[0] != self.root.shape[0] or logits.shape[1] == 0:
            raise InputError(
                f"The model returned a tensor of shape {tuple(logits.shape)} for {self.root.shape[0]} images; "
                "it has to be (batch, classes)."
            )
        if not logits.requires_grad:
            raise InputError(
                "The model's output does not depend on its input in a differentiable way: is something detached, or "
                "run under torch.no_grad()?"
            )
        missing = [name for name in self.wanted if name not in self.captures]
        if missing:
            raise InputError(f"Layer '{missing[0]}' was not run by the model's forward; name a module that is.")
        with torch.enable_grad():
            return plain(logits).clone()  # hooks on the model's own tensor do not see relevance

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if _get_current_dispatch_mode() is self.recorder:
                self._spans.append((torch.autograd._get_sequence_nr(), -1, name))

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if _get_current_dispatch_mode() is not self.recorder:
                return  # another thread's forward pass, or another explanation inside this one
            self._spans.append((torch.autograd._get_sequence_nr(), 1, name))
            if name not in self.wanted:
                return
            if name in self.captures:
                raise InputError(f"Layer '{name}' ran more than once in a forward pass; name a module that runs once.")
            if not isinstance(output, Tensor) or not output.requires_grad:
                raise InputError(f"Layer '{name}' does not return a tensor that depends on the network input.")
            self.captures[name] = output.clone(), edge_of(output)  # the model may overwrite its own

        return hook

    def module_name(self, node: Node) -> str:
        """The innermost module in whose forward a node was made."""
        number, stack = node._sequence_nr(), [""]
        for at, way, name in self._spans:
            if at > number:
                break
            stack = [*stack, name] if way < 0 else stack[:-1] if len(stack) > 1 else stack
        return stack[-1]

    # --- relevance passes ------------------------------------------------------------------------------------------

    def relevance(
        self, table: Rules, score: Tensor, *, use_box: bool = True, create_graph: bool = False
    ) -> dict[str, Tensor]:
        """Relevance of `score` (summed over the batch) at the input and at every captured layer."""
        bounds = self.bounds if use_box else None
        root = self.root if self.root_is_users else self.root.detach()
        asked = {"input": (root, edge_of(self.root)), **self.captures}
        base, at = self._tables(table)
        walk = Walk(
            base, [edge for _, edge in asked.values()], log=self.log, place=self.module_name, table_at=at, box=bounds,
            create_graph=create_graph, keep_root=self.root_is_users,
        )  # fmt: skip
        with torch.enable_grad():  # what makes a score of the logits is no part of the network: G is its derivative
            (G,) = torch.autograd.grad(score.sum(), self.logits, create_graph=create_graph, retain_graph=True)
        found = walk.run(edge_of(self.logits), G)
        with torch.set_grad_enabled(create_graph):
            maps = {name: _map(found.get(end, {}), value) for name, (value, end) in asked.items()}
        return maps if create_graph else {name: m.detach() for name, m in maps.items()}

    def _tables(self, table: Rules) -> tuple[RuleTable, Callable[[Node], RuleTable] | None]:
        chosen = rules.tables(table)
        if isinstance(chosen, RuleTable):
            return chosen, None
        default = chosen.pop("default")
        known = {name: module for module, name in self.names.items()}
        for key in chosen:
            if not (isinstance(key, type) or key in known):
                raise InputError(f"rule names {key!r}, which is neither a module of the model, a type nor 'default'.")

        def at(node: Node) -> RuleTable:
            name = self.module_name(node)
            while True:
                if name in chosen:
                    return chosen[name]
                for key, found in chosen.items():
                    if isinstance(key, type) and isinstance(known.get(name), key):
                        return found
                if not name:
                    return default
                name = name.rpartition(".")[0]

        return default, at

    def close(self) -> None:
        """Drops what only relevance passes need. What was returned stays differentiable."""
        self.recorder.forget()
        self.captures.clear()

    @contextmanager
    def open(self) -> Iterator[Trace]:
        try:
            yield self
        finally:
            self.close()


def box_of(box: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """The box as two tensors shaped like the images, checked: no image may leave it."""
    if not isinstance(box, tuple | list) or len(box) != 2:
        raise InputError(f"box is {box!r}; it has to be a pair (low, high).")
    low, high = (_bound(value, images) for value in box)
    if not bool((low <= high).all()):
        raise InputError("box=(low, high): low is above high, or not a number.")
    check_inside(images, low, high)
    return low, high


def _bound(value: Any, images: Tensor) -> Tensor:
    """A number, or one number a channel, as a tensor shaped like the images."""
    try:
        bound = torch.as_tensor(value, dtype=images.dtype, device=images.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"box holds {value!r}; it takes numbers, or one number a channel.") from error
    if bound.ndim == 1:
        if bound.numel() not in (1, images.shape[1]):
            raise InputError(f"box has {bound.numel()} numbers for images of {images.shape[1]} channels.")
        bound = bound.view(-1, *[1] * (images.ndim - 2))
    try:
        return bound.expand_as(images)
    except RuntimeError as error:
        raise InputError(f"box of shape {tuple(bound.shape)} does not fit images of {tuple(images.shape)}.") from error
