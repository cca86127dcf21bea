"""What was probably meant by a word that is none."""

from __future__ import annotations

import difflib

# What other programs call our options; spelling alone would not lead there.
MEANT = {
    "learning-rate": "lr", "optimiser": "optimizer", "batch-size": "batch", "num-workers": "workers",
    "gpu": "accelerator gpu", "gpus": "accelerator gpu", "cuda": "accelerator gpu", "cpu": "accelerator cpu",
    "device": "accelerator", "image-size": "size", "img-size": "size", "output-dir": "out", "run-dir": "out",
    "architecture": "model", "balanced": "class-weights balanced",
}  # fmt: skip


def nearest(word: str, known: list[str]) -> str:
    """How an error about an unknown word ends."""
    close = difflib.get_close_matches(word, known, 1, 0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; there are: {', '.join(known)}."


def nearest_option(word: str, known: list[str], dashes: str = "") -> str:
    """`nearest` for options, also by what they are called elsewhere. dashes: what each of `known` begins with."""
    foreign = {dashes + name: dashes + own for name, own in MEANT.items()}
    foreign = {name: own for name, own in foreign.items() if own.partition(" ")[0] in known}
    names = {name.replace("_", "-"): name for name in known} | foreign
    close = difflib.get_close_matches(word.replace("_", "-"), names, 1, 0.5)
    return f"; did you mean '{names[close[0]]}'?" if close else nearest(word, known)
