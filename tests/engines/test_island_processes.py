"""Tests of an island's processes, with an engine that starts none: what is started, killed and reported, in order."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from atoll.engines import island_processes, restart_rules
from atoll.engines.engine_interface import HostEnd, HostStart
from atoll.engines.island_processes import IslandProcesses, ProcessesState
from atoll.engines.restart_rules import MAX_RESTARTS
from atoll.wire.address import Address
from tests.waiting import until_async


class FakeProcess:
    """Process that ends if the test ends it, or if it is killed and `obeys`."""

    def __init__(self, log: list[str], start: HostStart, on_end: Callable[[HostEnd], None], obeys: bool) -> None:
        self.pid = 1000 * start.incarnation + start.host
        self.start = start
        self._log = log
        self._on_end = on_end
        self._obeys = obeys
        self._ended = False

    def exit(self, status: int | None, *, hung: bool = False) -> None:
        if not self._ended:
            self._ended = True
            asyncio.get_running_loop().call_soon(self._on_end, HostEnd(status, f"status {status}", hung))

    def terminate(self) -> None:
        self._log.append(f"terminate {self.pid}")
        if self._obeys:
            self.exit(0)

    def kill(self) -> None:
        self._log.append(f"kill {self.pid}")
        self.exit(-9)


class FakeEngine:
    """Engine that logs its requests and its reports in one list."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.released: list[int] = []
        self.processes: list[FakeProcess] = []
        self.running = 0  # incarnation of the last report
        self.obeys = True
        self.refuses = False
        self.error = OSError("no more processes")
        self.limit = 0  # processes of an incarnation that start nevertheless
        self.has_machines = True
        self.waiting: Callable[[Sequence[str]], None] | None = None

    @property
    def agents(self) -> None:
        return None

    def place(self, island: int, starts: Sequence[HostStart], then: Callable[[Sequence[str]], None]) -> None:
        if self.has_machines:
            then(())
        else:
            self.log.append(f"island {island} waits for {len(starts)} machines")
            self.waiting = then

    def release(self, island: int) -> None:
        self.released.append(island)

    def controller_at(self, address: Address) -> None:
        """Not used: no process is started here."""

    async def close(self) -> None:
        """Do nothing, because this engine has no resources elsewhere."""

    def cancel(self, island: int) -> None:
        self.log.append(f"island {island} does not wait any more")

    def start_host(self, start: HostStart, on_end: Callable[[HostEnd], None]) -> FakeProcess:
        if self.refuses and (start.rank >= self.limit):
            raise self.error
        process = FakeProcess(self.log, start, on_end, self.obeys)
        self.log.append(f"start {process.pid}")
        self.processes.append(process)
        return process

    def island_starts(self, island: int, incarnation: int, machines: Sequence[str]) -> None:
        self.running = incarnation
        if machines:
            self.log.append(f"incarnation {incarnation} of island {island} starts on {', '.join(machines)}")

    def worker_ended(self, host: int, incarnation: int, end: HostEnd) -> None:
        self.log.append(f"worker {1000 * incarnation + host} of host {host} ended with {end.status}")

    def island_removed(self, island: int, reason: str) -> None:
        self.log.append(f"island {island} given up: {reason}")

    def logged(self) -> list[str]:
        """Return the log entries since the last call."""
        log = self.log[:]
        self.log.clear()
        return log


def island_of(engine: FakeEngine, hosts: int = 2, *, restarts: bool = True) -> IslandProcesses:
    def starts(incarnation: int) -> list[HostStart]:
        return [HostStart(3, 6 + rank, rank, hosts, 4, incarnation) for rank in range(hosts)]

    return IslandProcesses(3, starts, engine, engine, restarts=restarts)


def played(scene: Callable[[FakeEngine], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scene(FakeEngine()))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_after_a_workers_end_the_others_are_killed_then_it_is_reported_then_all_are_started_again() -> None:
    async def scene(engine: FakeEngine) -> None:
        island = island_of(engine)
        island.start()
        assert engine.logged() == ["start 1006", "start 1007"]
        engine.processes[1].exit(-11)
        await settle()
        # The report follows the end of all processes of the island, and precedes its next incarnation.
        assert engine.logged() == ["kill 1006", "worker 1007 of host 7 ended with -11", "start 2006", "start 2007"]
        assert island.state is ProcessesState.RUNNING

    played(scene)


def test_an_island_starts_once_there_are_machines_for_all_of_its_hosts() -> None:
    async def scene(engine: FakeEngine) -> None:
        engine.has_machines = False
        island = island_of(engine)
        island.start()
        assert island.state is ProcessesState.WAITING
        assert engine.logged() == ["island 3 waits for 2 machines"]
        assert engine.waiting is not None
        engine.waiting(("m1", "m2"))
        assert engine.logged() == ["incarnation 1 of island 3 starts on m1, m2", "start 1006", "start 1007"]

    played(scene)


def test_an_island_that_waits_for_machines_ends_at_once() -> None:
    async def scene(engine: FakeEngine) -> None:
        engine.has_machines = False
        island = island_of(engine)
        island.start()
        island.restart()  # no process runs yet
        await island.end(60.0)
        assert engine.logged() == ["island 3 waits for 2 machines", "island 3 does not wait any more"]
        assert island.state is ProcessesState.STOPPED

    played(scene)


def test_a_lost_machine_is_the_cause_although_others_ended_before_it_was_noticed() -> None:
    async def scene(engine: FakeEngine) -> None:
        island_of(engine).start()
        engine.processes[0].kill = lambda: None  # type: ignore[method-assign]  # it cannot be reached
        engine.processes[1].exit(-6)
        await settle()
        engine.processes[0].exit(None)
        await settle()
        assert [line for line in engine.logged() if "ended" in line] == ["worker 1006 of host 6 ended with None"]

    played(scene)


def test_only_the_first_of_two_ends_is_reported() -> None:
    async def scene(engine: FakeEngine) -> None:
        island_of(engine).start()
        engine.processes[0].exit(1)
        engine.processes[1].exit(-15)
        await settle()
        assert [line for line in engine.logged() if "ended" in line] == ["worker 1006 of host 6 ended with 1"]

    played(scene)


def test_before_the_cluster_is_up_an_island_is_not_started_again() -> None:
    async def scene(engine: FakeEngine) -> None:
        island = island_of(engine, hosts=1, restarts=False)
        island.start()
        engine.processes[0].exit(1)
        await settle()
        assert engine.logged() == ["start 1006", "worker 1006 of host 6 ended with 1"]
        assert island.state is ProcessesState.STOPPED

    played(scene)


def test_what_hung_while_it_started_is_started_again_whether_the_cluster_is_up_or_not() -> None:
    async def scene(engine: FakeEngine) -> None:
        island = island_of(engine, restarts=False)
        island.start()
        engine.processes[0].exit(-9, hung=True)
        await settle()
        assert engine.logged()[2:] == ["kill 1007", "worker 1006 of host 6 ended with -9", "start 2006", "start 2007"]
        engine.processes[2].exit(-9, hung=True)
        await asyncio.sleep(0)
        island.expect_end()  # unless the cluster will end soon
        await settle()
        assert "start 3006" not in engine.logged()

    played(scene)


def test_a_restart_that_is_asked_for_reports_no_workers_end() -> None:
    async def scene(engine: FakeEngine) -> None:
        island = island_of(engine)
        island.start()
        island.restart()
        island.restart()  # while it is already restarting
        await settle()
        assert engine.logged()[2:] == ["kill 1006", "kill 1007", "start 2006", "start 2007"]

    played(scene)


def test_a_controller_that_knows_nothing_is_told_what_has_ended_and_what_runs() -> None:
    async def scene(engine: FakeEngine) -> None:
        island = island_of(engine)
        island.report()
        assert engine.logged() == []
        island.start()
        island.restart()
        await settle()
        engine.logged()
        engine.running = 0
        island.report()
        assert engine.logged() == ["worker 1006 of host 6 ended with None"]
        assert engine.running == 2

    played(scene)


def test_an_island_that_ends_is_asked_to_and_stays_ended() -> None:
    async def scene(engine: FakeEngine) -> None:
        island = island_of(engine)
        island.start()
        await asyncio.gather(island.end(60.0), island.end(60.0))
        assert island.state is ProcessesState.STOPPED
        island.restart()  # was in transit
        await settle()
        assert {line for line in engine.logged() if "terminate" not in line} == {"start 1006", "start 1007"}
        await island.end(60.0)
        island.restart()
        await settle()
        assert engine.logged() == []

    played(scene)


def test_an_island_that_ends_while_it_restarts_is_not_started_again() -> None:
    async def scene(engine: FakeEngine) -> None:
        island = island_of(engine)
        island.start()
        engine.processes[0].exit(1)
        await asyncio.sleep(0)
        assert island.state is ProcessesState.STOPPING
        await island.end(60.0)
        await settle()
        assert "start 2006" not in engine.logged()

    played(scene)


def test_what_does_not_end_when_it_is_asked_to_is_killed() -> None:
    async def scene(engine: FakeEngine) -> None:
        engine.obeys = False
        island = island_of(engine, hosts=1)
        island.start()
        await island.end(0.01)
        assert engine.logged() == ["start 1006", "terminate 1006", "kill 1006"]
        assert engine.released == [3]  # when no process of the island is running

    played(scene)


def test_an_island_that_keeps_ending_is_removed() -> None:
    async def scene(engine: FakeEngine) -> None:
        island = island_of(engine, hosts=1)
        island.start()
        for _ in range(MAX_RESTARTS + 1):
            engine.processes[-1].exit(1)
            await settle()
        assert len(engine.processes) == MAX_RESTARTS + 1
        assert engine.logged()[-1] == "island 3 given up: its workers ended 9 times within 60 s"
        assert island.state is ProcessesState.STOPPED

    played(scene)


def test_an_island_whose_workers_cannot_be_started_again_is_removed() -> None:
    async def scene(engine: FakeEngine) -> None:
        island_of(engine, hosts=1).start()
        engine.refuses = True
        engine.processes[0].exit(1)
        await settle()
        assert engine.logged()[-1] == "island 3 given up: its workers cannot be started: no more processes"

    played(scene)


@pytest.mark.parametrize("started", [0, 1])
def test_an_island_waits_while_files_or_memory_for_its_workers_are_lacking(
    started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(island_processes, "RETRY_SECONDS", 0.05)

    async def scene(engine: FakeEngine) -> None:
        island = island_of(engine)
        island.start()
        engine.refuses, engine.error, engine.limit = True, OSError(errno.EMFILE, "Too many open files"), started
        engine.processes[0].exit(1)
        await until_async(lambda: engine.running > MAX_RESTARTS + 1)
        assert not any("given up" in line for line in engine.logged())
        engine.refuses = False
        await until_async(lambda: island.state is ProcessesState.RUNNING)
        assert engine.logged()[-2:] == [f"start {1000 * engine.running + host}" for host in (6, 7)]

    played(scene)


def test_an_island_for_whose_workers_files_are_lacking_for_long_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(island_processes, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(restart_rules, "RESTART_SPAN_SECONDS", 0.2)

    async def scene(engine: FakeEngine) -> None:
        island_of(engine, hosts=1).start()
        engine.refuses, engine.error = True, OSError(errno.EMFILE, "Too many open files")
        engine.processes[0].exit(1)
        await asyncio.sleep(1.0)
        assert "its workers cannot be started: [Errno 24] Too many open files" in engine.logged()[-1]

    played(scene)


def test_an_island_that_ends_while_files_for_its_workers_are_lacking_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(island_processes, "RETRY_SECONDS", 0.05)

    async def scene(engine: FakeEngine) -> None:
        island = island_of(engine, hosts=1)
        island.start()
        engine.refuses, engine.error = True, OSError(errno.EMFILE, "Too many open files")
        engine.processes[0].exit(1)
        await settle()
        await island.end(1.0)
        engine.refuses = False
        await asyncio.sleep(0.2)
        assert len(engine.processes) == 1
        assert engine.released == [3]

    played(scene)
