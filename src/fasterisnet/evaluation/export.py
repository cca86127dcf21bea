"""`export_model`: the bare classifier as a file that runs without this package."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fasterisnet.errors import FasterISNetError, InputError
from fasterisnet.extras import install
from fasterisnet.files import replacing

Format = Literal["onnx", "pt2"]
TOLERANCE = 1e-4
ANY_BATCH = ({0: torch.export.Dim("batch")},)


def export_model(
    model: nn.Module, path: str | Path, format: Format, *, example: Tensor, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes the model in evaluation mode, for batches of any size, and proves the file before it takes its place.

    example: images as the network is fed, (sample, channel, ...). "onnx" for ONNX runtimes, "pt2" for
    `torch.export.load`. The file is read back; its logits must be the model's, for two sizes of batch. metadata: texts
    that go into the file: the properties of an ONNX model, `extra_files={"metadata.json": ""}` of the other.
    """
    if format not in get_args(Format):
        raise InputError(f"format is {format!r}; it has to be 'onnx' or 'pt2'.")
    if format == "onnx":
        _need_onnx()
    if example.ndim < 2 or len(example) == 0:
        raise InputError(f"example has shape {tuple(example.shape)}; it has to be (sample, channel, ...), not empty.")
    bare = copy.deepcopy(model).cpu().eval()
    images = example.detach().cpu()
    with replacing(path) as temporary:
        (_write_onnx if format == "onnx" else _write_pt2)(bare, temporary, images, dict(metadata or {}))
        _prove((_read_onnx if format == "onnx" else _read_pt2)(temporary), bare, images, Path(path))


def _write_onnx(model: nn.Module, path: Path, images: Tensor, metadata: dict[str, str]) -> None:
    with torch.no_grad():
        program = torch.onnx.export(
            _exported(model, images), (), input_names=["images"], output_names=["logits"],
            dynamic_shapes=ANY_BATCH, dynamo=True, verbose=False,
        )  # fmt: skip
    assert program is not None
    program.model.metadata_props.update(metadata)
    program.save(path, external_data=False)


def _read_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def _write_pt2(model: nn.Module, path: Path, images: Tensor, metadata: dict[str, str]) -> None:
    buffer = io.BytesIO()  # given a path, torch would write its name into the file, and abort when the disk is full
    torch.export.save(_exported(model, images), buffer, extra_files={"metadata.json": json.dumps(metadata)})
    path.write_bytes(buffer.getbuffer())


def _read_pt2(path: Path) -> Callable[[Tensor], Tensor]:
    return torch.export.load(path).module()


def _exported(model: nn.Module, images: Tensor) -> Any:
    """The graph of the model. A batch of one would fix the size of batches, so it is shown two or more."""
    several = images if len(images) > 1 else images.repeat(2, *[1] * (images.ndim - 1))
    with torch.no_grad():
        program = torch.export.export(model, (several,), dynamic_shapes=ANY_BATCH)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # holds paths of this machine
    return program


@torch.no_grad()
def _prove(read: Callable[[Tensor], Tensor], model: nn.Module, images: Tensor, path: Path) -> None:
    """Compares the logits of the file with those of the model, on the example and on one image more."""
    larger = torch.cat([images.flip(-1), images[:1]])
    for batch in (images, larger):
        wanted, found = model(batch), read(batch)
        if found.shape != wanted.shape:
            raise FasterISNetError(f"{path} would return {tuple(found.shape)}, the model {tuple(wanted.shape)}.")
        error = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
        if not error <= TOLERANCE:
            raise FasterISNetError(
                f"{path} was not written: for {len(batch)} images its logits differ from the model's by {error:.1e} "
                f"(allowed: {TOLERANCE:.0e} relative). Try the other format, or a simpler model."
            )


def _need_onnx() -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"ONNX export needs {', '.join(missing)}: {install('export')}")
