"""The worker processes of an island, which are started together and restarted together when one of them ends.

XLA's collectives do not survive the loss of a process (see docs/design/failures.md). Invariant: no process of an
island is started while a process of an earlier incarnation runs.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Sequence
from functools import partial

from atoll.cluster.state_machine import StateMachine
from atoll.engines.engine_interface import Engine, HostEnd, HostProcess, HostStart, Reports
from atoll.engines.restart_rules import RETRY_SECONDS, RestartPolicy, StartRetries

_log = logging.getLogger(__name__)


Adopt = Callable[[HostStart, Callable[[HostEnd], None]], HostProcess]


class ProcessesState(enum.IntEnum):
    """The state of an island's processes. It is no copy of `IslandState`, which says what the controller knows.

    The processes of an island run before all of them have joined, and end before the controller learns of it.
    """

    WAITING = 0  # for machines, all or none
    RUNNING = 1
    STOPPING = 2  # being killed, and restarted when the last one has ended
    ENDING = 3
    STOPPED = 4  # no process runs: not started yet, ended, or removed


_S = ProcessesState
TRANSITIONS: dict[ProcessesState, frozenset[ProcessesState]] = {
    _S.STOPPED: frozenset({_S.WAITING}),
    # ENDING if a process cannot be started
    _S.WAITING: frozenset({_S.RUNNING, _S.STOPPED, _S.ENDING}),
    # STOPPED if no process could be started
    _S.RUNNING: frozenset({_S.STOPPING, _S.ENDING, _S.STOPPED}),
    _S.STOPPING: frozenset({_S.STOPPED, _S.ENDING}),
    _S.ENDING: frozenset({_S.STOPPED}),
}


class IslandProcesses(StateMachine[ProcessesState]):
    """Keeps an island's worker processes running. All methods are called on the event loop, and none blocks.

    `starts(incarnation)` returns the processes of one incarnation; the first one has the number `incarnation + 1`.
    Until `allow_restarts`, unless `restarts` is set, the island is only restarted if a worker hung while it started.
    """

    transitions = TRANSITIONS

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
        self._restarts = restarts
        self.state: ProcessesState = ProcessesState.STOPPED
        self._starts = starts
        self._engine = engine
        self._reports = reports
        self._policy = RestartPolicy()
        self._incarnation = incarnation
        self._machines: Sequence[str] = ()
        self._processes: dict[int, HostProcess] = {}  # running processes, by host
        self._cause: tuple[int, HostEnd] | None = None  # of the end of this incarnation: a host and its end
        self._last_end: tuple[int, int, HostEnd] | None = None  # host, incarnation, end
        self._retries = StartRetries(f"the workers of island {number}", _log.warning)
        self._nothing_runs = asyncio.Event()

    def start(self) -> None:
        """Start all processes when there are machines for them.

        Raise OSError if a process cannot be started; `end` then ends the others.
        """
        self.enter(ProcessesState.WAITING)
        self._engine.place(self.number, self._starts(self._incarnation), self._placed)

    def adopt(self, incarnation: int, machines: Sequence[str], adopt: Adopt) -> None:
        """Continue with the processes of an engine that is lost. `adopt` is `AgentHandler.adopt`."""
        self.enter(ProcessesState.WAITING)
        self.enter(ProcessesState.RUNNING)
        self._incarnation, self._machines = incarnation, machines
        self._nothing_runs.clear()
        for start in self._starts(incarnation):
            self._processes[start.host] = adopt(start, partial(self._process_ended, start.host))

    def _placed(self, machines: Sequence[str]) -> None:
        self.enter(ProcessesState.RUNNING)
        self._incarnation += 1
        self._machines = machines
        self._cause = None
        self._nothing_runs.clear()
        self._reports.island_starts(self.number, self._incarnation, machines)
        for start in self._starts(self._incarnation):
            self._processes[start.host] = self._engine.start_host(start, partial(self._process_ended, start.host))
        self._retries.started()

    def report(self) -> None:
        """Report the last end and the running incarnation to a controller that may not know them."""
        if self._last_end is not None:
            self._reports.worker_ended(*self._last_end)
        if self.state is ProcessesState.RUNNING:
            self._reports.island_starts(self.number, self._incarnation, self._machines)

    def allow_restarts(self) -> None:
        """Restart the island from now on if one of its processes ends: the cluster is up, or the island returns."""
        self._restarts = True

    def excuse(self) -> None:
        """Do not count the newest restart against the limit. The controller knows the cause only after the restart."""
        self._policy.excuse()

    def restart(self) -> None:
        """Kill the processes, and start the island again when they have ended. Do nothing while the island ends."""
        if self.state is ProcessesState.RUNNING:
            self._stop()
        elif self.state is ProcessesState.STOPPED and self._restarts:
            self._start_again()

    def expect_end(self) -> None:
        """Treat ends of processes as intended from now on, since the controller is about to end them."""
        self._restarts = False
        self._stop_waiting()
        if self.state in (ProcessesState.RUNNING, ProcessesState.STOPPING):
            self.enter(ProcessesState.ENDING)

    def _described(self) -> str:
        return f"the processes of island {self.number}"

    async def end(self, seconds: float) -> None:
        """End the processes, by force after `seconds`, and do not restart them. Return when no process runs."""
        self._restarts = False
        self._stop_waiting()
        if not self._processes:
            if self.state is not ProcessesState.STOPPED:
                self.enter(ProcessesState.STOPPED)
            self._engine.release(self.number)
            return
        if self.state is not ProcessesState.ENDING:
            self.enter(ProcessesState.ENDING)
        for process in self._processes.values():
            process.terminate()
        force = asyncio.get_running_loop().call_later(seconds, self._kill)
        try:
            await self._nothing_runs.wait()
        finally:
            force.cancel()
        self._engine.release(self.number)

    def _stop_waiting(self) -> None:
        if self.state is ProcessesState.WAITING:
            self._engine.cancel(self.number)
            self.enter(ProcessesState.STOPPED)

    def _process_ended(self, host: int, end: HostEnd) -> None:
        self._processes.pop(host)
        if self.state is ProcessesState.RUNNING:
            _log.warning("the worker of host %d has ended: %s", host, end.text)
            self._cause = host, end
            self._stop()
            return
        if self._cause is not None and end.status is None:
            # A lost machine is detected late, and is the cause of the other hosts' ends.
            self._cause = host, end
        if not self._processes:
            self._all_ended()

    def _stop(self) -> None:
        self.enter(ProcessesState.STOPPING)
        self._kill()
        if not self._processes:
            self._all_ended()

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _all_ended(self) -> None:
        stopping = self.state is ProcessesState.STOPPING
        self.enter(ProcessesState.STOPPED)
        self._nothing_runs.set()
        if not stopping:
            return
        first = self._starts(self._incarnation)[0].host
        host, end = self._cause or (first, HostEnd(None, "its island was restarted"))
        self._last_end = host, self._incarnation, end
        if self._cause is not None:
            self._reports.worker_ended(*self._last_end)
        if self._retries.is_lacking:
            self._start_later()
        elif self._restarts or (self._cause is not None and self._cause[1].hung):
            self._start_again()

    def _start_later(self) -> None:
        asyncio.get_running_loop().call_later(RETRY_SECONDS, self._retry)

    def _retry(self) -> None:
        if self._restarts and self.state is ProcessesState.STOPPED:
            self._start_again()

    def _start_again(self) -> None:
        if not self._policy.allow(asyncio.get_running_loop().time()):
            self._remove(self._policy.reason)
            return
        try:
            self.start()
        except OSError as error:
            if self._restarts and self._retries.allow(error, asyncio.get_running_loop().time()):
                self._policy.excuse()
                if self._processes:
                    self._stop()
                else:
                    self.enter(ProcessesState.STOPPED)
                    self._start_later()
                return
            self.enter(ProcessesState.ENDING if self._processes else ProcessesState.STOPPED)
            self._kill()
            self._remove(f"its workers cannot be started: {error}")

    def _remove(self, reason: str) -> None:
        _log.error("island %d is not restarted: %s", self.number, reason)
        self._reports.island_removed(self.number, reason)
