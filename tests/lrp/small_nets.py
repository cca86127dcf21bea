"""Small networks and helpers that several test files of the engine share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lrp.helpers import pictures, randomised

RULES = ["epsilon", "zplus", "gamma", "gradient"]
CLASSES = 4
BOX = (-3.0, 3.0)


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
