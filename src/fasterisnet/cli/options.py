"""The options of a run, as `train` and `tune` take them."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from typing import Any


def add_options(p: argparse.ArgumentParser) -> None:
    """Every option of a run."""
    from fasterisnet.runs.config import Config
    from fasterisnet.runs.values import pretrained, switch

    p.add_argument(
        "--preset", metavar="X", dest="option_preset", default=argparse.SUPPRESS,
        help="paper: the options of the paper; those given besides come on top",
    )  # fmt: skip
    for option in fields(Config):
        flag = "--" + option.name.replace("_", "-")
        shown = argparse.SUPPRESS if option.metadata["rare"] else option.metadata["help"]
        if (
            shown is not argparse.SUPPRESS
            and option.default not in (MISSING, "", None, False)
            and option.name != "method"
        ):
            shown = f"{shown} ({option.default})"
        alone: Any = {"nargs": "?", "const": "true"} if option.metadata["check"] in (switch, pretrained) else {}
        p.add_argument(flag, metavar="X", help=shown, default=argparse.SUPPRESS, dest=f"option_{option.name}", **alone)


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of a run that were written on the command line."""
    return {key[7:]: _value(key[7:], text) for key, text in vars(options).items() if key.startswith("option_")}


def _value(name: str, text: str) -> Any:
    """A text of the command line as YAML would understand it; digits are a decimal number, also behind a zero."""
    if name in ("data", "model", "out", "method"):
        return text
    import yaml

    try:
        return int(text) if text.isascii() and text.isdigit() else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
