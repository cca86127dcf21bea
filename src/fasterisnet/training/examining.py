"""The data check at the beginning of a run, and what a heatmap method needs: masks it can use."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from fasterisnet.data import check
from fasterisnet.errors import InputError, UsageError
from fasterisnet.training.config import Config

SKIPPED = ("image", "mask", "missing", "size", "box")  # what `on_bad_image: skip` leaves out


def examine_data(config: Config, say: Callable[[str], None]) -> check.Report:
    """The data check, before a new run: what is fatal ends it, and a heatmap method needs masks it can use.

    Files of the user's own are all read. With `on_bad_image: skip` those that cannot be used are no reason to end.
    """
    report = check.check_data(
        config.data, foreground=config.foreground, window=config.window, workers=max(config.workers, 1),
        seed=config.seed, decode=False,
    )  # fmt: skip
    skipped = {check.KINDS[kind].problem for kind in SKIPPED} if config.on_bad_image == "skip" else set()
    fatal = [row for row in report.rows if row.severity == "fatal" and row.problem not in skipped]
    if fatal:
        count = sum(row.count for row in fatal)
        more = f" There are {count - 1:,} more problems; {_listing(config)} lists all." if count > 1 else ""
        raise InputError(f"{fatal[0].examples[0]}. {fatal[0].advice}{more}")
    if config.method != "standard":
        _check_masks(config, report, say)
    warned = [f"{row.problem} ({row.count:,})" for row in report.rows if row.severity == "warning"]
    if warned:
        say(f"The data check warns of {', '.join(warned)}; {_listing(config)} says more.")
    return report


def _check_masks(config: Config, report: check.Report, say: Callable[[str], None]) -> None:
    usable, images = report.masks.get("train", 0), report.splits.get("train", 0)
    rows = [row for kind in ("no mask", "empty") if (row := report.found(kind))]
    example = f" One of them ({rows[0].problem}): {rows[0].examples[0]}." if rows else ""
    advice = f"{example} Give masks, or train with --method standard; {_listing(config)} says more."
    if not usable:
        raise InputError(
            f"The method {config.method} punishes relevance outside of masks, but none of the {images:,} training "
            f"images has a mask that can be used.{advice}"
        )
    if usable < images / 2 and not config.allow_missing_masks:
        raise UsageError(
            f"Only {usable:,} of {images:,} training images ({usable / images:.0%}) have a mask that can be used; if "
            f"the method {config.method} is meant for so few, say --allow-missing-masks.{advice}"
        )
    used = f", and {config.mask_share:.0%} of them are used (mask_share)" if config.mask_share < 1 else ""
    say(f"Masks: {usable:,} of {images:,} training images ({usable / images:.0%}) have one{used}.")


def _listing(config: Config) -> str:
    """The command that says everything about the data."""
    words = ["fasterisnet", "data", "check", config.data]
    words += ["--foreground", ",".join(map(str, config.foreground))] if config.foreground else []
    if config.window is not None:
        words += ["--window", config.window if isinstance(config.window, str) else "{:g},{:g}".format(*config.window)]
    return f"`{shlex.join(words)}`"
