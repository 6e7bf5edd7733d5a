"""A running script of a user, and the processes and files that it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.forked_process import Popen, children
from tests.lines import next_line
from tests.process_environments import processes_with

# the project's promise
GONE_SECONDS = 2.0
# Additional time for a busy machine, and for the inspections of the tests.
GRACE_SECONDS = 60.0


class Script:
    """Running script in its own process group. All its temporary files are in `directory`."""

    def __init__(self, code: str, directory: Path, environment: dict[str, str]) -> None:
        self.directory = directory
        path = directory / "script.py"
        path.write_text(textwrap.dedent(code))
        self._errors = directory / "stderr"
        with open(self._errors, "wb") as errors:
            self.process = Popen(
                [sys.executable, str(path)],
                env=environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def line(self) -> str:
        """Return the next line of its output, or "" at the end."""
        return next_line(self.process).decode().rstrip("\n")

    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def processes(self) -> dict[str, psutil.Process]:
        """Return its descendants, by the module that each runs."""
        found = {}
        for child in children(self.process.pid, recursive=True):
            found[child.cmdline()[3]] = child
        return found

    def leftovers(self) -> list[str]:
        """Return the remaining processes, files and shared memory of the script."""
        processes = processes_with("XDG_RUNTIME_DIR", str(self.directory))
        found = [f"process {each.pid}" for each in processes if each.pid != self.process.pid]
        found += [str(path) for path in self.directory.glob("atoll*")]
        found += map(str, Path("/dev/shm").glob(f"atoll-{self.process.pid}-*"))
        return found

    def assert_gone(self) -> None:
        """Fail unless nothing is left within the promised time."""
        deadline = time.monotonic() + GONE_SECONDS + GRACE_SECONDS
        while left := self.leftovers():
            assert time.monotonic() < deadline, left
            time.sleep(0.02)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


StartScript = Callable[..., Script]
