"""Models by name: what comes out is what the library makes, with the head and the channels that were asked for."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from fasterisnet.errors import InputError, UsageError
from fasterisnet.models import build_model, model_names, names_code, small_network


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def picture(channels: int, size: int = 64, count: int = 2) -> Tensor:
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["resnet18", "torchvision:resnet18"])
def test_torchvision(name: str) -> None:
    model = build_model(name, 7)
    assert type(model) is torchvision.models.ResNet
    assert shapes(model) == shapes(torchvision.models.resnet18(num_classes=7))
    assert model.eval()(picture(3)).shape == (2, 7)


@pytest.mark.parametrize("name", ["timm:resnet18", "resnet18d", "resnet18d.ra2_in1k"])
def test_timm(name: str) -> None:
    model = build_model(name, 5)
    bare = name.removeprefix("timm:")
    assert shapes(model) == shapes(timm.create_model(bare, num_classes=5))
    assert type(model).__module__.startswith("timm.")
    assert model.eval()(picture(3)).shape == (2, 5)


def test_bare_name_is_torchvisions_if_it_has_one() -> None:
    assert "resnet18" in timm.list_models()
    assert type(build_model("resnet18", 3)).__module__ == "torchvision.models.resnet"


def test_same_random_state_gives_the_librarys_own_weights() -> None:
    torch.manual_seed(3)
    found = build_model("squeezenet1_1", 4).state_dict()
    torch.manual_seed(3)
    wanted = torchvision.models.squeezenet1_1(num_classes=4).state_dict()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(("name", "size"), [("googlenet", 64), ("inception_v3", 96)])
def test_nets_with_auxiliary_outputs_return_one_tensor_in_training_too(name: str, size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build_model(name, 3)
    output = model.train()(picture(3, size))
    assert isinstance(output, Tensor) and output.shape == (2, 3)


GREY = ["resnet18", "squeezenet1_1", "mobilenet_v3_small", "googlenet", "densenet121", "swin_t", "small"]


@pytest.mark.parametrize("name", GREY)
def test_one_channel(name: str) -> None:
    model = build_model(name, 4, channels=1)
    assert model.eval()(picture(1)).shape == (2, 4)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "swin_t"])
def test_one_channel_answers_a_grey_image_as_three_would(name: str) -> None:
    """Same random state, same net: the first filters are summed, nothing else may differ."""
    torch.manual_seed(0)
    three = build_model(name, 4).eval()
    torch.manual_seed(0)
    one = build_model(name, 4, channels=1).eval()
    grey = picture(1)
    torch.testing.assert_close(one(grey), three(grey.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-5)


def test_one_channel_of_timm() -> None:
    model = build_model("timm:resnet18", 4, channels=1)
    assert shapes(model) == shapes(timm.create_model("resnet18", num_classes=4, in_chans=1))


def test_small() -> None:
    """Two convolutions for every width, the first halves the image."""
    model = build_model("small", 10)
    assert model(picture(3, 28)).shape == (2, 10)
    narrow = small_network(3, 1, widths=(4, 5))
    assert [tuple(m.weight.shape[:2]) for m in narrow if isinstance(m, nn.Conv2d | nn.Linear)] == [
        (4, 1), (4, 4), (5, 4), (5, 5), (3, 5),
    ]  # fmt: skip
    assert [m.stride for m in narrow if isinstance(m, nn.Conv2d)] == [(2, 2), (1, 1)] * 2
    with pytest.raises(InputError, match="at least one width"):
        small_network(3, 1, widths=())


# --- functions ------------------------------------------------------------------------------------------------------

FUNCTIONS = """
from torch import nn
import helper_beside

def both(num_classes, channels=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 16, num_classes))

def neither():
    return nn.Linear(2, 3)

def everything(*, weights=None, **kwargs):
    assert set(kwargs) == {"num_classes"}
    return nn.Linear(2, **{"out_features": kwargs["num_classes"]})

def taught(num_classes, pretrained=False):
    layer = nn.Linear(2, num_classes)
    layer.bias.data.fill_(9.0 if pretrained else 0.0)
    return layer

def text():
    return "a model"

def demanding(num_classes, depth):
    return nn.Linear(2, num_classes)

def broken(num_classes):
    return {}["weights"]

LIST = [1]
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, which is not on the path."""
    folder = tmp_path / "own_nets_for_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "nets.py").write_text(FUNCTIONS)
    (tmp_path / "helper_beside.py").write_text("")
    monkeypatch.chdir(tmp_path)
    before = __import__("sys").path.copy()
    yield "own_nets_for_test.nets"  # pyright: ignore[reportReturnType]
    modules = __import__("sys").modules
    for name in [n for n in modules if n.startswith(("own_nets_for_test", "helper_beside"))]:
        del modules[name]
    assert __import__("sys").path == before


def test_functions_get_what_they_ask_for(own_module: str) -> None:
    both = build_model(f"{own_module}:both", 5, channels=2, trust=True)
    assert both(torch.rand(1, 2, 4, 4)).shape == (1, 5)
    assert build_model(f"{own_module}:neither", 5, trust=True).weight.shape == (3, 2)
    assert build_model(f"{own_module}:everything", 6, trust=True).weight.shape == (6, 2)
    assert build_model(f"{own_module}:taught", 2, trust=True).bias.tolist() == [0, 0]
    assert build_model(f"{own_module}:taught", 2, pretrained=True, trust=True).bias.tolist() == [9, 9]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("{}:text", {}, "returned a str; it has to return a torch.nn.Module"),
        ("{}:bothh", {}, "no function 'bothh'. Near it: both"),
        ("{}:LIST", {}, "no function 'LIST'; what is called so is a list"),
        ("{}:broken", {}, r"broken' failed, in .*nets.py, line \d+: KeyError: 'weights'"),
        ("{}:demanding", {}, "cannot be called with num_classes.*depth"),
        ("{}:neither", {"pretrained": True}, "no argument 'pretrained'"),
        ("no_such_package.nets:f", {}, "no module 'no_such_package'"),
        ("own_nets_for_test.absent:f", {}, "no module 'own_nets_for_test.absent'"),
    ],
)
def test_functions_that_do_not_work(own_module: str, name: str, options: dict[str, bool], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_model(name.format(own_module), 3, trust=True, **options)


def test_a_module_that_lacks_something_itself(own_module: str) -> None:
    Path("helper_beside.py").write_text("import no_such_dependency")
    with pytest.raises(InputError, match=r"Importing .* failed: No module named 'no_such_dependency'"):
        build_model(f"{own_module}:both", 3, trust=True)


def test_a_module_that_is_no_python(own_module: str) -> None:
    Path("helper_beside.py").write_text("def (")
    with pytest.raises(InputError, match=r"Importing .* failed, in .*: SyntaxError"):
        build_model(f"{own_module}:both", 3, trust=True)


@pytest.mark.parametrize(
    "name", ["{}:both", "timm:{}:both", "torchvision:{}:both", "timm:resnet18.{}:both", ":{}:both"]
)
def test_names_become_code_only_where_somebody_said_so(own_module: str, name: str) -> None:
    """The gate and the import read a name alike: whatever is not a library's name is code."""
    name = name.format(own_module)
    assert names_code(name)
    with pytest.raises(UsageError, match="say --trust"):
        build_model(name, 3)
    assert own_module not in __import__("sys").modules
    if name != f"{own_module}:both":
        with pytest.raises(UsageError, match="There is no model"):
            build_model(name, 3, trust=True)
        assert own_module not in __import__("sys").modules


@pytest.mark.parametrize(
    "name", ["small", "resnet18", "torchvision:resnet18", "timm:resnet18d", "timm:resnet18.a1_in1k"]
)
def test_names_of_libraries_are_no_code(name: str) -> None:
    assert not names_code(name)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("resnet_18", "resnet18"),
        ("timm:resnet18dd", "resnet18d"),
        ("torchvision:densnet121", "densenet121"),
        ("smal", "small"),
        ("timm:resnet18d.no_such_tag", "resnet18d"),
    ],
)
def test_unknown_names_get_near_ones(name: str, near: str) -> None:
    with pytest.raises(InputError, match=f"There is no model '{name}'.*Near it:.*{near}"):
        build_model(name, 3)


def test_torchvision_names_are_classifiers_only() -> None:
    names = model_names()
    assert {"small", "resnet18", "densenet121", "vit_b_16", "timm:resnet18d"} <= set(names)
    assert not any("fasterrcnn" in n or "deeplab" in n or "quantized" in n or "r3d" in n for n in names[:100])
    with pytest.raises(InputError, match="no model 'torchvision:fcn_resnet50'"):
        build_model("torchvision:fcn_resnet50", 3)
    with pytest.raises(InputError, match="no model 'torchvision:resnet18d'"):
        build_model("torchvision:resnet18d", 3)


@pytest.mark.parametrize(("classes", "channels"), [(0, 3), (3, 0), (-1, 3)])
def test_impossible_sizes(classes: int, channels: int) -> None:
    with pytest.raises(InputError, match="at least 1 class"):
        build_model("small", classes, channels=channels)
