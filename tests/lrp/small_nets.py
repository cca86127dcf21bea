"""Small networks and helpers that several test files of the engine share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasterisnet import explain
from lrp.helpers import Net, kept, parameter_gradients, pictures, randomised, relu_rule

RULES = ["epsilon", "zplus", "gamma", "gradient"]
CLASSES = 4
BOX = (-6.0, 6.0)


class Residual(nn.Module):
    """Convolutions, batch norms, in-place ReLUs, a residual sum, dropout, pooling, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(6 * 9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        identity = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(identity))
        out += identity
        return self.fc(self.dropout(self.pool(self.relu(out))).flatten(1))


def residual(*, training: bool = False, seed: int = 0) -> Residual:
    return randomised(Residual(), seed).train(training)


def assert_derivative(loss: Callable[[], Tensor], variable: Tensor, gradient: Tensor, *, step: float = 1e-6) -> None:
    """`gradient` is the derivative of the loss by `variable`: central differences along three directions."""
    for seed in range(3):
        direction = pictures(*variable.shape, seed=100 + seed)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                variable.add_(direction, alpha=sign * step)
            values.append(loss().item())
            with torch.no_grad():
                variable.sub_(direction, alpha=sign * step)
        numeric = (values[0] - values[1]) / (2 * step)
        analytic = (gradient * direction).sum().item()
        assert abs(numeric - analytic) <= 1e-6 * max(abs(numeric), abs(analytic), 1e-3), (numeric, analytic)


def assert_explained_alike(
    trap: nn.Module, plain: nn.Module, images: Tensor, *, rule: str, tolerance: float = 1e-10, **options: Any
) -> Tensor:
    """Same map, trainable or not, and same gradients of a loss on it, for two networks with the same parameters."""

    def result(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        untrained = explain(model, images, 1, rule=rule, **options)
        heatmap = explain(model, images, 1, rule=rule, create_graph=True, strict=True, **options)
        torch.testing.assert_close(untrained, heatmap.detach())
        return heatmap.detach(), parameter_gradients(model, heatmap.square().sum())

    first, first_grads = result(trap)
    second, second_grads = kept(lambda: result(plain), plain, images, rule, options)
    assert second.abs().max() > 0 and second.isfinite().all()
    torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)
    scale = max(float(grad.abs().max()) for grad in second_grads.values())
    for name in first_grads.keys() | second_grads.keys():
        torch.testing.assert_close(first_grads[name], second_grads[name], rtol=tolerance, atol=tolerance * scale)
    return first


def behind(place: str, act: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Tensor]:
    """A network with an activation behind a convolution, batch norm, linear operation, sum or view."""
    images = pictures(2, 3, 4, 4)
    parts: dict[str, nn.Module] = {"conv": nn.Conv2d(3, 5, 3, padding=1), "fc": nn.Linear(80, 3)}
    functions: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "conv": lambda m, x: m.fc(act(m.conv(x)).flatten(1)),
        "bn": lambda m, x: m.fc(act(m.bn(m.conv(x))).flatten(1)),
        "first bn": lambda m, x: m.fc(act(m.conv(act(m.bn(x)))).flatten(1)),
        "linear": lambda m, x: m.fc(act(m.hidden(x.flatten(1)))),
        "linear 3-D": lambda m, x: m.fc(act(m.tokens(x.flatten(2))).flatten(1)),
        "linear 4-D": lambda m, x: m.fc(act(m.deep(x)).flatten(1)),
        "matmul": lambda m, x: m.fc(act(x.flatten(1) @ m.hidden.weight.T)),
        "add": lambda m, x: m.fc(act(m.conv(x) + m.other(x)).flatten(1)),
        "iadd": lambda m, x: m.fc(act(m.conv(x).add_(m.other(x))).flatten(1)),
        "view": lambda m, x: m.fc(act(m.conv(x).view(2, -1))),
        "transpose": lambda m, x: m.fc(act(m.conv(x).transpose(1, 2)).flatten(1)),
        "cat": lambda m, x: m.fc(act(torch.cat([m.conv(x)[:, :2], m.other(x)[:, :3]], 1)).flatten(1)),
        "pool": lambda m, x: m.fc(F.pad(act(F.avg_pool2d(m.conv(x), 3, 1)), (1, 1, 1, 1)).flatten(1)),
        "layer norm": lambda m, x: m.fc(act(m.norm(m.conv(x))).flatten(1)),
        "product": lambda m, x: m.fc(act(m.conv(x) * m.other(x)).flatten(1)),
    }
    extra: dict[str, dict[str, Callable[[], nn.Module]]] = {
        "bn": {"bn": lambda: nn.BatchNorm2d(5)},
        "first bn": {"bn": lambda: nn.BatchNorm2d(3)},
        "linear": {"hidden": lambda: nn.Linear(48, 80)},
        "matmul": {"hidden": lambda: nn.Linear(48, 80, bias=False)},
        "linear 3-D": {"tokens": lambda: nn.Linear(16, 16), "fc": lambda: nn.Linear(48, 3)},
        "linear 4-D": {"deep": lambda: nn.Linear(4, 4), "fc": lambda: nn.Linear(48, 3)},
        "layer norm": {"norm": lambda: nn.LayerNorm([5, 4, 4])},
    }
    for name in ("add", "iadd", "cat", "product"):
        extra[name] = {"other": lambda: nn.Conv2d(3, 5, 1)}
    parts |= {name: build() for name, build in extra.get(place, {}).items()}
    return randomised(Net(functions[place], **parts)).eval(), images


def zeroed(t: Tensor) -> Tensor:
    t[:, 0] = 0
    return t


def in_place_sum(a: Tensor, b: Tensor) -> Tensor:
    a += b
    return a


def gate_by_operator(x: Tensor, g: Tensor) -> Tensor:
    x *= g
    return x


def squeeze_excite(apply: Callable[[Tensor, Tensor], Tensor], *, surrogate: bool = False) -> nn.Module:
    relu = relu_rule if surrogate else torch.relu

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.conv(x)
        gate = torch.sigmoid(m.up(relu(m.down(x.mean((2, 3), keepdim=True)))))
        return m.fc(apply(x, gate.detach() if surrogate else gate).flatten(1))

    parts = {"down": nn.Conv2d(5, 2, 1), "up": nn.Conv2d(2, 5, 1)}
    return randomised(Net(forward, conv=nn.Conv2d(3, 5, 3, padding=1), fc=nn.Linear(80, 3), **parts))


def attention_net(function: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> nn.Module:
    return randomised(Net(function, embed=nn.Linear(5, 8), **parts, fc=nn.Linear(8, 3))).eval()
