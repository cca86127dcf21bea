"""Pictures show what they should: colours by sign, a symmetric scale, the outline round the mask."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from fasterisnet.errors import InputError
from fasterisnet.evaluation import accuracy_figure, curve_of_f, figures, heatmap_figure, overlay, save_figure
from fasterisnet.evaluation.figures import accuracy_panels, loss_panels, times_figure
from fasterisnet.evaluation.overlays import NEGATIVE, OUTLINE, PALEST, POSITIVE


def colour(rgb: tuple[float, ...]) -> list[int]:
    return [round(255 * value) for value in rgb]


def blank(size: int = 28, value: float = 0.0) -> Tensor:
    return torch.full((3, size, size), value)


def test_overlay_colours_signs_and_keeps_the_rest_grey() -> None:
    heatmap = torch.zeros(3, 28, 28)
    heatmap[0, 2, 3], heatmap[1, 5, 6] = 2.0, -2.0
    picture = overlay(blank(), heatmap)
    assert picture.dtype == torch.uint8 and picture.shape == (3, 224, 224)
    assert picture[:, 2 * 8 : 3 * 8, 3 * 8 : 4 * 8].flatten(1).T.unique(dim=0).tolist() == [colour(POSITIVE)]
    assert picture[:, 5 * 8 : 6 * 8, 6 * 8 : 7 * 8].flatten(1).T.unique(dim=0).tolist() == [colour(NEGATIVE)]
    others = torch.ones(28, 28, dtype=torch.bool)
    others[2, 3] = others[5, 6] = False
    assert picture[:, ::8, ::8][:, others].T.unique(dim=0).tolist() == [[round(255 * PALEST)] * 3]


def test_the_scale_is_symmetric() -> None:
    """The weaker sign is paler in proportion to its share of the largest absolute value, whichever sign that has."""
    for sign in (1.0, -1.0):
        heatmap = torch.zeros(28, 28)
        heatmap[0, 0], heatmap[1, 1], heatmap[2, 2] = 4 * sign, 1.0, -1.0
        picture = overlay(blank(), heatmap)[:, ::8, ::8].double() / 255
        distances = []
        for position, rgb in ((1, POSITIVE), (2, NEGATIVE)):
            full = torch.tensor(rgb).double() - PALEST
            distances.append(float(((picture[:, position, position] - PALEST) / full).mean()))
        assert distances[0] == pytest.approx(distances[1], abs=0.02)
        assert 0.2 < distances[0] < 0.5


def test_bound_sets_the_scale() -> None:
    heatmap = torch.zeros(28, 28)
    heatmap[0, 0] = 1.0
    weak, full = (overlay(blank(), heatmap, bound=bound)[:, 0, 0].tolist() for bound in (10.0, 0.5))
    assert full == colour(POSITIVE) and weak != full


def test_a_single_outlier_does_not_make_a_large_map_pale() -> None:
    """In full colour: what the strongest 0.1 % of the pixels reach, here 40 of them."""
    heatmap = torch.zeros(200, 200)
    heatmap[0, 0], heatmap[100, :60] = -1000.0, 1.0
    picture = overlay(blank(200), heatmap)
    assert picture[:, 100, 5].tolist() == colour(POSITIVE) and picture[:, 0, 0].tolist() == colour(NEGATIVE)
    alone = torch.zeros(200, 200)
    alone[3, 3] = 1.0
    assert overlay(blank(200), alone)[:, 3, 3].tolist() == colour(POSITIVE)


def test_channels_are_added_up() -> None:
    heatmap = torch.zeros(3, 28, 28)
    heatmap[:, 0, 0] = torch.tensor([1.0, 1.0, -3.0])
    assert overlay(blank(), heatmap)[:, 0, 0].tolist() == colour(NEGATIVE)


def test_a_map_of_zeros_is_grey() -> None:
    picture = overlay(blank(value=1.0), torch.zeros(28, 28))
    assert bool((picture == 255).all())


def test_the_outline_surrounds_the_mask_and_leaves_it_free() -> None:
    mask = torch.zeros(1, 28, 28, dtype=torch.bool)
    mask[:, 10:14, 10:14] = True
    heatmap = torch.zeros(28, 28)
    heatmap[10:14, 10:14] = 1.0
    picture = overlay(blank(), heatmap, mask)
    green = (picture == torch.tensor(colour(OUTLINE)).view(3, 1, 1)).all(0)
    assert bool(green[79, 80:112].all()) and bool(green[112, 80:112].all())
    assert bool(green[80:112, 79].all()) and bool(green[80:112, 112].all())
    assert not bool(green[80:112, 80:112].any()) and not bool(green[:70].any())
    assert not bool((overlay(blank(), heatmap) == picture).all())


@pytest.mark.parametrize(("size", "shown"), [(28, 224), (64, 256), (192, 192), (224, 224), (300, 300)])
def test_only_tiny_images_are_enlarged(size: int, shown: int) -> None:
    assert overlay(blank(size), torch.zeros(size, size)).shape == (3, shown, shown)


def test_images_of_any_range_and_kind() -> None:
    grey = torch.rand(1, 28, 28)
    zero = torch.zeros(28, 28)
    wanted = overlay(grey, zero)
    assert torch.equal(overlay(grey.expand(3, -1, -1), zero), wanted)
    eight = (grey * 255).round().to(torch.uint8)
    assert int((overlay(eight, zero).int() - wanted.int()).abs().max()) <= 1
    stretched = overlay(grey * 4 - 2, zero)
    assert int(stretched.min()) == round(255 * PALEST) and int(stretched.max()) == 255


def figure_of(count: int = 3, size: int = 28, **options: object) -> Figure:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 3, size, size, generator=generator)
    maps = {name: torch.randn(count, 3, size, size, generator=generator) for name in ("standard", "ISNet")}
    masks = torch.zeros(count, 1, size, size)
    masks[:, :, 4:9, 4:9] = 1
    return heatmap_figure(images, maps, masks, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("layout", "rows", "columns"), [("rows", 3, 3), ("columns", 3, 3)])
def test_every_image_beside_its_maps(layout: str, rows: int, columns: int) -> None:
    figure = figure_of(layout=layout, titles=["a 1", "a 2", "a 3"])
    *pictures, bar = figure.axes
    assert len(pictures) == rows * columns and "relevance" in bar.get_ylabel()
    top, left = ([a.get_title() for a in pictures[:columns]], [a.get_ylabel() for a in pictures[::columns]])
    methods, titles = ["image", "standard", "ISNet"], ["a 1", "a 2", "a 3"]
    assert (top, left) == ((methods, titles) if layout == "rows" else (titles, methods))
    assert all(a.images[0].get_interpolation() == "nearest" for a in pictures)
    low, high = bar.get_ylim()
    assert low == -high


def test_the_figure_shows_the_overlays() -> None:
    images, maps = torch.rand(2, 3, 28, 28), torch.randn(2, 3, 28, 28)
    masks = torch.zeros(2, 28, 28)
    masks[:, :5] = 1
    figure = heatmap_figure(images, {"m": maps}, masks)
    shown = np.asarray(figure.axes[3].images[0].get_array())
    assert np.array_equal(shown, overlay(images[1], maps[1], masks[1]).permute(1, 2, 0).numpy())


def test_one_image_has_its_title_on_top() -> None:
    assert figure_of(1, titles=["a long name"]).get_suptitle() == "a long name"


def test_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "maps.png"
    figure = figure_of()
    save_figure(figure, path)
    with Image.open(path) as picture:
        assert picture.width > 600
    before = path.read_bytes()

    def failing(temporary: Path, **options: object) -> None:
        Path(temporary).write_text("half")
        raise OSError("disk full")

    figure.savefig = failing  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(OSError, match="disk full"):
        save_figure(figure, path)
    assert path.read_bytes() == before and os.listdir(path.parent) == ["maps.png"]


@pytest.mark.parametrize("kind", ["pdf", "svg"])
def test_other_formats(kind: str, tmp_path: Path) -> None:
    save_figure(curve_of_f(0.5, 2), tmp_path / f"curve.{kind}")
    assert (tmp_path / f"curve.{kind}").read_bytes()[:5] in (b"%PDF-", b"<?xml")


def test_accuracy_over_epochs() -> None:
    figure = accuracy_figure({"i.i.d.": [0.5, 0.75, 0.9], "deceiving": [None, 0.2, float("nan")]})
    first, second = figure.axes[0].lines
    assert first.get_xdata() == pytest.approx([1, 2, 3]) and first.get_ydata() == pytest.approx([50, 75, 90])
    assert second.get_xdata() == pytest.approx([2]) and second.get_ydata() == pytest.approx([20])
    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == ["i.i.d. (90.0)", "deceiving (20.0)"]
    accuracy_figure({})


def test_panels_of_accuracy() -> None:
    histories = {f"row {i}": {"i.i.d.": [0.5, 0.1 * i], "deceiving": [0.2, None]} for i in range(5)}
    axes = accuracy_panels(histories, columns=3).axes
    shown = [axis for axis in axes if axis.get_visible()]
    assert [axis.get_title() for axis in shown] == list(histories)
    assert shown[4].lines[0].get_ydata() == pytest.approx([50, 40])
    assert [axis.get_xlabel() for axis in shown] == ["", "", "epoch", "epoch", "epoch"]
    with pytest.raises(InputError, match="no history"):
        accuracy_panels({})


def test_panels_of_losses() -> None:
    histories = {
        "standard": {"classification": [2.0, 1.0]},
        "isnet": {"classification": [2.0, 1.5], "background": [1.0, None]},
    }
    standard, isnet = loss_panels(histories).axes
    assert [line.get_ydata().tolist() for line in standard.lines] == [[2, 1], []]
    assert [line.get_ydata().tolist() for line in isnet.lines] == [[2, 1.5], [1]]
    assert [line.get_color() for line in standard.lines] == [line.get_color() for line in isnet.lines]
    assert isnet.get_ylim()[0] == 0 and [standard.get_title(), isnet.get_title()] == list(histories)
    assert 2 < standard.get_ylim()[1] < 3
    panels = loss_panels(
        {**histories, "another": {"classification": [3.0]}, "explodes": {"classification": [3.0, 900.0]}}
    )
    assert 3 < panels.axes[0].get_ylim()[1] < 10


def test_times_over_classes() -> None:
    axis = times_figure({"Original": {1: 0.1, 10: 1.0}}, {"Original": 1.0}).axes[0]
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert axis.lines[0].get_xdata() == pytest.approx([1, 10]) and axis.lines[0].get_ydata() == pytest.approx([0.1, 1])
    assert axis.get_legend().get_texts()[0].get_text() == "Original, slope 1.00"


def test_curve_of_f_is_the_papers() -> None:
    c1, c2 = 0.5, 2.0
    line = curve_of_f(c1, c2).axes[0].lines[0]
    for s, f in zip(line.get_xdata(), line.get_ydata(), strict=True):
        if s < c1:
            wanted = (c1 - s) ** 2 / c1**2
        elif s <= c2:
            wanted = 0
        elif s <= c2 + c1:
            wanted = (c2 - s) ** 2 / c1**2
        else:
            wanted = 1 + s - (c2 + c1)
        assert f == pytest.approx(wanted, abs=1e-9)


def test_refusals(tmp_path: Path) -> None:
    images, maps = torch.rand(2, 3, 28, 28), torch.rand(2, 3, 28, 28)
    with pytest.raises(InputError, match="1 maps of 'm' for 2 images"):
        heatmap_figure(images, {"m": maps[:1]})
    with pytest.raises(InputError, match="3 titles for 2"):
        heatmap_figure(images, {"m": maps}, titles=["a", "b", "c"])
    with pytest.raises(InputError, match=r"\(sample, channel, height, width\)"):
        heatmap_figure(images[0], {"m": maps})
    with pytest.raises(InputError, match="cannot be laid over"):
        overlay(images[0], torch.rand(14, 14))
    with pytest.raises(InputError, match="not finite"):
        overlay(images[0], torch.full((28, 28), torch.nan))
    with pytest.raises(InputError, match="1 or 3 channels"):
        overlay(torch.rand(2, 28, 28), maps[0])
    with pytest.raises(InputError, match=r"picture\.xyz: a figure can be saved as"):
        save_figure(curve_of_f(1, 2), tmp_path / "picture.xyz")


def test_matplotlib_is_needed_only_for_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module loads and draws overlays where matplotlib cannot be imported; a figure says what to install."""
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("figures_alone", figures.__file__)
    assert spec is not None and spec.loader is not None
    alone = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(alone)
    assert alone.overlay(blank(), torch.zeros(28, 28)).shape == (3, 224, 224)
    with pytest.raises(InputError, match=r"need the package matplotlib: pip install .*\[train\]"):
        alone.curve_of_f(1, 2)
