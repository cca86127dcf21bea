"""An explanation leaves the model, the images and torch itself as they were, also when it fails half-way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet import explain
from fasterisnet.errors import InputError, RuleError
from lrp.helpers import Net, pictures, randomised
from lrp.small_nets import BOX, CLASSES, RULES, Residual, residual

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layers": {"layers": ["relu", "pool", "fc"]},
    "box": {"box": BOX},
    "both": {"box": BOX, "layers": ["bn2", "pool"]},
}
LABELS = torch.tensor([0, 3, 1])


class Reused(Residual):
    """Runs its ReLU once, so that it can be named as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        identity = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(identity))
        out += identity
        return self.fc(self.dropout(self.pool(self.relu(out))).flatten(1))


def build(training: bool) -> Reused:
    return randomised(Reused()).train(training)


def anatomy(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that an explanation could leave a trace on, values aside."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name, "class"] = type(module)
        found[name, "attributes"] = sorted(vars(module))
        found[name, "training"] = module.training
        found[name, "inplace"] = getattr(module, "inplace", None)
        found[name, "forward"] = "forward" in vars(module)
        for attribute, value in vars(module).items():
            if "hooks" in attribute:
                found[name, attribute] = dict(value) if isinstance(value, dict) else value
    for name, parameter in model.named_parameters():
        found[name, "object"] = id(parameter)
        found[name, "version"] = parameter._version
        found[name, "requires_grad"] = parameter.requires_grad
        found[name, "grad"] = parameter.grad
        found[name, "hooks"] = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        found[name, "attributes"] = sorted(vars(parameter))
    for name, buffer in model.named_buffers():
        found[name, "object"] = id(buffer)
        found[name, "attributes"] = sorted(vars(buffer))
    return found


def surroundings() -> tuple[Any, ...]:
    """State of torch outside the model."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        len(torch.overrides._get_current_function_mode_stack()),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_values(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]), name


def loss_gradients(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Gradients of one ordinary training step, always with the same random numbers."""
    torch.manual_seed(5)
    F.cross_entropy(model(images), LABELS).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("rule", RULES)
def test_model_images_and_random_state_are_untouched(rule: str, option: str, training: bool) -> None:
    model, images = build(training), pictures()
    kept = images.clone()
    before, was, outside = values(model), anatomy(model), surroundings()
    torch.manual_seed(3)
    random = torch.get_rng_state()
    explain(model, images, rule=rule, **OPTIONS[option])
    assert torch.equal(torch.get_rng_state(), random)
    assert_same_values(before, model.state_dict())
    assert anatomy(model) == was
    assert surroundings() == outside
    assert torch.equal(images, kept)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("rule", RULES)
def test_create_graph_changes_what_one_forward_changes(rule: str, option: str, training: bool) -> None:
    """Train mode: statistics and random state move on as in one ordinary forward pass, bit for bit."""
    model, images = build(training), pictures()
    ordinary = copy.deepcopy(model)
    was, outside = anatomy(model), surroundings()
    torch.manual_seed(3)
    ordinary(images)
    random = torch.get_rng_state()
    torch.manual_seed(3)
    maps = explain(model, images, rule=rule, create_graph=True, **OPTIONS[option])
    assert torch.equal(torch.get_rng_state(), random)
    assert_same_values(ordinary.state_dict(), model.state_dict())
    assert anatomy(model) == was
    assert surroundings() == outside
    heatmap = maps["input"] if isinstance(maps, dict) else maps
    assert heatmap.requires_grad
    if training:
        assert model.bn1.num_batches_tracked == 1


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_ordinary_gradients_are_the_same_before_and_after(rule: str, create_graph: bool, training: bool) -> None:
    """Also while the maps, and with them their graph, are still alive."""
    model, images = build(training), pictures()
    before = loss_gradients(model, images)
    maps = explain(model, images, rule=rule, create_graph=create_graph, box=BOX, layers=["pool"])
    after = loss_gradients(model, images)
    assert maps["input"].shape == images.shape
    assert before.keys() == dict(model.named_parameters()).keys()
    assert_same_values(before, after)


@pytest.mark.parametrize("rule", RULES)
def test_a_graph_made_before_can_still_be_used(rule: str) -> None:
    """Train mode: monitor with an explanation between the forward pass, or a trainable map, and its backward pass."""
    model, images = build(True), pictures()
    gradients = []
    for monitored in (False, True):
        torch.manual_seed(5)
        loss = F.cross_entropy(model(images), LABELS)
        loss = loss + explain(model, images, 1, create_graph=True).square().sum()
        if monitored:
            explain(model, images, rule=rule, box=BOX)
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad(set_to_none=True)
    assert len(gradients[0]) == len(dict(model.named_parameters()))
    assert_same_values(*gradients)


def test_training_through_the_maps_adds_to_nothing_but_grad() -> None:
    model, images = build(True), pictures()
    was = anatomy(model)
    explain(model, images, create_graph=True).square().sum().backward()
    assert model.conv1.weight.grad is not None and model.conv1.weight.grad.abs().sum() > 0
    model.zero_grad(set_to_none=True)
    assert anatomy(model) == was


@pytest.mark.parametrize("part", ["model", "bn1", "dropout"])
def test_statistics_stay_where_only_a_part_is_in_train_mode(part: str) -> None:
    model, images = build(False), pictures()
    if part == "model":
        model.training = True
    else:
        model.get_submodule(part).train()
    before = values(model)
    torch.manual_seed(3)
    random = torch.get_rng_state()
    explain(model, images)
    assert_same_values(before, model.state_dict())
    assert torch.equal(torch.get_rng_state(), random)


def test_buffers_outside_the_state_dict_stay() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.seen += x.detach().mean()
        return m.fc(x)

    model = randomised(Net(forward, fc=nn.Linear(5, 3)))
    model.register_buffer("seen", torch.zeros((), dtype=torch.float64), persistent=False)
    explain(model, pictures(2, 5))
    assert model.seen == 0


def test_hooks_of_the_user_stay_and_run() -> None:
    model, images = build(False), pictures()
    calls: list[str] = []
    model.conv1.register_forward_hook(lambda *_: calls.append("forward"))
    model.fc.register_forward_pre_hook(lambda *_: calls.append("before"))
    was = anatomy(model)
    explain(model, images, layers=["conv1", "fc"])
    assert calls == ["forward", "before"]
    assert anatomy(model) == was


# --- explanations that fail ----------------------------------------------------------------------------------------


class Failing(Reused):
    """Raises behind its second batch norm, inside its forward pass."""

    error: type[BaseException] = RuntimeError

    def forward(self, x: Tensor) -> Tensor:
        identity = self.relu(self.bn1(self.conv1(x)))
        if self.failing:
            self.bn2(self.conv2(identity))
            raise self.error("half-way")
        return self.fc(self.dropout(self.pool(self.bn2(self.conv2(identity)).relu_())).flatten(1))

    failing = True


class Interrupted(Failing):
    error = KeyboardInterrupt


class Unruled(Failing):
    """Has an operation without a rule in its middle."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.bn1(self.conv1(x)))
        return self.fc(self.dropout(self.pool(self.bn2(self.conv2(x)).relu_())).flatten(1))


class Twice(Failing):
    """Runs its second convolution twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(self.dropout(self.pool(self.bn2(self.conv2(self.conv2(x))).relu_())).flatten(1))


class Shapeless(Failing):
    """Returns no (batch, classes)."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.fc(self.dropout(self.pool(self.bn2(self.conv2(self.bn1(self.conv1(x)))).relu_())).flatten(1))
        return out.sum(1) if self.failing else out


def failing_target(_logits: Tensor) -> Tensor:
    raise ZeroDivisionError("target")


FAILURES: dict[str, tuple[type[Failing], dict[str, Any], type[BaseException]]] = {
    "model": (Failing, {}, RuntimeError),
    "interrupt": (Interrupted, {"layers": ["bn1"]}, KeyboardInterrupt),
    "target": (Twice, {"target": failing_target, "layers": ["bn1"]}, ZeroDivisionError),
    "class": (Twice, {"target": CLASSES}, InputError),
    "strict": (Unruled, {"strict": True, "layers": ["bn1"]}, RuleError),
    "no such layer": (Twice, {"layers": ["bn1", "conv9"]}, InputError),
    "layer twice": (Twice, {"layers": ["bn1", "conv2"]}, InputError),
    "output": (Shapeless, {"layers": ["bn1"]}, InputError),
    "box": (Twice, {"box": (1.0, 0.0)}, InputError),
    "fused": (Twice, {"rule": "zplus", "layers": ["conv1"]}, RuleError),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("failure", FAILURES)
def test_untouched_when_explain_raises(failure: str, training: bool, create_graph: bool) -> None:
    kind, options, error = FAILURES[failure]
    model, images = randomised(kind()).train(training), pictures()
    model.failing = False
    gradients = loss_gradients(model, images)
    model.failing = True
    before, was, outside = values(model), anatomy(model), surroundings()
    random = torch.get_rng_state()
    with pytest.raises(error):
        explain(model, images, create_graph=create_graph, **options)
    assert surroundings() == outside
    assert anatomy(model) == was
    assert_clean(images)
    if not create_graph:
        assert torch.equal(torch.get_rng_state(), random)
    if not (create_graph and training):
        assert_same_values(before, model.state_dict())
    model.failing = False
    assert_same_values(gradients, loss_gradients(model, images))


# --- the images ----------------------------------------------------------------------------------------------------


def assert_clean(images: Tensor, *, requires_grad: bool = False) -> None:
    assert images.requires_grad is requires_grad
    assert images.grad is None
    assert images._version == 0
    assert vars(images) == {}
    assert not images._backward_hooks


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("rule", RULES)
def test_images_are_untouched(rule: str, option: str, create_graph: bool, requires_grad: bool) -> None:
    images = pictures().requires_grad_(requires_grad)
    kept = images.detach().clone()
    maps = explain(build(False), images, rule=rule, create_graph=create_graph, **OPTIONS[option])
    assert torch.equal(images, kept)
    assert_clean(images, requires_grad=requires_grad)
    assert (maps["input"] if isinstance(maps, dict) else maps) is not images


@pytest.mark.parametrize("failure", ["model", "target", "strict", "layer twice", "no such layer"])
def test_images_that_require_grad_are_clean_after_a_failure(failure: str) -> None:
    kind, options, error = FAILURES[failure]
    images = pictures().requires_grad_()
    with pytest.raises(error):
        explain(randomised(kind()), images, **options)
    assert_clean(images, requires_grad=True)


def in_place_first(change: Callable[[Tensor], Tensor]) -> Net:
    return randomised(Net(lambda m, x: m.fc(change(x)), fc=nn.Linear(5, 3)))


@pytest.mark.parametrize(
    "change",
    [lambda x: x.sub_(0.5), lambda x: F.relu(x, inplace=True), lambda x: x.mul_(2.0)],
    ids=["sub", "relu", "mul"],
)
def test_a_model_that_overwrites_its_input(change: Callable[[Tensor], Tensor]) -> None:
    """The images are kept, and the map is that of the same model without the in-place step."""
    images = pictures(2, 5)
    kept = images.clone()
    heatmap = explain(in_place_first(change), images, 1)
    assert torch.equal(images, kept)
    torch.testing.assert_close(heatmap, explain(in_place_first(lambda x: change(x.clone())), images, 1))


def test_the_maps_share_no_memory_with_images_or_activations() -> None:
    """Writing into a map harms nobody."""
    model, images = build(False), pictures()
    kept, before = images.clone(), values(model)
    for heatmap in explain(model, images, layers=["relu", "fc"]).values():
        assert heatmap.grad_fn is None and not heatmap.requires_grad
        heatmap.zero_()
    assert torch.equal(images, kept)
    assert_same_values(before, model.state_dict())


def test_residual_of_the_helpers_runs_its_relu_twice() -> None:
    """The shared network is one with a re-used in-place ReLU; naming it is refused."""
    with pytest.raises(InputError, match=r"'relu' ran more than once"):
        explain(residual(), pictures(), layers=["relu"])
