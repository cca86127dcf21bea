"""Small networks and helpers that several test files of the engine share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

RULES = ["epsilon", "zplus", "gamma", "gradient"]
CLASSES = 4
BOX = (-6.0, 6.0)


class Net(nn.Module):
    """A network made of a function of itself and its input, and of named modules."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


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


def randomised(model: M, seed: int = 0) -> M:
    """The same model in float64, nothing in it at a special value."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(0.4 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                for positive in (module.running_var, module.weight):
                    if positive is not None:
                        positive.copy_(0.5 + torch.rand(positive.shape, generator=generator, dtype=torch.float64))
    return model


def residual(*, training: bool = False, seed: int = 0) -> Residual:
    return randomised(Residual(), seed).train(training)


def pictures(*shape: int, seed: int = 1) -> Tensor:
    shape = shape or (3, 3, 6, 6)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameter_gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of the loss by parameter; zeros where it has none."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, grads, strict=True)}


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
