"""zB behind what happens to the images inside the model, and z+ that never turns negative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from lrp.helpers import RULES, TWO_RULES, assert_alike, assert_close, pictures, quietly, twins

MEAN, STD = torch.tensor([0.4, 0.5, 0.6]).double(), torch.tensor([0.2, 0.25, 0.3]).double()


def channel(t: Tensor) -> Tensor:
    return t.view(-1, 1, 1)


def parts() -> dict[str, nn.Module]:
    return {"conv": nn.Conv2d(3, 6, 3), "bn": nn.BatchNorm2d(6), "fc": nn.Linear(24, 3)}


def unpadded(prepare: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: m.fc(torch.relu(m.bn(m.conv(prepare(x)))).flatten(1))


IMAGES = pictures(2, 3, 4, 4).sigmoid()
NOOPS: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda x: x.to(torch.float64),
    "to, copied": lambda x: x.to("cpu", torch.float64, copy=True),
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "clone": lambda x: x.clone(),
    "view": lambda x: x.view(x.shape),
    "dropout in eval": lambda x: F.dropout(x, 0.5, False),
    "dropout of nothing": lambda x: F.dropout(x, 0.0, True),
    "flip twice": lambda x: x.flip(3).flip(3),
    "cat": lambda x: torch.cat([x[:, :1], x[:, 1:]], 1),
    "squeeze": lambda x: x[None].squeeze(0),
    "identity": nn.Identity(),
}


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("name", NOOPS)
def test_box_behind_a_noop(name: str, rule: str) -> None:
    nets = twins([unpadded(lambda x: x), unpadded(NOOPS[name])], **parts())
    assert_alike(*nets, IMAGES, rule=rule, box=(0.0, 1.0), what=name)


ONE = torch.ones(3).double()
AFFINE: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, Tensor]] = {
    "(x - mean)/std": (lambda x: (x - channel(MEAN)) / channel(STD), 1 / STD, -MEAN / STD),
    "sub, div": (lambda x: x.sub(channel(MEAN)).div(channel(STD)), 1 / STD, -MEAN / STD),
    "in place": (lambda x: x.clone().sub_(channel(MEAN)).div_(channel(STD)), 1 / STD, -MEAN / STD),
    "x * a + b": (lambda x: x * channel(1 / STD) + channel(-MEAN / STD), 1 / STD, -MEAN / STD),
    "2x - 1": (lambda x: 2 * x - 1, 2 * ONE, -ONE),
    "x * 2 - 1": (lambda x: x * 2.0 - 1.0, 2 * ONE, -ONE),
    "(x - 0.5)/0.5": (lambda x: (x - 0.5) / 0.5, 2 * ONE, -ONE),
    "1 - x": (lambda x: 1 - x, -ONE, ONE),
    "255x": (lambda x: x * 255 / 127.5 - 1, 2 * ONE, -ONE),
    "by channels": (lambda x: torch.stack([(x[:, c] - MEAN[c]) / STD[c] for c in range(3)], 1), 1 / STD, -MEAN / STD),
    "cast": (lambda x: (x.to(torch.float64) - channel(MEAN)).contiguous() / channel(STD), 1 / STD, -MEAN / STD),
}


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("name", AFFINE)
def test_an_affine_path_carries_the_box_along(name: str, rule: str) -> None:
    """zB of the box [0, 1] behind `(x - mean)/std`: zB of the convolution at x' in the box's image.

    That is the specification's own form: `l` and `h` are the box the network input lives in, (0 - mean)/std to
    (1 - mean)/std. The map is shaped like the images and equal to that of the images normalised outside.
    """
    prepare, scale, shift = AFFINE[name]
    inside, outside = twins([unpadded(prepare), unpadded(lambda x: x)], **parts())
    prepared = prepare(IMAGES)
    ends = torch.stack([shift, scale + shift])
    box = (ends.amin(0).tolist(), ends.amax(0).tolist())
    expected = fi.explain(outside, prepared, 1, rule=rule, box=box)
    found, messages = quietly(lambda: fi.explain(inside, IMAGES, 1, rule=rule, box=(0.0, 1.0)))
    assert not messages
    assert_close(found, expected, 1e-9, name)


def test_input_dropout_in_a_box() -> None:
    """Dropped and scaled-up inputs stay in the scaled box, dropped ones at a box of zero: no relevance, finite."""
    model = (
        nn.Sequential(nn.Dropout(0.5), nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)).double().train()
    )
    for seed in range(3):
        torch.manual_seed(seed)
        heatmap, messages = quietly(lambda: fi.explain(model, IMAGES, 1, box=(0.0, 1.0)))
        torch.manual_seed(seed)
        with torch.random.fork_rng():
            mask = F.dropout(torch.ones_like(IMAGES), 0.5) / 2
        assert bool(heatmap.isfinite().all())
        if not messages:
            assert float((heatmap * (1 - mask)).abs().max()) == 0.0
            plain = nn.Sequential(*model[1:]).eval()
            scaled = fi.explain(Masked(plain, mask * 2), IMAGES, 1, box=(0.0, 1.0))
            assert_close(heatmap, scaled, 1e-9)


class Masked(nn.Module):
    def __init__(self, inner: nn.Module, mask: Tensor) -> None:
        super().__init__()
        self.inner, self.mask = inner, mask

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.mask)


def test_two_first_layers_in_a_box() -> None:
    """The images read by two convolutions: the sum of both layers' zB maps."""

    def branches(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.cat([torch.relu(m.a(x)), torch.relu(m.b(x))], 1).flatten(1))

    def joined(m: Any, x: Tensor) -> Tensor:
        weight, bias = torch.cat([m.a.weight, m.b.weight]), torch.cat([m.a.bias, m.b.bias])
        return m.fc(torch.relu(F.conv2d(x, weight, bias)).flatten(1))

    nets = twins([joined, branches], a=nn.Conv2d(3, 2, 3), b=nn.Conv2d(3, 4, 3), fc=nn.Linear(24, 3))
    for rule in RULES:
        assert_alike(*nets, IMAGES, rule=rule, box=(0.0, 1.0))


# --- z+ is never negative ------------------------------------------------------------------------------------------

SIGNED: dict[str, Callable[[Tensor], Tensor]] = {
    "pad(-1)": lambda t: F.pad(t, (1, 1, 1, 1), value=-1.0)[:, :, :4, :4],
    "pad(2)": lambda t: F.pad(t, (1, 1, 1, 1), value=2.0)[:, :, :4, :4],
    "bicubic": lambda t: F.interpolate(t, size=(5, 5), mode="bicubic")[:, :, :4, :4],
    "bicubic, antialias": lambda t: F.interpolate(t, size=(3, 3), mode="bicubic", antialias=True).repeat(1, 1, 2, 2)[
        :, :, :4, :4
    ],
    "bilinear": lambda t: F.interpolate(t, size=(5, 5), mode="bilinear", align_corners=True)[:, :, :4, :4],
    "grid_sample": lambda t: F.grid_sample(
        t,
        torch.linspace(-1.2, 1.2, 64, dtype=t.dtype).view(1, 4, 4, 2, 2).sum(-2).expand(len(t), -1, -1, -1),
        align_corners=False,
    ),
    "grid_sample, bicubic": lambda t: F.grid_sample(
        t,
        torch.linspace(-1.0, 1.0, 32, dtype=t.dtype).view(1, 4, 4, 2).expand(len(t), -1, -1, -1),
        mode="bicubic",
        align_corners=False,
    ),
    "cumsum": lambda t: t.cumsum(2),
    "diff": lambda t: F.pad(t.diff(dim=3), (0, 1)),
    "neg": lambda t: -t,
    "1 - t": lambda t: 1 - t,
    "minus": lambda t: t - t.roll(1, 1),
    "lerp": lambda t: torch.lerp(t, t.roll(1, 2), 1.5),
    "leaky": lambda t: F.leaky_relu(t, 0.2),
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "product": lambda t: t * t.roll(1, 1),
    "layer norm": lambda t: F.layer_norm(t, t.shape[1:]),
    "fft": lambda t: torch.fft.ifft(torch.fft.fft(t)).real,
    "softmax": lambda t: t.softmax(1),
    "log_softmax": lambda t: t.log_softmax(1),
    "matmul": lambda t: t @ t.mT,
    "kernel": lambda t: F.conv2d(
        t, torch.tensor([[[[-1.0, 2.0, -1.0]]]]).double().repeat(6, 1, 1, 1), padding=(0, 1), groups=6
    ),
    "masked_fill(-2)": lambda t: t.masked_fill(t > 0.5, -2.0),
    "clamp(-1, 1)": lambda t: t.clamp(-1, 1),
    "max pool": lambda t: F.max_pool2d(t, 3, 1, 1),
    "avg pool, padded": lambda t: F.avg_pool2d(t, 3, 1, 1),
    "index_add": lambda t: t.index_add(1, torch.tensor([0, 0, 1]), t[:, :3], alpha=-1),
    "sub_": lambda t: t.clone().sub_(0.3),
    "sort": lambda t: t.sort(3).values,
    "normalize": lambda t: F.normalize(t, dim=1),
    "softplus": F.softplus,
}


@pytest.mark.parametrize("name", SIGNED)
def test_zplus_is_never_negative(name: str) -> None:
    """Started from non-negative relevance; or it is loud."""
    step = SIGNED[name]

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.relu(m.conv2(step(m.conv(x)))).flatten(1))

    (net,) = twins([forward], conv=nn.Conv2d(3, 6, 3, padding=1), conv2=nn.Conv2d(6, 4, 3), fc=nn.Linear(16, 3))
    for images in (IMAGES, IMAGES - 0.5):
        heatmap, messages = quietly(lambda: fi.explain(net, images, fi.targets.Joint(), rule="zplus"))
        assert bool(heatmap.isfinite().all())
        assert messages or float(heatmap.min()) >= 0.0, f"{name}: {float(heatmap.min()):.2e}"


@pytest.mark.parametrize(("alpha", "is_loud"), [(2.0, False), (-1.0, True)])
def test_index_add_with_a_negative_factor_is_loud_under_zplus(alpha: float, is_loud: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.relu(m.hidden(x))
        return m.fc(h.index_add(1, torch.tensor([0, 2]), h[:, 1:3], alpha=alpha))

    (net,) = twins([forward], hidden=nn.Linear(5, 6), fc=nn.Linear(6, 3))
    _, messages = quietly(lambda: fi.explain(net, pictures(2, 5), 1, rule="zplus"))
    assert any("index_add" in message for message in messages) == is_loud
