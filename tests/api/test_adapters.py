"""Names that users of captum, timm and matplotlib know, and what works without any of them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import visualization
from PIL import Image
from torch import Tensor, nn

import fasterisnet as fi
from fasterisnet.errors import InputError

ROOT = Path(__file__).parents[2]


def network() -> nn.Module:
    torch.manual_seed(0)
    return fi.create_model("small", num_classes=3).eval()


def pictures(count: int = 2) -> Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))


TARGETS: dict[str, tuple[Any, Any]] = {
    "a number": (1, [1, 1]),
    "a tensor of one": (torch.tensor([2]), [2, 2]),
    "a tensor without dimension": (torch.tensor(2), [2, 2]),
    "one a sample, a list": ([0, 2], [0, 2]),
    "one a sample, a tensor": (torch.tensor([2, 1]), [2, 1]),
    "none: the highest": (None, None),
}


@pytest.mark.parametrize("case", TARGETS)
@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
def test_attribute_is_explain(case: str, rule: str) -> None:
    model, images = network(), pictures()
    target, classes = TARGETS[case]
    found = fi.LRP(model, rule=rule).attribute(images, target=target)
    assert found.shape == images.shape
    assert torch.equal(found, fi.explain(model, images, classes, rule=rule))


def test_attribute_takes_a_tuple_for_a_tuple() -> None:
    model, images = network(), pictures()
    lrp = fi.LRP(model, box=(0, 1))
    (found,) = lrp.attribute((images,), target=1)
    assert torch.equal(found, fi.explain(model, images, 1, box=(0, 1)))
    with pytest.raises(InputError, match="tuple that holds one"):
        lrp.attribute((images, images), target=1)


def test_attribute_can_be_trained_through() -> None:
    model = network()
    fi.LRP(model).attribute(pictures(), target=0, create_graph=True).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters() if p.ndim > 1)


def test_captum_draws_it() -> None:
    images = pictures(1)
    maps = fi.LRP(network()).attribute(images, target=0)
    heat, image = (t[0].permute(1, 2, 0).numpy() for t in (maps, images))
    figure, _ = visualization.visualize_image_attr(heat, image, "blended_heat_map", "all", use_pyplot=False)
    assert figure.axes and figure.axes[0].images


def test_overlay_is_a_picture() -> None:
    images = pictures(1)
    heatmap = torch.zeros(16, 16)
    heatmap[2, 3] = 1.0
    found = fi.overlay(images[0], heatmap)
    assert isinstance(found, Image.Image) and found.mode == "RGB" and found.size == (224, 224)
    red, green, blue = found.getpixel((3 * 14 + 7, 2 * 14 + 7))  # type: ignore[misc]
    assert red > 200 and max(green, blue) < 60


def test_figure_shows_every_map() -> None:
    model, images = network(), pictures()
    one = fi.figure(images, fi.explain(model, images))
    two = fi.figure(images, {"a": fi.explain(model, images), "b": fi.explain(model, images, 1)}, titles=["x", "y"])
    assert [len([axis for axis in f.axes if axis.images]) for f in (one, two)] == [2 * 2, 2 * 3]


@pytest.mark.parametrize("name", ["small", "resnet18", "timm:resnet18d"])
def test_create_model_has_the_arguments_of_timm(name: str) -> None:
    model = fi.create_model(name, num_classes=4, in_chans=1)
    assert model.eval()(torch.rand(2, 1, 32, 32)).shape == (2, 4)


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert fi.__version__ == project["version"]
    assert f"\nversion: {fi.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


BARE = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {missing} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import torch
import fasterisnet as fi
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 2))
images, labels = torch.rand(2, 3, 6, 6), torch.tensor([0, 1])
assert fi.explain(model, images).shape == images.shape
fi.Dual(ranges=(0.1, 1.0)).loss(model, images, labels, torch.ones(2, 6, 6)).total.backward()
from fasterisnet.cli import main
for arguments in (["--version"], ["--help"], ["train", "--help"]):
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 0, (arguments, end.code)
    else:
        raise AssertionError(arguments)
"""
EXTRAS = {
    "PIL", "cv2", "jinja2", "lightning", "matplotlib", "mlxtend", "numpy", "rich", "safetensors", "scipy", "sklearn",
    "timm", "torchmetrics", "torchvision", "yaml",
}  # fmt: skip


def test_torch_alone_is_enough() -> None:
    """To explain, to train, and to be told what the commands are."""
    done = subprocess.run(
        [sys.executable, "-c", BARE.format(missing=EXTRAS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"fasterisnet {fi.__version__}\n")
