"""What cannot be explained is refused with a message that says what is wrong and where."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasterisnet import explain
from fasterisnet.errors import FasterISNetError
from fasterisnet.lrp.targets import Eta, Logit
from lrp.helpers import Net, pictures, randomised
from lrp.small_nets import BOX, RULES, residual


def refuses(words: list[str], model: nn.Module, images: Any, *arguments: Any, **options: Any) -> None:
    """`explain` raises our error, with all these words in its message; twice, as nothing may be left behind."""
    for _ in range(2):
        with pytest.raises(FasterISNetError) as caught:
            explain(model, images, *arguments, **options)
        for word in words:
            assert word in str(caught.value), f"{word!r} is not in {caught.value}"


def returning(function: Callable[[Any, Tensor], Any]) -> nn.Module:
    return randomised(Net(function, fc=nn.Linear(5, 3)))


# --- the model's output --------------------------------------------------------------------------------------------

OUTPUTS: dict[str, tuple[Callable[[Any, Tensor], Any], list[str]]] = {
    "3-D": (lambda m, x: m.fc(x)[:, None], ["(2, 1, 3)", "(batch, classes)"]),
    "1-D": (lambda m, x: m.fc(x)[:, 0], ["(2,)", "(batch, classes)"]),
    "other batch": (lambda m, x: m.fc(x).repeat(2, 1), ["(4, 3)", "2 images"]),
    "tuple": (lambda m, x: (m.fc(x), x), ["tuple", "(batch, classes)"]),
    "list": (lambda m, x: [m.fc(x)], ["list", "(batch, classes)"]),
    "dict": (lambda m, x: {"out": m.fc(x)}, ["dict", "(batch, classes)"]),
    "None": (lambda m, x: None, ["NoneType", "(batch, classes)"]),
    "number": (lambda m, x: 0.5, ["float", "(batch, classes)"]),
    "detached": (lambda m, x: m.fc(x).detach(), ["does not depend", "input"]),
    "constant": (lambda m, x: torch.zeros(2, 3), ["does not depend", "input"]),
    "no_grad": (lambda m, x: torch.no_grad()(m.fc)(x), ["does not depend", "input"]),
    "classes": (lambda m, x: m.fc(x).argmax(1, keepdim=True), ["does not depend", "input"]),
    "no classes": (lambda m, x: m.fc(x)[:, :0], ["(2, 0)", "(batch, classes)"]),
    "parameters only": (lambda m, x: m.fc.bias.expand(2, 3) + 0, ["does not depend", "input"]),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("case", OUTPUTS)
def test_model_output(case: str, create_graph: bool) -> None:
    function, words = OUTPUTS[case]
    refuses(words, returning(function), pictures(2, 5), create_graph=create_graph)


def test_no_model() -> None:
    refuses(["model", "resnet18", "Module"], "resnet18", pictures(2, 5))  # type: ignore[arg-type]


# --- targets -------------------------------------------------------------------------------------------------------

TARGETS: dict[str, tuple[Any, list[str]]] = {
    "class too high": (4, ["class 4", "out of range", "4 outputs"]),
    "negative class": (-1, ["class -1", "out of range"]),
    "tensor too high": (torch.tensor([0, 1, 9]), ["class 9", "out of range"]),
    "negative tensor": (torch.tensor([0, -2, 1]), ["class -2", "out of range"]),
    "too few": (torch.tensor([0, 1]), ["(2,)", "3 images"]),
    "too many": (torch.tensor([0, 1, 2, 3]), ["(4,)", "3 images"]),
    "2-D": (torch.tensor([[0], [1], [2]]), ["(3, 1)", "3 images"]),
    "floats": (torch.tensor([0.0, 1.0, 2.0]), ["integers", "float32"]),
    "booleans": (torch.tensor([True, False, True]), ["integers", "bool"]),
    "a boolean": (True, ["integers", "bool"]),
    "logit object": (Logit(7), ["class 7", "out of range"]),
    "eta object": (Eta(torch.tensor([0, 5, 0])), ["class 5", "out of range"]),
    "string": ("cat", ["target", "cat", "class"]),
    "number": (1.5, ["target", "1.5", "class"]),
    "list of words": (["cat", "dog"], ["cat", "integer"]),
    "column": (lambda z: z[:, :1], ["target", "(3, 1)", "one number per sample"]),
    "scalar": (lambda z: z.sum(), ["target", "()", "one number per sample"]),
    "all logits": (lambda z: z, ["target", "(3, 4)", "one number per sample"]),
    "no tensor": (lambda z: 1.0, ["target returned", "tensor", "one number per sample"]),
    "nothing": (lambda z: None, ["target returned", "tensor", "one number per sample"]),
    "detached": (lambda z: z[:, 0].detach(), ["target returned", "differentiable"]),
    "argmax": (lambda z: z.argmax(1), ["target returned", "differentiable"]),
    "class, not object": (Eta, ["target", "Eta"]),
}


@pytest.mark.parametrize("case", TARGETS)
def test_target(case: str) -> None:
    target, words = TARGETS[case]
    refuses(words, residual(), pictures(), target)


# --- images --------------------------------------------------------------------------------------------------------


def spoiled(value: float) -> Tensor:
    images = pictures()
    images[2, 1, 0, 3] = value
    return images


IMAGES: dict[str, tuple[Any, list[str]]] = {
    "bytes": (torch.zeros(3, 3, 6, 6, dtype=torch.uint8), ["images", "uint8", "floating point"]),
    "integers": (torch.zeros(3, 3, 6, 6, dtype=torch.int64), ["images", "int64", "floating point"]),
    "booleans": (torch.zeros(3, 3, 6, 6, dtype=torch.bool), ["images", "bool", "floating point"]),
    "complex": (torch.zeros(3, 3, 6, 6, dtype=torch.complex64), ["images", "complex64", "floating point"]),
    "NaN": (spoiled(math.nan), ["images", "NaN", "sample 2"]),
    "infinite": (spoiled(math.inf), ["images", "infinite", "sample 2"]),
    "minus infinite": (spoiled(-math.inf), ["images", "infinite", "sample 2"]),
    "empty batch": (torch.zeros(0, 3, 6, 6), ["images", "(0, 3, 6, 6)", "empty"]),
    "empty image": (torch.zeros(2, 3, 0, 6), ["images", "(2, 3, 0, 6)", "empty"]),
    "no batch": (torch.zeros(5), ["images", "(5,)", "batch"]),
    "number": (torch.zeros(()), ["images", "()", "batch"]),
    "list": ([[0.0, 1.0]], ["images", "list", "tensor"]),
    "array": (pictures().numpy(), ["images", "ndarray", "tensor"]),
    "None": (None, ["images", "NoneType", "tensor"]),
}


@pytest.mark.parametrize("case", IMAGES)
def test_images(case: str) -> None:
    images, words = IMAGES[case]
    refuses(words, residual(), images)


def test_an_image_without_its_batch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).eval()
    refuses(["(3, 6, 6)", "images.unsqueeze(0)"], model, torch.rand(2, 3, 6, 6)[0])


# --- rules and the stabiliser --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["lrp", "", "Epsilon", None, 3, ["epsilon"]])
def test_unknown_rule(rule: Any) -> None:
    refuses(["rule", str(rule), *RULES], residual(), pictures(), rule=rule)


@pytest.mark.parametrize("epsilon", [-0.01, -math.inf, math.nan])
@pytest.mark.parametrize("rule", RULES)
def test_stabiliser(rule: str, epsilon: float) -> None:
    refuses(["epsilon", str(epsilon)], residual(), pictures(), rule=rule, epsilon=epsilon)


@pytest.mark.parametrize("epsilon", [math.inf, "0.01", None])
def test_stabiliser_that_is_no_number(epsilon: Any) -> None:
    refuses(["epsilon", str(epsilon)], residual(), pictures(), epsilon=epsilon)


# --- the first layer's box -----------------------------------------------------------------------------------------


def first(function: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> nn.Module:
    conv, fc = nn.Conv2d(3, 5, 3, padding=1), nn.Linear(180, 3)
    return randomised(Net(function, conv=conv, fc=fc, **parts)).eval()


def tail(m: Any, x: Tensor) -> Tensor:
    return m.fc(torch.relu(m.conv(x)).flatten(1))


STEMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, nn.Module], str]] = {
    "batch norm": (lambda m, x: tail(m, m.bn(x)), {"bn": nn.BatchNorm2d(3)}, "batch_norm"),
    "relu": (lambda m, x: tail(m, torch.relu(x)), {}, "relu"),
    "pooling": (lambda m, x: tail(m, nn.functional.avg_pool2d(x, 3, 1, 1)), {}, "avg_pool2d"),
    "max pooling": (lambda m, x: tail(m, nn.functional.max_pool2d(x, 3, 1, 1)), {}, "max_pool2d"),
    "layer norm": (lambda m, x: tail(m, m.norm(x)), {"norm": nn.LayerNorm([3, 6, 6])}, "layer_norm"),
    "stranger": (lambda m, x: tail(m, torch.sin(x)), {}, "sin"),
    "skip": (lambda m, x: tail(m, x) + x.mean((2, 3)), {}, "mean"),
    "two inputs": (lambda m, x: tail(m, torch.cat([x[:, :1], x[:, 1:].tanh()], 1)), {}, "tanh"),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", STEMS)
def test_box_where_the_first_operation_is_not_linear(case: str, rule: str) -> None:
    function, parts, name = STEMS[case]
    refuses(["zB", name], first(function, **parts), pictures(2, 3, 6, 6), rule=rule, box=BOX)


def test_box_names_the_module() -> None:
    stem = Net(lambda m, x: m.act(x), act=nn.Tanh())
    refuses(["tanh", "'stem.act'"], first(lambda m, x: tail(m, m.stem(x)), stem=stem), pictures(2, 3, 6, 6), box=BOX)


BOXES: dict[str, tuple[Any, list[str]]] = {
    "four channels": (([0.0] * 4, [1.0] * 4), ["box", "4", "3 channels"]),
    "two channels above": ((0.0, torch.ones(2)), ["box", "2", "3 channels"]),
    "other shape": ((torch.zeros(3, 5, 5), 1.0), ["box", "(3, 5, 5)"]),
    "low above high": ((1.0, 0.0), ["box", "low", "high"]),
    "one channel upside down": (([0.0, 2.0, 0.0], [1.0, 1.0, 1.0]), ["box", "low", "high"]),
    "NaN": ((math.nan, 1.0), ["box"]),
    "a number": (1.0, ["box", "low", "high"]),
    "one number": ((1.0,), ["box", "low", "high"]),
    "three numbers": ((0.0, 0.5, 1.0), ["box", "low", "high"]),
    "words": (("black", "white"), ["box"]),
}


@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
@pytest.mark.parametrize("case", BOXES)
def test_box(case: str, rule: str) -> None:
    box, words = BOXES[case]
    refuses(words, residual(), pictures(), rule=rule, box=box)


# --- layers --------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Modules that run twice, not at all, or answer with something else than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(5, 5)
        self.never = nn.Linear(5, 5)
        self.pair = Net(lambda _m, x: (x, x))
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        self.constant = Net(lambda _m, x: torch.ones(2, 5, dtype=torch.float64))
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.relu(self.twice(x)))
        x, _ = self.pair(x * self.constant(x))
        tokens = x[:, None]
        return self.fc(self.attention(tokens, tokens, tokens)[0][:, 0])


LAYERS: dict[str, tuple[Any, list[str]]] = {
    "unknown": (["fc", "conv9"], ["layers", "'conv9'", "not a module"]),
    "unknown, alike": (["head.fc"], ["layers", "'head.fc'", "not a module", "mean fc"]),
    "twice": (["twice"], ["'twice'", "more than once"]),
    "never": (["fc", "never"], ["'never'", "not run"]),
    "pair": (["pair"], ["'pair'", "tensor"]),
    "attention": (["attention"], ["'attention'", "tensor"]),
    "constant": (["constant"], ["'constant'", "depend"]),
    "one name": ("twice", ["layers", "twice", "list"]),
    "no name": ([3], ["layers", "3"]),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("case", LAYERS)
def test_layers(case: str, create_graph: bool) -> None:
    layers, words = LAYERS[case]
    refuses(words, randomised(Odd()).eval(), pictures(2, 5), layers=layers, create_graph=create_graph)


@pytest.mark.parametrize(
    ("rule", "box", "layer"),
    [("zplus", None, "conv1"), ("zplus", None, "conv2"), ("epsilon", BOX, "conv1"), ("zplus", BOX, "conv1")],
)
def test_layer_that_is_one_with_the_batch_norm_behind_it(rule: str, box: Any, layer: str) -> None:
    refuses([f"'{layer}'", "batch norm"], residual(), pictures(), rule=rule, box=box, layers=[layer])


def test_layer_in_front_of_a_batch_norm_where_nothing_is_fused() -> None:
    """The refusals above are not for every rule: epsilon knows relevance between the two."""
    maps = explain(residual(), pictures(), layers=["conv1", "conv2"])
    assert maps["conv1"].shape == (3, 6, 6, 6) and maps["conv1"].abs().max() > 0
    boxed = explain(residual(), pictures(), layers=["conv2"], box=BOX)
    torch.testing.assert_close(boxed["conv2"], maps["conv2"])


def test_errors_are_errors_of_their_kind_too() -> None:
    """Callers who know nothing of this package catch ValueError and RuntimeError."""
    with pytest.raises(ValueError, match="out of range"):
        explain(residual(), pictures(), 99)
    with pytest.raises(RuntimeError, match="zB"):
        explain(first(lambda m, x: tail(m, x.tanh())), pictures(2, 3, 6, 6), box=BOX)
