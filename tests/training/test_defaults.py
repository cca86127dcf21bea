"""What a run does that is told nothing but its data, method, network, size and epochs; and the paper's settings."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.fabric import Fabric
from torch import nn

from fasterisnet.benchmark.recipe import Recipe
from fasterisnet.benchmark.results import difference, read_result
from fasterisnet.data.loader import Loader
from fasterisnet.data.sources import open_source
from fasterisnet.errors import UsageError
from fasterisnet.losses import background_loss, decay_for
from fasterisnet.methods import Standard
from fasterisnet.runs.card import Card
from fasterisnet.runs.config import PRESETS, Config
from fasterisnet.runs.folder import Run
from fasterisnet.runs.inputs import preparation_of
from fasterisnet.runs.report import background_line, learning_lines
from fasterisnet.training.distributed import Place
from fasterisnet.training.loop import train
from fasterisnet.training.setup import build_method
from fasterisnet.training.state import Progress
from fasterisnet.training.statistics import measure_statistics

# What config.yaml of a version before presets said of what has another default now, or did not exist.
OLD = """
data: drawn
method: dual
lr: 0.001
schedule: constant
heatmap_weight: null
decay: 0.9
zb: true
calibration_epochs: 4
calibration_batches: 0
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "epochs"), [("stochastic", 10), ("selective", 10), ("dual", 10), ("softmax-grad-input", 15)]
)
def test_nothing_but_data_method_network_size_and_epochs(tmp_path: Path, method: str, epochs: int) -> None:
    """Right where the mark lies, where a plain classifier has 0; and less relevance in the background than at first."""
    config = Config(
        data="drawn?classes=2&size=16&per_class=60", method=method, model="small", size=16, epochs=epochs,
        out=str(tmp_path / "run"), watch=["deceiving"], workers=0, tensorboard=False, accelerator="cpu",
    )  # fmt: skip
    run = train(config, report=False)
    rows = [{key: float(value) for key, value in row.items()} for row in run.rows]
    chosen = rows[run.load_weights()[1].epoch - 1]
    assert chosen["deceiving_accuracy"] > 0.75 and chosen["val_accuracy"] > 0.75
    assert chosen["val_background"] < 0.75 * rows[0]["val_background"]


def test_an_old_run_means_what_it_meant(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(OLD)
    config = Run(tmp_path).config
    assert (config.optimizer, config.statistics_batches, config.settled) == ("sgd", 0, 0)
    assert {key: getattr(config, key) for key in yaml.safe_load(OLD)} == yaml.safe_load(OLD)
    method: Any = build_method(config)
    assert (method.weight, method.decay, method.box) == (0.95, 0.9, (0.0, 1.0))


def test_preset_and_what_wins_over_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: drawn\npreset: paper\nlr: 0.5\n")
    config = Config.read(file, {"decay": 0.99, "method": "selective"})
    assert (config.lr, config.decay) == (0.5, 0.99)
    rest = {key: value for key, value in PRESETS["paper"].items() if key not in ("lr", "decay")}
    assert {key: getattr(config, key) for key in rest} == rest
    assert Config.read(file, {"method": "standard"}).schedule == "constant"
    with pytest.raises(UsageError, match="one of paper"):
        Config.read(None, {"data": "drawn", "preset": "papre"})


def test_options_a_method_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="standard has no such option"):
        Config.read(None, {"data": "drawn", "method": "standard", "heatmap_weight": 0.3})
    file = tmp_path / "config.yaml"
    file.write_text(Config(data="drawn", method="standard").write())
    assert Config.read(file, {}) == Config(data="drawn", method="standard")


def test_what_is_automatic() -> None:
    assert Config(data="D").lr == Config(data="D", optimizer="adamw").lr < Config(data="D", optimizer="sgd").lr
    assert Config(data="D", pretrained="w.pt").lr < Config(data="D").lr
    assert Config(data="D", lr=0.3, optimizer="sgd").lr == 0.3
    assert [Config(data="D", method=name).deep_supervision for name in ("selective", "original")] == ["auto", False]
    assert Config.of({"data": "D", "preset": "paper"}).deep_supervision is False
    weights = {name: Config(data="D", method=name).heatmap_weight for name in ("stochastic", "dual", "standard")}
    assert 0.5 <= weights["stochastic"] < 1 and 0.5 <= weights["dual"] < 1 and weights["standard"] == "auto"
    for option in ("lr", "decay"):
        with pytest.raises(UsageError, match="auto, or a number"):
            Config.of({"data": "D", option: "atuo"})


@pytest.mark.parametrize("pixels", [1, 9, 784, 50176])
def test_automatic_decay_is_a_share_of_the_map(pixels: int) -> None:
    d = decay_for(pixels)
    assert math.fsum(d**i for i in range(pixels)) == pytest.approx(max(0.02 * pixels, 1), rel=1e-3)
    maps, masks = torch.rand(2, 1, 1, 1, pixels), torch.rand(2, 1, 1, pixels) < 0.5
    torch.testing.assert_close(background_loss(maps, masks, "auto"), background_loss(maps, masks, d))


def test_results_are_still_those_of_their_recipe() -> None:
    recipe, folder = Recipe.read("mnist"), Path(__file__).parents[2] / "results" / "mnist"
    made = {row: path for row in recipe.rows if (path := folder / f"{row}-seed0.json").exists()}
    assert {"standard", "stochastic", "selective", "dual", "original"} <= made.keys()
    for row, path in made.items():
        config = recipe.config(row, 0, "DIR", Path("out"), {})
        assert difference(read_result(path)["config"], vars(config)) is None, row


# --- batch norms before validation -----------------------------------------------------------------------------------


def _place(**changes: Any) -> tuple[Place, Loader]:
    config = Config(data="drawn?per_class=8&size=16", size=16, batch=6, workers=0, **changes)
    samples = open_source(config.data).split("train")
    loader = Loader(samples, preparation_of(config), config.batch, seed=0, training=True)
    return Place(Fabric(accelerator="cpu", devices=1), config), loader


def test_statistics_are_those_of_the_first_batches() -> None:
    place, loader = _place(statistics_batches=3)
    model = nn.Sequential(nn.Dropout(0.5), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    norm = model[2]
    assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.fill_(1e9)  # what was there before has no influence
    before = {name: value.clone() for name, value in model.named_parameters()}
    with torch.no_grad():
        batches = [model[1](images) for images, *_ in loader.epoch(4)][:3]
        means = torch.stack([maps.mean((0, 2, 3)) for maps in batches])
        variances = torch.stack([maps.var((0, 2, 3)) for maps in batches])
    measure_statistics(place, Standard(), model, loader, 4)
    torch.testing.assert_close(norm.running_mean, means.mean(0))
    torch.testing.assert_close(norm.running_var, variances.mean(0))
    assert norm.momentum == 0.1 and not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_statistics_can_be_left_alone() -> None:
    place, loader = _place(statistics_batches=0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measure_statistics(place, Standard(), model, loader, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- which epoch -----------------------------------------------------------------------------------------------------


def _chosen(losses: list[float], trained: Sequence[float] = (), **options: Any) -> int:
    """The epoch whose weights are kept, from 1 on."""
    config, progress = Config(data="D", epochs=len(losses), **options), Progress()
    for epoch, loss in enumerate(losses):
        progress.epoch = epoch
        progress.rows.append({"train_loss": trained[epoch] if trained else loss})
        if progress.is_better(loss, config):
            progress.best_loss, progress.best_epoch = loss, epoch
    return progress.best_epoch + 1


def test_luck_before_the_rate_has_come_down_is_not_chosen() -> None:
    losses, falling = [0.9, 0.1, 0.8, 0.7, 0.6, 0.5, 0.5, 0.4, 0.3, 0.35], [1 / n for n in range(1, 11)]
    assert _chosen(losses, falling, settled=0.7) == 9
    assert _chosen(losses, falling, settled=0) == 2
    assert _chosen(losses, falling, settled=1) == 10
    assert _chosen([0.1, 0.2, math.inf, math.inf], falling, settled=0.5) == 1
    assert _chosen([0.4], settled=0.7) == 1


def test_nor_is_what_came_after_the_training_had_come_apart() -> None:
    """As it was seen: the rate had come down, but the loss had come up, and every earlier epoch was better."""
    trained = [1.55, 1.16, 0.73, 0.59, 0.52, 0.41, 0.36, 0.31, 0.42, 0.45, 0.33, 0.81, 1.42, 1.09, 0.91]
    assert _chosen(trained) == 8
    assert _chosen([*trained[:13], 0.4, 0.5], [*trained[:13], 0.4, 0.5]) == 14
    assert _chosen(trained, heatmap_weight=[0.5, 0.9]) == 12  # P has changed what is added up


# --- the end of a run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "losses", "said"),
    [
        ("stochastic", (1.8, 1.7, 1.6), True),
        ("stochastic", (1.8, 1.0, 0.3), False),
        ("stochastic", (1.8,), False),
        ("stochastic", (0.05, 0.05, 0.06), False),
        ("stochastic", (0.5, 0.9, 0.9), True),
        ("standard", (0.0, 0.0, 0.0), False),
    ],
)
def test_a_background_loss_that_does_not_fall_is_told(
    tmp_path: Path, method: str, losses: tuple[float, ...], said: bool
) -> None:
    run, heard = Run(tmp_path), []
    run.create(Config(data="drawn", method=method))
    run.write_metrics([{"epoch": i, "train_background": loss} for i, loss in enumerate(losses)])
    lines = background_line(run, heard.append)
    assert lines == heard and len(lines) == said
    assert all("has hardly fallen" in line and "--heatmap-weight" in line for line in lines)


@pytest.mark.parametrize(
    ("method", "losses", "classification", "said"),
    [
        ("stochastic", (1.55, 0.31, 1.4, 0.91), 0.85, ["came up again, from 0.31 in epoch 2 to 0.91"]),
        ("stochastic", (1.55, 0.5, 0.7), 0.85, []),  # it goes up and down
        ("standard", (1.1, 0.005, 0.02), 0.02, []),
        ("standard", (6e4, 2e9), 2e9, ["came up again", "were not learned: .* of the last epoch is 2e"]),
        ("stochastic", (1.5, 0.9), 1.2, ["were not learned: .* guessing 1.1.* a lower --heatmap-weight"]),
        ("unet-classifier", (0.3, 1.0), 1.0, []),  # another loss in every stage
        ("standard", (1.2,), 1.2, []),
    ],
)
def test_a_training_that_came_apart_or_taught_nothing_is_told(
    tmp_path: Path, method: str, losses: tuple[float, ...], classification: float, said: list[str]
) -> None:
    run, heard = Run(tmp_path), []
    run.create(Config(data="drawn", method=method))
    run.write_metrics(
        [{"epoch": i, "train_loss": loss, "train_classification": classification} for i, loss in enumerate(losses)]
    )
    lines = learning_lines(run, Card("small", ["a", "b", "c"], False, {}, method, False, 1, None), heard.append)
    assert lines == heard and len(lines) == len(said)
    assert all(re.search(words, line) for words, line in zip(said, lines, strict=True))
