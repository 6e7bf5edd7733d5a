"""The compiler processes that a host keeps for its sessions, and what it reports about those that compile."""

from __future__ import annotations

import queue
from typing import Any, cast

import pytest

from atoll.cluster.topology import Topology
from atoll.controller.validation.peer_validation import HOSTS
from atoll.devices.compilers.compiler_messages import CompileProgram, Finished, Rejected
from atoll.devices.compilers.compiler_server import CompilerCrashedError
from atoll.errors import OK, Code, Status, StatusError
from atoll.protocol.messages import Compiled, CompileReport, CompileStage
from atoll.worker.compilers import Compilers, ProgramCompilation
from tests.waiting import until

SECONDS = 60.0
PROGRAM = CompileProgram(b"", b"", 1, 1, "cpu")


class Process:
    """A process that has not ended, unless it was killed."""

    has_ended = False
    is_closed = False
    is_killed = False
    rejection = OK

    def __init__(self) -> None:
        self.ticks = self.reads = 0
        self.began: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.ends: queue.SimpleQueue[None] = queue.SimpleQueue()

    @property
    def cpu_ticks(self) -> int:
        self.reads += 1
        return self.ticks

    def compile(self, request: CompileProgram, asked: Any, name: str) -> Finished:
        """Compile until the test says that it ends, or it is killed."""
        self.began.put(None)
        self.ends.get(timeout=SECONDS)
        if self.is_killed:
            raise CompilerCrashedError(Status(int(Code.INTERNAL), "it was killed"))
        return Finished(Rejected(self.rejection), retires=True)

    def kill(self) -> None:
        self.is_killed = True
        self.ends.put(None)

    def close(self) -> None:
        self.is_closed = True


class Server:
    """Gives out new processes."""

    def __init__(self) -> None:
        self.processes: list[Process] = []

    def take(self) -> Process:
        self.processes.append(Process())
        return self.processes[-1]

    def prepare(self) -> None:
        raise AssertionError("no process may be started before the first program")


@pytest.mark.parametrize("is_open", [True, False])
def test_an_idle_process_is_kept_for_an_open_session_only(is_open: bool) -> None:
    compilers = Compilers(cast(Any, Server()))
    if is_open:
        compilers.open(7, prepare=False)
    process = cast(Any, compilers.take(7))
    compilers.give_back(7, process, takes_more=True)
    assert process.is_closed is not is_open
    assert (compilers.take(7) is process) is is_open


@pytest.mark.parametrize("code", [Code.RESOURCE_EXHAUSTED, 0, 99, -1])
def test_any_rejection_by_a_compiler_process_is_a_status_that_the_controller_takes(code: int) -> None:
    """A tenant's program may control the process. The controller expels a worker that reports another status."""
    server = Server()
    compilers = Compilers(cast(Any, server))
    failures: queue.SimpleQueue[Status] = queue.SimpleQueue()

    def work(compilation: ProgramCompilation) -> None:
        with pytest.raises(StatusError) as caught:
            compilation.compile(PROGRAM, None, "f")
        failures.put(caught.value.status)

    compilers.submit("ana", 1.0, 7, False, work)
    until(lambda: len(server.processes) == 1)
    server.processes[0].rejection = Status(code, "no", {str(number): b"" for number in range(17)})
    server.processes[0].ends.put(None)
    status = failures.get(timeout=SECONDS)
    HOSTS[Compiled](Compiled("f", status, b"", 0.0, False), Topology.parse("1x1x1"))
    assert status.code == (Code.RESOURCE_EXHAUSTED if code == Code.RESOURCE_EXHAUSTED else Code.INTERNAL)


def test_progress_is_the_cpu_time_of_the_process_that_compiles() -> None:
    server = Server()
    compilers = Compilers(cast(Any, server))
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def work(compilation: ProgramCompilation) -> None:
        with pytest.raises(StatusError):
            compilation.compile(PROGRAM, None, "f")
        ended.put(None)

    running, other, queued = (compilers.submit("ana", 1.0, 7, False, work) for _ in range(3))
    until(lambda: len(server.processes) == 2)
    for process in server.processes:
        process.began.get(timeout=SECONDS)
    assert compilers.report("f", running).progress == -1, "the CPU time of its process is unknown"
    server.processes[0].ticks, server.processes[1].ticks = 5, 7
    assert {compilers.report("f", each).progress for each in (running, other)} == {5, 7}
    assert compilers.report("f", running).stage is CompileStage.COMPILING
    for process in server.processes:
        process.reads = 0
    assert compilers.report("f", queued) == CompileReport("f", CompileStage.QUEUED)
    assert [process.reads for process in server.processes] == [0, 0], "reading takes long"
    for process in server.processes:
        process.ends.put(None)
    for _ in range(2):
        ended.get(timeout=SECONDS)
    until(lambda: len(server.processes) == 3)
    server.processes[2].ends.put(None)
    ended.get(timeout=SECONDS)
