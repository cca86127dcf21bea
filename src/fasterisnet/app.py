"""`fasterisnet app`: drop an image in the browser and see what trained networks say of it and where they look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fasterisnet.errors import FasterISNetError, UsageError
from fasterisnet.evaluation.alterations import before
from fasterisnet.evaluation.attention import background_mass, logits_of
from fasterisnet.evaluation.explainers import EXPLAINERS, heatmaps
from fasterisnet.evaluation.overlays import overlay
from fasterisnet.extras import install
from fasterisnet.runs.card import Card
from fasterisnet.runs.folder import Run
from fasterisnet.runs.report import viewable

DECISION = "the network's own decision"


class ForClass(nn.Module):
    """A network whose decision is always one class, so that every explainer explains that one."""

    def __init__(self, model: nn.Module, chosen: int) -> None:
        super().__init__()
        self.model, self.chosen = model, chosen

    def forward(self, images: Tensor) -> Tensor:
        """Its score, and another that is always lower."""
        score = logits_of(self.model, images)[:, self.chosen]
        return torch.stack([score, score.detach() - 1], 1)


class View(NamedTuple):
    """What a network makes of an image: chances by class, the map over the image, and both in words."""

    chances: dict[str, float]
    picture: np.ndarray
    words: str


@dataclass
class Viewer:
    """One trained run, ready to look at images."""

    name: str
    model: nn.Module
    card: Card

    @classmethod
    def open(cls, folder: str | Path, *, trust: bool = False) -> Viewer:
        """The network of a run."""
        return cls(Path(folder).resolve().name, *Run(folder).load_model(trust=trust))

    def prepared(self, image: np.ndarray, mask: np.ndarray | None = None) -> tuple[Tensor, Tensor | None]:
        """Pixels (height, width[, channel]) and, if there is one, their mask, as the network sees them."""
        pixels = torch.from_numpy(np.ascontiguousarray(image)).byte()
        pixels = pixels.unsqueeze(0).expand(3, -1, -1) if pixels.ndim == 2 else pixels.movedim(-1, 0)[:3]
        outline = None if mask is None else torch.from_numpy(np.atleast_3d(mask)[..., :3].max(-1) > 127).unsqueeze(0)
        if outline is not None and outline.shape[1:] != pixels.shape[1:]:
            raise UsageError(
                f"The mask has {tuple(outline.shape[1:])} pixels, the image {tuple(pixels.shape[1:])}; they have to "
                "be of one size."
            )
        batch, shown = self.card.prepare(pixels, outline)
        return batch.unsqueeze(0), None if outline is None else shown.unsqueeze(0)

    def chances(self, batch: Tensor) -> dict[str, float]:
        """How likely each class is."""
        with torch.no_grad():
            logits = logits_of(self.model, batch)[0]
        if self.card.multi_label or len(logits) == 1:
            return dict(zip(self.card.classes, logits.sigmoid().tolist(), strict=False))
        return dict(zip(self.card.classes, logits.softmax(0).tolist(), strict=True))

    def look(
        self,
        image: np.ndarray,
        target: str = DECISION,
        explainer: str = "epsilon",
        mask: np.ndarray | None = None,
        background: np.ndarray | None = None,
    ) -> View:
        """The view of an image. background: another picture, which takes the place of what is outside the mask."""
        batch, outline = self.prepared(image, mask)
        chances = self.chances(batch)
        chosen = max(chances, key=lambda name: chances[name]) if target == DECISION else target
        if chosen not in chances:
            raise UsageError(f"{self.name} knows no class '{chosen}'; it knows {', '.join(chances)}.")
        words = [f"{self.name}: {chosen} {chances[chosen]:.1%}"]
        if background is not None:
            if outline is None:
                raise UsageError("The background can be swapped only where a mask tells what it is; give one.")
            batch = self._swapped(batch, outline, background)
            moved = self.chances(batch)
            words.append(f"before another background: {chosen} {moved[chosen]:.1%}")
            chances = moved
        network = ForClass(self.model, self.card.classes.index(chosen))
        maps = heatmaps(explainer, network, batch, box=self.card.box)
        if outline is not None:
            words.append(f"{float(background_mass(maps, outline)[0]):.1%} of the relevance is in the background")
        picture = overlay(viewable(batch, self.card)[0], maps[0], None if outline is None else outline[0])
        return View(chances, picture.movedim(0, -1).numpy(), "; ".join(words))

    def _swapped(self, batch: Tensor, outline: Tensor, background: np.ndarray) -> Tensor:
        donor, _ = self.prepared(background)
        return before(batch, outline, donor, torch.zeros_like(outline))


def build(viewers: Sequence[Viewer]) -> Any:
    """The page, a gradio app with one column a network."""
    import gradio

    classes = [DECISION, *dict.fromkeys(name for viewer in viewers for name in viewer.card.classes)]
    with gradio.Blocks(title="fasterisnet", analytics_enabled=False) as page:
        gradio.Markdown(
            "# Where does it look?\nRed speaks for the class, blue against it. With a mask (white is the object) the "
            "share of the relevance outside of it is counted, and the background can be swapped for another picture."
        )
        with gradio.Row():
            image = gradio.Image(label="image", type="numpy", elem_id="image")
            mask = gradio.Image(label="mask (optional)", type="numpy", elem_id="mask")
            background = gradio.Image(label="another background (optional)", type="numpy", elem_id="background")
        with gradio.Row():
            target = gradio.Dropdown(classes, value=DECISION, label="class", elem_id="class")
            explainer = gradio.Dropdown(
                [(text, name) for name, text in EXPLAINERS.items()], value="epsilon", label="explainer"
            )
        outputs: list[Any] = []
        with gradio.Row():
            for number, viewer in enumerate(viewers):
                with gradio.Column():
                    gradio.Markdown(f"### {viewer.name} ({viewer.card.method}, {viewer.card.model})")
                    outputs += [
                        gradio.Textbox(label="in words", elem_id=f"words-{number}", lines=2),
                        gradio.Image(label="where it looks", elem_id=f"map-{number}"),
                        gradio.Label(label="chances", num_top_classes=5),
                    ]

        def shown(*values: Any) -> list[Any]:
            pixels, chosen, way, outline, other = values
            if pixels is None:
                return [None] * len(outputs)
            found: list[Any] = []
            for viewer in viewers:
                try:
                    view = viewer.look(pixels, chosen, way, outline, other)
                except FasterISNetError as error:  # the other networks may have an answer
                    found += [str(error), None, None]
                else:
                    found += [view.words, view.picture, view.chances]
            return found

        inputs = [image, target, explainer, mask, background]
        for part in inputs:
            part.change(shown, inputs, outputs)
    return page


def serve(
    folders: Sequence[str],
    say: Callable[[str], object],
    *,
    port: int | None = None,
    host: str = "127.0.0.1",
    trust: bool = False,
) -> None:
    """Opens the page, says where, and serves it until the program is stopped. Nothing leaves this machine."""
    try:
        import gradio  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"The app needs gradio: {install('app')}") from error
    page = build([Viewer.open(folder, trust=trust) for folder in folders])
    _, address, _ = page.launch(server_name=host, server_port=port, share=False, quiet=True, prevent_thread_lock=True)
    say(f"Open {address} in a browser; Ctrl-C ends it.")
    page.block_thread()
