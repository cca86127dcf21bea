"""The page of the demo: every number keeps its name when it is stacked, and the commands it ends with exist."""

from __future__ import annotations

import html
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

from fasterisnet import demo
from fasterisnet.cli import parser

TESTS = {test: {"accuracy": 0.5, "background_mass": 0.25} for test in demo.TESTS}
ROWS = [{"name": name, "seconds": 9.0, "epochs": 3, "tests": TESTS} for name in demo.NAMES.values()]
VIEW = {"picture": "data:,", "answer": "3", "right": False, "outside": 0.5}
GALLERY = [{"truth": str(i), "image": "data:,", "views": [VIEW, VIEW]} for i in range(demo.SHOWN)]


def page(folder: Path = Path("runs/my demo")) -> str:
    return demo._page(ROWS, GALLERY, 1.0, 60.0, demo._next(folder))


class Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "td":
            self.cells.append(dict(attrs).get("data-name"))


def test_every_cell_says_what_it_is() -> None:
    """On a narrow screen rows are stacked and their head is gone."""
    found = Cells()
    found.feed(page())
    assert found.cells == 2 * list(demo.TESTS.values()) + 2 * [
        "epochs",
        "training, tests included",
        "in use, 64 digits",
    ]
    assert "@media (max-width: 760px)" in page()


def test_the_commands_can_be_given() -> None:
    commands = [html.unescape(c) for block in re.findall(r"<pre>(.*?)</pre>", page(), re.S) for c in block.split("\n")]
    commands = [command for command in commands if command.strip()]
    assert len(commands) == 5
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "fasterisnet"
        options, unknown = parser().parse_known_args(arguments)
        assert unknown == [] and callable(options.work)
    assert "'runs/my demo/isnet'" in commands[0]
