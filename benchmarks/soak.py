"""Runs that are killed at random, against runs that are left alone: `make soak`, or

    python benchmarks/soak.py --minutes 60 --kills 200          # kills, full disks, changed data
    python benchmarks/soak.py --undisturbed 40 --minutes 60     # two processes with loader workers, left alone

Killed (SIGKILL) are main processes, other ranks, loader workers and the server they come from, each at a random moment;
then the run is resumed, until it has had its share of kills and may finish. It has to end with the bytes of a run that
was left alone, and nothing (file or process) may stay. A process that does not end or move for two minutes hangs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from fasterisnet import cli
from fasterisnet.data.drawn import drawn_source

HANGS = 120.0  # seconds without a sign of life
COMPARED = ("best.safetensors", "metrics.csv", "calibration.json", "report.json", "report.md")
FILES = {*COMPARED, "audit", "best.json", "config.yaml", "data.json", "state.pt"}
SMALL = [
    "--model", "small", "--size", "16", "--batch", "12", "--epochs", "4", "--checkpoint-every", "2",
    "--accelerator", "cpu", "--tensorboard", "false", "--method", "stochastic", "--calibration-epochs", "1",
]  # fmt: skip
KINDS = {
    "one process": ["--workers", "0"],
    "loader workers": ["--workers", "2"],
    "two processes": ["--workers", "1", "--devices", "2"],
}
OFTEN = [0.6, 0.2, 0.2]
ISSUE = [
    "--data", "drawn?size=16&per_class=20", "--model", "small", "--size", "16", "--batch", "12", "--workers", "2",
    "--method", "standard", "--epochs", "40", "--devices", "2", "--accelerator", "cpu",
]  # fmt: skip


def pictures(base: Path) -> Path:
    """A folder of images and masks."""
    source = drawn_source(per_class=16, size=16)
    for split, name in (("train", "train"), ("val", "val"), ("ood", "test")):
        samples = source.split(split)
        for i in range(len(samples)):
            image, mask, label = samples.read(i)
            assert isinstance(label, int) and mask is not None
            pixels = image.permute(1, 2, 0).numpy(), mask[0].numpy().astype(np.uint8) * 255
            for top, values in zip(("", "masks"), pixels, strict=True):
                path = base / top / name / source.classes[label] / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(values).save(path)
    return base


class Command:
    """A command in a session of its own: all its processes are found, however they were started."""

    def __init__(self, arguments: list[str], log: Path, *, quick: bool) -> None:
        """quick: a fork of this process, which has imported everything already; for runs of one process."""
        self.log = log
        self.code: int | None = None
        if quick:
            self.leader = os.fork()
            if self.leader == 0:
                _become(arguments, log)
        else:
            command = [sys.executable, "-m", "fasterisnet", *arguments]
            with log.open("ab") as file:
                self.popen = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
            self.leader = self.popen.pid

    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.leader, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def processes(self) -> dict[str, list[int]]:
        """By what they do."""
        found: dict[str, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                state, parent, _, session = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if int(session) != self.leader or state == "Z":
                continue
            pid = int(entry.name)
            kind = "tracker" if "resource_tracker" in words else "rank"
            if "forkserver" in words:
                kind = "server" if "forkserver" not in _words(int(parent)) else "worker"
            found.setdefault("main" if pid == self.leader else kind, []).append(pid)
        return found

    def until(self, condition: Callable[[], bool]) -> None:
        """Until it is so, the command has ended, or it seems to hang."""
        end = time.time() + HANGS
        while not condition() and not self.ended() and time.time() < end:
            time.sleep(0.02)

    def wait(self, moved: Callable[[], float] | None = None) -> bool:
        """Until nothing is left of it; False if it hangs, and then it is ended."""
        begin = time.time()
        while True:
            done = self.ended()
            if done and not self.processes():
                return True
            if time.time() - max(begin, moved() if moved else 0.0) > HANGS:
                for pid in [pid for pids in self.processes().values() for pid in pids]:
                    _kill(pid)
                self.ended()
                return False
            time.sleep(0.05 if not done else 0.2)


def _become(arguments: list[str], log: Path) -> None:
    """In the child: a session of its own, its output in a file, and then the command."""
    code = 1
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        code = cli.main(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _longer(log: Path, size: int) -> bool:
    """Whether a command has said something: it calibrates, or goes on."""
    return log.exists() and log.stat().st_size > size


def outcome(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in COMPARED if (run / name).exists()}


class Soak:
    def __init__(self, folder: Path, seed: int, kills: int, end: float) -> None:
        self.folder, self.random, self.wanted, self.end = folder, random.Random(seed), kills, end
        self.counts: Counter[str] = Counter()
        self.data = pictures(folder / "data")
        self.wholes: dict[str, dict[str, bytes]] = {}
        self.lasts: dict[str, float] = {}  # seconds of a run after its start

    def over(self) -> bool:
        return time.time() > self.end or self.counts["kills"] >= self.wanted

    def start(self, kind: str, run: Path) -> Command:
        """Begins a run, or goes on with it if there is something to go on with."""
        arguments = ["train", "--data", str(self.data), "--out", str(run), *SMALL, *KINDS[kind]]
        if (run / "config.yaml").exists():
            arguments = ["train", "--resume", str(run)]
            self.counts["resumes"] += 1
        return Command(arguments, self.folder / f"{run.name}.log", quick=kind == "one process")

    def whole(self, kind: str) -> dict[str, bytes]:
        if kind not in self.wholes:
            run = self.folder / f"whole {kind}"
            command = self.start(kind, run)
            command.until((run / "config.yaml").exists)
            begin = time.time()
            if not command.wait() or command.code != 0:
                sys.exit(f"the undisturbed run failed: {command.log}")
            self.wholes[kind], self.lasts[kind] = outcome(run), time.time() - begin
        return self.wholes[kind]

    def kill_once(self, kind: str, run: Path, command: Command) -> None:
        """One of its processes, at any time of the run, sometimes of its start; nothing if it was quicker."""
        if self.random.random() < 0.9:
            size = command.log.stat().st_size if command.log.exists() else 0
            command.until(lambda: (run / "config.yaml").exists() and _longer(command.log, size))
        moment = time.time() + self.random.uniform(0.0, self.lasts[kind])
        command.until(lambda: time.time() > moment)
        found = command.processes()
        self.lasts[kind] *= 0.8 if command.ended() else 1.05  # machines are slower and faster
        if not command.ended() and found:
            victim = self.random.choice(sorted(found))
            if _kill(self.random.choice(found[victim])):
                self.counts["kills"] += 1
                self.counts[f"kills of {victim}"] += 1
                self.counts[f"kills, {kind}"] += 1

    def one(self, number: int) -> None:
        """A run that is killed several times and has to end as if it had not been."""
        kind = self.random.choices(list(KINDS), OFTEN)[0]
        whole = self.whole(kind)
        run = self.folder / f"run {number}"
        for left in range(self.random.randint(3, 8), -1, -1):
            command = self.start(kind, run)
            if left and not self.over():
                self.kill_once(kind, run, command)
            if not command.wait():
                self.counts["hangs"] += 1
            if command.code == 0:
                break
            if self.random.random() < 0.1:
                self.change(kind, run)
        else:
            self.counts["not finished"] += 1
            print(f"{run} has not finished: {run.name}.log", flush=True)
            return
        self.counts["runs"] += 1
        self.judge(run, whole)
        shutil.rmtree(run)

    def judge(self, run: Path, whole: dict[str, bytes]) -> None:
        found = outcome(run)
        for name in whole.keys() | found.keys():
            if whole.get(name) != found.get(name):
                self.counts["differing files"] += 1
                print(f"{run / name} differs", flush=True)
        extra = [
            path.name for path in run.iterdir() if path.name not in FILES and not path.name.startswith("heatmaps-")
        ]
        self.counts["left-over files"] += len(extra)
        if extra:
            print(f"{run} still holds {', '.join(sorted(extra))}", flush=True)

    def change(self, kind: str, run: Path) -> None:
        """A picture more: going on is refused, and possible again when it is gone."""
        if not (run / "state.pt").exists():
            return
        added = self.data / "train" / "disc" / "added.png"
        shutil.copy(next((self.data / "train" / "disc").glob("*.png")), added)
        command = Command(["train", "--resume", str(run)], self.folder / f"{run.name}.log", quick=kind == "one process")
        refused = command.wait() and command.code == cli.USAGE
        added.unlink()
        self.counts["changed data refused" if refused else "changed data NOT noticed"] += 1

    def full_disk(self, number: int) -> None:
        """A small disk with room for a part of the files; then with room for all of them."""
        whole = self.whole("one process")
        disk = self.folder / "disk"
        disk.mkdir(exist_ok=True)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], check=False).returncode:
            return
        try:
            room = os.statvfs(disk)
            free = self.random.randint(0, 5 * 2**20)
            (disk / "filler").write_bytes(bytes(room.f_bavail * room.f_bsize - free))
            run = disk / f"full {number}"
            command = self.start("one process", run)
            self.counts["hangs"] += not command.wait()
            self.counts["full disks"] += command.code == 1
            (disk / "filler").unlink()
            command = self.start("one process", run)
            self.counts["hangs"] += not command.wait()
            self.judge(run, whole)
        finally:
            subprocess.run(["umount", str(disk)], check=True)

    def run(self) -> None:
        number = 0
        while not self.over():
            number += 1
            self.one(number)
            if os.geteuid() == 0 and number % 4 == 0 and not self.over():
                self.full_disk(number)
            print(dict(self.counts), flush=True)


def undisturbed(folder: Path, runs: int, end: float) -> Counter[str]:
    """The same command again and again: it ends, and always with the same bytes."""
    counts: Counter[str] = Counter()
    first: dict[str, bytes] = {}
    for number in range(runs):
        if time.time() > end:
            break
        run = folder / f"alone {number}"
        log = folder / f"alone {number}.log"
        command = Command(["train", *ISSUE, "--out", str(run)], log, quick=False)
        ended = command.wait(lambda log=log: log.stat().st_mtime)
        counts["runs"] += 1
        counts["hangs"] += not ended
        if ended:
            counts["failed"] += command.code != 0
            first = first or outcome(run)
            counts["differing"] += outcome(run) != first
        print(dict(counts), flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--undisturbed", type=int, default=0, metavar="N", help="N runs of two processes, not killed")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # threads do not survive a fork, so there must be none
        os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        os.execv(sys.executable, sys.orig_argv)
    end = time.time() + 60 * options.minutes
    for name in ("fasterisnet.training.loop", "matplotlib.backends.backend_agg", "matplotlib.figure"):
        importlib.import_module(name)  # forked commands have it then
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {options.seed}, in {folder}", flush=True)
    if options.undisturbed:
        counts = undisturbed(folder, options.undisturbed, end)
    else:
        soak = Soak(folder, options.seed, options.kills, end)
        soak.run()
        counts = soak.counts
    print(json.dumps({key: counts[key] for key in sorted(counts)}, indent=2))
    bad = (
        "hangs",
        "differing",
        "differing files",
        "left-over files",
        "failed",
        "not finished",
        "changed data NOT noticed",
    )
    wrong = sum(counts[key] for key in bad)
    print(f"kills {counts['kills']}, resumes {counts['resumes']}, hangs {counts['hangs']}, faults in all {wrong}")
    if not wrong:
        shutil.rmtree(folder)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
