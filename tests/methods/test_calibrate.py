"""C1 and C2 from a plain classifier: `calibrate` against the same thing written as a loop.

Merging what several processes measured is in test_distributed.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.errors import FasterISNetError, NonFiniteError
from fasterisnet.methods import ISNet
from fasterisnet.targets import AllLogits, EtaOfLowest, Joint
from methods.tester import Residual, anatomy, filled, labels_for, masks_for, pictures

DEPTHS = ["maxpool", "layer1", "layer2"]
Batches = list[tuple[Tensor, ...]]


def model(seed: int = 0, **settings: Any) -> Residual:
    return filled(Residual(**settings).double(), seed)


def batches(count: int = 4, size: int = 3) -> Batches:
    images = pictures(count * size, 2, 9, 8)
    return list(zip(images.split(size), labels_for(images).split(size), masks_for(images).split(size), strict=True))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def stochastic(**settings: Any) -> fi.Stochastic:
    return fi.Stochastic(generator=torch.Generator().manual_seed(3), **settings)


def maps_of(method: ISNet, net: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """The method's maps by depth, (sample, map, ...), through `explain`; `Stochastic` draws as it is told to."""
    settings: dict[str, Any] = {"box": (0, 1), "layers": DEPTHS if method.deep_supervision else []}
    if isinstance(method, fi.Dual):
        found = [fi.explain(net, images, Joint(), rule=rule, **settings) for rule in ("zplus", "epsilon")]
        return {depth: torch.stack([m[depth] for m in found], 1) for depth in found[0]}
    if isinstance(method, fi.Original):
        return fi.explain(net, images, AllLogits(), **settings)
    if isinstance(method, fi.Selective):
        target: Any = EtaOfLowest()
    else:
        assert isinstance(method, fi.Stochastic)
        target = method.draw(copy.deepcopy(net)(images))
    return {depth: m.unsqueeze(1) for depth, m in fi.explain(net, images, target, **settings).items()}


METHODS = {"Original": fi.Original, "Dual": fi.Dual, "Selective": fi.Selective, "Stochastic": stochastic}


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_equals_a_loop(name: str, deep: bool, clip: float | None) -> None:
    """Plain epochs, then one that measures each batch before learning from it. Every map and depth, to 1e-10."""
    method, net = METHODS[name](deep_supervision=deep, box=(0.0, 1.0)), model()
    ranges = fi.calibrate(method, net, batches(), epochs=2, optimizer=adam, clip=clip)

    plain, optimizer, sums = net.train(), adam(net.parameters()), {}
    for epoch in range(3):
        for images, labels, _ in batches():
            if epoch == 2:
                for depth, maps in maps_of(method, plain, images).items():
                    sums.setdefault(depth, []).append(maps.abs().flatten(2).sum(2))
            optimizer.zero_grad()
            F.cross_entropy(plain(images), labels).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(plain.parameters(), clip)
            optimizer.step()
    assert list(ranges.depths) == ["input", *(DEPTHS if deep else [])] == list(sums)
    for depth, values in sums.items():
        every = torch.cat(values)
        assert every.shape == (12, {"Original": 3, "Dual": 2}.get(name, 1))
        mean, deviation = every.mean(0), every.std(0)
        low = torch.maximum(mean / 5, mean - 3 * deviation)
        high = torch.minimum(25 * low, mean + 3 * deviation)
        c1, c2 = (torch.tensor(bound, dtype=torch.float64) for bound in ranges.depths[depth])
        torch.testing.assert_close(c1, low, rtol=1e-10, atol=0)
        torch.testing.assert_close(c2, high, rtol=1e-10, atol=0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("deep", [False, True])
def test_model_and_method_are_left_as_they_were(deep: bool, training: bool) -> None:
    net, method = model(dropout=0.5).train(training), stochastic(deep_supervision=deep, heatmap_weight=[0.5, 0.6])
    method.set_epoch(1)
    before, was = copy.deepcopy(net.state_dict()), anatomy(net)
    assert method.generator is not None
    random, settings = method.generator.get_state(), {k: v for k, v in vars(method).items() if k != "generator"}
    fi.calibrate(method, net, batches(), epochs=1, optimizer=adam)
    assert anatomy(net) == was
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(method.generator.get_state(), random)
    assert {k: v for k, v in vars(method).items() if k != "generator"} == settings


def test_training_changes_what_is_measured() -> None:
    """Without the plain epochs another range comes out: they are not skipped."""
    found = [fi.calibrate(fi.Selective(), model(), batches(), epochs=n, optimizer=adam) for n in (0, 3)]
    assert found[0] != found[1]


def test_draws_differ_between_batches() -> None:
    """Without a generator too: the same images again are explained by other classes."""
    net, images, seen = model(classes=10).eval(), pictures(), []

    class Watched(fi.Stochastic):
        def draw(self, logits: Tensor) -> Tensor:
            seen.append(super().draw(logits))
            return seen[-1]

    torch.manual_seed(0)
    for _ in range(5):
        Watched().measure(net, images)
    assert len({tuple(classes.tolist()) for classes in seen}) > 1


def test_ranges_survive_a_file_and_go_into_the_loss(tmp_path: Path) -> None:
    net, (images, labels, masks) = model().eval(), batches()[0]
    ranges = fi.calibrate(fi.Dual(deep_supervision=True), net, batches(), epochs=1)
    ranges.save(tmp_path / "ranges.json")
    loaded = fi.Ranges.load(tmp_path / "ranges.json")
    assert loaded == ranges
    losses = [
        fi.Dual(deep_supervision=True, ranges=r).loss(net, images, labels, masks).total.item() for r in (ranges, loaded)
    ]
    assert losses[0] == losses[1]
    assert losses[0] != fi.Dual(deep_supervision=True, ranges=(0.3, 0.6)).loss(net, images, labels, masks).total.item()


def test_progress_is_reported() -> None:
    calls: list[tuple[int, int, float]] = []
    fi.calibrate(fi.Selective(), model(), batches(), epochs=2, progress=lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [(epoch, step) for epoch in range(3) for step in range(1, 5)]
    first = F.cross_entropy(model().train()(batches()[0][0]), batches()[0][1])
    assert calls[0][2] == pytest.approx(first.item(), rel=1e-12)
    assert all(isinstance(call[2], float) for call in calls)


def test_batches_without_masks_are_enough() -> None:
    whole = fi.calibrate(fi.Selective(), model(), batches(), epochs=1)
    assert fi.calibrate(fi.Selective(), model(), [batch[:2] for batch in batches()], epochs=1) == whole


def test_a_data_loader() -> None:
    """Any loader will do, torch's included, and a ragged last batch counts each sample once."""
    images = pictures(7, 2, 9, 8)
    data = torch.utils.data.TensorDataset(images, labels_for(images))
    loader = torch.utils.data.DataLoader(data, batch_size=3)
    parts = list(zip(images.split(3), labels_for(images).split(3), strict=True))
    assert fi.calibrate(fi.Original(), model(), loader, epochs=1) == fi.calibrate(
        fi.Original(), model(), parts, epochs=1
    )


@pytest.mark.parametrize(
    ("loader", "message"), [([], "gave no batch; "), (iter(batches()), "gave no batch any more.* a generator")],
    ids=["empty", "used up after an epoch"],
)  # fmt: skip
def test_no_data_is_an_error(loader: Any, message: str) -> None:
    with pytest.raises(FasterISNetError, match=message):
        fi.calibrate(fi.Selective(), model(), loader, epochs=1)


def test_a_single_sample_is_an_error() -> None:
    with pytest.raises(FasterISNetError, match="at least two samples"):
        fi.calibrate(fi.Selective(), model(), batches(count=1, size=1), epochs=0)


def test_vanished_relevance_is_an_error_that_says_what_to_do() -> None:
    net = model()
    nn.init.zeros_(net.fc.weight)
    with pytest.raises(NonFiniteError, match=r"map 0 at depth 'input' vanished.*calibrate again"):
        fi.calibrate(fi.Original(), net, batches(), epochs=0, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))


IMAGES, LABELS = pictures(4, 2, 9, 8), torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([IMAGES], "holds Tensor; it has to begin with two tensors"),
        ([(IMAGES,)], "begin with two tensors"),
        (["ab"], "holds str"),
        ([(IMAGES, LABELS.tolist())], "holds Tensor, list"),
        ([{"image": IMAGES, "label": LABELS.numpy()}], "holds Tensor, ndarray"),
        (list(zip(IMAGES, LABELS, strict=True)), "goes into a DataLoader first"),
        ([(IMAGES.byte(), LABELS)], "convert them to floating point"),
        (None, "loader is a NoneType"),
    ],
)
def test_batches_that_are_none_are_an_error_in_one_line(loader: Any, message: str) -> None:
    with pytest.raises(FasterISNetError, match=message):
        fi.calibrate(fi.Stochastic(), model(), loader)


def test_only_isnets_are_calibrated_and_only_for_whole_epochs() -> None:
    method: Any = fi.RRR()
    with pytest.raises(FasterISNetError, match="RRR has no C1 and C2"):
        fi.calibrate(method, model(), batches())
    with pytest.raises(FasterISNetError, match="epochs is -1"):
        fi.calibrate(fi.Stochastic(), model(), batches(), epochs=-1)
