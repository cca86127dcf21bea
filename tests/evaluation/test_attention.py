"""Background attention on maps and nets whose answer is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fasterisnet.errors import InputError
from fasterisnet.evaluation import background_area, background_mass, highest_pixel_inside, rank_accuracy


def maps_and_masks() -> tuple[Tensor, Tensor]:
    maps = torch.zeros(4, 2, 2, 3)
    maps[0, 0, 0, 0], maps[0, 1, 1, 2] = -3.0, 1.0  # 3 of 4 outside
    maps[1, :, 1, 2] = 5.0  # all inside
    maps[2, 0, 0, 0] = 2.0  # no mask
    masks = torch.zeros(4, 1, 2, 3)
    masks[[0, 1, 3], :, 1, 2] = 1
    return maps, masks  # the last map is zero


@pytest.mark.parametrize("form", ["channel", "flat", "both channels", "255"])
def test_background_mass(form: str) -> None:
    maps, masks = maps_and_masks()
    given = {"channel": masks, "flat": masks[:, 0], "both channels": masks.repeat(1, 2, 1, 1), "255": masks * 255}[form]
    assert background_mass(maps, given).tolist() == pytest.approx([0.75, 0.0, torch.nan, torch.nan], nan_ok=True)


def test_highest_pixel_inside() -> None:
    maps, masks = maps_and_masks()
    assert highest_pixel_inside(maps, masks).tolist() == pytest.approx([0, 1, torch.nan, torch.nan], nan_ok=True)


def test_the_highest_pixel_is_that_of_all_channels_together() -> None:
    maps = torch.zeros(1, 2, 1, 3)
    maps[0, :, 0, 0] = torch.tensor([2.0, -2.0])
    maps[0, 0, 0, 1] = 3.0
    assert highest_pixel_inside(maps, torch.tensor([[[1, 0, 0]]])).item() == 1
    assert highest_pixel_inside(maps, torch.tensor([[[0, 1, 0]]])).item() == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_maps_that_are_not_finite_have_no_value(value: float) -> None:
    maps, masks = maps_and_masks()
    maps[0, 0, 0, 1] = value
    assert background_mass(maps, masks).isnan().tolist() == [True, False, True, True]
    assert highest_pixel_inside(maps, masks).isnan().tolist() == [True, False, True, True]


def test_signals_and_volumes() -> None:
    for shape in ((5,), (2, 3, 4)):
        maps = torch.rand(3, 2, *shape)
        masks = torch.rand(3, *shape) < 0.5
        masks.flatten(1)[:, 0] = True
        wanted = [float(maps[i][:, ~masks[i]].sum() / maps[i].sum()) for i in range(3)]
        torch.testing.assert_close(background_mass(maps, masks), torch.tensor(wanted, dtype=torch.float64))


def test_rank_accuracy() -> None:
    """Two pixels are foreground, so the two strongest count: one of them is inside in the first sample, both in the
    second; the third has no mask, the fourth no relevance."""
    maps = torch.zeros(4, 2, 2, 2)
    maps[0, 0] = torch.tensor([[5.0, -4.0], [3.0, 0.0]])
    maps[1, 1] = torch.tensor([[5.0, 1.0], [-6.0, 0.0]])
    maps[2, 0, 0, 0] = 1.0
    masks = torch.tensor([[1, 0], [1, 0]]).expand(4, 2, 2).clone()
    masks[2] = 0
    assert rank_accuracy(maps, masks).tolist() == pytest.approx([0.5, 1.0, torch.nan, torch.nan], nan_ok=True)


def test_the_area_is_what_an_indifferent_map_has_in_the_background() -> None:
    masks = torch.zeros(2, 1, 2, 3)
    masks[0, 0, 0, 0] = 1
    area = background_area(masks, (2, 3))
    assert area.tolist() == pytest.approx([5 / 6, torch.nan], nan_ok=True)
    assert background_mass(torch.ones(2, 3, 2, 3), masks)[0] == area[0]


def test_refusals() -> None:
    maps, masks = maps_and_masks()
    with pytest.raises(InputError, match="do not fit"):
        background_mass(maps, masks[:2])
    with pytest.raises(InputError, match=r"\(sample, channel, space...\)"):
        background_mass(torch.rand(3, 2), torch.ones(3, 2))
