"""`fasterisnet evaluate`: a trained run on a split of some data."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fasterisnet.cli.arguments import DONE, add_accelerator, add_run, amount, check_file, command, count
from fasterisnet.errors import InputError, UsageError


def add(commands: Any) -> None:
    """What it takes."""
    p = command(
        commands, "evaluate", "Test a trained run on a split of some data.",
        "  fasterisnet evaluate runs/mine --data DIR --split test --json test.json", work,
    )  # fmt: skip
    add_run(p)
    p.add_argument("--data", help="folder, manifest or benchmark (default: the one trained on)")
    p.add_argument("--split", action="append", help="split to test on, may be repeated (default: every test split)")
    p.add_argument("--json", metavar="FILE", help="write the metrics of the split, or of all by name, to a file")
    p.add_argument("--batch", type=count, default=32)
    p.add_argument("--workers", type=amount, default=2)
    add_accelerator(p)
    p.add_argument("--no-attention", action="store_true", help="leave out background_mass, which needs heatmaps")


def work(options: argparse.Namespace) -> int:
    """Does it; returns the exit code."""
    from fasterisnet.data.pictures import readable
    from fasterisnet.runs.device import chosen_device
    from fasterisnet.runs.folder import Run
    from fasterisnet.runs.report import check_classes, measured_splits, source_for, table

    check_file(options.json)
    device = chosen_device(options.accelerator)
    run = Run(options.run)
    config = run.config
    model, card = run.load_model(trust=options.trust)
    source = source_for(run, card, options.data or "")
    check_classes(card, source)
    names = options.split or [name for name in source.splits if name not in ("train", config.validation)]
    if not names:
        raise UsageError(f"The data has no test split (it has {', '.join(source.splits)}); name one with --split.")
    tests = measured_splits(
        model, card, {name: source.split(name) for name in names}, print, skip_bad=config.on_bad_image == "skip",
        batch=options.batch, workers=options.workers, attention=not options.no_attention, device=device,
    )  # fmt: skip
    for text in tests.bad:
        print(f"Skipped: {text}")
    if tests.unreadable:
        name = readable(tests.unreadable[0])
        raise InputError(f"None of the images of '{name}' can be read, so there is nothing to test on.")
    results = tests.results
    print(table(results))
    if options.json:
        from fasterisnet.files import write_text

        content = results[names[0]] if len(names) == 1 else results
        write_text(options.json, json.dumps(content, indent=2) + "\n")
    return DONE
