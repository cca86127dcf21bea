"""Commands in processes of their own that need not import anything: a server has, and forks one for each command.

`Command(words)` is `subprocess.Popen([sys.executable, *words])`, nine seconds of processor time cheaper. The process is
a real one: it has a session, can be killed, and ends with an exit code and its cleaning up. Of a run in several
processes the others stand by from the beginning and become what Lightning would have started. What is about the start
itself, such as the path of imports or the encoding of the terminal, needs `subprocess`.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

GROUP = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
# What a run imports, first and later; no thread may be begun by it.
MODULES = (
    "fasterisnet.training.loop", "fasterisnet.audit.audit", "fasterisnet.benchmark.runner", "matplotlib.pyplot",
    "torch.utils.tensorboard", "torchvision.transforms.v2",
)  # fmt: skip


def environment() -> dict[str, str]:
    """One thread, and the tests' own modules can be imported; nothing of a process group that this one may be in."""
    kept = {key: value for key, value in os.environ.items() if key not in GROUP}
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


# --- in the tests -----------------------------------------------------------------------------------------------------


class Command:
    """A process that runs a script or `-m module`, with its arguments; `processes`: how many the run will have."""

    def __init__(self, words: list[str], *, processes: int = 1, cwd: Path | None = None) -> None:
        self.words = words
        with tempfile.NamedTemporaryFile(delete=False) as out, tempfile.NamedTemporaryFile(delete=False) as error:
            self.files = [out.name, error.name]
        self.pid: int = _ask(
            words=words, files=self.files, processes=processes, cwd=str(cwd or Path.cwd()), environment=environment()
        )

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Its end; after so many seconds it is brought about."""
        late = threading.Timer(timeout, os.killpg, (self.pid, signal.SIGKILL))
        late.start()
        status = _ask(wait=self.pid)
        late.cancel()
        texts = [Path(file).read_text() for file in self.files]
        for file in self.files:
            os.unlink(file)
        return subprocess.CompletedProcess(self.words, os.waitstatus_to_exitcode(status), *texts)


@cache
def _server() -> subprocess.Popen[str]:
    """One for all tests of this process; it leaves when this one does."""
    server = subprocess.Popen(
        [sys.executable, __file__], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    atexit.register(server.communicate)
    return server


def _ask(**question: Any) -> int:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(question) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    if not answer:
        raise RuntimeError(f"the server of commands has ended with code {server.wait()}")
    return int(answer)


# --- in the server ----------------------------------------------------------------------------------------------------


def serve() -> None:
    """Forks and waits as it is told, until nobody is there who could."""
    for name in MODULES:
        import_module(name)
    tasks = os.listdir("/proc/self/task") if os.path.exists("/proc/self/task") else [""]
    if len(tasks) > 1:
        raise RuntimeError(f"{len(tasks)} threads are there after the imports; a fork would lose them")
    running: set[int] = set()
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            running.discard(question["wait"])
            answer = os.waitpid(question["wait"], 0)[1]
        else:
            answer = os.fork()
            if not answer:
                become(**question)
            running.add(answer)
        print(answer, flush=True)
    for pid in running:
        os.killpg(pid, signal.SIGKILL)


def become(words: list[str], files: list[str], processes: int, cwd: str, environment: dict[str, str]) -> NoReturn:
    """The process that was asked for, from the fork to its end."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(cwd)
    take(environment)
    if processes > 1:
        standing = [Standby(words) for _ in range(processes - 1)]
        launchers: Any = import_module("lightning.fabric.strategies.launchers.subprocess_script")
        launchers.subprocess = SimpleNamespace(Popen=lambda _command, env, cwd: standing.pop().begin(env))
    run(words)


def take(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    import_module("lightning.fabric.utilities.rank_zero").rank_zero_only.rank = int(environment.get("LOCAL_RANK", "0"))


def run(words: list[str]) -> NoReturn:
    """As `python` would run them, with the ends that a process can have."""
    code, interrupted = 1, False
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  the interpreter does the same
        interrupted = isinstance(error, KeyboardInterrupt)
        traceback.print_exc()
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


class Standby:
    """A process that waits to be the next one of a run: as much of `subprocess.Popen` as a launcher uses."""

    def __init__(self, words: list[str]) -> None:
        reading, self.writing = os.pipe()
        self.returncode: int | None = None
        self.asking = threading.Lock()
        self.pid = os.fork()
        if not self.pid:
            os.close(self.writing)
            with os.fdopen(reading) as told:
                environment = told.read()
            if not environment:
                os._exit(0)  # the run has ended without it
            take(json.loads(environment))
            run(words)
        os.close(reading)

    def begin(self, environment: dict[str, str]) -> Standby:
        with os.fdopen(self.writing, "w") as tell:
            tell.write(json.dumps(dict(environment)))
        return self

    def poll(self) -> int | None:
        with self.asking:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


if __name__ == "__main__":
    serve()
