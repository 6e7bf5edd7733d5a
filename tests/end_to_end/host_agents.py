"""Host agents on this machine, which are restarted when they are killed, as systemd or a launcher does."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.forked_process import Popen

_PAUSE = 0.1  # delay before a restart, as for systemd
_DISMISS_SECONDS = 5.0
_END_SECONDS = 30.0


class HostAgent:
    """Run `atoll host` for one island, from the creation of the join token's file until the cluster has ended."""

    def __init__(
        self, island: int, join_file: Path, environment: Mapping[str, str], log: Path, options: Sequence[str] = ()
    ) -> None:
        self._command = [sys.executable, "-m", "atoll.operate.command", "host", "--island", str(island), *options]
        self._join_file = join_file
        self._environment = dict(environment) | {"ATOLL_JOIN": str(join_file)}
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False
        self._keeper = threading.Thread(target=self._keep, name="host-agent", daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        while not self._is_over:
            if self._join_file.exists():
                self._run()
            time.sleep(_PAUSE)

    def _run(self) -> None:
        with open(self._log, "ab") as log:
            self._process = Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if self._process.wait() == 0:  # the cluster has dismissed it
            self._is_over = True

    def process(self) -> psutil.Process:
        """Return the current process of the agent."""
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def close(self) -> None:
        """Wait for the agent's end after that of its cluster, and fail if it does not end.

        An agent that was being restarted when the cluster ended does not know of it, so it is asked to end.
        """
        self._is_over = True
        self._keeper.join(_DISMISS_SECONDS)
        if self._keeper.is_alive() and self._process is not None:
            self._process.terminate()
            self._keeper.join(_END_SECONDS)
        if self._keeper.is_alive() and self._process is not None:
            self._process.kill()
            self._keeper.join()
            raise AssertionError(f"a host agent does not end with its cluster\n{self._log.read_text()[-5000:]}")
