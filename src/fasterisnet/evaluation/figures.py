"""Figures: heatmaps beside images, accuracies over epochs, the curve of the foreground loss.

matplotlib is imported only when a figure is made, and without its global state (no pyplot).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fasterisnet.errors import InputError
from fasterisnet.evaluation.overlays import coloured, overlay, with_outline
from fasterisnet.extras import install
from fasterisnet.files import replacing
from fasterisnet.losses import foreground_loss, prepare_masks

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
PROGRAM = "fasterisnet"


def heatmap_figure(
    images: Tensor,
    maps: Mapping[str, Tensor],
    masks: Tensor | None = None,
    *,
    titles: Sequence[str] | None = None,
    layout: Literal["rows", "columns"] = "rows",
    bound: float | None = None,
) -> Figure:
    """Every image beside its maps, one for each name in `maps`; an image is a row, or a column.

    titles: one for each image. bound: the relevance in full colour everywhere; by default each map has its own.
    """
    _check(images, maps, titles)
    outlined = None if masks is None else prepare_masks(masks, images.shape[2:])
    pictures = [
        [with_outline(image, None if outlined is None else outlined[i])]
        + [overlay(image, m[i], None if outlined is None else outlined[i], bound=bound) for m in maps.values()]
        for i, image in enumerate(images)
    ]
    across = layout == "rows"
    rows, columns = (len(images), 1 + len(maps)) if across else (1 + len(maps), len(images))
    aspect = images.shape[2] / images.shape[3]
    heading = titles[0].count("\n") + 1 if titles is not None and rows == 1 else 0
    figure = new_figure(1.75 * columns + 1.4, 1.75 * aspect * rows + 0.35 + 0.2 * heading)
    axes = figure.subplots(rows, columns, squeeze=False)
    for i, line in enumerate(pictures):
        for j, picture in enumerate(line):
            axes[(i, j) if across else (j, i)].imshow(picture.permute(1, 2, 0).numpy(), interpolation="nearest")
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_color("0.6")
    of_images = list(titles) if titles is not None else [""] * len(images)
    of_pictures = ["image", *maps]
    if across and len(images) == 1:  # room for a long title
        figure.suptitle(of_images[0], fontsize=10, parse_math=False)
        of_images = [""]
    _name(axes, of_pictures if across else of_images, of_images if across else of_pictures)
    _colour_bar(figure, axes, bound)
    return figure


History = Mapping[str, Sequence[float | None]]


def accuracy_figure(history: History) -> Figure:
    """Accuracy on every test (0 to 1) after each epoch; None where a test was not made."""
    figure = new_figure(6.4, 3.8)
    axis = figure.subplots()
    _accuracies(axis, history, with_last=True)
    _over_epochs(axis)
    axis.set(xlabel="epoch", ylabel="accuracy, %")
    if history:
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


def accuracy_panels(histories: Mapping[str, History], *, columns: int = 4) -> Figure:
    """The same for several networks, one panel each, on one scale. All have the same tests."""

    def draw(axis: Axes, history: History) -> None:
        _accuracies(axis, history, with_last=False)

    return _panels(histories, columns, draw, "accuracy, %")


def loss_panels(histories: Mapping[str, History], *, columns: int = 4) -> Figure:
    """Losses after each epoch of several networks, one panel each, on one scale; some may lack some of the losses.

    The scale is that of most networks: one whose losses explode leaves its panel at the top.
    """
    names = list(dict.fromkeys(name for history in histories.values() for name in history))

    def draw(axis: Axes, history: History) -> None:
        for position, name in enumerate(names):
            axis.plot(*_points(history.get(name, [])), color=LINES[position % len(LINES)], linewidth=1.5, label=name)

    figure = _panels(histories, columns, draw, "loss")
    highest = [max((v for values in h.values() for v in _points(values)[1]), default=0) for h in histories.values()]
    figure.axes[0].set_ylim(0, 1.05 * min(max(highest), 2 * statistics.median(highest)) or 1)  # and with it of all
    return figure


def _panels(histories: Mapping[str, History], columns: int, draw: Callable[[Axes, History], None], y: str) -> Figure:
    if not histories:
        raise InputError("There is no history to draw.")
    columns = min(columns, len(histories))
    rows = -(-len(histories) // columns)
    figure = new_figure(2.3 * columns + 0.6, 2.0 * rows + 0.6)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axis in axes.flat[len(histories) :]:
        axis.set_visible(False)
    for axis, (name, history) in zip(axes.flat, histories.items(), strict=False):
        draw(axis, history)
        axis.set_title(name, fontsize=10)
        _over_epochs(axis)
    for row in axes:
        row[0].set_ylabel(y)
    for position in range(len(histories)):
        if position + columns >= len(histories):
            axes.flat[position].set_xlabel("epoch")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), columns), frameon=False)
    return figure


def _accuracies(axis: Axes, history: History, *, with_last: bool) -> None:
    for position, (name, values) in enumerate(history.items()):
        epochs, accuracies = _points(values)
        accuracies = [100 * v for v in accuracies]
        colour, style = LINES[position % len(LINES)], ("-", "--", ":")[position // len(LINES) % 3]
        last = f" ({accuracies[-1]:.1f})" if accuracies and with_last else ""
        width = 1.5 + 1.5 * max(0, min(len(history), 4) - 1 - position)  # lines below others are wider, so they show
        axis.plot(
            epochs, accuracies, style, color=colour, linewidth=width, marker="o", ms=width + 1.5, label=name + last
        )
    axis.set(ylim=(0, 102))


def _over_epochs(axis: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(color="0.9")
    axis.spines[["top", "right"]].set_visible(False)


def _points(values: Sequence[float | None]) -> tuple[list[int], list[float]]:
    """Epochs that have a value, and the values."""
    known = [(epoch, v) for epoch, v in enumerate(values, start=1) if v is not None and math.isfinite(v)]
    return [epoch for epoch, _ in known], [v for _, v in known]


def times_figure(times: Mapping[str, Mapping[int, float]], slopes: Mapping[str, float]) -> Figure:
    """Seconds of a step over the number of classes, for several methods, both axes logarithmic."""
    figure = new_figure(6.4, 3.8)
    axis = figure.subplots()
    for position, (name, values) in enumerate(times.items()):
        label = f"{name}, slope {slopes[name]:.2f}"
        axis.loglog(list(values), list(values.values()), "o-", color=LINES[position % len(LINES)], ms=3, label=label)
    axis.set(xlabel="classes", ylabel="seconds of a training step")
    axis.grid(color="0.9")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    return figure


def curve_of_f(c1: float, c2: float) -> Figure:
    """f(s), the foreground loss over the relevance in the foreground: nothing between C1 and C2."""
    s = torch.linspace(0, c2 + 2.5 * c1, 800, dtype=torch.float64)
    loss = foreground_loss(s.view(-1, 1, 1, 1), torch.ones(len(s), 1, 1), c1, c2)[:, 0]
    figure = new_figure(6.4, 3.6)
    axis = figure.subplots()
    axis.axvspan(c1, c2, color=LINES[2], alpha=0.12, label="the plain classifier's range: no loss")
    axis.plot(s.numpy(), loss.numpy(), color=LINES[0], linewidth=2, label="f(s)")
    axis.set_xticks([0, c1, c2, c2 + c1], ["0", f"C1\n{c1:.3g}", f"C2\n{c2:.3g}", f"C2+C1\n{c2 + c1:.3g}"])
    axis.set(xlabel="relevance in the foreground, s", ylabel="loss", xlim=(0, float(s[-1])), ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper center")
    return figure


def save_figure(figure: Figure, path: str | Path, *, dpi: int = 150) -> None:
    """Writes the figure in the format of the path's ending (png, pdf, svg, ...), whole or not at all."""
    known = figure.canvas.get_supported_filetypes()
    if Path(path).suffix.lstrip(".").lower() not in known:
        raise InputError(f"{path}: a figure can be saved as {', '.join(sorted(known))}; give the file such an ending.")
    mark: dict[str, Any] = {"metadata": {"Software": PROGRAM}} if Path(path).suffix.lower() == ".png" else {}
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=dpi, **mark)


def is_own_figure(path: str | Path) -> bool:
    """Whether `save_figure` wrote this .png file."""
    from PIL import Image

    try:
        with Image.open(path, formats=["PNG"]) as picture:
            return picture.info.get("Software") == PROGRAM
    except (OSError, ValueError, SyntaxError):
        return False


# --- matplotlib -----------------------------------------------------------------------------------------------------


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that needs no display."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"Figures need the package matplotlib: {install('train')}") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _name(axes: np.ndarray, top: Sequence[str], left: Sequence[str]) -> None:
    for axis, text in zip(axes[0], top, strict=True):
        axis.set_title(text, fontsize=10, parse_math=False)
    for row, text in zip(axes, left, strict=True):
        row[0].set_ylabel(text, fontsize=10, parse_math=False)


LONGEST_BAR = 6.0  # inches; it grows wide with its length


def _colour_bar(figure: Figure, axes: np.ndarray, bound: float | None) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    scale = torch.linspace(-1, 1, 257).view(1, 1, -1)
    colours = ListedColormap(coloured(torch.full_like(scale, 0.5), scale)[:, 0].T.numpy())
    reach = 1.0 if bound is None else bound
    bar = figure.colorbar(
        ScalarMappable(Normalize(-reach, reach), colours), ax=axes.ravel().tolist(), aspect=30,
        shrink=min(0.8, LONGEST_BAR / figure.get_figheight()),
    )  # fmt: skip
    bar.set_ticks([-reach, 0, reach], labels=[f"−{reach:g}\nagainst", "0", f"{reach:g}\nfor"], fontsize=9)
    bar.set_label("relevance, share of\nthe map's top 0.1 %" if bound is None else "relevance", fontsize=9)


def _check(images: Tensor, maps: Mapping[str, Tensor], titles: Sequence[str] | None) -> None:
    if images.ndim != 4 or len(images) == 0:
        raise InputError(f"images have shape {tuple(images.shape)}; they have to be (sample, channel, height, width).")
    for name, found in maps.items():
        if len(found) != len(images):
            raise InputError(f"There are {len(found)} maps of '{name}' for {len(images)} images; give one for each.")
    if titles is not None and len(titles) != len(images):
        raise InputError(f"There are {len(titles)} titles for {len(images)} images; give one for each.")
