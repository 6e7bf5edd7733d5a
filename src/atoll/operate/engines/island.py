"""The processes of one island: started together, and started anew together once one of them has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from atoll.processes.lifeline import watch_in_loop
from atoll.processes.process import command, end

_log = logging.getLogger(__name__)

# Some restarts in a while are bad luck; more of them will not get better by trying.
_MAX_RESTARTS = 8
_RESTART_SPAN_SECONDS = 60.0


def start(
    module: str, options: msgspec.Struct, env: dict[str, str], descriptors: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Starts a process of Atoll's own. What libraries print in it is not for the user of a script."""
    return subprocess.Popen(
        command(module, options), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=env, pass_fds=descriptors
    )


class Island:
    """Keeps an island's workers running.

    `processes_of(incarnation)` gives its workers' processes: the host of each, or the first of several, its module and
    its options; the number rises with each start.
    `on_end(host, pid, status)` hears of each worker that ended by itself, with its exit status (negative: the signal),
    before any other is started in its place; `on_given_up(text)` that the island is not started again.
    """

    def __init__(
        self,
        hosts: Sequence[int],
        processes_of: Callable[[int], Sequence[tuple[int, str, msgspec.Struct]]],
        env: dict[str, str],
        on_end: Callable[[int, int, int], None],
        on_given_up: Callable[[str], None],
    ) -> None:
        self.hosts = tuple(hosts)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._processes_of = processes_of
        self._env = env
        self._on_end = on_end
        self._on_given_up = on_given_up
        self._incarnation = 0
        self._restarts: deque[float] = deque(maxlen=_MAX_RESTARTS)
        self.restarts_itself = False  # from the day on which it was up for the first time
        self._ending = False

    def start(self) -> None:
        self._incarnation += 1
        for host, module, options in self._processes_of(self._incarnation):
            process = start(module, options, self._env)
            self.processes.append(process)
            watch_in_loop(process.pid, partial(self._ended, host, process))

    def restart(self) -> None:
        """Kills what runs, and starts all anew."""
        self._kill()
        self._start_again()

    def end(self, seconds: float) -> None:
        """Ends the workers, by force where they do not go; they are not started again."""
        self._ending = True
        for process in self.processes:
            end(process, seconds)

    def _ended(self, host: int, process: subprocess.Popen[bytes]) -> None:
        if self._ending or process not in self.processes:
            return
        status = process.wait()
        _log.warning("the worker of host %d has ended: %s", host, describe(status))
        self._kill()
        self._on_end(host, process.pid, status)
        if self.restarts_itself:
            self._start_again()

    def _kill(self) -> None:
        processes, self.processes = self.processes, []
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in processes:
            process.wait()

    def _start_again(self) -> None:
        now = asyncio.get_running_loop().time()
        if len(self._restarts) == _MAX_RESTARTS and now - self._restarts[0] < _RESTART_SPAN_SECONDS:
            text = f"its workers ended {_MAX_RESTARTS + 1} times within {_RESTART_SPAN_SECONDS:.0f} s"
            _log.error("hosts %s are not started again: %s", self.hosts, text)
            self._on_given_up(text)
            return
        self._restarts.append(now)
        self.start()


def describe(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"
