"""Networks that only tests need."""

from torch import Tensor, nn

from fasterisnet.methods import unet_classifier


def with_dropout(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.3), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3),
        nn.Linear(8, num_classes),
    )  # fmt: skip


def without_norm(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
    )  # fmt: skip


class Drawing(nn.Module):
    """Classifies and draws masks, without a norm."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.mask, self.head = nn.Conv2d(8, 1, 3, padding=1), nn.Linear(8, num_classes)

    def both(self, images: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.body(images)
        return self.head(maps.mean((2, 3))), self.mask(maps)

    def foreground(self, images: Tensor) -> Tensor:
        return self.both(images)[1] > 0

    def forward(self, images: Tensor) -> Tensor:
        return self.both(images)[0]


def plain_segmenter(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1))


def behind_plain_segmenter(num_classes: int) -> nn.Module:
    """A classifier whose U-Net, if it gets one, is a plain stack without a norm."""
    unet_classifier.unet = lambda _encoder, channels, _size: plain_segmenter(channels)
    return without_norm(num_classes)


def with_softmax(num_classes: int) -> nn.Module:
    return nn.Sequential(without_norm(num_classes), nn.Softmax(1))


def frozen(num_classes: int) -> nn.Module:
    return without_norm(num_classes).requires_grad_(False)


class Careless(nn.Module):
    """Looks for something in itself that is not there; the text of the error has two lines."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, num_classes)

    def forward(self, _: Tensor) -> Tensor:
        raise KeyError("no such\nthing")
