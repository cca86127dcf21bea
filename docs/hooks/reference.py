"""What the site has besides docs/: the Python reference, from docstrings, and the pictures of results/."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

MARK = "<!-- reference -->"


def on_files(files: Any, config: Any) -> Any:
    """Adds the figures of results/, which lie beside docs/."""
    root = Path(config["docs_dir"]).parent
    for path in sorted(root.glob("results/**/*.png")):
        files.append(File.generated(config, path.relative_to(root).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in the reference, and points at the figures where the site has them."""
    return markdown.replace(MARK, reference() if MARK in markdown else "").replace("](../results/", "](results/")


def reference() -> str:
    """A section for every public name."""
    import fasterisnet

    return "\n".join(_section(name, getattr(fasterisnet, name)) for name in sorted(fasterisnet.__all__, key=str.lower))


def _section(name: str, value: Any) -> str:
    lines = [f"## {name}", ""]
    if callable(value):
        try:
            lines += ["```python", f"{name}{inspect.signature(value)}", "```", ""]
        except (TypeError, ValueError):
            lines += []
    text = inspect.getdoc(value) or ""
    lines += ["```text", text, "```", ""] if text else []
    if inspect.isclass(value):
        for method, function in inspect.getmembers(value, inspect.isfunction):
            if not method.startswith("_") and function.__module__.startswith("fasterisnet") and function.__doc__:
                lines += [f"* `{method}{inspect.signature(function)}`: {inspect.getdoc(function)!s}".replace("\n", " ")]
        lines.append("")
    return "\n".join(lines)
