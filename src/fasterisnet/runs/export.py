"""A trained network for use elsewhere: the file says itself how it is to be fed, and a card what it is good for."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from fasterisnet.errors import InputError, UsageError
from fasterisnet.evaluation.export import Format, export_model
from fasterisnet.files import read_json, write_text
from fasterisnet.runs.card import Card
from fasterisnet.runs.folder import Run
from fasterisnet.runs.report import cell, masks_line, table

MARK = "<!-- written by fasterisnet export -->"
CARD, PREDICT = "MODEL_CARD.md", "predict.py"


def export_run(
    run: Run, out: str | Path, format: Format, *, trust: bool = False, audit: str | Path | None = None
) -> list[Path]:
    """Writes the network, its card and, for ONNX, a short program that uses it; returns where they are.

    audit: a folder or file of `fasterisnet audit`, whose verdict on these weights the card repeats; by default that in
    the run folder.
    """
    out = Path(out)
    _check_place(out)
    audited = _audited(run, audit)
    model, card = run.load_model(trust=trust)
    about = described(run, card)
    size, channels = card.prepare.size, card.prepare.channels
    export_model(model, out, format, example=torch.rand(2, channels, size, size), metadata=about)
    written = [out, out.with_name(CARD)]
    if format == "onnx":
        written.append(out.with_name(PREDICT))
        write_text(written[-1], _program())
    write_text(written[1], _card(run, card, out, format, about, audited))
    return written


def described(run: Run, card: Card) -> dict[str, str]:
    """What has to be known to use the network, each as JSON: classes, input, and which weights these are."""
    prepare = {k: v for k, v in card.preparation.items() if k != "augmentation"}
    facts = {
        "classes": card.classes, "multi_label": card.multi_label, "equalise": False, "fit": "stretch", "mean": [],
        "std": [], **prepare, "model": card.model, "method": card.method, "epoch": card.epoch,
        "weights_sha256": run.checksum(),
    }  # fmt: skip
    return {key: json.dumps(value) for key, value in facts.items()}


def _program() -> str:
    return files("fasterisnet").joinpath("pages", PREDICT).read_text(encoding="utf-8")


def _check_place(out: Path) -> None:
    """What lies beside the network and is not of an earlier export is not replaced."""
    for name, mark in ((CARD, MARK), (PREDICT, _program().splitlines()[0])):
        there = out.with_name(name)
        if there.exists() and not (there.is_file() and there.read_bytes().startswith(mark.encode())):
            raise UsageError(f"{there} is there and not of an earlier export; choose an --out in another folder.")


def _audited(run: Run, audit: str | Path | None) -> dict[str, Any] | None:
    places = [run.path("audit.json"), run.path("audit") / "audit.json"]
    if audit is not None:
        places = [Path(audit) / "audit.json" if Path(audit).is_dir() else Path(audit)]
    there = next((place for place in places if place.is_file()), None)
    if there is None:
        if audit is not None:
            raise UsageError(f"{audit} holds no audit.json; make one with `fasterisnet audit {run.folder} --data ...`.")
        return None
    try:
        found = read_json(there)
        {key: found[key] for key in ("data", "split", "images")}
        mine = [model for model in found["models"] if _is_of(model, run)]
        if mine:
            told = {**found, **mine[0]}
            return {**told, "mine": mine[0]["name"], "sentence": told["sentence"], "reasons": list(told["reasons"])}
        names = ", ".join(str(model["name"]) for model in found["models"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise InputError(f"{there} is not the result of an audit ({error}); audit again, or move it away.") from error
    if audit is not None:
        raise UsageError(f"{there} is about {names}, not about these weights of {run.folder}; audit them first.")
    return None


def _is_of(model: dict[str, Any], run: Run) -> bool:
    """Whether an audited classifier has the weights of a run; audits of older versions know its name alone."""
    told = model.get("weights_sha256")
    return told == run.checksum() if told else model["name"] == run.folder.resolve().name


def _card(
    run: Run, card: Card, out: Path, format: Format, about: dict[str, str], audited: dict[str, Any] | None
) -> str:
    config, report, prepare = run.config, run.report, card.prepare
    with out.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    scaled = "scaled to 0..1" + (f", minus {list(prepare.mean)}, over {list(prepare.std)}" if prepare.mean else "")
    fit = "padded with black to a square" if prepare.fit == "pad" else "stretched to a square"
    how = "sigmoid of each logit (several classes may be true)" if card.multi_label else "softmax of the logits"
    lines = [
        MARK,
        f"# {out.name}",
        "",
        f"`{card.model}`, trained with the method `{card.method}` of fasterisnet; weights of epoch {card.epoch} of "
        f"{config.epochs}.",
        "",
        "## Use",
        "",
        f"* Input `images`: float32, (batch, {prepare.channels}, {prepare.size}, {prepare.size}). Images are "
        f"{'histogram-equalised, ' if prepare.equalise else ''}{fit}, resized (bilinear, antialiased), {scaled}.",
        *([f"* Files of more than 8 bits were read with the window {prepare.window}."] if prepare.window else []),
        f"* Output `logits`: (batch, {len(card.classes)}); {how}. In this order: "
        f"{', '.join(cell(name) for name in card.classes)}.",
        f"* All of this is in the file too ({'metadata of the ONNX model' if format == 'onnx' else 'metadata.json'}).",
        *([f"* `python {PREDICT} {out.name} IMAGE` uses it."] if format == "onnx" else []),
        f"* SHA-256 of the file: `{checksum}`; of the weights in the run: `{json.loads(about['weights_sha256'])}`.",
        "",
        "## Tests",
        "",
        *([table(report["tests"])] if report else ["The run has made no tests yet."]),
        "",
        *masks_line(run),
        *([f"Trained on {report['training_samples']:,} samples."] if report else []),
        "",
        "## Does it look at the background?",
        "",
    ]
    if audited is None:
        lines.append("It was not audited. `fasterisnet audit` answers this with tests that need no heatmap.")
    else:
        which = f"{audited['images']} images of the split {cell(str(audited['split']))}"
        lines += [f"{audited['sentence']} (Audit of `{audited['mine']}` on {which}.)", ""]
        lines += [f"* {reason}" for reason in audited["reasons"]]
    return "\n".join(lines) + "\n"
