"""Whom an audit is about: a run, a named network with its weights, an ONNX file or a function that returns one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fasterisnet.data.preparation import Preparation
from fasterisnet.errors import InputError, UsageError
from fasterisnet.evaluation.attention import logits_of
from fasterisnet.extras import install
from fasterisnet.models import build_model, load_weights
from fasterisnet.runs.card import Card
from fasterisnet.runs.device import chosen_device
from fasterisnet.runs.folder import Run

KINDS = (
    "a run folder, NAME@FILE (a network of torchvision or timm and its weights), a file.onnx, or "
    "package.module:function (maybe with @FILE) together with --trust"
)


@dataclass
class Subject:
    """A classifier that can be asked; `model` is None if it cannot be explained from the inside."""

    name: str
    kind: str
    predict: Callable[[Tensor], Tensor]
    prepare: Preparation
    model: nn.Module | None = None
    box: tuple[Any, Any] | None = None
    classes: list[str] | None = None
    multi_label: bool = False
    method: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def open_subject(
    text: str,
    classes: int,
    *,
    prepare: Preparation | None = None,
    trust: bool = False,
    device: torch.device | None = None,
) -> Subject:
    """The classifier that a text names. classes: how many the data has; prepare: how images become its input, unless
    it says so itself (`card_of`). device: of networks, those of ONNX files excepted (the fastest there is).
    """
    device = device or chosen_device()
    if is_run(text):
        return _run(text, device, trust)
    if text.lower().endswith(".onnx"):
        return _onnx(text, prepare or Preparation())
    name, at, file = text.partition("@")
    code = ":" in name and not name.startswith(("torchvision:", "timm:"))
    if Path(text).exists():
        raise UsageError(f"{text} is no run folder (it has no best.safetensors). A model is {KINDS}.")
    if code and not trust:
        raise UsageError(f"'{name}' names code that would be imported and called; if you trust it, say --trust.")
    if not code and not at:
        raise UsageError(f"'{text}' has no weights, so there is nothing to audit. A model is {KINDS}.")
    prepare = prepare or Preparation()
    shown = f"{name}@{Path(file).name}" if at else name
    subject = _told(Subject(shown, "function" if code else "network", logits_of_nothing, prepare), card_of(text))
    classes = classes if subject.classes is None else len(subject.classes)
    model = build_model(name, classes, channels=subject.prepare.channels, trust=trust)
    if at:
        _load(model, name, file)
    return _module(subject, model, device)


def card_of(text: str) -> Card | None:
    """What a classifier says of itself: its classes, and how images become its input. Runs, their weights and what
    `fasterisnet export` wrote do; None for all others.
    """
    if is_run(text):
        return Run(text).load_weights()[1]
    file = Path(text if text.lower().endswith(".onnx") else text.partition("@")[2])
    if not file.is_file():
        return None
    try:
        if file.suffix.lower() == ".onnx":
            return _onnx_card(_session(text).get_modelmeta().custom_metadata_map)
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                told = opened.metadata() or {}
            return Card.read(told["card"]) if "card" in told else None
    except (ValueError, TypeError, KeyError, SafetensorError) as error:
        raise InputError(f"{file} does not say clearly what it is of ({error}); write it again.") from error
    return None


def _onnx_card(told: dict[str, str]) -> Card | None:
    """What `fasterisnet export` wrote into a file; one without a checksum of weights is of somebody else."""
    if "weights_sha256" not in told:
        return None
    facts = {key: json.loads(value) for key, value in told.items()}
    own = {key: facts.pop(key) for key in ("model", "classes", "multi_label", "method", "epoch")}
    return Card.read(json.dumps({**own, "preparation": facts, "zb": False, "validation_loss": None}))


def _told(subject: Subject, card: Card | None) -> Subject:
    """A classifier with what its file says of it."""
    if card is None:
        return subject
    facts = {"network": card.model, "epoch": card.epoch}
    return replace(
        subject, prepare=replace(card.prepare, augmentation="none"), box=card.box, classes=card.classes,
        multi_label=card.multi_label, method=card.method, facts=facts,
    )  # fmt: skip


def logits_of_nothing(_: Tensor) -> Tensor:
    """Stands for a network that is not there yet."""
    raise InputError("There is no network.")


def _run(text: str, device: torch.device, trust: bool) -> Subject:
    model, card = Run(text).load_model(trust=trust)
    subject = _told(Subject(Path(text).resolve().name, "run", logits_of_nothing, card.prepare), card)
    subject.facts["weights_sha256"] = Run(text).checksum()
    return _module(subject, model, device)


def _module(subject: Subject, model: nn.Module, device: torch.device) -> Subject:
    model = model.to(device).eval()

    @torch.no_grad()
    def predict(images: Tensor) -> Tensor:
        return logits_of(model, images.to(device))

    return replace(subject, model=model, predict=predict)


def _session(text: str) -> Any:
    """An ONNX file that can be asked."""
    try:
        import onnxruntime
    except ImportError as error:
        raise UsageError(f"An ONNX file needs the package onnxruntime: {install('export')}") from error
    if not Path(text).is_file():
        raise UsageError(f"{text} is not a file.")
    try:
        return onnxruntime.InferenceSession(text, providers=["CPUExecutionProvider"])
    except Exception as error:  # its kinds of errors have no common base but this
        raise InputError(f"{text} cannot be read as ONNX: {str(error)[:200]}") from error


def _onnx(text: str, prepare: Preparation) -> Subject:
    session, card = _session(text), card_of(text)
    prepare = prepare if card is None else card.prepare
    wanted = session.get_inputs()[0]
    if len(session.get_inputs()) != 1 or len(wanted.shape) != 4:
        raise InputError(f"{text} has to take one input (sample, channel, height, width); it takes {wanted.shape}.")
    batch, channels, height, width = (n if isinstance(n, int) and n > 0 else None for n in wanted.shape)
    if height != width:
        raise InputError(f"{text} takes images of {width} x {height} pixels; images are prepared as squares.")
    changes = {k: v for k, v in (("channels", channels), ("size", height)) if v is not None}
    if len(prepare.mean) not in (0, channels or prepare.channels):
        raise UsageError(f"{text} takes {channels} channels, but mean and std have {len(prepare.mean)} numbers each.")

    def predict(images: Tensor) -> Tensor:
        parts = images.split(batch or len(images))
        outputs = []
        for part in parts:
            missing = (batch or len(part)) - len(part)
            given = torch.cat([part, part[-1:].expand(missing, -1, -1, -1)]) if missing else part
            found = session.run(None, {wanted.name: given.numpy()})[0]
            outputs.append(torch.as_tensor(found)[: len(part)])
        return torch.cat(outputs)

    subject = _told(Subject(Path(text).name, "onnx", predict, prepare), card)
    return replace(subject, prepare=replace(subject.prepare, **changes))


def _load(model: nn.Module, name: str, file: str) -> None:
    """Weights for every layer, or none: an audit of layers that were never trained says nothing."""
    if not Path(file).is_file():
        raise UsageError(f"{file} is not a file of weights.")
    done = load_weights(model, file)
    if done.left:
        raise InputError(
            f"{file} has no weights, or some of another shape, for {len(done.left)} tensors of '{name}' with as many "
            f"classes as the data has: {', '.join(done.left[:4])}. Audit it on data of its own classes."
        )
    if done.unused:
        warnings.warn(f"{file}: not in the model: {', '.join(done.unused[:8])}.", stacklevel=2)


def is_run(text: str) -> bool:
    """Whether a text names a run folder, or one that weights were copied to."""
    return (Path(text) / "best.safetensors").is_file() or (Path(text) / "config.yaml").is_file()
