"""What the site has besides docs/: the Python reference, from docstrings, and the pictures and tables of results/."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

MARK = "<!-- reference -->"


def on_files(files: Any, config: Any) -> Any:
    """Adds the figures and tables of results/, which lie beside docs/."""
    root = Path(config["docs_dir"]).parent
    for path in sorted([*root.glob("results/**/*.png"), *root.glob("results/**/*.md")]):
        files.append(File.generated(config, path.relative_to(root).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in the reference, and points at figures and tables where the site has them."""
    return markdown.replace(MARK, reference() if MARK in markdown else "").replace("](../results/", "](results/")


def reference() -> str:
    """A section for every public name, and for the families of methods that share arguments."""
    import fasterisnet

    public = {name: getattr(fasterisnet, name) for name in sorted(fasterisnet.__all__, key=str.lower)}
    families = {kind.__name__: kind for value in public.values() for kind in _families(value)}
    return "\n".join(_section(name, value) for name, value in (public | families).items())


def _families(value: Any) -> list[type]:
    """What a method is a kind of, apart from itself."""
    from fasterisnet.methods import Method

    kinds = value.__mro__[1:] if inspect.isclass(value) else ()
    return [kind for kind in kinds if issubclass(kind, Method)]


def _section(name: str, value: Any) -> str:
    lines = [f"## {name}", ""]
    if callable(value):
        try:
            lines += ["```python", f"{name}{_signature(value)}", "```", ""]
        except (TypeError, ValueError):
            lines += []
    lines += [_paragraphs(inspect.getdoc(value) or ""), ""]
    families = [f"[{kind.__name__}](#{kind.__name__.lower()})" for kind in _families(value)]
    lines += [f"Takes what {', '.join(families)} takes as well.", ""] if families else []
    if inspect.isclass(value):
        for method, function in vars(value).items():
            if inspect.isfunction(function) and not method.startswith("_") and function.__doc__:
                said = inspect.cleandoc(function.__doc__).replace("\n", " ")
                lines += [f"* `{method}{_signature(function)}`: {said}"]
        lines.append("")
    return "\n".join(lines)


def _signature(value: Any) -> str:
    """Annotations are texts here, so their quotes say nothing."""
    bare = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(value)))
    return bare.replace("(self, ", "(").replace("(self)", "()")


def _paragraphs(text: str) -> str:
    """A docstring as Markdown: its examples are code."""
    said, _, example = text.partition("Example:\n")
    return f"{said}\n```pycon\n{inspect.cleandoc(example)}\n```" if example else said
