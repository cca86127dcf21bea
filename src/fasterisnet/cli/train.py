"""`fasterisnet train`: a classifier from images, labels and masks."""

from __future__ import annotations

import argparse
import json
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from fasterisnet.cli.arguments import DONE, FAILED, INTERRUPTED, command, say_error, told
from fasterisnet.cli.options import add_options, given_options
from fasterisnet.errors import FasterISNetError, NonFiniteError, UsageError


def add(commands: Any) -> None:
    """What it takes."""
    p = command(
        commands, "train", "Train a classifier on images, labels and masks.",
        "  fasterisnet train --data DIR --method selective --model resnet50 --epochs 50 --out runs/mine\n"
        "  fasterisnet train --resume runs/mine        (goes on exactly where it was stopped)", work,
    )  # fmt: skip
    p.usage = "fasterisnet train --data DIR [--method NAME] [--model NAME] [option ...]"
    p.add_argument("--config", metavar="FILE", help="YAML file with options; those given here come on top")
    p.add_argument(
        "--resume", metavar="RUN", help="go on with a run that was stopped; --epochs N extends one that ended"
    )
    p.add_argument("--trust", action="store_true", help="import the model that --config or --resume names as code")
    p.add_argument("--data-changed-ok", action="store_true", help="with --resume: go on although the data changed")
    p.add_argument("--show-config", action="store_true", help="print all options with what they mean, and stop")
    add_options(p)


def work(options: argparse.Namespace) -> int:
    """Does it; returns the exit code."""
    from fasterisnet.runs.config import Config

    given = given_options(options)
    if options.show_config:
        for option in fields(Config):
            default = option.default if option.default is not MISSING else []
            print(f"{option.name}: {json.dumps(default)}  # {option.metadata['help']}")
        return DONE
    from fasterisnet.audit.audit import audit_run
    from fasterisnet.runs.folder import Run
    from fasterisnet.training.console import Terminal
    from fasterisnet.training.distributed import LostProcessError, is_first_process, resume_hint
    from fasterisnet.training.loop import train

    if options.resume:
        if given.keys() - {"epochs"} or options.config:
            raise UsageError("--resume takes the options of the run it goes on with; none but --epochs may be given.")
        config = replace(Run(options.resume).config, **given, out=options.resume)
    else:
        config = Config.read(Path(options.config) if options.config else None, given)
    trust = options.trust or (not options.resume and "model" in given)  # who writes a name into a command means it
    try:
        with Terminal() as watcher:
            run = train(
                config, resume=bool(options.resume), watcher=watcher, trust=trust,
                data_changed_ok=options.data_changed_ok,
            )  # fmt: skip
    except KeyboardInterrupt as error:
        if is_first_process():
            hint = f"; {resume_hint(config)}" if _begun(config.out) else ""
            say_error(f"{str(error) or 'stopped'}{hint}")
        return getattr(error, "code", INTERRUPTED)
    except (UsageError, LostProcessError, NonFiniteError):
        raise
    except (FasterISNetError, OSError) as error:
        text = told(error)
        say_error(f"{text}{'' if text.endswith('.') else '.'} {resume_hint(config)}" if _begun(config.out) else text)
        return FAILED
    if is_first_process():
        if config.audit:
            audit_run(run, config.audit, watcher.say, trust=trust)
        print(f"Done: {run.folder} (weights: best.safetensors, tests: report.md{_page_of(run.folder)})")
    return DONE


def _begun(out: str) -> bool:
    """Whether there is a state to go on from."""
    return (Path(out) / "state.pt").exists()


def _page_of(folder: Path) -> str:
    """Where the audit is, if one was made."""
    return ", the page to show: audit/audit.html" if (folder / "audit/audit.html").is_file() else ""
