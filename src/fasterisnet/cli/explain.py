"""`fasterisnet explain`: pictures of where trained networks look."""

from __future__ import annotations

import argparse
from typing import Any

from fasterisnet.cli.arguments import DONE, add_accelerator, add_run, check_folder, command


def add(commands: Any) -> None:
    """What it takes."""
    p = command(
        commands, "explain", "Pictures of where a trained network looks: red speaks for the class, blue against it.",
        "  fasterisnet explain runs/mine a.png b.png --compare runs/standard --out pictures", work,
    )  # fmt: skip
    add_run(p)
    p.add_argument("images", metavar="IMAGE", nargs="+", help="image files, or folders of them")
    p.add_argument("--out", metavar="DIR", default="explained", help="where the pictures go (default: %(default)s)")
    p.add_argument(
        "--compare", metavar="RUN", action="append", default=[], help="another run beside it; may be repeated"
    )
    p.add_argument("--target", metavar="CLASS", help="class to explain (default: the most likely one)")
    p.add_argument("--masks", metavar="DIR", help="folder of masks with the images' names, drawn as outlines")
    p.add_argument("--window", metavar="X", help="of more than 8 bits: low,high or auto (default: as it was trained)")
    add_accelerator(p)
    p.add_argument("--rule", default="epsilon", choices=("epsilon", "zplus", "gradient"))


def work(options: argparse.Namespace) -> int:
    """Does it; returns the exit code."""
    from fasterisnet.files import readable
    from fasterisnet.runs.device import chosen_device
    from fasterisnet.runs.explain import explain_files

    check_folder(options.out)
    for path in explain_files(
        [options.run, *options.compare], options.images, options.out, target=options.target, masks=options.masks,
        rule=options.rule, window=options.window, trust=options.trust, device=chosen_device(options.accelerator),
    ):  # fmt: skip
        print(readable(path))
    return DONE
