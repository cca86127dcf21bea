"""Does it work? A tiny set whose class is given away by one bright pixel: who reads the pixel, who reads the shape."""

import pytest
import torch
from torch import Tensor, nn

import fasterisnet as fi

SIZE, CLASSES, BATCH, RATE, EPOCHS = 16, 4, 32, 0.05, 11
METHODS = {
    "Original": lambda: fi.Original(0.85, box=None),
    "Dual": lambda: fi.Dual(0.85, box=None),
    "Selective": lambda: fi.Selective(0.85, box=None),
    "Stochastic": lambda: fi.Stochastic(0.85, box=None),
    "Stochastic, deep": lambda: fi.Stochastic(0.85, box=None, deep_supervision=True),
}


def shapes() -> Tensor:
    """A lying bar, a standing bar, a cross and a ring, 7x7."""
    found = torch.zeros(CLASSES, 7, 7, dtype=torch.bool)
    found[0, 2:5] = found[1, :, 2:5] = True
    found[2, 3] = found[2, :, 3] = True
    found[3] = True
    found[3, 1:6, 1:6] = False
    return found


SHAPES = shapes()


def drawn(count: int, shift: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels, masks. The bright pixel in the top row shows the class `shift` further on."""
    labels = torch.arange(count) % CLASSES
    masks = torch.zeros(count, 1, SIZE, SIZE, dtype=torch.bool)
    for mask, label in zip(masks, labels, strict=True):
        y, x = torch.randint(3, 7, (2,)).tolist()
        mask[0, y : y + 7, x : x + 7] = SHAPES[label]
    images = 0.6 * masks + 0.2 * torch.rand(count, 1, SIZE, SIZE)
    images[torch.arange(count), 0, 0, 2 + 4 * ((labels + shift) % CLASSES)] = 1
    return images.repeat(1, 3, 1, 1), labels, masks


def network() -> nn.Sequential:
    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(*block(3, 12, 1), *block(12, 24, 2), *block(24, 24, 2), nn.Flatten(), nn.Linear(384, CLASSES))


def sgd(parameters, rate: float = RATE):
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def gentle(parameters):
    """For calibration. A net that is already sure of every pixel saturates eta, and C1, C2 of Selective vanish."""
    return sgd(parameters, 1e-3)


def train(model: nn.Module, method, images: Tensor, labels: Tensor, masks: Tensor) -> None:
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=EPOCHS * -(-len(images) // BATCH))
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(images)).split(BATCH):
            parts = method.loss(model.train(), images[chosen], labels[chosen], masks[chosen])
            optimizer.zero_grad()
            parts.total.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, shift: int) -> float:
    """In percent, on the same shapes whatever the pixel shows."""
    with torch.random.fork_rng():
        torch.manual_seed(1000)
        images, labels, _ = drawn(800, shift)
    return 100 * (model.eval()(images).argmax(1) == labels).double().mean().item()


def trained(method, seed: int = 0) -> tuple[float, float]:
    """Accuracy (i.i.d., deceiving) of a network that learnt from biased images."""
    torch.manual_seed(seed)
    images, labels, masks = drawn(512)
    model = network()
    if not isinstance(method, fi.Standard):
        batches = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))
        method.ranges = fi.calibrate(method, model, batches, epochs=1, optimizer=gentle)
    train(model, method, images, labels, masks)
    return accuracy(model, 0), accuracy(model, 1)


def test_standard_reads_the_pixel():
    iid, deceiving = trained(fi.Standard())
    assert iid > 80 and iid - deceiving > 30, (iid, deceiving)


@pytest.mark.parametrize("name", METHODS)
def test_isnets_read_the_shape(name):
    iid, deceiving = trained(METHODS[name]())
    assert iid > 80 and abs(iid - deceiving) < 2, (iid, deceiving)
