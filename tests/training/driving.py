"""Starts `driver.py`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from commands import Command

DRIVER = Path(__file__).with_name("driver.py")


def driven(folder: Path, options: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process, or a group of them, that trains the run in `folder`."""
    config = folder.with_suffix(".json")
    config.write_text(json.dumps({**options, "out": str(folder)}))
    return Command([str(DRIVER), str(config), *arguments], processes=options.get("devices", 1)).wait()
