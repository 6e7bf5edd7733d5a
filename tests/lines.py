"""Read the output of a process line by line, with a deadline. A silent process is killed, and its test fails."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import suppress
from typing import AnyStr

SECONDS = 90.0  # shorter than the time limit of tests, so that the failure names the process


def next_line(process: subprocess.Popen[AnyStr], seconds: float = SECONDS) -> AnyStr:
    """Return the next line of a process that leads its process group, with its line end, or "" if it has ended."""
    assert process.stdout is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        line = process.stdout.readline()
    finally:
        timer.cancel()
    if late.is_set():
        raise AssertionError(f"no line within {seconds:.0f} s: {process.args!r}")
    return line
