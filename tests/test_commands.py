"""A forked command ends as one that Python starts does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import Command, environment

BEGIN = """
import atexit, os, signal, sys, threading, time
atexit.register(print, "cleaned up")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread came to its end"))).start()
print(sys.argv[1:], os.getcwd(), __name__, os.environ["OMP_NUM_THREADS"], os.getsid(0) == os.getpid())
"""
ENDS = {
    "nothing": "",
    "a code": "sys.exit(3)",
    "words": "sys.exit('a reason')",
    "an error": "raise ValueError('wrong')",
    "killed": "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)",
    "told to end": "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "interrupted": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "interrupted, and caught": """
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_python_ends(end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BEGIN + ENDS[end])
    words = [str(script), "a b", ""]
    process = subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, env=environment(), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, error = process.communicate()
    found = Command(words, cwd=tmp_path).wait()
    assert (found.returncode, found.stdout) == (process.returncode, out)
    assert found.stderr.splitlines()[-1:] == error.splitlines()[-1:]


def test_it_can_be_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import time\nopen({str(tmp_path / 'here')!r}, 'w')\ntime.sleep(600)")
    command = Command([str(script)])
    while not (tmp_path / "here").exists():
        time.sleep(0.05)
    os.kill(command.pid, signal.SIGKILL)
    assert command.wait().returncode == -signal.SIGKILL
    assert Command([str(script)]).wait(timeout=0.5).returncode == -signal.SIGKILL
