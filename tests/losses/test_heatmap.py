"""The heatmap loss against the authors' numbers, its invariants, and what it accepts as masks."""

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fasterisnet.errors import InputError
from fasterisnet.losses import (
    HeatmapLoss,
    background_loss,
    foreground_loss,
    has_foreground,
    heatmap_loss,
    prepare_masks,
    resize_masks,
)
from fasterisnet.losses.heatmap import Foreground

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = dict(np.load(FOLDER / "heatmap_loss.npz"))
GOLDEN32 = dict(np.load(FOLDER / "heatmap_loss_float32.npz"))
BOUNDS = {"C0": (1.0, 25.0), "C1": (5.0, 20.0), "C2": (40.0, 60.0)}
SETTINGS = [
    (case, decay, bounds, version)
    for case in ("a", "b", "c_dual", "d_lds", "e_edge")
    for decay in ("0.9", "0.999", "1")
    for bounds in BOUNDS
    for version in ("hybrid", "L2")
]
PRECISIONS = pytest.mark.parametrize(
    ("golden", "dtype", "tolerance"), [(GOLDEN, torch.float64, 1e-9), (GOLDEN32, torch.float32, 1e-5)]
)


def inputs(case: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    masks = GOLDEN.get(f"{case}.mask_resized", GOLDEN[f"{case}.mask"])
    return torch.tensor(GOLDEN[f"{case}.heatmap"], dtype=dtype), torch.tensor(masks)


def random_case(*space: int, maps: int = 2, channels: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heatmaps = torch.randn(4, maps, channels, *space, dtype=torch.float64, generator=generator)
    return heatmaps, torch.rand(4, 1, *space, generator=generator) > 0.5


def close(actual: Tensor, expected: object, tolerance: float = 1e-9) -> None:
    wanted = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=1e-12)


@PRECISIONS
@pytest.mark.parametrize(("case", "decay", "bounds", "version"), SETTINGS)
def test_golden(
    case: str,
    decay: str,
    bounds: str,
    version: str,
    golden: dict[str, np.ndarray],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    heatmaps, masks = inputs(case, dtype)
    c1, c2 = ((c, 2 * c) if case == "c_dual" else c for c in BOUNDS[bounds])
    foreground: Foreground = "hybrid" if version == "hybrid" else "square"
    parts = heatmap_loss(heatmaps, masks, c1, c2, decay=float(decay), w1=1, w2=3, foreground=foreground)
    key = f"{case}.d{decay}.{bounds}.{version}.official_"
    assert {part.dtype for part in parts} == {dtype}
    close(parts.background_per_sample, golden[f"{key}L1_per_sample"], tolerance)
    close(parts.foreground_per_sample, golden[f"{key}L2_per_sample"], tolerance)
    close(parts.total, golden[f"{key}total_w1_1_w2_3_mean"], tolerance)
    close(parts.total, parts.background + 3 * parts.foreground, tolerance)
    close(background_loss(heatmaps, masks, float(decay)).mean(1), golden[f"{key}L1_per_sample"], tolerance)
    close(foreground_loss(heatmaps, masks, c1, c2, foreground).mean(1), golden[f"{key}L2_per_sample"], tolerance)


@pytest.mark.parametrize("case", ["a", "b"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_golden_gradient(case: str, dtype: torch.dtype, tolerance: float) -> None:
    heatmaps, masks = inputs(case, dtype)
    heatmaps.requires_grad_()
    heatmap_loss(heatmaps, masks, 5, 20, decay=0.9, w2=3).total.backward()
    assert heatmaps.grad is not None
    expected = torch.tensor(GOLDEN[f"{case}.grad_total_d0.9.C1"], dtype=dtype)
    torch.testing.assert_close(heatmaps.grad, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


def test_golden_masks_of_deep_supervision() -> None:
    resized = resize_masks(torch.tensor(GOLDEN["d_lds.mask"]), (5, 5))
    close(resized, GOLDEN["d_lds.mask_resized"], 0)


def test_empty_mask_gives_the_cap_and_no_background_gradient() -> None:
    heatmaps, masks = inputs("e_edge")
    heatmaps.requires_grad_()
    losses = background_loss(heatmaps, masks)
    assert losses[0].item() == pytest.approx(-math.log(1e-7), rel=1e-8)
    (gradient,) = torch.autograd.grad(losses.sum(), heatmaps)
    assert not gradient[0].any()
    assert gradient[2].any()


def test_non_finite_relevance_is_never_replaced() -> None:
    """The authors' code swaps NaN for numbers (golden `f_nan`); here it has to stay visible."""
    heatmaps, masks = inputs("f_nan")
    finite = heatmaps.flatten(1).isfinite().all(dim=1)
    assert not finite.all()
    parts = heatmap_loss(heatmaps, masks, 5, 20)
    assert not parts.total.isfinite()
    assert (parts.total_per_sample.isfinite() == finite).all()
    assert np.isfinite(GOLDEN["f_nan.official_L1_per_sample"]).all()


@pytest.mark.parametrize("where", ["foreground", "background"])
@pytest.mark.parametrize("version", ["hybrid", "square"])
def test_one_nan_shows_in_its_sample_only(where: str, version: Foreground) -> None:
    heatmaps, masks = random_case(6, 5)
    pixel = (masks[1, 0] == (where == "foreground")).nonzero()[0]
    heatmaps[1, 0, 0, pixel[0], pixel[1]] = math.nan
    values = heatmap_loss(heatmaps, masks, 1, 25, foreground=version).total_per_sample
    assert values.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_background_loss_is_zero_when_all_relevance_is_in_the_foreground(decay: float) -> None:
    heatmaps, masks = random_case(6, 5)
    assert not background_loss(heatmaps * masks.unsqueeze(1), masks, decay).any()
    assert (background_loss(heatmaps, masks, decay) > 0.1).all()


@pytest.mark.parametrize("scale", [1e-4, 0.1, 7.0, 1e6])
def test_background_loss_ignores_the_scale_of_relevance(scale: float) -> None:
    heatmaps, masks = random_case(6, 5)
    close(background_loss(scale * heatmaps, masks), background_loss(heatmaps, masks), 1e-5)


def test_background_loss_keeps_its_digits_far_from_the_foreground() -> None:
    """One foreground pixel of relevance 1, one background pixel of relevance 1e5, E = 2: ln(1 + 1e5/2)."""
    heatmaps = torch.tensor([1.0, 1e5]).reshape(1, 1, 1, 2)
    loss = background_loss(heatmaps, torch.tensor([[True, False]]), decay=0, e=2.0)
    close(loss, [[math.log1p(1e5 / 2)]], 1e-6)


@pytest.mark.parametrize(
    ("s", "hybrid", "square"),
    [(0, 1, 1), (1, 0.25, 0.25), (2, 0, 0), (3.5, 0, 0), (5, 0, 0), (6, 0.25, 0.25), (7, 1, 1), (11, 5, 9)],
)
def test_foreground_loss_by_hand(s: float, hybrid: float, square: float) -> None:
    """C1 = 2 and C2 = 5, so the linear part of eq. newLoss starts at 7."""
    heatmaps = torch.full((1, 1, 1, 4), s / 4, dtype=torch.float64)
    masks = torch.ones(1, 4, dtype=torch.bool)
    close(foreground_loss(heatmaps, masks, 2, 5), [[hybrid]])
    close(foreground_loss(heatmaps, masks, 2, 5, "square"), [[square]])


@pytest.mark.parametrize(("edge", "value"), [(0.3, 0.0), (1.7, 0.0), (2.0, 1.0)])
@pytest.mark.parametrize("version", ["hybrid", "square"])
def test_foreground_loss_is_continuous_at_its_edges(edge: float, value: float, version: Foreground) -> None:
    step = 1e-6
    s = torch.tensor([edge - step, edge, edge + step], dtype=torch.float64).reshape(3, 1, 1, 1)
    values = foreground_loss(s, torch.ones(3, 1, dtype=torch.bool), 0.3, 1.7, version)
    torch.testing.assert_close(values, torch.full_like(values, value), rtol=0, atol=10 * step)


@pytest.mark.parametrize(("s", "slope"), [(1, -0.5), (2, 0), (5, 0), (6, 0.5), (7, 1), (7.5, 1), (1e30, 1)])
def test_hybrid_slope_with_c1_2_and_c2_5(s: float, slope: float) -> None:
    heatmaps = torch.full((1, 1, 1, 1), float(s), requires_grad=True)
    foreground_loss(heatmaps, torch.ones(1, 1, dtype=torch.bool), 2, 5).sum().backward()
    assert heatmaps.grad is not None
    assert heatmaps.grad.item() == slope


@pytest.mark.parametrize("decay", [0.9, 1.0])
@pytest.mark.parametrize("version", ["hybrid", "square"])
@pytest.mark.parametrize("bounds", [(30.0, 50.0), (1.0, 4.0), (1.0, 20.0)])
def test_gradient_numerically(decay: float, version: Foreground, bounds: tuple[float, float]) -> None:
    heatmaps, masks = random_case(4, 3, channels=2)

    def total(maps: Tensor) -> Tensor:
        return heatmap_loss(maps, masks, *bounds, decay=decay, w1=2, w2=3, foreground=version).total

    assert torch.autograd.gradcheck(total, (heatmaps.requires_grad_(),))


@pytest.mark.parametrize("space", [(24,), (6, 4), (2, 3, 4), (2, 2, 2, 3)])
def test_any_number_of_spatial_dimensions(space: tuple[int, ...]) -> None:
    heatmaps, masks = random_case(24)
    shaped = heatmap_loss(heatmaps.reshape(4, 2, 3, *space), masks.reshape(4, *space), 1, 25)
    for actual, expected in zip(shaped, heatmap_loss(heatmaps, masks, 1, 25), strict=True):
        close(actual, expected)


def test_bounds_keep_their_digits_in_float64() -> None:
    heatmaps = torch.full((1, 1, 1, 1), 0.05, dtype=torch.float64)
    close(foreground_loss(heatmaps, torch.ones(1, 1), 0.1, 0.3), [[0.25]], 1e-14)


def test_each_map_has_its_own_range() -> None:
    heatmaps, masks = random_case(6, 5)
    c1, c2 = torch.tensor([30.0, 0.1]), torch.tensor([31.0, 0.2])
    together = foreground_loss(heatmaps, masks, c1, c2)
    for i in range(2):
        one = foreground_loss(heatmaps[:, i : i + 1], masks, c1[i].item(), c2[i].item())
        close(together[:, i : i + 1], one)


def test_channels_may_have_masks_of_their_own() -> None:
    heatmaps, masks = random_case(6, 5, maps=1)
    parts = heatmap_loss(heatmaps, masks.expand(-1, 3, -1, -1), 1, 25)
    close(parts.total, heatmap_loss(heatmaps, masks, 1, 25).total)
    only_first = torch.cat([masks, torch.zeros_like(masks), torch.zeros_like(masks)], dim=1)
    expected = foreground_loss(heatmaps[:, :, :1], masks, 20, 25)
    close(foreground_loss(heatmaps, only_first, 20, 25), expected)


def test_equal_mask_channels_fit_any_heatmap_and_different_ones_do_not() -> None:
    heatmaps, masks = random_case(6, 5, channels=8)
    masks = masks.repeat(1, 3, 1, 1)
    close(background_loss(heatmaps, masks), background_loss(heatmaps, masks[:, 0]))
    masks[0, 1] = ~masks[0, 1]
    with pytest.raises(InputError, match="1 or 8 channels"):
        background_loss(heatmaps, masks)


def test_samples_can_be_left_out() -> None:
    heatmaps, masks = random_case(6, 5)
    masks[2] = False
    heatmaps.requires_grad_()
    include = has_foreground(masks)
    assert include.tolist() == [True, True, False, True]
    parts = heatmap_loss(heatmaps, masks, 1, 25, include=include)
    close(parts.total, heatmap_loss(heatmaps[include], masks[include], 1, 25).total)
    assert parts.total_per_sample.shape == (3,)
    (gradient,) = torch.autograd.grad(parts.total, heatmaps)
    assert gradient.flatten(1).any(dim=1).tolist() == include.tolist()


def test_leaving_out_every_sample_gives_a_zero_that_can_be_differentiated() -> None:
    heatmaps, masks = random_case(6, 5)
    heatmaps.requires_grad_()
    parts = heatmap_loss(heatmaps, masks, 1, 25, include=torch.zeros(4, dtype=torch.bool))
    assert parts.total == 0
    assert not torch.autograd.grad(parts.total, heatmaps)[0].any()


@pytest.mark.parametrize("include", [torch.ones(4), torch.ones(3, dtype=torch.bool)])
def test_wrong_choice_of_samples_is_an_error(include: Tensor) -> None:
    with pytest.raises(InputError, match="one bool for each of the 4 samples"):
        heatmap_loss(*random_case(6, 5), 1, 25, include=include)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_computes_in_float32(dtype: torch.dtype) -> None:
    heatmaps, masks = random_case(14, 14)
    heatmaps = heatmaps.to(dtype)
    expected = heatmap_loss(heatmaps.float(), masks, 1, 25, decay=0.99)
    leaf = heatmaps.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parts = heatmap_loss(leaf, masks, 1, 25, decay=0.99)
    for actual, wanted in zip(parts, expected, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)
    parts.total.backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype


def test_module_is_the_function_with_its_settings() -> None:
    heatmaps, masks = random_case(6, 5)
    include = torch.tensor([True, True, False, True])
    module = HeatmapLoss((2, 40), (3, 50), decay=0.5, w1=2, w2=3, e=0.7, foreground="square")
    expected = heatmap_loss(
        heatmaps, masks, (2, 40), (3, 50), decay=0.5, w1=2, w2=3, e=0.7, foreground="square", include=include
    )
    for actual, wanted in zip(module(heatmaps, masks, include), expected, strict=True):
        close(actual, wanted, 0)
    assert not module.state_dict()
    assert "c2=(3, 50), decay=0.5" in repr(module)


@pytest.mark.parametrize("foreground", [1, 255])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16])
def test_masks_of_any_dtype(foreground: int, dtype: torch.dtype) -> None:
    masks = torch.tensor([[[0, 1], [1, 0]], [[0, 0], [0, 0]]], dtype=torch.bool)
    prepared = prepare_masks(masks.to(dtype) * foreground, (2, 2))
    assert prepared.dtype == torch.bool
    assert prepared.equal(masks.unsqueeze(1))


@pytest.mark.parametrize("values", [[0, 0.5, 1], [0, 1, 255], [0, 128, 255], [0, 2, 2], [0, -1, 1], [0, math.nan, 1]])
def test_soft_masks_are_an_error(values: list[float]) -> None:
    masks = torch.stack([torch.zeros(3), torch.tensor(values)])
    with pytest.raises(InputError, match=r"in sample 1\. Threshold them first: `masks >= 0.5`"):
        prepare_masks(masks, (3,))


@pytest.mark.parametrize("shape", [(4, 1, 1, 6, 5), (6, 5), (3, 6, 5), (4, 2, 6, 5)])
def test_masks_of_another_layout_are_an_error(shape: tuple[int, ...]) -> None:
    heatmaps, _ = random_case(6, 5)
    with pytest.raises(InputError, match=r"[Mm]asks .*shape"):
        background_loss(heatmaps, torch.arange(math.prod(shape)).reshape(shape) % 7 == 0)


def test_heatmaps_without_a_map_dimension_are_an_error() -> None:
    with pytest.raises(InputError, match=r"sample, map, channel, space"):
        background_loss(torch.rand(4, 3, 8), torch.ones(4, 8))


def test_other_mask_sizes_are_resized_and_warned_about_once() -> None:
    heatmaps, masks = random_case(3, 7)
    large = masks.repeat_interleave(2, dim=2).repeat_interleave(3, dim=3)
    with pytest.warns(UserWarning, match=r"\(6, 21\) were resized to \(3, 7\)"):
        first = background_loss(heatmaps, large)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = background_loss(heatmaps, large)
    close(first, background_loss(heatmaps, masks))
    close(first, second)


@pytest.mark.parametrize("size", [(5,), (3, 4), (2, 3, 2)])
def test_shrinking_keeps_every_foreground_pixel(size: tuple[int, ...]) -> None:
    old = 11
    for pixel in range(old):
        masks = torch.zeros(1, *(old for _ in size), dtype=torch.bool)
        masks[(0, *(pixel for _ in size))] = True
        cells = resize_masks(masks, size)[0].nonzero()
        nearest = torch.tensor([pixel * new // old for new in size])
        assert (cells == nearest).all(dim=1).any()


def test_resizing_by_hand() -> None:
    masks = torch.tensor([[[0, 0, 0, 1], [0, 0, 0, 0]]], dtype=torch.uint8)
    smaller_and_larger = resize_masks(masks, (4, 2))
    assert smaller_and_larger.tolist() == [[[0, 1], [0, 1], [0, 0], [0, 0]]]
    assert smaller_and_larger.dtype == torch.uint8
    assert resize_masks(torch.tensor([[0, 0, 1]]), (5,)).tolist() == [[0, 0, 0, 1, 1]]


@pytest.mark.parametrize("size", [(), (0, 4), (2, 2, 2, 2)])
def test_impossible_sizes_are_an_error(size: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="cannot be resized"):
        resize_masks(torch.ones(1, 4, 4), size)


@pytest.mark.parametrize("bounds", [(0, 1), (-1, 1), (2, 1), (math.nan, 1), (1, math.inf), ((1, 1, 1), 2)])
def test_impossible_bounds_are_an_error(bounds: tuple[float, float]) -> None:
    with pytest.raises(InputError, match="C1 and C2 must be"):
        foreground_loss(*random_case(6, 5), *bounds)


def test_impossible_settings_are_an_error() -> None:
    with pytest.raises(InputError, match="E in the background loss"):
        background_loss(*random_case(6, 5), e=0)
    with pytest.raises(InputError, match="'cubic'"):
        foreground_loss(*random_case(6, 5), 1, 2, "cubic")  # pyright: ignore[reportArgumentType]
