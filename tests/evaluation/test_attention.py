"""Background attention on maps and nets whose answer is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fasterisnet.errors import InputError
from fasterisnet.evaluation import (
    background_mass,
    change_when_background_erased,
    change_when_background_swapped,
    highest_pixel_inside,
)


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


class Sums(nn.Module):
    """Logit 0: the sum of the top left pixel, which is background. Logit 1: that of the bottom right, foreground."""

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        return torch.stack([x[:, :, 0, 0].sum(1), x[:, :, -1, -1].sum(1)], 1)


def scene() -> tuple[Tensor, Tensor]:
    images = torch.zeros(4, 2, 2, 2)
    images[:, 0, 0, 0] = torch.tensor([8.0, 0.0, 4.0, 100.0])  # background of samples 0, 1 and 2
    images[:, 0, 1, 1] = 3.0
    masks = torch.zeros(4, 1, 2, 2)
    masks[:3, :, 1, 1] = 1
    return images, masks


def test_erased_with_a_constant() -> None:
    """Background pixels 8, 0, 4 become 0.5 in both channels; the fourth sample has no mask and does not count."""
    images, masks = scene()
    model = Sums().train()
    change = change_when_background_erased(model, images, masks, fill=0.5)
    assert change.samples == 3 and model.training
    assert change.logits == pytest.approx((7 + 1 + 3) / 6)
    assert change.decisions == pytest.approx(2 / 3)
    colours = change_when_background_erased(model, images, masks, fill=[0.5, 2.5])
    assert colours.logits == pytest.approx((5 + 3 + 1) / 6)


def test_erased_with_the_mean_of_all_backgrounds() -> None:
    """Three background pixels a sample, 12 in sum over nine: 4/3 in the first channel, 0 in the second."""
    images, masks = scene()
    change = change_when_background_erased(Sums(), images, masks)
    assert change.logits == pytest.approx((8 - 4 / 3 + 4 / 3 + 4 - 4 / 3) / 6)


def test_erasing_leaves_the_images_alone_and_the_foreground_too() -> None:
    images, masks = scene()
    before = images.clone()

    class Foreground(Sums):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :, -1, -1]

    for change in (change_when_background_erased, change_when_background_swapped):
        assert change(Foreground(), images, masks)[:2] == (0.0, 0.0)
    assert torch.equal(images, before)


@pytest.mark.parametrize("seed", range(4))
def test_swapped_with_another_sample(seed: int) -> None:
    """Three backgrounds in a circle: every sample gets one of the two others', none its own."""
    images, masks = scene()
    change = change_when_background_swapped(Sums(), images, masks, seed=seed)
    assert change.logits == pytest.approx((8 + 4 + 4) / 6)
    assert change.samples == 3 and change.decisions == 2 / 3


def test_swapping_does_not_bring_the_other_foreground_along() -> None:
    images = torch.zeros(2, 1, 1, 3)
    images[0, 0, 0] = torch.tensor([9.0, 1.0, 3.0])  # foreground 9 at the left, background mean 2
    images[1, 0, 0] = torch.tensor([5.0, 7.0, 8.0])  # foreground 8 at the right, background mean 6
    masks = torch.tensor([[[[1, 0, 0]]], [[[0, 0, 1]]]])
    shown = []

    class Watching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            shown.append(x)
            return x.flatten(1)

    change_when_background_swapped(Watching(), images, masks)
    assert shown[1].flatten(1).tolist() == [[9, 7, 6], [2, 1, 8]]


def test_multi_label_and_one_logit_decisions() -> None:
    images, masks = scene()

    class Signs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x[:, 0, 0, 0] - 1, x[:, 0, 1, 1]], 1)

    class One(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :1, 0, 0] - 1

    assert change_when_background_erased(Signs(), images, masks, fill=0.0, multi_label=True).decisions == 2 / 3
    assert change_when_background_erased(Signs(), images, masks, fill=0.0).decisions == 2 / 3
    assert change_when_background_erased(One(), images, masks, fill=0.0).decisions == 2 / 3


def test_refusals() -> None:
    images, masks = scene()
    with pytest.raises(InputError, match="None of the images has a mask"):
        change_when_background_erased(Sums(), images, torch.zeros_like(masks))
    with pytest.raises(InputError, match="two samples"):
        change_when_background_swapped(Sums(), images[:1], masks[:1])
    with pytest.raises(InputError, match="3 numbers for images of 2"):
        change_when_background_erased(Sums(), images, masks, fill=[1, 2, 3])
    with pytest.raises(InputError, match="do not fit"):
        background_mass(images, masks[:2])
    with pytest.raises(InputError, match=r"\(sample, channel, space...\)"):
        background_mass(torch.rand(3, 2), torch.ones(3, 2))
