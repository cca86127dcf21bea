"""The page where images are dropped: what it shows, and that it works in a browser."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import pytest
from PIL import Image

from fasterisnet.app import DECISION, Viewer
from fasterisnet.audit.audit import audit_run
from fasterisnet.errors import UsageError
from fasterisnet.runs.config import Config
from fasterisnet.runs.folder import Run
from fasterisnet.training.loop import train

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that has seen a little."""
    folder = tmp_path_factory.mktemp("app") / "run"
    train(
        Config(
            data="drawn?size=16&per_class=20", method="standard", model="small", size=16, epochs=2, lr=0.05, workers=0,
            tensorboard=False, out=str(folder),
        )
    )  # fmt: skip
    return folder


def scene() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    mask = np.zeros((24, 30), np.uint8)
    mask[6:18, 8:20] = 255
    return rng.integers(0, 255, (24, 30, 3), dtype=np.uint8), mask


def test_views(run: Path) -> None:
    viewer = Viewer.open(run)
    image, mask = scene()
    plain = viewer.look(image)
    assert sum(plain.chances.values()) == pytest.approx(1, abs=1e-5)
    assert plain.picture.ndim == 3
    assert "background" not in plain.words
    other = min(plain.chances, key=lambda name: plain.chances[name])
    chosen = viewer.look(image, other, mask=mask)
    assert chosen.words.startswith(f"{viewer.name}: {other} ")
    assert "% of the relevance is in the background" in chosen.words
    assert not np.array_equal(chosen.picture, viewer.look(image, mask=mask).picture)
    swapped = viewer.look(image, mask=mask, background=255 - image[::-1])
    assert "before another background" in swapped.words
    assert swapped.chances != plain.chances


@pytest.mark.parametrize("explainer", ["epsilon", "zplus", "gradient", "integrated", "occlusion"])
def test_every_explainer_explains_the_chosen_class(run: Path, explainer: str) -> None:
    viewer, (image, _) = Viewer.open(run), scene()
    pictures = [viewer.look(image, name, explainer).picture for name in viewer.card.classes]
    assert not np.array_equal(pictures[0], pictures[1])


def test_grey_pictures_and_mistakes(run: Path) -> None:
    viewer, (image, mask) = Viewer.open(run), scene()
    assert viewer.look(image[..., 0], DECISION).picture.shape[-1] == 3
    with pytest.raises(UsageError, match="one size"):
        viewer.look(image, mask=mask[:5])
    with pytest.raises(UsageError, match="give one"):
        viewer.look(image, background=image)
    with pytest.raises(UsageError, match="knows no class"):
        viewer.look(image, "cat")


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "fasterisnet", "app", str(run), "--port", str(port)]
    quiet = {**os.environ, "GRADIO_ANALYTICS_ENABLED": "False"}
    with subprocess.Popen(command, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                assert process.poll() is None, "the app ended by itself"
                try:
                    urlopen(f"http://127.0.0.1:{port}/", timeout=2).close()
                    break
                except (URLError, OSError):
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not BROWSER:
        pytest.skip("no Chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


def test_the_app_in_a_browser(run: Path, address: str, browser: Any, tmp_path: Path) -> None:
    """An image is dropped, a map appears, and a number changes with the class."""
    from playwright.sync_api import expect

    image, mask = scene()
    Image.fromarray(image).save(tmp_path / "image.png")
    Image.fromarray(mask).save(tmp_path / "mask.png")
    page = browser.new_page(viewport={"width": 1200, "height": 1000})
    page.goto(address)
    for name in ("image", "mask"):
        page.locator(f"#{name} input[type=file]").set_input_files(str(tmp_path / f"{name}.png"))
    words = page.locator("#words-0 textarea")
    expect(words).to_have_value(re.compile(".*background.*"), timeout=60_000)
    expect(page.locator("#map-0 img")).to_be_visible(timeout=60_000)
    first = words.input_value()
    decided = first.split(": ")[1].split(" ")[0]
    other = next(name for name in Viewer.open(run).card.classes if name != decided)
    page.locator("#class input").click()
    page.get_by_role("option", name=other).click()
    expect(words).to_have_value(re.compile(f".*{re.escape(other)}.*"), timeout=60_000)
    assert words.input_value() != first


@pytest.mark.parametrize("width", [375, 1200])
def test_the_audit_in_a_browser(run: Path, browser: Any, width: int) -> None:
    """It fits, every picture is there, and nothing is fetched or run."""
    audit_run(Run(run), 20, lambda _: None)
    page = browser.new_page(viewport={"width": width, "height": 900}, java_script_enabled=True)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((run / "audit/audit.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    sizes = page.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert sizes
    assert min(sizes) > 0
    assert not [url for url in asked if not url.startswith(("file:", "data:"))]
    assert "background" in page.inner_text("body")
