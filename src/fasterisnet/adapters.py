"""Names that users of captum, matplotlib and timm know. What a name needs is imported when it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from fasterisnet.errors import InputError
from fasterisnet.lrp.explain import explain
from fasterisnet.lrp.rules import Rules
from fasterisnet.lrp.targets import Classes, Target

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL import Image

Inputs = TypeVar("Inputs", Tensor, tuple[Tensor, ...])


class LRP:
    """`explain` with the interface of captum's attribution methods, whose visualisation takes what it returns.

    Takes any classifier, which stays as it is, and the options of `explain` that are not a matter of one batch: rule,
    epsilon, box, strict.

    Example:
        >>> maps = LRP(model, rule="zplus").attribute(images, target=1)
        >>> shown = captum.attr.visualization.visualize_image_attr(maps[0].permute(1, 2, 0).numpy(), use_pyplot=False)
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Rules = "epsilon",
        epsilon: float = 0.01,
        box: tuple[Any, Any] | None = None,
        *,
        strict: bool = False,
    ) -> None:
        self.model = model
        self.options: dict[str, Any] = {"rule": rule, "epsilon": epsilon, "box": box, "strict": strict}

    def attribute(
        self, inputs: Inputs, target: Target | Classes | None = None, *, create_graph: bool = False
    ) -> Inputs:
        """Relevance of every input value, shaped like `inputs`; a tuple for a tuple, as captum has it.

        target: a class for all samples (a number, or a tensor that holds one), one a sample (a list or tensor), a
        target of `fasterisnet.targets`, or None for the highest logit. create_graph: the maps can be trained through.
        """
        if isinstance(target, Tensor) and target.numel() == 1:
            target = target.reshape(())
        if isinstance(inputs, Tensor):
            return explain(self.model, inputs, target, create_graph=create_graph, **self.options)
        if not isinstance(inputs, tuple) or len(inputs) != 1:
            raise InputError(f"inputs is a {type(inputs).__name__}; it has to be a tensor, or a tuple that holds one.")
        return (explain(self.model, inputs[0], target, create_graph=create_graph, **self.options),)


def overlay(image: Tensor, heatmap: Tensor, mask: Tensor | None = None, *, bound: float | None = None) -> Image.Image:
    """The map over the image in grey as a PIL image: red speaks for the class, blue against it, the mask in green.

    image: (channel, height, width), in [0, 1] or else stretched to it. heatmap: the same, or (height, width). bound:
    the relevance in full colour, by default that of the strongest 0.1 % of the pixels. Tiny images are enlarged.

    Example:
        >>> overlay(images[0], explain(model, images)[0]).save("where.png")
    """
    from PIL import Image

    from fasterisnet.evaluation import overlays

    pixels = overlays.overlay(image, heatmap, mask, bound=bound)
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def figure(
    images: Tensor,
    maps: Tensor | Mapping[str, Tensor],
    masks: Tensor | None = None,
    *,
    titles: Sequence[str] | None = None,
    bound: float | None = None,
) -> Figure:
    """Every image beside its map, or its maps by name, as a matplotlib figure; an image is a row.

    images: (sample, channel, height, width). maps: the same shape, or a dictionary of such. masks: drawn as outlines.
    titles: one for each image. bound: the relevance in full colour everywhere; by default each map has its own.

    Example:
        >>> maps = {rule: explain(model, images, rule=rule) for rule in ("epsilon", "zplus")}
        >>> figure(images, maps, masks).savefig("where.png")
    """
    from fasterisnet.evaluation import figures

    named = {"relevance": maps} if isinstance(maps, Tensor) else maps
    return figures.heatmap_figure(images, named, masks, titles=titles, bound=bound)


def create_model(
    model_name: str,
    pretrained: bool | str = False,
    *,
    num_classes: int = 1000,
    in_chans: int = 3,
    trust: bool = False,
) -> nn.Module:
    """A classifier by its name, with timm's names of arguments, for torchvision's models as well.

    model_name: as in timm or torchvision (`timm:resnet18` and `torchvision:resnet18` choose), `small`, or a function of
    your own, `package.module:function`, which is run if `trust` says so. pretrained: True for the library's weights, or
    the path of a .safetensors or .pt file.

    Example:
        >>> model = create_model("resnet18", num_classes=10, in_chans=1)
    """
    from fasterisnet.models import build_model

    return build_model(model_name, num_classes, channels=in_chans, pretrained=pretrained, trust=trust)
