"""Starts `driver.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).with_name("driver.py")


def environment() -> dict[str, str]:
    """One thread, and the tests' own modules can be imported; nothing of a process group that this one may be in."""
    kept = {
        k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_PORT")
    }
    paths = [str(DRIVER.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def driven(folder: Path, options: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process, or a group of them, that trains the run in `folder`."""
    config = folder.with_suffix(".json")
    config.write_text(json.dumps({**options, "out": str(folder)}))
    command = [sys.executable, str(DRIVER), str(config), *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
