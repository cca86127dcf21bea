"""Runs `fasterisnet.check` over every classification model of torchvision, more than one of each timm family, every
image classifier of HuggingFace (from its configuration, two layers deep) and MONAI's in two and three dimensions.

    python benchmarks/coverage.py [--only PART_OF_NAME] [--out docs/coverage.md] [--cache runs/coverage.jsonl]

Rows are kept in the cache as they come, so an interrupted run goes on where it was; delete it to start afresh.
transformers and monai are no dependencies of ours: where one is not installed, its models are left out.

Models are untrained, their batch-norm statistics settled on random images, zero-initialised layers drawn at random, and
fed the smallest square image they accept.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import importlib.util
import json
import platform
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn

import fasterisnet as fi

SIZES = (32, 48, 64, 75, 96, 112, 128, 160, 192, 224, 240, 256, 299)
CLASSES = 10

TIMM = """
beit_base_patch16_224 botnet26t_256 eca_halonext26ts gcresnet33ts mobileone_s0 repvgg_a0 cait_xxs24_224
coat_lite_tiny convit_tiny convmixer_768_32 convnext_atto convnextv2_atto cpubone_b0_bfrobust crossvit_9_240 csatv2
cs3darknet_focus_s cspresnet50 darknet17 davit_tiny deit3_small_patch16_224 deit_tiny_distilled_patch16_224
densenet121 dla34 dpn68 edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientnet_b0_gn
efficientnetv2_rw_t mixnet_s tinynet_e efficientvim_m1 efficientvit_b0 efficientvit_m0 eva02_tiny_patch14_224
fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny ghostnet_050 hardcorenas_a hgnetv2_b0 hiera_tiny_224
hieradet_small hrnet_w18_small iformer_t inception_next_atto inception_resnet_v2 inception_v4 lcnetv2_small
levit_128s lowformer_b0 mambaout_femto coatnet_nano_rw_224 maxxvit_rmlp_nano_rw_256 poolformer_s12 caformer_s18
mixer_s32_224 gmlp_ti16_224 resmlp_12_224 mobilenetv3_small_050 mobilenetv4_conv_small mobilevit_xxs
mobilevitv2_050 mvitv2_tiny naflexvit_base_patch16_gap nest_tiny nextvit_small dm_nfnet_f0 nf_regnet_b0 pit_ti_224
pvt_v2_b0 rdnet_tiny regnetx_002 regnety_002 regnetz_b16 repghostnet_050 repvit_m0_9 res2net50_14w_8s resnest14d
resnet10t resnetblur50 ecaresnet26t seresnext26t_32x4d resnetv2_50d_gn rexnet_100 selecsls42b legacy_seresnet18
sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_cr_tiny_224
swinv2_tiny_window8_256 tiny_vit_5m_224 tnt_s_patch16_224 tresnet_m twins_svt_small visformer_tiny
vit_tiny_patch16_224 vit_relpos_small_patch16_224 vitamin_small_224 volo_d1_224 ese_vovnet19b_dw legacy_xception
xception41 xcit_nano_12_p16_224
vgg11_bn resnet18 resnext50_32x4d resnetaa50 resnetrs50 wide_resnet50_2 seresnet18 cspdarknet53 dla46_c gernet_s
halonet26t lambda_resnet26t sehalonet33ts bat_resnext26ts mobilenetv2_050 mobilenet_edgetpu_v2_xs efficientnet_lite0
efficientnet_es efficientnet_cc_b0_4e mnasnet_small spnasnet_100 fbnetc_100 semnasnet_075 tf_mixnet_s regnetv_040
regnetz_005 swin_s3_tiny_224 flexivit_small beitv2_base_patch16_224
mobilenetv4_hybrid_medium convnext_zepto_rms
""".split()
# HuggingFace's that need another package, take no images or have no classes of their own.
NOT_THESE = frozenset({"Dinat", "ImageGPT", "TimmWrapper", "ShieldGemma2", "Siglip2", "PPLCNet"})


@dataclass
class Row:
    """One line of the table."""

    library: str
    model: str
    size: int = 0
    ok: bool = False
    error: float = float("nan")
    kept: str = ""
    note: str = ""


def settle(model: nn.Module, images: Tensor) -> None:
    """Gives an untrained model plausible batch-norm statistics and no all-zero weights."""
    for parameter in model.parameters():
        if not parameter.detach().any() and (parameter.ndim > 1 or parameter.numel() > CLASSES):
            nn.init.normal_(parameter, std=0.05)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    if norms:
        with torch.no_grad():
            model(torch.cat([images] * 4) + 0.3 * torch.randn(4 * len(images), *images.shape[1:]))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


@dataclass(frozen=True)
class Case:
    """A network to examine, and the channels and dimensions of its images."""

    library: str
    name: str
    build: Callable[[], nn.Module]
    channels: int = 3
    dimensions: int = 2


class First(nn.Module):
    """A network that returns its logits with other things behind them, as one that returns them alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)[0]


def smallest_input(model: nn.Module, case: Case) -> tuple[nn.Module, Tensor]:
    """Random images in [0, 1] of the smallest square (cubic) size the model accepts, and the model.

    Every size is tried on a copy: Swin keeps the windows that the first images had room for.
    """
    failure: Exception | None = None
    for size in SIZES:
        images, tried = torch.rand(2, case.channels, *[size] * case.dimensions), copy.deepcopy(model).eval()
        try:
            with torch.no_grad():
                tried(images)
        except (RuntimeError, AssertionError, ValueError, IndexError, ZeroDivisionError) as error:
            failure = error
        else:
            return tried, images
    raise RuntimeError(f"no input size of {SIZES} is accepted: {failure}")


def examine(case: Case) -> Row:
    torch.manual_seed(0)
    row = Row(case.library, case.name)
    try:
        model = case.build()
        model, images = smallest_input(model, case)
        row.size = images.shape[-1]
        settle(model, images)
        verdict = fi.check(model, images)
    except Exception as error:  # noqa: BLE001 - a table of failures must not end at the first
        row.note = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        return row
    row.ok, row.error = verdict.ok, verdict.second_order_error
    row.kept = f"{verdict.sums[0]:.2g} / {verdict.scores[0]:.2g}"
    more = len(verdict.problems) - 1
    row.note = "; ".join(verdict.problems[:1]) + (f" (and {more} more like it)" if more > 0 else "")
    return row


def torchvision_models() -> Iterator[Case]:
    for name in torchvision.models.list_models(module=torchvision.models):
        extra = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
        yield Case(
            "torchvision", name, lambda n=name, e=extra: torchvision.models.get_model(n, num_classes=CLASSES, **e)
        )


def timm_models() -> Iterator[Case]:
    for name in TIMM:
        yield Case("timm", name, lambda n=name: timm.create_model(n, num_classes=CLASSES))


def huggingface_models() -> Iterator[Case]:
    """Two layers of each kind of network, 64 pixels where the configuration says how many and its windows fit."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    known = auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

    def build(configuration: Any) -> nn.Module:
        made = configuration(num_labels=CLASSES)
        for part in (made, getattr(made, "vision_config", None)):
            unless = {"num_hidden_layers": "depths", "image_size": "window_size"}
            for option, value in (("num_hidden_layers", 2), ("image_size", 64)):
                if isinstance(getattr(part, option, None), int) and not hasattr(part, unless[option]):
                    setattr(part, option, value)
        found = known[configuration]
        return (found[0] if isinstance(found, tuple) else found)(made)

    for configuration in known:
        name = configuration.__name__.removesuffix("Config")
        if name not in NOT_THESE:
            yield Case("transformers", name, lambda c=configuration: build(c))


def monai_models() -> Iterator[Case]:
    nets = importlib.import_module("monai.networks.nets")

    def vit(dimensions: int) -> nn.Module:
        size = {"img_size": [32] * dimensions, "patch_size": [8] * dimensions, "spatial_dims": dimensions}
        depth = {"hidden_size": 96, "mlp_dim": 192, "num_layers": 2, "num_heads": 4}
        return First(nets.ViT(1, **size, **depth, classification=True, num_classes=CLASSES, post_activation=""))

    for d in (2, 3):
        shape = {"spatial_dims": d, "in_channels": 1, "out_channels": CLASSES}
        resnet = {"spatial_dims": d, "n_input_channels": 1, "num_classes": CLASSES}
        se = {"spatial_dims": d, "in_channels": 1, "num_classes": CLASSES}
        builders: dict[str, Callable[..., nn.Module]] = {
            "DenseNet121": lambda k=shape: nets.DenseNet121(**k),
            "ResNet10": lambda k=resnet: nets.resnet10(**k),
            "ResNet18": lambda k=resnet: nets.resnet18(**k),  # shortcut_type "A" detaches its shortcuts
            "EfficientNet-B0": lambda k=se: nets.EfficientNetBN("efficientnet-b0", **k, pretrained=False),
            "SEResNet50": lambda k=se: nets.SEResNet50(**k),
            "SEResNeXt50": lambda k=se: nets.SEResNext50(**k),
            "ViT": lambda n=d: vit(n),
            "Classifier": lambda n=d: nets.Classifier([1, *[32] * n], CLASSES, (8, 16, 16), (2, 2, 2)),
        }
        for name, build in builders.items():
            yield Case("MONAI", f"{name}, {d}-D", build, channels=1, dimensions=d)


def models() -> Iterator[Case]:
    yield from torchvision_models()
    yield from timm_models()
    if importlib.util.find_spec("transformers"):
        yield from huggingface_models()
    if importlib.util.find_spec("monai"):
        yield from monai_models()


def write(path: Path, rows: list[Row]) -> None:
    """Replaces what the page says of the libraries; what stands in front of them stays."""
    libraries = list(dict.fromkeys(row.library for row in rows))
    versions = ", ".join(f"{name} {version(name.lower()).split('+')[0]}" for name in ("torch", *libraries))
    head = path.read_text(encoding="utf-8") if path.exists() else "# Coverage\n\nMade by\n"
    head = re.split(r"^## (?:torchvision|timm|transformers|MONAI):", head, maxsplit=1, flags=re.MULTILINE)[0]
    made = f"Made by `python benchmarks/coverage.py`; {versions}, {platform.machine()}, seed 0."
    lines = [re.sub(r"^Made by.*$", made, head.rstrip(), count=1, flags=re.MULTILINE), ""]
    for library in libraries:
        part = [r for r in rows if r.library == library]
        passed = sum(r.ok for r in part)
        lines += [f"## {library}: {passed} of {len(part)} pass ({100 * passed / len(part):.1f} %)", ""]
        lines += [
            "| model | px | verdict | second-order error | kept | cause |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for r in part:
            error = "" if r.error != r.error else f"{r.error:.0e}"
            lines.append(
                f"| {r.model} | {r.size or ''} | {'pass' if r.ok else '**fail**'} | {error} | {r.kept} | {r.note} |"
            )
        lines.append("")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models whose 'library/name' contains this")
    parser.add_argument("--out", type=Path, default=Path("docs/coverage.md"))
    parser.add_argument("--cache", type=Path, default=Path("runs/coverage.jsonl"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    done = {}
    if options.cache.exists():
        found = [Row(**json.loads(line)) for line in options.cache.read_text().splitlines()]
        done = {(row.library, row.model): row for row in found}
    options.cache.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in models():
        if options.only not in f"{case.library}/{case.name}":
            continue
        row = done.get((case.library, case.name))
        if row is None:
            began = time.perf_counter()
            row = examine(case)
            with options.cache.open("a") as cache:
                cache.write(json.dumps(asdict(row)) + "\n")
            seconds = time.perf_counter() - began
            outcome = "pass" if row.ok else f"FAIL {row.note}"
            print(f"{case.library}/{case.name} {row.size} px {outcome} ({seconds:.0f} s)", flush=True)
            gc.collect()
        rows.append(row)
    write(options.out, rows)


if __name__ == "__main__":
    main()
