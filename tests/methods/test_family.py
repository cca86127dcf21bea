"""What the ISNet family promises: its maps, depths, masks, tasks, and steps that cannot be taken."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import fasterisnet as fi
from fasterisnet.errors import FasterISNetError, NonFiniteError
from fasterisnet.losses import gwrp, heatmap_loss, resize_masks
from fasterisnet.methods.depths import supervised_depths
from fasterisnet.methods.ranges import Range
from fasterisnet.targets import AllLogits, EtaOfLowest, Joint

RANGES = (0.5, 2.0)
FAMILY = [fi.Original, fi.Dual, fi.Selective, fi.Stochastic, fi.GradInput, fi.SoftmaxGradInput]


def net(classes: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes),
    ).double().eval()  # fmt: skip


def batch(classes: int = 4, samples: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    masks = torch.zeros(samples, 1, 10, 12)
    masks[:, :, 2:7, 3:9] = 1
    images = torch.rand(samples, 3, 10, 12, generator=generator, dtype=torch.float64)
    return images, torch.arange(samples) % classes, masks


def expected_terms(maps: Tensor, masks: Tensor) -> tuple[float, float]:
    loss = heatmap_loss(maps, masks, *RANGES, decay=0.9)
    return float(loss.background), float(loss.foreground)


@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
def test_dual_is_two_joint_maps(box: Any) -> None:
    model, (images, labels, masks) = net(), batch()
    maps = [fi.explain(model, images, Joint(), rule=rule, box=box) for rule in ("zplus", "epsilon")]
    parts = fi.Dual(ranges=RANGES, decay=0.9, box=box).loss(model, images, labels, masks)
    terms = expected_terms(torch.stack(maps, 1), masks)
    assert (float(parts.background), float(parts.foreground)) == pytest.approx(terms, rel=1e-10)


@pytest.mark.parametrize(("method", "target"), [(fi.Selective, EtaOfLowest()), (fi.Original, AllLogits())])
def test_maps_are_those_of_explain(method: Any, target: Any) -> None:
    model, (images, labels, masks) = net(), batch()
    maps = fi.explain(model, images, target, box=(0, 1))
    maps = maps if isinstance(target, AllLogits) else maps.unsqueeze(1)
    parts = method(ranges=RANGES, decay=0.9, box=(0, 1)).loss(model, images, labels, masks)
    assert (float(parts.background), float(parts.foreground)) == pytest.approx(expected_terms(maps, masks), rel=1e-10)


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "googlenet", "vgg11_bn", "squeezenet1_1"])
def test_zplus_maps_are_never_negative(name: str) -> None:
    torch.manual_seed(0)
    extra = {"init_weights": True} if name == "googlenet" else {}
    model = torchvision.models.get_model(name, num_classes=5, **extra).eval()
    for box in (None, (0, 1)):
        assert float(fi.explain(model, torch.rand(2, 3, 64, 64), Joint(), rule="zplus", box=box).min()) >= 0


@pytest.mark.parametrize(("name", "size"), [("resnet18", 28), ("resnet18", 64), ("resnet50", 64)])
def test_six_maps_on_resnets(name: str, size: int) -> None:
    model = torchvision.models.get_model(name, num_classes=3).eval()
    images = torch.rand(2, 3, size, size)
    assert supervised_depths(model, images) == ["maxpool", "layer1", "layer2", "layer3", "layer4"]
    measured = fi.Stochastic(deep_supervision=True).measure(model, images)
    assert list(measured) == ["input", "maxpool", "layer1", "layer2", "layer3", "layer4"]
    assert all(totals.shape == (2, 1) and bool((totals > 0).all()) for totals in measured.values())


@pytest.mark.parametrize(
    ("build", "depths"),
    [
        (
            lambda: torchvision.models.densenet121(),
            ["features.pool0", *[f"features.denseblock{i}" for i in (1, 2, 3)], "features.norm5"],
        ),
        (lambda: torchvision.models.vgg11_bn(), [f"features.{i}" for i in (2, 6, 13, 20, 27, 28)]),
        (lambda: timm.create_model("convnext_atto"), ["stem", "stages.0", "stages.1", "stages.2", "norm_pre"]),
    ],
)
def test_depths_of_other_networks(build: Callable[[], nn.Module], depths: list[str]) -> None:
    assert supervised_depths(build().eval(), torch.rand(2, 3, 64, 64)) == depths


def test_a_module_under_two_names() -> None:
    shared = nn.Conv2d(4, 4, 3, padding=1)

    def stage(inputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, 4, 3, 2, 1), nn.ReLU(), shared, nn.Conv2d(4, 4, 3, padding=1))

    model = nn.Sequential(stage(3), stage(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    assert supervised_depths(model.eval(), torch.rand(2, 3, 32, 32)) == ["0", "1"]


def test_a_network_without_maps_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(360, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    with pytest.raises(FasterISNetError, match="name modules"):
        fi.Stochastic(ranges=RANGES, deep_supervision=True).loss(model, *batch())


@pytest.mark.parametrize("method", [fi.Dual, fi.Stochastic, fi.Selective])
def test_depths_are_those_of_the_calibration(method: Any) -> None:
    """What `deep_supervision` is if nobody says it: as True if calibrated, the input alone with a pair (C1, C2)."""
    model, (images, labels, masks) = net(), batch()

    def heatmap(**settings: Any) -> float:
        torch.manual_seed(3)
        return float(method(**settings).loss(model, images, labels, masks).heatmap)

    ranges = fi.calibrate(method(), model, [(images, labels)] * 2, epochs=1)
    assert list(ranges.depths) == ["input", *supervised_depths(model, images)]
    assert heatmap(ranges=ranges) == heatmap(ranges=ranges, deep_supervision=True)
    assert heatmap(ranges=RANGES) == heatmap(ranges=RANGES, deep_supervision=False) != heatmap(ranges=ranges)
    again = method(ranges=fi.Ranges({"input": ranges.depths["input"]}))
    assert list(fi.calibrate(again, model, [(images, labels)] * 2, epochs=1).depths) == list(ranges.depths)


def test_without_maps_the_input_is_supervised() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(360, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    method, (images, labels, masks) = fi.Stochastic(), batch()
    method.ranges = fi.calibrate(method, model, [(images, labels)], epochs=1)
    assert list(method.ranges.depths) == ["input"]
    assert bool(torch.isfinite(method.loss(model, images, labels, masks).total))


def test_depths_follow_the_model() -> None:
    method = fi.Selective(ranges=RANGES, deep_supervision=True)
    method.loss(net(), *batch())
    other = nn.Sequential(nn.Sequential(*net()[:7]), *net()[7:])
    method.loss(other, *batch())
    assert method.depths(other, batch()[0]) == ["0"]


def test_depth_losses_are_ranked() -> None:
    """GWRP over the losses of the depths, d = 0.7."""
    model, (images, labels, masks) = net(), batch()
    maps = fi.explain(model, images, EtaOfLowest(), box=(0, 1), layers=["2", "6"])
    losses = [
        heatmap_loss(m.unsqueeze(1), resize_masks(masks.bool(), m.shape[2:]), *RANGES, decay=0.9, w2=3.0).total
        for m in maps.values()
    ]
    method = fi.Selective(None, 0.9, 1.0, 3.0, box=(0, 1), ranges=RANGES, deep_supervision=["2", "6"])
    heatmap = method.loss(model, images, labels, masks).heatmap
    assert float(heatmap) == pytest.approx(float(gwrp(torch.stack(losses), 0.7)), rel=1e-10)


# --- tasks and masks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", FAMILY)
def test_one_logit(method: Any) -> None:
    images, labels, masks = batch(2)
    parts = method(ranges=RANGES).loss(net(1), images, labels, masks)
    logits = net(1)(images)[:, 0]
    expected = nn.functional.binary_cross_entropy_with_logits(logits, labels.double())
    assert float(parts.classification) == pytest.approx(float(expected))
    assert bool(torch.isfinite(parts.total))


@pytest.mark.parametrize("method", FAMILY)
def test_multi_label(method: Any) -> None:
    images, _, masks = batch()
    labels = (torch.arange(16).reshape(4, 4) % 3 == 0).double()
    if method in (fi.Selective, fi.SoftmaxGradInput):
        with pytest.raises(FasterISNetError, match="multi-label"):
            method(ranges=RANGES).loss(net(), images, labels, masks)
    else:
        parts = method(ranges=RANGES).loss(net(), images, labels, masks)
        expected = nn.functional.binary_cross_entropy_with_logits(net()(images), labels)
        assert float(parts.classification) == pytest.approx(float(expected))


def test_samples_without_a_mask_count_for_classification_only() -> None:
    model, (images, labels, masks) = net(), batch()
    method = fi.Selective(ranges=RANGES)
    empty = masks.clone()
    empty[1] = 0
    with_none = method.loss(model, images, labels, [masks[0], None, masks[2], masks[3]])
    with_empty = method.loss(model, images, labels, empty)
    kept = [0, 2, 3]
    alone = method.loss(model, images[kept], labels[kept], masks[kept])
    for parts in (with_none, with_empty):
        assert parts.without_mask == 1 and parts.samples == 4
        assert float(parts.heatmap) == pytest.approx(float(alone.heatmap), rel=1e-12)
        assert float(parts.classification) == pytest.approx(float(method.loss(model, *batch()).classification))


@pytest.mark.parametrize("method", FAMILY)
def test_no_masks_at_all(method: Any) -> None:
    images, labels, _ = batch()
    parts = method(0.6, ranges=RANGES).loss(net(), images, labels)
    assert parts.without_mask == 4 and float(parts.heatmap) == 0
    assert float(parts.total) == pytest.approx(0.4 * float(parts.classification))


@pytest.mark.parametrize(
    "convert", [Tensor.bool, Tensor.byte, Tensor.double, lambda m: (m * 255).byte(), lambda m: m[:, 0]]
)
def test_masks_of_any_type(convert: Callable[[Tensor], Tensor]) -> None:
    images, labels, masks = batch()
    method = fi.Dual(ranges=RANGES)
    expected = float(method.loss(net(), images, labels, masks).total)
    assert float(method.loss(net(), images, labels, convert(masks)).total) == expected


def test_masks_of_another_size_are_resized_with_a_warning() -> None:
    images, labels, masks = batch()
    large = masks.repeat_interleave(3, 2).repeat_interleave(3, 3)
    method = fi.Selective(ranges=RANGES)
    with pytest.warns(UserWarning, match="resized"):
        parts = method.loss(net(), images, labels, large)
    assert float(parts.total) == float(method.loss(net(), images, labels, masks).total)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.loss(net(), images, labels, large)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "soft masks": ({"masks": torch.full((4, 1, 10, 12), 0.3)}, "[Tt]hreshold"),
    "too few masks": ({"masks": torch.ones(3, 1, 10, 12)}, "3 masks for 4 images; give one for each"),
    "masks of no type": ({"masks": "masks"}, "masks is a str"),
    "label too high": ({"labels": torch.tensor([0, 1, 2, 4])}, "0 to 3"),
    "float labels": ({"labels": torch.rand(4)}, "integers"),
    "too few labels": ({"labels": torch.tensor([0, 1])}, "give one for each"),
    "labels of no type": ({"labels": [0, 1, 2, 3]}, "has to be a tensor"),
    "no ranges": ({"ranges": None}, "calibrate"),
    "ranges of another method": ({"ranges": fi.Ranges({"input": Range((1.0, 1.0), (2.0, 2.0))})}, "calibrate"),
    "ranges of another depth": (
        {"ranges": fi.Ranges({"layer1": Range((1.0,), (2.0,))}), "deep_supervision": False}, "calibrate"
    ),
    "layer without maps": ({"deep_supervision": ["8"]}, "not a map"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str) -> None:
    changes, message = BAD[case]
    images, labels, masks = batch()
    settings = {"ranges": RANGES, **{k: v for k, v in changes.items() if k in ("ranges", "deep_supervision")}}
    arguments = {"labels": labels, "masks": masks, **{k: v for k, v in changes.items() if k in ("labels", "masks")}}
    with pytest.raises(FasterISNetError, match=message):
        fi.Selective(**settings).loss(net(), images, **arguments)


@pytest.mark.parametrize(
    "settings",
    [
        {"heatmap_weight": 1.5}, {"heatmap_weight": "0.9"}, {"heatmap_weight": []}, {"decay": -0.1}, {"e": -1.0},
        {"epsilon": -0.01}, {"ranges": (2.0, 1.0)}, {"ranges": (1.0, 2.0, 3.0)}, {"deep_supervision": "layer1"},
        {"deep_supervision": 3}, {"background_weight": -1.0},
    ],
)  # fmt: skip
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(FasterISNetError):
        fi.Stochastic(**settings)


def test_fewer_maps_at_once_give_the_same_gradient() -> None:
    model, data = net(), batch()
    found = []
    for maps_at_once in (None, 1, 3):
        model.zero_grad()
        parts = fi.Original(0.7, ranges=RANGES, maps_at_once=maps_at_once).loss(model, *data)
        parts.total.backward()
        found.append([float(parts.total), *[p.grad.clone() for p in model.parameters() if p.grad is not None]])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-10, atol=1e-12)


# --- relevance that is not finite ----------------------------------------------------------------------------------


class Explosion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Tensor:
        return G * torch.inf


class Exploding(nn.Module):
    """Passes its input on; while `on`, sends back an infinite derivative."""

    on = True

    def forward(self, x: Tensor) -> Tensor:
        return Explosion.apply(x) if self.on else x.clone()


@pytest.mark.filterwarnings("ignore::fasterisnet.RuleWarning")
def test_steps_without_finite_relevance_are_skipped_counted_and_end_the_run() -> None:
    model = nn.Sequential(net()[0], nn.ReLU(), Exploding(), *net()[3:]).double().eval()
    data = batch()
    method = fi.Selective(ranges=RANGES)
    for count in range(1, 10):
        model.zero_grad()
        parts = method.loss(model, *data)
        parts.total.backward()
        assert parts.skipped and float(parts.total) == 0 and method.skipped == count
        assert all(float(p.grad.abs().sum()) == 0 for p in model.parameters() if p.grad is not None)
    with pytest.raises(NonFiniteError, match="10 steps in a row; first bad layer: '1'"):
        method.loss(model, *data)
    model[2].on = False
    parts = method.loss(model, *data)
    assert not parts.skipped and float(parts.total) > 0
