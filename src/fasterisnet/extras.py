"""What this package can do without: how to install it, wherever the package came from."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

NAME = "fasterisnet"
# Extras of packages by the names they are imported under; all others are for training.
EXTRAS = {
    "onnx": "export", "onnxruntime": "export", "onnxscript": "export", "nibabel": "medical", "pydicom": "medical",
    "pycocotools": "coco", "gradio": "app", "cv2": "boxes",
}  # fmt: skip


def install(extra: str) -> str:
    """The command that installs an extra: from the folder of the source if it is there, else package by package."""
    folder = _source()
    if folder is not None:
        return f"pip install {shlex.quote(f'{folder}[{extra}]')}"
    wanted = [text.partition(";") for text in metadata.requires(NAME) or []]
    markers = (f'extra == "{extra}"', f"extra == '{extra}'")
    needed = [name.strip() for name, _, marker in wanted if marker.strip() in markers]
    return shlex.join(["pip", "install", *needed])


def install_module(module: str | None) -> str:
    """The command that installs what a missing module belongs to."""
    return install(EXTRAS.get((module or "").partition(".")[0], "train"))


def _source() -> Path | None:
    """Where the package runs from, or was installed from, if that is a folder that can be installed again."""
    places = [Path(__file__).resolve().parents[2]]
    try:
        told = metadata.distribution(NAME).read_text("direct_url.json")
        places.append(Path(unquote(urlparse(json.loads(told)["url"]).path)) if told else places[0])
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        pass
    return next((p for p in places if (p / "pyproject.toml").is_file() and (p / "src" / NAME).is_dir()), None)
