"""Welford's moments, C1 and C2 from them, and the file that keeps them."""

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterisnet.errors import InputError, NonFiniteError
from fasterisnet.losses import RunningMoments, heatmap_loss, range_from_moments, total_relevance
from fasterisnet.methods.ranges import Range, Ranges

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = dict(np.load(FOLDER / "gwrp.npz"))
HEATMAPS = dict(np.load(FOLDER / "heatmap_loss.npz"))
RANGES = Ranges({"input": Range((0.1, 2.0), (1 / 3, 2.0)), "layer1": Range((5e-12,), (7e8,))})


def moments_of(*values: float) -> RunningMoments:
    moments = RunningMoments()
    moments.update(torch.tensor(values, dtype=torch.float64).unsqueeze(1))
    return moments


@pytest.mark.parametrize("case", ["welford", "welford2"])
@pytest.mark.parametrize("batch", [1, 7, 40])
def test_golden(case: str, batch: int) -> None:
    moments = RunningMoments()
    for values in torch.tensor(GOLDEN[f"{case}.values"]).split(batch):
        moments.update(values)
    found = torch.stack([moments.mean, moments.deviation, *range_from_moments(moments)])
    torch.testing.assert_close(found, torch.tensor(GOLDEN[f"{case}.M_S_C1_C2"]), rtol=1e-9, atol=0)


@pytest.mark.parametrize("case", ["a", "b", "c_dual", "d_lds", "e_edge"])
def test_golden_total_relevance(case: str) -> None:
    heatmaps = torch.tensor(HEATMAPS[f"{case}.heatmap"], requires_grad=True)
    total = total_relevance(heatmaps)
    assert not total.requires_grad
    torch.testing.assert_close(total, torch.tensor(HEATMAPS[f"{case}.tunecut_total_abs"]), rtol=1e-9, atol=0)


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 1),
    offset=st.sampled_from([0.0, 1.0, 1e8]),
    seed=st.integers(0, 2**31),
)
def test_merging_processes_equals_one_pass(sizes: list[int], offset: float, seed: int) -> None:
    values = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + offset
    merged = RunningMoments()
    for part in values.split(sizes):
        process = RunningMoments()
        for batch in part.split(2):
            process.update(batch)
        merged.merge(pickle.loads(pickle.dumps(process)))
    assert merged.count == len(values)
    torch.testing.assert_close(merged.mean, values.mean(0), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(merged.deviation, values.std(0), rtol=1e-7, atol=1e-7)


def test_moments_are_float64_whatever_comes_in() -> None:
    moments = RunningMoments()
    values = torch.rand(50, 2, 3).bfloat16()
    moments.update(values)
    assert moments.mean.dtype == moments.deviation.dtype == torch.float64
    torch.testing.assert_close(moments.mean, values.double().mean(0))
    torch.testing.assert_close(moments.deviation, values.double().std(0))


def test_an_empty_batch_changes_nothing() -> None:
    moments = moments_of(1, 2, 4)
    moments.update(torch.empty(0, 1))
    moments.merge(RunningMoments())
    assert (moments.count, moments.mean.item()) == (3, pytest.approx(7 / 3))


def test_moments_of_different_maps_are_an_error() -> None:
    moments = RunningMoments()
    moments.update(torch.rand(4, 2))
    with pytest.raises(InputError, match="cannot be merged"):
        moments.update(torch.rand(4, 1))
    with pytest.raises(InputError, match="single number"):
        moments.update(torch.tensor(1.0))


def test_one_sample_has_no_deviation() -> None:
    with pytest.raises(InputError, match="at least two samples"):
        range_from_moments(moments_of(3))


@pytest.mark.parametrize(
    ("mean", "deviation", "c1", "c2"),
    [(10, 1, 7, 13), (10, 4, 2, 22), (10, 100, 2, 50), (10, 0, 10, 10)],
)
def test_range_by_hand(mean: float, deviation: float, c1: float, c2: float) -> None:
    spread = deviation / math.sqrt(2)
    low, high = range_from_moments(moments_of(mean - spread, mean + spread))
    assert (low.item(), high.item()) == (pytest.approx(c1), pytest.approx(c2))


@pytest.mark.parametrize("values", [(0, 0), (1e-13, 1e-13), (1, math.nan), (1, math.inf), (1e200, 1e308)])
def test_vanished_and_exploded_relevance_is_an_error(values: tuple[float, float]) -> None:
    moments = RunningMoments()
    moments.update(torch.tensor([[1.0, values[0]], [2.0, values[1]]], dtype=torch.float64))
    with pytest.raises(NonFiniteError, match=r"map 1 at depth 'layer1' vanished or exploded.*then calibrate again"):
        Ranges.from_moments({"layer1": moments})


def test_ranges_from_moments_go_into_the_loss() -> None:
    moments = RunningMoments()
    moments.update(torch.tensor([[9.0, 90.0], [10.0, 100.0], [11.0, 110.0]]))
    ranges = Ranges.from_moments({"input": moments})
    assert ranges == Ranges({"input": Range((7.0, 70.0), (13.0, 130.0))})
    heatmaps = torch.ones(1, 2, 1, 10)
    parts = heatmap_loss(heatmaps, torch.ones(1, 10), *ranges.depths["input"])
    assert parts.foreground.item() == pytest.approx((60 / 70) ** 2 / 2)


def test_saved_ranges_come_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "ranges.json"
    path.write_text("an older file")
    RANGES.save(path)
    assert Ranges.load(path) == RANGES
    assert [file.name for file in tmp_path.iterdir()] == ["ranges.json"]


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ranges.json"
    RANGES.save(path)

    def full(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        Ranges({"input": Range((1.0,), (2.0,))}).save(path)
    assert Ranges.load(path) == RANGES
    assert [file.name for file in tmp_path.iterdir()] == ["ranges.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 2, "depths": {"input": {"c1": [1], "c2": [2]}}}',
        '{"depths": {"input": {"c1": [1], "c2": [2]}}}',
        '{"format": 1, "depths": [1]}',
        '{"format": 1, "depths": {}}',
        '{"format": 1, "depths": {"input": {"c1": [1]}}}',
        '{"format": 1, "depths": {"input": {"c1": [1], "c2": [2], "c3": [3]}}}',
        '{"format": 1, "depths": {"input": {"c1": 1, "c2": 2}}}',
        '{"format": 1, "depths": {"input": {"c1": ["1"], "c2": [2]}}}',
        '{"format": 1, "depths": {"input": {"c1": [true], "c2": [2]}}}',
        '{"format": 1, "depths": {"input": {"c1": [], "c2": []}}}',
        '{"format": 1, "depths": {"input": {"c1": [1], "c2": [2, 3]}}}',
        '{"format": 1, "depths": {"input": {"c1": [3], "c2": [2]}}}',
        '{"format": 1, "depths": {"input": {"c1": [1e-13], "c2": [2]}}}',
        '{"format": 1, "depths": {"input": {"c1": [1], "c2": [NaN]}}}',
        '{"format": 1, "depths": {"input": {"c1": [1], "c2": [Infinity]}}}',
        '{"format": 1, "depths": {"input": {"c1": [1], "c2": [1' + "0" * 400 + "]}}}",
    ],
)
def test_any_other_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ranges.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"ranges\.json is not a calibration.*Calibrate again"):
        Ranges.load(path)


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Calibrate first"):
        Ranges.load(tmp_path / "ranges.json")
