"""Pretrained weights, from the library or a local file: what fits is taken, the rest named, pickles refused."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from fasterisnet.errors import InputError
from fasterisnet.models import build_model, load_weights, small_network

Weights = dict[str, Tensor]
HEAD = str(len(small_network()) - 1)


def taught(classes: int = 10, channels: int = 3) -> nn.Module:
    """A small net with weights and statistics unlike those of any fresh one."""
    model = small_network(classes, channels)
    generator = torch.Generator().manual_seed(5)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model.eval()


def safetensors(weights: Weights, path: Path) -> Path:
    save_file({k: v.contiguous() for k, v in weights.items()}, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def pt(weights: Weights, path: Path) -> Path:
    torch.save(weights, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def wrapped(weights: Weights, path: Path) -> Path:
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in weights.items()}}, path.with_suffix(".ckpt"))
    return path.with_suffix(".ckpt")


@pytest.mark.parametrize("save", [safetensors, pt, wrapped])
def test_same_net_has_same_logits(save: Callable[[Weights, Path], Path], tmp_path: Path) -> None:
    source = taught()
    path = save(source.state_dict(), tmp_path / "weights")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build_model("small", 10, pretrained=str(path)).eval()
    images = torch.rand(2, 3, 16, 16)
    assert torch.equal(model(images), source(images))


@pytest.mark.parametrize("save", [safetensors, pt])
def test_other_head_is_left_and_named(save: Callable[[Weights, Path], Path], tmp_path: Path) -> None:
    source = taught()
    path = save(source.state_dict(), tmp_path / "weights")
    with pytest.warns(
        UserWarning, match=rf"loaded.*initialised: {HEAD}.weight, {HEAD}.bias\. Not in the model: {HEAD}"
    ):
        model = build_model("small", 4, pretrained=str(path))
    found, wanted = model.state_dict(), source.state_dict()
    assert found[f"{HEAD}.weight"].shape[0] == 4
    assert all(torch.equal(found[k], wanted[k]) for k in wanted if not k.startswith(f"{HEAD}."))


@pytest.mark.parametrize(("held", "wanted"), [(3, 1), (1, 3)])
def test_other_number_of_channels(held: int, wanted: int, tmp_path: Path) -> None:
    source = taught(channels=held)
    model = small_network(10, wanted).eval()
    done = load_weights(model, safetensors(source.state_dict(), tmp_path / "weights"))
    assert not done.left and not done.unused
    grey = torch.rand(2, 1, 16, 16)
    torch.testing.assert_close(model(grey.expand(-1, wanted, -1, -1)), source(grey.expand(-1, held, -1, -1)))


def test_torchvisions_old_densenet_files(tmp_path: Path) -> None:
    source = build_model("densenet121", 1000)
    old = {}
    for key, value in source.state_dict().items():
        for kind in ("norm", "conv"):
            for number in "12":
                if ".denselayer" in key:
                    key = key.replace(f".{kind}{number}.", f".{kind}.{number}.")
        old[key] = value
    assert sum(".norm.1." in key for key in old) == 58 * 5
    with pytest.warns(UserWarning, match=r"as initialised: classifier.weight, classifier.bias\."):
        model = build_model("densenet121", 3, pretrained=str(pt(old, tmp_path / "densenet")))
    key = "features.denseblock3.denselayer7.conv2.weight"
    assert torch.equal(model.state_dict()[key], source.state_dict()[key])


# --- refusals -------------------------------------------------------------------------------------------------------


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_pickled_code_is_refused_and_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    torch.save({"0.weight": torch.rand(24, 3, 3, 3), "state_dict": Payload(trap)}, tmp_path / "bad.pt")
    with pytest.raises(InputError, match=r"bad\.pt is refused.*would run code"):
        build_model("small", 10, pretrained=str(tmp_path / "bad.pt"))
    assert not trap.exists()


@pytest.mark.parametrize("save", [safetensors, pt])
@pytest.mark.parametrize("kept", [0, 7, 0.5, -1])
def test_truncated_files_say_so(save: Callable[[Weights, Path], Path], kept: float, tmp_path: Path) -> None:
    path = save(taught().state_dict(), tmp_path / "weights")
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if 0 < kept < 1 else int(kept)])
    with pytest.raises(InputError, match=rf"{path.name} (cannot be read|is refused: it is damaged)"):
        build_model("small", 10, pretrained=str(path))


def test_files_without_anything_of_use(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.pt is not a file"):
        build_model("small", 10, pretrained=str(tmp_path / "absent.pt"))
    other = safetensors(torchvision.models.squeezenet1_1().state_dict(), tmp_path / "other")
    with pytest.raises(InputError, match=r"None of the 52 tensors.*features\.0\.bias.*the model has 0\.weight"):
        build_model("small", 10, pretrained=str(other))
    torch.save(torch.rand(3), tmp_path / "tensor.pt")
    with pytest.raises(InputError, match="holds a Tensor"):
        build_model("small", 10, pretrained=str(tmp_path / "tensor.pt"))
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    with pytest.raises(InputError, match="holds no tensors"):
        build_model("small", 10, pretrained=str(tmp_path / "empty.pt"))


# --- the libraries' own weights -------------------------------------------------------------------------------------


def test_torchvisions_weights_with_another_head(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(9)
    source = torchvision.models.squeezenet1_1()
    calls = []

    def offered(url: str, *args: object, **kwargs: object) -> Weights:
        calls.append(url)
        return source.state_dict()

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offered)
    model = build_model("squeezenet1_1", 3, channels=1, pretrained=True)
    found, wanted = model.state_dict(), source.state_dict()
    assert len(calls) == 1 and "squeezenet1_1" in calls[0]
    head = ("classifier.1.weight", "classifier.1.bias", "features.0.weight")
    assert all(torch.equal(found[k], wanted[k]) for k in wanted if k not in head)
    assert found["classifier.1.weight"].shape[0] == 3
    torch.testing.assert_close(found["features.0.weight"], wanted["features.0.weight"].sum(1, keepdim=True))


def test_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", unreachable)
    with pytest.raises(InputError, match=r"weights of 'squeezenet1_1' cannot be had.*no route.*give its path"):
        build_model("squeezenet1_1", 3, pretrained=True)


def test_without_network_timm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_url", _unreachable, raising=False)
    with pytest.raises(InputError, match=r"weights of 'resnet18d' cannot be had.*give its path"):
        build_model("timm:resnet18d", 3, pretrained=True)


def _unreachable(*args: object, **kwargs: object) -> None:
    raise URLError("no route to host")


def test_small_has_nothing_to_download() -> None:
    with pytest.raises(InputError, match="no weights to download"):
        build_model("small", 10, pretrained=True)
