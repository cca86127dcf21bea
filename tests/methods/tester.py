"""One tester for every training method: the same checks, whatever the method computes inside.

`METHODS` lists how each is made. A new method is put through all checks by adding it there.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet as fi
from fasterisnet.methods import Parts
from fasterisnet.methods.base import Method
from seeds import generator

M = TypeVar("M", bound=nn.Module)
CLASSES = 3
SETTINGS: dict[str, Any] = {
    "heatmap_weight": 0.6, "decay": 0.8, "background_weight": 1.5, "foreground_weight": 0.7, "ranges": (0.3, 0.6),
}  # fmt: skip


class Settled(fi.Stochastic):
    """A Stochastic ISNet whose draw is a function of the sample alone: its second highest logit."""

    def draw(self, logits: Tensor) -> Tensor:
        return logits.detach().topk(min(2, logits.shape[1]), 1).indices[:, -1]


def _standard(**_settings: Any) -> fi.Standard:
    return fi.Standard()


def _stochastic(**settings: Any) -> fi.Stochastic:
    return fi.Stochastic(generator=torch.Generator().manual_seed(4), **settings)


def _grouped(**settings: Any) -> fi.Original:
    return fi.Original(maps_at_once=2, **settings)


Make = Callable[..., Method]
METHODS: dict[str, Make] = {
    "Standard": _standard,
    "Original": fi.Original,
    "Original, two maps at once": _grouped,
    "Dual": fi.Dual,
    "Selective": fi.Selective,
    "Stochastic": _stochastic,
    "GradInput": fi.GradInput,
    "SoftmaxGradInput": fi.SoftmaxGradInput,
}
DEEP = [name for name in METHODS if name not in ("Standard", "Original, two maps at once")]
ALL = [(name, False) for name in METHODS] + [(name, True) for name in DEEP]
IDS = [name + (", deep" if deep else "") for name, deep in ALL]


# --- networks -------------------------------------------------------------------------------------------------------


def _layer(kind: str, dims: int) -> Callable[..., nn.Module]:
    return getattr(nn, f"{kind}{dims}d")


class Block(nn.Module):
    """The block of a ResNet, in-place operations included."""

    def __init__(self, inputs: int, outputs: int, stride: int, dims: int) -> None:
        super().__init__()
        conv, norm = _layer("Conv", dims), _layer("BatchNorm", dims)
        self.conv1, self.bn1 = conv(inputs, outputs, 3, stride, 1, bias=False), norm(outputs)
        self.conv2, self.bn2 = conv(outputs, outputs, 3, 1, 1, bias=False), norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(conv(inputs, outputs, 1, stride, bias=False), norm(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.shortcut(x)
        return self.relu(y)


class Residual(nn.Module):
    """A small ResNet for signals, images or volumes."""

    def __init__(self, classes: int = CLASSES, dims: int = 2, width: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1, self.bn1 = _layer("Conv", dims)(2, width, 3, padding=1), _layer("BatchNorm", dims)(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), _layer("MaxPool", dims)(3, 2, 1)
        self.layer1, self.layer2 = Block(width, width, 1, dims), Block(width, width + 2, 2, dims)
        self.dropout, self.fc = nn.Dropout(dropout), nn.Linear(width + 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(self.dropout(x.flatten(2).mean(2)))


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of a map, as ConvNeXt does it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Modern(nn.Module):
    """ConvNeXt in small: patches, layer norms, depthwise convolutions, GELU, layer scale."""

    def __init__(self, classes: int = CLASSES, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, width, 2, 2), LayerNorm2d(width))
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, groups=width), LayerNorm2d(width), nn.Conv2d(width, 2 * width, 1),
            nn.GELU(), nn.Conv2d(2 * width, width, 1),
        )  # fmt: skip
        self.scale = nn.Parameter(torch.ones(width, 1, 1))
        self.down = nn.Conv2d(width, width, 2, 2)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.down(x + self.scale * self.body(x)))


def plain(classes: int = CLASSES) -> nn.Sequential:
    """Convolution, batch norm, ReLU, twice."""
    layers = [nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(5, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6, classes))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain": (plain, (8, 8)),
    "residual": (Residual, (9, 8)),
    "modern": (Modern, (8, 8)),
    "signal": (lambda: Residual(dims=1), (24,)),
    "volume": (lambda: Residual(dims=3), (8, 6, 7)),
}


def filled(model: M, seed: int = 0) -> M:
    """Random values for everything, of a size that keeps activations near one."""
    source = generator(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=source, dtype=torch.float64).to(tensor.dtype)
                spread = math.sqrt(2 / tensor[0].numel()) if tensor.ndim > 1 and tensor[0].numel() > 1 else 0.2
                positive = name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight"))
                tensor.copy_(0.7 + 0.6 * noise.sigmoid() if positive else spread * noise)
    return model


def exact(model: M, seed: int = 0) -> M:
    """In float64, biases and fused shifts below zero: as constants of z+ and zB they are then zero, whatever they do.

    So finite differences are valid for every parameter under every rule.
    """
    model = filled(model.double(), seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                module.bias.copy_(-0.05 - module.bias.abs())
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.abs_()
                module.bias.copy_(-0.05 - 0.1 * module.bias.abs())
    return model.eval()


# --- data -----------------------------------------------------------------------------------------------------------


def pictures(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(shape or (4, 2, 9, 8), generator=generator(seed), dtype=torch.float64).to(dtype)


def masks_for(images: Tensor, seed: int = 2) -> Tensor:
    """A box of foreground for every sample, never all of the image."""
    source = generator(seed)
    masks = torch.zeros(len(images), 1, *images.shape[2:], dtype=torch.bool)
    for mask in masks:
        where = []
        for size in images.shape[2:]:
            start = int(torch.randint(0, size // 2, (), generator=source))
            where.append(slice(start, start + size // 2))
        mask[0][tuple(where)] = True
    return masks


def labels_for(images: Tensor, classes: int = CLASSES) -> Tensor:
    return torch.arange(len(images)) % classes


# --- helpers --------------------------------------------------------------------------------------------------------


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """By parameter; zeros where there is none."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}


def distance(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of any number, in units of the largest number wanted."""
    assert actual.keys() == wanted.keys()
    size = max(float(w.abs().max()) for w in wanted.values())
    return max(float((actual[n] - w).abs().max()) for n, w in wanted.items()) / size


def slope(loss: Callable[[], float], tensor: Tensor, direction: Tensor, step: float) -> float:
    """Derivative of the loss along a direction of one parameter, by central differences."""
    start, values = tensor.detach().clone(), []
    for sign in (1, -1):
        with torch.no_grad():
            tensor.copy_(start + sign * step * direction)
        values.append(loss())
    with torch.no_grad():
        tensor.copy_(start)
    return (values[0] - values[1]) / (2 * step)


def anatomy(model: nn.Module) -> dict[Any, Any]:
    """All of a model that a step could leave a trace on, values aside."""
    found: dict[Any, Any] = {}
    for name, module in model.named_modules():
        found[name] = type(module), module.training, sorted(vars(module)), getattr(module, "inplace", None)
        for attribute, value in vars(module).items():
            if "hooks" in attribute:
                found[name, attribute] = dict(value) if isinstance(value, dict) else value
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[name, "tensor"] = id(tensor), tensor.requires_grad, sorted(vars(tensor)), tensor._backward_hooks
    return found


# --- the tester -----------------------------------------------------------------------------------------------------


class Tester:
    """Puts one method, with or without deep supervision, through every `check_`."""

    __test__ = False  # not for pytest to collect

    def __init__(self, name: str, deep: bool = False) -> None:
        self.name, self.deep = name, deep

    def method(self, **settings: Any) -> Any:
        return METHODS[self.name](**{**SETTINGS, "deep_supervision": self.deep, **settings})

    def independent(self, **settings: Any) -> Any:
        """The same method, its draws a function of each sample alone."""
        if self.name == "Stochastic":
            return Settled(**{**SETTINGS, "deep_supervision": self.deep, **settings})
        return self.method(**settings)

    def at_work(self) -> tuple[str, ...]:
        """The parts of the loss that are not zero."""
        return () if self.name == "Standard" else ("background", "foreground")

    @staticmethod
    def batch(dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[Residual, Tensor, Tensor, Tensor]:
        """A model in eval mode, images, labels, masks."""
        images = pictures(dtype=dtype)
        return filled(Residual(**settings).to(dtype)).eval(), images, labels_for(images), masks_for(images)

    def compare_with_differences(
        self, model: nn.Module, fill: Callable[[nn.Module, int], nn.Module], images: Tensor, **settings: Any
    ) -> None:
        """The gradient of `total` for every parameter along a random direction, to 1e-6.

        fill: makes a random network of the model. The first that has something to lose in both heatmap losses is taken.
        """
        method = self.independent(**settings)
        batch = images, labels_for(images), masks_for(images)

        @torch.no_grad()
        def loss() -> float:
            """As a validation loss: the same number (see `check_without_gradients`), and no graph for its gradients."""
            return float(method.loss(model, *batch).total)

        for seed in range(20):
            parts = method.loss(fill(model, seed), *batch)
            if all(abs(float(getattr(parts, name).detach())) > 1e-3 for name in self.at_work()):
                break
        else:
            raise AssertionError("no network with something to lose in all parts")
        found = gradients(model, parts.total)
        assert any(float(g.abs().max()) > 0 for g in found.values())
        for number, (name, parameter) in enumerate(model.named_parameters()):
            direction = pictures(*parameter.shape, seed=20 + number) - 0.5
            analytic = float((found[name] * direction).sum())
            size = max(abs(analytic), float(found[name].norm() * direction.norm()) / parameter.numel() ** 0.5)
            for step in (1e-6, 1e-7, 1e-5):  # a longer one may cross a kink of ReLU, max pooling or ranking
                error = abs(slope(loss, parameter, direction, step) - analytic)
                if error <= 1e-6 * size:
                    break
            assert error <= 1e-6 * size, (name, error, analytic)

    def check_gradient_with_zb(self) -> None:
        self.compare_with_differences(Residual(width=3), exact, pictures(3, 2, 9, 8))

    def check_gradient_with_a_box_per_channel(self) -> None:
        """Normalised images, and the first paper's square foreground loss."""
        mean, std = [0.4, 0.6], [0.3, 0.5]
        images = (pictures(2, 2, 8, 8) - torch.tensor(mean).view(2, 1, 1)) / torch.tensor(std).view(2, 1, 1)
        settings = {"box": fi.normalised_box(mean, std), "foreground": "square", "decay": 1.0}
        self.compare_with_differences(plain(), exact, images, **settings)

    def check_gradient_without_zb(self) -> None:
        """With biases of either sign, other activations and norms (Dual: without, they are constants in z+)."""
        if self.name == "Dual":
            self.compare_with_differences(Residual(width=3), exact, pictures(3, 2, 9, 8), box=None)
        else:
            self.compare_with_differences(Modern(width=4).double(), filled, pictures(3, 2, 8, 8), box=None)

    def check_parts_fit_together(self) -> None:
        model, images, labels, masks = self.batch()
        method = self.method()
        parts = method.loss(model, images, labels, masks)
        assert isinstance(parts, Parts)
        weight = 0.0 if self.name == "Standard" else method.weight
        w1, w2 = SETTINGS["background_weight"], SETTINGS["foreground_weight"]
        torch.testing.assert_close(parts.heatmap, w1 * parts.background + w2 * parts.foreground, rtol=1e-12, atol=0)
        total = (1 - weight) * parts.classification + weight * parts.heatmap
        torch.testing.assert_close(parts.total, total, rtol=1e-12, atol=0)
        torch.testing.assert_close(parts.classification, F.cross_entropy(model(images), labels), rtol=1e-12, atol=0)
        torch.testing.assert_close(parts.logits, model(images).detach(), rtol=1e-12, atol=0)
        assert not parts.logits.requires_grad
        assert (parts.samples, parts.without_mask, parts.skipped) == (4, 0, False)

    def check_parts_can_be_trained_alone(self) -> None:
        """The gradient of the total is the weighted sum of the gradients of its parts."""
        model, images, labels, masks = self.batch()
        method = self.independent()
        if self.name == "Standard":
            return
        total = gradients(model, method.loss(model, images, labels, masks).total)
        one = gradients(model, method.loss(model, images, labels, masks).classification)
        two = gradients(model, method.loss(model, images, labels, masks).heatmap)
        assert distance({n: 0.4 * one[n] + 0.6 * two[n] for n in one}, total) < 1e-12

    def check_weight_zero_is_plain_training(self) -> None:
        model, images, labels, masks = self.batch()
        parts = self.method(heatmap_weight=0).loss(model, images, labels, masks)
        wanted = gradients(model, F.cross_entropy(model(images), labels))
        assert distance(gradients(model, parts.total), wanted) < 1e-12

    def check_schedules(self) -> None:
        """A list keeps its last value; a function is asked every epoch."""
        model, images, labels, masks = self.batch()
        schedules: list[Any] = [[0.0, 0.5, 1.0], lambda epoch: min(epoch, 2) / 2]
        for schedule in schedules:
            method = self.independent(heatmap_weight=schedule)
            for epoch, weight in ((0, 0.0), (1, 0.5), (2, 1.0), (7, 1.0), (0, 0.0)):
                method.set_epoch(epoch)
                parts = method.loss(model, images, labels, masks)
                wanted = parts.classification
                if self.name != "Standard":
                    assert method.weight == weight
                    wanted = (1 - weight) * parts.classification + weight * parts.heatmap
                torch.testing.assert_close(parts.total, wanted, rtol=1e-12, atol=0)

    def check_batches_do_not_matter(self) -> None:
        """The mean over two halves is the loss of the whole, also of their gradients (eval mode, all with masks).

        Deep supervision ranks its depths by the loss of the whole batch: there the samples' relevance is compared.
        """
        model, images, labels, masks = self.batch()
        method = self.independent()
        whole, halves = slice(None), (slice(0, 2), slice(2, 4))
        if self.deep:
            full = method.measure(model, images)
            for depth, values in full.items():
                parts = torch.cat([method.measure(model, images[half])[depth] for half in halves])
                torch.testing.assert_close(parts, values, rtol=1e-12, atol=0)
            return
        one = method.loss(model, images[whole], labels[whole], masks[whole])
        many = [method.loss(model, images[half], labels[half], masks[half]) for half in halves]
        for name in ("total", "classification", "background", "foreground", "heatmap"):
            mean = torch.stack([getattr(parts, name).detach() for parts in many]).mean()
            torch.testing.assert_close(mean, getattr(one, name).detach(), rtol=1e-12, atol=1e-15)
        wanted = gradients(model, one.total)
        for parts in many:
            (parts.total / len(many)).backward()
        assert distance({n: p.grad for n, p in model.named_parameters()}, wanted) < 1e-12

    def check_clipping(self) -> None:
        """Gradients of a loss on heatmaps are gradients like any other: clipped to norm 1, same direction."""
        model, images, labels, masks = self.batch()
        method = self.independent()
        wanted = gradients(model, 50 * method.loss(model, images, labels, masks).total)
        (50 * method.loss(model, images, labels, masks).total).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert float(norm) > 1
        clipped = {n: p.grad for n, p in model.named_parameters()}
        assert math.isclose(float(sum(g.square().sum() for g in clipped.values())), 1.0, rel_tol=1e-5)
        assert distance({n: g * norm for n, g in clipped.items()}, wanted) < 1e-5

    def check_training_lowers_the_loss(self) -> None:
        model, images, labels, masks = self.batch()
        method, optimizer = self.independent(), torch.optim.SGD(model.parameters(), lr=0.02)
        values = []
        for _ in range(8):
            loss = method.loss(model, images, labels, masks).total
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            values.append(float(loss.detach()))
        assert values[-1] < values[0]

    def check_reproducible(self) -> None:
        """Two runs from one seed are the same number by number; dropout and batch statistics included."""
        runs = []
        for _ in range(2):
            torch.manual_seed(11)
            model, images, labels, masks = self.batch(dropout=0.5)
            model.train()
            method = self.method()
            losses = [method.loss(model, images, labels, masks) for _ in range(6)]
            runs.append([torch.stack([p.total.detach() for p in losses]), *gradients(model, losses[-1].total).values()])
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))

    def check_pickle_and_deepcopy(self) -> None:
        """A copy, made after use, goes on exactly where the original does, and shares nothing with it."""
        model, images, labels, masks = self.batch()
        method = self.method(heatmap_weight=[0.1, 0.6])
        method.set_epoch(1)
        method.loss(model, images, labels, masks)
        copies = [copy.deepcopy(method), pickle.loads(pickle.dumps(method))]
        results = []
        for one in (method, *copies):
            assert repr(one) == repr(method)
            results.append([float(one.loss(model, images, labels, masks).total.detach()) for _ in range(5)])
        assert results[0] == results[1] == results[2]
        for one in copies:
            one.set_epoch(0)
        assert getattr(method, "epoch", 1) == 1

    def check_bfloat16(self) -> None:
        """Autocast changes the numbers by no more than bf16 (8 bits) has to, and the loss itself is float32."""
        model, images, labels, masks = self.batch(torch.float32)
        method = self.independent()
        full = method.loss(model, images, labels, masks)
        wanted = torch.cat([g.flatten() for g in gradients(model, full.total).values()])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = method.loss(model, images, labels, masks)
        for name in ("total", "classification", "background", "foreground", "heatmap"):
            value = getattr(half, name)
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, getattr(full, name), rtol=0.02, atol=0)
        found = torch.cat([g.flatten() for g in gradients(model, half.total).values()])
        least = 0.95 if self.name == "Standard" else 0.999  # Standard is torch alone; it does no better
        assert float(F.cosine_similarity(found, wanted, dim=0)) > least
        assert 0.98 < float(found.norm() / wanted.norm()) < 1.02

    def check_float16(self) -> None:
        """Weights and relevance beyond float16 (65,504): the ISNets compute as in float32. Standard is torch alone."""
        model, images, labels, masks = self.batch(torch.float32)
        if self.name != "Standard":
            with torch.no_grad():
                model.fc.weight.mul_(3e6)
        method = self.independent(heatmap_weight=0.5, ranges=(1e6, 2e6))
        full = method.loss(model, images, labels, masks)
        with torch.autocast("cpu", dtype=torch.float16):
            parts = method.loss(model, images, labels, masks)
        assert parts.total.dtype == torch.float32 and bool(torch.isfinite(parts.total)) and not parts.skipped
        exact_to = 1e-2 if self.name == "Standard" else 1e-6
        torch.testing.assert_close(parts.total, full.total, rtol=exact_to, atol=0)
        assert all(bool(g.isfinite().all()) for g in gradients(model, parts.total).values())

    def check_without_gradients(self) -> None:
        """A validation loss: the same number inside no_grad and inference_mode, and nothing to differentiate."""
        model, images, labels, masks = self.batch()
        method = self.independent()
        wanted = method.loss(model, images, labels, masks).total.detach()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                parts = method.loss(model, images, labels, masks)
            torch.testing.assert_close(parts.total.clone(), wanted, rtol=1e-12, atol=0)
            assert not parts.total.requires_grad

    def check_frozen_parameters(self) -> None:
        """A model of which some, or all, parameters are not trained."""
        model, images, labels, masks = self.batch()
        method = self.independent()
        wanted = gradients(model, method.loss(model, images, labels, masks).total)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layer2" in name)
        total = method.loss(model, images, labels, masks).total
        total.backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-9, atol=1e-12)
            else:
                assert parameter.grad is None
        model.requires_grad_(False)
        frozen = method.loss(model, images, labels, masks).total
        torch.testing.assert_close(frozen.detach(), total.detach(), rtol=1e-12, atol=0)

    def check_model_is_left_alone(self) -> None:
        """Eval mode: nothing changes. Train mode: what one plain forward changes, running statistics and dropout."""
        for training in (False, True):
            model, images, labels, masks = self.batch(dropout=0.5)
            model.train(training)
            twin, kept, method = copy.deepcopy(model), images.clone(), self.method()
            torch.manual_seed(5)
            twin(images)
            random = torch.get_rng_state()
            was = anatomy(model)
            torch.manual_seed(5)
            parts = method.loss(model, images, labels, masks)
            assert torch.equal(torch.get_rng_state(), random)
            assert anatomy(model) == was
            parts.total.backward()
            assert anatomy(model) == was
            state = model.state_dict()
            for name, value in twin.state_dict().items():
                assert torch.equal(state[name], value), name
            assert torch.equal(images, kept) and not images.requires_grad
            assert not torch.overrides._get_current_function_mode_stack()

    def check_one_method_serves_several_models(self) -> None:
        """Nothing of a model stays in the method: neither depths nor sizes."""
        method = self.independent()
        images = pictures(3, 2, 8, 8)
        batch = images, labels_for(images), masks_for(images)
        for model in (exact(plain()), filled(Residual().double()).eval(), filled(Modern().double()), exact(plain())):
            used = method.loss(model, *batch).total
            torch.testing.assert_close(used, self.independent().loss(model, *batch).total, rtol=1e-12, atol=0)

    def check_step_is_the_loss(self) -> None:
        model, images, labels, masks = self.batch()
        step = fi.Step(model, self.independent())
        parts = step(images, labels, masks)
        wanted = self.independent().loss(model, images, labels, masks)
        assert torch.equal(parts.total, wanted.total)
        assert [n.removeprefix("model.") for n, _ in step.named_parameters()] == [
            n for n, _ in model.named_parameters()
        ]

    def check_few_and_many_classes(self) -> None:
        """One logit (binary), two classes, and more than maps go at once."""
        for classes in (1, 2, 11):
            model, images, _, masks = self.batch(classes=classes)
            labels = torch.tensor([0, 1, 1, 0])
            parts = self.method().loss(model, images, labels, masks)
            if classes == 1:
                bce = F.binary_cross_entropy_with_logits(model(images)[:, 0], labels.double())
                torch.testing.assert_close(parts.classification, bce, rtol=1e-12, atol=0)
            assert bool(torch.isfinite(parts.total))
            assert all(bool(g.isfinite().all()) for g in gradients(model, parts.total).values())

    def finite_on(self, net: str, seed: int) -> None:
        """A random network in train mode, float32: finite loss, finite gradients, none of them missing."""
        make, space = NETS[net]
        torch.manual_seed(seed)
        model = filled(make(), seed)
        images = pictures(3, 2, *space, seed=seed, dtype=torch.float32)
        parts = self.method().loss(model, images, labels_for(images), masks_for(images, seed))
        assert bool(torch.isfinite(parts.total)) and not parts.skipped
        if self.name != "Standard":
            assert float(parts.heatmap.detach()) > 0
        parts.total.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name
        assert any(float(p.grad.abs().max()) > 0 for p in model.parameters() if p.grad is not None)


CHECKS = [name.removeprefix("check_") for name in vars(Tester) if name.startswith("check_")]
