"""The worker processes of one island: started together, and restarted together once one of them has ended.

XLA's collectives do not survive the loss of a process, so an island lives and dies as a whole (see
docs/how-it-works/failures.md). Invariant: no process of an island is started while one of an earlier incarnation runs.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Sequence
from functools import partial

from atoll.engines.engine_interface import Engine, HostEnd, HostProcess, HostStart, Reports
from atoll.engines.restarts import RestartPolicy

_log = logging.getLogger(__name__)


class State(enum.Enum):
    """What an island's processes do."""

    WAITING = enum.auto()  # for machines, all or none
    RUNNING = enum.auto()
    STOPPING = enum.auto()  # they are being killed, and are started again when the last has ended
    ENDING = enum.auto()
    STOPPED = enum.auto()  # nothing runs: not started yet, ended, or given up


class Island:
    """Keeps an island's worker processes running. All methods are called on the event loop, and none blocks.

    `starts(incarnation)` gives the processes of one start of the island; the first has the number after `incarnation`.
    With `restarts` False, as before the cluster is up for the first time, an island whose worker ends is not started
    again, but where that hung while it started.
    """

    def __init__(
        self,
        number: int,
        starts: Callable[[int], Sequence[HostStart]],
        engine: Engine,
        reports: Reports,
        *,
        restarts: bool = False,
        incarnation: int = 0,
    ) -> None:
        self.number = number
        self.restarts = restarts
        self.state = State.STOPPED
        self._starts = starts
        self._engine = engine
        self._reports = reports
        self._policy = RestartPolicy()
        self._incarnation = incarnation
        self._machines: Sequence[str] = ()
        self._processes: dict[int, HostProcess] = {}  # those that run, by host
        self._cause: tuple[int, HostEnd] | None = None  # of this incarnation's end: a host, and its end
        self._last_end: tuple[int, int, HostEnd] | None = None  # with the incarnation
        self._nothing_runs = asyncio.Event()

    def start(self) -> None:
        """Starts all its processes, once there are machines for them.

        Raises OSError where one cannot be started; `end` then ends the others.
        """
        self.state = State.WAITING
        self._engine.place(self.number, self._starts(self._incarnation), self._placed)

    def _placed(self, machines: Sequence[str]) -> None:
        self.state = State.RUNNING
        self._incarnation += 1
        self._machines = machines
        self._cause = None
        self._nothing_runs.clear()
        self._reports.island_starts(self.number, self._incarnation, machines)
        for start in self._starts(self._incarnation):
            self._processes[start.host] = self._engine.start_host(start, partial(self._process_ended, start.host))

    def report(self) -> None:
        """Says what has ended and what runs, to a controller that may not know it."""
        if self._last_end is not None:
            self._reports.worker_ended(*self._last_end)
        if self.state is State.RUNNING:
            self._reports.island_starts(self.number, self._incarnation, self._machines)

    def excuse(self) -> None:
        """Do not count the newest restart against the limit. The controller knows the cause only after the restart."""
        self._policy.excuse()

    def restart(self) -> None:
        """Kills the processes that run, and starts all again when they have ended. Does nothing while it ends."""
        if self.state is State.RUNNING:
            self._stop()
        elif self.state is State.STOPPED and self.restarts:
            self._start_again()

    def expect_end(self) -> None:
        """The processes are about to be ended by the controller: their ends are in order, and nothing is restarted."""
        self.restarts = False
        self._stop_waiting()
        if self.state in (State.RUNNING, State.STOPPING):
            self.state = State.ENDING

    async def end(self, seconds: float) -> None:
        """Ends the processes, by force after `seconds`; returns when none runs. They are not started again."""
        self.restarts = False
        self._stop_waiting()
        if not self._processes:
            self.state = State.STOPPED
            self._engine.release(self.number)
            return
        self.state = State.ENDING
        for process in self._processes.values():
            process.terminate()
        force = asyncio.get_running_loop().call_later(seconds, self._kill)
        try:
            await self._nothing_runs.wait()
        finally:
            force.cancel()
        self._engine.release(self.number)

    def _stop_waiting(self) -> None:
        if self.state is State.WAITING:
            self._engine.cancel(self.number)
            self.state = State.STOPPED

    def _process_ended(self, host: int, end: HostEnd) -> None:
        self._processes.pop(host)
        if self.state is State.RUNNING:
            _log.warning("the worker of host %d has ended: %s", host, end.text)
            self._cause = host, end
            self._stop()
            return
        if self._cause is not None and end.status is None:
            # A lost machine is noticed late. What the others did without it is no cause.
            self._cause = host, end
        if not self._processes:
            self._all_ended()

    def _stop(self) -> None:
        self.state = State.STOPPING
        self._kill()
        if not self._processes:
            self._all_ended()

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _all_ended(self) -> None:
        stopping, self.state = self.state is State.STOPPING, State.STOPPED
        self._nothing_runs.set()
        if not stopping:
            return
        first = self._starts(self._incarnation)[0].host
        host, end = self._cause or (first, HostEnd(None, "its island was restarted"))
        self._last_end = host, self._incarnation, end
        if self._cause is not None:
            self._reports.worker_ended(*self._last_end)
        if self.restarts or (self._cause is not None and self._cause[1].hung):
            self._start_again()

    def _start_again(self) -> None:
        if not self._policy.allow(asyncio.get_running_loop().time()):
            self._give_up(self._policy.reason)
            return
        try:
            self.start()
        except OSError as error:
            self.state = State.ENDING if self._processes else State.STOPPED
            self._kill()
            self._give_up(f"its workers cannot be started: {error}")

    def _give_up(self, reason: str) -> None:
        _log.error("island %d is not started again: %s", self.number, reason)
        self._reports.island_removed(self.number, reason)
