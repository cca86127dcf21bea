"""A training process that can be told to die.

    driver.py CONFIG.json [resume] [step N | error N | signal N | checkpoint N] [rank1]

`step N`: killed (SIGKILL) before its Nth update; `error N`: an exception there; `signal N`: SIGTERM; with `rank1`, only
in the second process. `checkpoint N`: killed when half of its Nth state file is written.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(what: str, number: int) -> None:
    from fasterisnet.files import replacing
    from fasterisnet.runs import folder as run
    from fasterisnet.training import loop

    count = 0

    def counted() -> bool:
        nonlocal count
        count += 1
        return count == number

    if what in ("step", "error", "signal"):
        update = loop.Training._update

        def deadly_update(training: Any) -> None:
            if counted():
                if what == "error":
                    raise RuntimeError("something went wrong here")
                die() if what == "step" else os.kill(os.getpid(), signal.SIGTERM)
            update(training)

        loop.Training._update = deadly_update
    else:
        write = run.write_bytes

        def deadly_write(path: Path, content: memoryview) -> None:
            if path.name == "state.pt" and counted():
                with replacing(path) as temporary:
                    temporary.write_bytes(content[: len(content) // 2])
                    die()
            write(path, content)

        run.write_bytes = deadly_write


def main() -> None:
    """Imports are here since loader workers read this file too; pictures would take longer than the training."""
    from fasterisnet.runs import report
    from fasterisnet.runs.config import Config
    from fasterisnet.training import loop
    from fasterisnet.training.stopping import Stopped

    report.picture = lambda *_: None
    config, *rest = sys.argv[1:]
    resume = "resume" in rest
    here = "rank1" not in rest or os.environ.get("LOCAL_RANK") == "1"
    for what in ("step", "error", "signal", "checkpoint"):
        if what in rest and here:
            die_at(what, int(rest[rest.index(what) + 1]))
    try:
        loop.train(Config(**json.loads(Path(config).read_text())), resume=resume, trust=True)
    except Stopped as stopped:
        sys.exit(stopped.code)


if __name__ == "__main__":
    main()
