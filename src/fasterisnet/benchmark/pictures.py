"""Where the networks of an experiment look: the same few test samples, explained by every row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fasterisnet.data.base import Label, Samples
from fasterisnet.errors import InputError, RuleError
from fasterisnet.evaluation.figures import heatmap_figure, save_figure
from fasterisnet.files import write_bytes
from fasterisnet.lrp.explain import explain
from fasterisnet.runs.folder import Run
from fasterisnet.runs.report import read, viewable

SHOWN = 4


def save_maps(run: Run, samples: Samples, path: Path, *, outlines: bool = False, trust: bool = False) -> None:
    """Test samples of different classes, their masks, and the map of their true class.

    Epsilon, and zB at the first layer if the network begins with one that zB applies to. outlines: white in place of
    the samples, for those that must not be shown; their masks say what is where.
    """
    model, card = run.load_model(trust=trust)
    images, masks, found = read(samples, _of_different_classes(samples, SHOWN), card)
    labels = torch.tensor([_class_of(label) for label in found])
    try:
        maps = explain(model, images, labels, box=card.prepare.box)
    except RuleError:
        maps = explain(model, images, labels)
    shown = torch.ones_like(images) if outlines else viewable(images, card)
    content = {"images": shown, "masks": masks, "maps": maps.sum(1).nan_to_num()}
    write_bytes(path, save({key: value.contiguous() for key, value in content.items()}))


def _class_of(label: Label) -> int:
    """Of several true ones the first."""
    return label if isinstance(label, int) else label.index(max(label))


def _of_different_classes(samples: Samples, count: int) -> list[int]:
    """The first sample of each of the first `count` classes that are met."""
    met: dict[Any, int] = {}
    for i in range(len(samples)):
        met.setdefault(str(samples.label(i)), i)
        if len(met) == count:
            break
    return list(met.values())


def heatmap_grid(files: dict[str, Path], path: Path) -> list[str]:
    """Columns: the samples. Rows: the samples themselves, then the maps of every row of the experiment.

    Returns the rows that are not in the picture because they explain other samples than the first.
    """
    contents = {row: _loaded(file) for row, file in files.items() if file.exists()}
    if not contents:
        return []
    first = next(iter(contents.values()))
    maps = {
        row: content["maps"]
        for row, content in contents.items()
        if all(torch.equal(content[key], first[key]) for key in ("images", "masks"))
    }
    figure = heatmap_figure(first["images"], maps, first["masks"], layout="columns")
    save_figure(figure, path, dpi=120)  # maps have about a hundred pixels a side
    return [row for row in contents if row not in maps]


def _loaded(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise InputError(f"{file} is not a file; it holds no maps of a benchmark.")
    try:
        content = load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} holds no maps of a benchmark: {error}") from error
    if content.keys() != {"images", "masks", "maps"}:
        raise InputError(f"{file} holds no maps of a benchmark, but {', '.join(content) or 'nothing'}.")
    return content
