"""Misses a host agent that hangs: the actor that has started it is the only one who could start another.

An agent looks at its lease four times a second, so a process that uses no CPU time, and that the kernel never
switches to, does not run: it is stopped, say. The engine has given it up by then, and its worker with it.
"""

from __future__ import annotations

import subprocess
import threading
import time

from atoll.cluster.processes.process_table import cpu_ticks, switches
from atoll.cluster.processes.startup_heartbeat import LOOK_SECONDS, StartWatch


class AgentWatch:
    """Kills a process that has not run for `seconds`; `silence` then says so."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        self.silence = ""
        self._process = process
        self._watch = StartWatch(seconds)
        threading.Thread(target=self._run, name="atoll-agent", daemon=True).start()

    def _run(self) -> None:
        pid = self._process.pid
        while self._process.poll() is None:
            used = cpu_ticks(pid) + switches(pid)
            if self._watch.is_silent(time.monotonic(), used, has_spoken=False):
                self.silence = f"it did not run for {self._watch.seconds:.0f} s, and was killed"
                self._process.kill()
                return
            time.sleep(LOOK_SECONDS)
