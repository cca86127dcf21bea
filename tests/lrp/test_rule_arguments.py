"""What `explain` accepts: classes as lists and numbers, layers as modules, a rule for every module, strictness."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fasterisnet as fi
from fasterisnet.errors import FasterISNetError, InputError, RuleError, RuleWarning
from lrp.helpers import RULES, assert_close, parameter_gradients, pictures, randomised, twins

EPS = 0.01
GAMMA = 0.25


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    randomised(model).eval()
    return model


IMAGES = pictures(2, 5)

# --- classes -------------------------------------------------------------------------------------------------------

CLASSES: dict[str, Any] = {
    "list": [2, 0],
    "tuple": (2, 0),
    "numpy array": np.array([2, 0]),
    "numpy small integers": np.array([2, 0], dtype=np.uint8),
    "list of numpy integers": [np.int64(2), np.int32(0)],
    "list of tensors": [torch.tensor(2), torch.tensor(0)],
    "int32 tensor": torch.tensor([2, 0], dtype=torch.int32),
}


@pytest.mark.parametrize("name", CLASSES)
def test_one_class_a_sample(name: str) -> None:
    expected = fi.explain(network(), IMAGES, torch.tensor([2, 0]))
    assert_close(fi.explain(network(), IMAGES, CLASSES[name]), expected, 1e-12)
    assert_close(fi.explain(network(), IMAGES, fi.targets.Logit(CLASSES[name])), expected, 1e-12)


@pytest.mark.parametrize("number", [np.int64(1), np.int32(1), np.uint8(1), np.array(1), torch.tensor(1)], ids=repr)
def test_one_class_for_all(number: Any) -> None:
    assert_close(fi.explain(network(), IMAGES, number), fi.explain(network(), IMAGES, 1), 1e-12)


@pytest.mark.parametrize(
    "wrong",
    [[0, 1, 2], [0.5, 1.0], ["0", "1"], np.array([0.0, 1.0]), [3, 0], [-1, 0], [], "1", [True, False]],
    ids=repr,
)
def test_classes_that_make_no_sense(wrong: Any) -> None:
    with pytest.raises(InputError):
        fi.explain(network(), IMAGES, wrong)


# --- layers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_layers_may_be_modules(rule: str) -> None:
    model = network()
    expected = fi.explain(model, IMAGES, 1, rule=rule, layers=["1", "3"])
    maps = fi.explain(model, IMAGES, 1, rule=rule, layers=[model[1], model[3]])
    found = {str(key): value for key, value in maps.items()} if set(maps) == set(expected) else None
    if found is None:  # keyed by the modules themselves
        found = {"input": maps["input"], "1": maps[model[1]], "3": maps[model[3]]}
    for name, heatmap in expected.items():
        assert_close(found[name], heatmap, 1e-12, name)
    mixed = fi.explain(model, IMAGES, 1, rule=rule, layers=["1", model[3]])
    assert len(mixed) == 3


def test_a_module_that_is_not_the_model_s() -> None:
    with pytest.raises(FasterISNetError):
        fi.explain(network(), IMAGES, 1, layers=[nn.ReLU()])


# --- a rule for every module ---------------------------------------------------------------------------------------


def forward(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    values = [x]
    for layer in model:
        values.append(layer(values[-1]))
    return values


def zplus_step(layer: nn.Linear, x: Tensor, R: Tensor) -> Tensor:
    W, b = layer.weight, layer.bias.detach()
    plus, minus = W.clamp(min=0), W.clamp(max=0)
    z = x.clamp(min=0) @ plus.t() + x.clamp(max=0) @ minus.t() + b.clamp(min=0)
    s = R / (z + EPS)
    return torch.where(x >= 0, s @ plus, s @ minus)


def gamma_step(layer: nn.Linear, x: Tensor, R: Tensor) -> Tensor:
    W, b = layer.weight + GAMMA * layer.weight.clamp(min=0), layer.bias + GAMMA * layer.bias.clamp(min=0)
    z = x @ W.t() + b
    return R / torch.where(z < 0, z - EPS, z + EPS) @ W


def composite(model: nn.Sequential, x: Tensor, c: int, first: str, middle: str) -> Tensor:
    """Head epsilon, then the two layers below by the rules named; ReLU by the rule of epsilon above every layer."""
    values = forward(model, x)
    G = torch.zeros_like(values[5])
    G[:, c] = 1
    G = G @ model[4].weight
    for i, rule in ((2, middle), (0, first)):
        y = values[i + 2]
        G = G * (y / (y + EPS))  # the rectifier, which the default entry rules
        below, above = values[i], values[i + 1]
        if rule == "epsilon":
            G = G @ model[i].weight
        elif rule == "zplus":
            G = zplus_step(model[i], below, above * G)
        elif rule == "gamma":
            G = gamma_step(model[i], below, above * G)
    return x * G


@pytest.mark.parametrize(
    ("first", "middle"),
    [("gamma", "epsilon"), ("zplus", "epsilon"), ("epsilon", "gamma"), ("epsilon", "zplus"), ("zplus", "gamma")],
)
def test_a_rule_for_some_modules(first: str, middle: str) -> None:
    """`{"default": "epsilon", "0": "gamma", ...}` against the rules by hand, map and gradients."""
    model, plain = network(), network()
    found = fi.explain(model, IMAGES, 1, rule={"default": "epsilon", "0": first, "2": middle}, create_graph=True)
    expected = composite(plain, IMAGES, 1, first, middle)
    assert_close(found.detach(), expected.detach(), 1e-10, "map")
    gradients = parameter_gradients(plain, expected.square().sum())
    for name, gradient in parameter_gradients(model, found.square().sum()).items():
        if name.endswith("weight"):
            assert_close(gradient, gradients[name], 1e-8, name)


def test_default_alone_and_rules_for_nobody() -> None:
    for rule in RULES:
        expected = fi.explain(network(), IMAGES, 1, rule=rule)
        assert_close(fi.explain(network(), IMAGES, 1, rule={"default": rule}), expected, 1e-12)
        assert_close(fi.explain(network(), IMAGES, 1, rule={"default": rule, nn.Conv2d: "epsilon"}), expected, 1e-12)
    assert_close(fi.explain(network(), IMAGES, 1, rule={"0": "epsilon"}), fi.explain(network(), IMAGES, 1), 1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_every_module_by_type_is_the_rule_itself(rule: str) -> None:
    """A rule for linear layers and rectifiers both, given by type or by name."""
    expected = fi.explain(network(), IMAGES, 1, rule=rule)
    by_type = fi.explain(network(), IMAGES, 1, rule={"default": "epsilon", nn.Linear: rule, nn.ReLU: rule})
    by_name = fi.explain(network(), IMAGES, 1, rule={"default": "epsilon", **{str(i): rule for i in range(5)}})
    assert_close(by_type, expected, 1e-10, "by type")
    assert_close(by_name, expected, 1e-10, "by name")


def test_a_name_stands_above_a_type_and_a_parent_for_its_children() -> None:
    layers = list(network())
    model = nn.Sequential(nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:4]), layers[4])
    randomised(model)
    by_parent = fi.explain(model, IMAGES, 1, rule={"default": "epsilon", "0": "zplus"})
    by_child = fi.explain(model, IMAGES, 1, rule={"default": "epsilon", "0.0": "zplus", "0.1": "zplus"})
    assert_close(by_parent, by_child, 1e-10, "parent")
    by_both = fi.explain(
        model,
        IMAGES,
        1,
        rule={"default": "epsilon", nn.Linear: "gamma", "0.0": "zplus", "1.0": "epsilon", "2": "epsilon"},
    )
    expected = fi.explain(model, IMAGES, 1, rule={"default": "epsilon", "0.0": "zplus"})
    assert_close(by_both, expected, 1e-10, "name above type")
    assert not torch.allclose(by_both, fi.explain(model, IMAGES, 1))


def test_composites_with_a_box_and_batch_norm() -> None:
    """Epsilon above, gamma in the middle, zB below: one dictionary and a box."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    images = pictures(2, 3, 4, 4).sigmoid()
    for seed in range(20):  # until it is not dead
        if bool(fi.explain(randomised(model, seed).eval(), images, 1, box=(0.0, 1.0)).any()):
            break
    composed = fi.explain(model, images, 1, rule={"default": "epsilon", "3": "gamma"}, box=(0.0, 1.0))
    assert bool(composed.isfinite().all())
    assert not torch.allclose(composed, fi.explain(model, images, 1, box=(0.0, 1.0)))
    alone = fi.explain(model, images, 1, rule={"default": "epsilon"}, box=(0.0, 1.0))
    assert_close(alone, fi.explain(model, images, 1, box=(0.0, 1.0)), 1e-12)


def test_rules_by_module_that_make_no_sense() -> None:
    for wrong in (
        {"default": "nonsense"},
        {"default": "epsilon", "nowhere": "gamma"},
        {"default": "epsilon", 3: "gamma"},
        {"default": "epsilon", "0": None},
    ):
        with pytest.raises(FasterISNetError):
            fi.explain(network(), IMAGES, 1, rule=wrong)


def test_rule_tables_are_public() -> None:
    assert hasattr(fi, "RuleTable")


# --- strict --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_strict_raises_where_a_warning_would_be(rule: str) -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.exp()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    (net,) = twins([lambda m, x: m.fc(Own.apply(m.hidden(x)))], hidden=nn.Linear(5, 6), fc=nn.Linear(6, 3))
    with pytest.warns(RuleWarning, match="Own") as caught:
        fi.explain(net, IMAGES, 1, rule=rule)
    assert len([w for w in caught if issubclass(w.category, RuleWarning)]) == 1
    for options in ({}, {"create_graph": True}):
        with pytest.raises(RuleError, match="Own"):
            fi.explain(net, IMAGES, 1, rule=rule, strict=True, **options)
    twice = copy.deepcopy(net)
    twice.function = lambda m, x: m.fc(Own.apply(Own.apply(m.hidden(x)) / 10))
    with pytest.warns(RuleWarning) as caught:
        fi.explain(twice, IMAGES, 1, rule=rule)
    assert len([w for w in caught if issubclass(w.category, RuleWarning)]) == 1  # once for each kind, not for each call


def test_warnings_name_the_module() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.i0(x)

    model = nn.Sequential(nn.Linear(5, 6), nn.Sequential(Odd()), nn.Linear(6, 3)).double()
    with pytest.warns(RuleWarning, match=r"1\.0"):
        fi.explain(model, IMAGES, 1)


def test_strict_is_silent_where_all_is_known() -> None:
    for rule in RULES:
        assert_close(
            fi.explain(network(), IMAGES, 1, rule=rule, strict=True), fi.explain(network(), IMAGES, 1, rule=rule), 1e-12
        )
