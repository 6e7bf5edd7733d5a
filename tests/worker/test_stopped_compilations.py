"""Compilations that a host stops because their compiler process makes no progress."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from atoll.devices.compilers.compiler_messages import CompiledProgram
from atoll.devices.null.model import MODELS
from atoll.devices.null.null_backend import Collectives, NullBackend, NullFunction
from atoll.devices.null.null_program import NullProgram
from atoll.engines.null_hosts.null_host import AtOnce
from atoll.errors import OK, Status, StatusError
from atoll.protocol.messages import CloseWorld, Compile, Compiled, CompileReport, CompileStage
from atoll.transfers.inbox import Inbox
from atoll.worker import host_functions
from atoll.worker.compilers import Compilers, ProgramCompilation
from atoll.worker.host_functions import HostFunctions
from atoll.worker.store import TypeKeys
from tests.devices.null.test_sim_events import HandClock
from tests.waiting import until
from tests.worker.test_idle_compilers import SECONDS, Server

UNKNOWN = CompileReport("a", CompileStage.UNKNOWN)
PROGRAM = NullProgram("step", 0.0, (), ())


class Loader:
    """Loads null programs, while `is_stored` from its cache."""

    def __init__(self, backend: NullBackend) -> None:
        self._backend = backend
        self.is_stored = False

    def find(self, request: Any, tenant: str) -> Any:
        return "stored" if self.is_stored else None

    def load(self, program: Any, assignment: Any, callbacks: Any = None, world: int = 0) -> NullFunction:
        function = NullFunction(self._backend, PROGRAM, (0,), 1)
        function.world = world
        return function


class StoppedFunction(NullFunction):
    """A function whose compilation is stopped after it was loaded, when its size is looked at for the report."""

    def __init__(self, backend: NullBackend, stop: Callable[[], None]) -> None:
        self._stop: Callable[[], None] = lambda: None
        super().__init__(backend, PROGRAM, (0,), 1)
        self._stop = stop

    @property
    def scratch_bytes(self) -> int:  # type: ignore[override]
        self._stop()
        return 0

    @scratch_bytes.setter
    def scratch_bytes(self, value: int) -> None:
        """Ignore the size of the program."""


class Worlds:
    """Worlds that this host joins at once. Closed ones have a successor."""

    def __init__(self) -> None:
        self.closed: dict[int, CloseWorld] = {}

    def when_joined(self, world: int, then: Callable[[Status], None]) -> None:
        then(OK)

    def note_closing(self, message: CloseWorld) -> None:
        self.closed[message.world] = message

    def closing_of(self, world: int) -> CloseWorld | None:
        return self.closed.get(world)

    def close(self, message: CloseWorld) -> None:
        """Nothing waits for a world."""


class Host:
    """A host with compiler processes, and with one function, which tenant ana compiles."""

    def __init__(self) -> None:
        self.server = Server()
        self.compiled: list[Compiled] = []
        self.inbox = Inbox(lambda session, feed: None)
        backend = NullBackend(0, 1, MODELS["instant"], HandClock(), Collectives())
        self.loader = Loader(backend)
        backend.loader = cast(Any, self.loader)
        compilers, worlds = Compilers(cast(Any, self.server)), cast(Any, Worlds())
        keys, report = TypeKeys(), self.compiled.append
        self.functions = HostFunctions(
            backend, self.inbox, keys, report=report, pool=cast(Any, AtOnce()), compilers=compilers, worlds=worlds
        )

    def request(self, feed: int, world: int = 0) -> None:
        self.inbox.put(1, feed, PROGRAM.source())
        self.functions.compile(Compile("a", 1, feed, (((0, 0),),), tenant="ana", world=world))

    def await_process(self, count: int) -> None:
        until(lambda: len(self.server.processes) == count)
        self.server.processes[-1].began.get(timeout=SECONDS)


@pytest.fixture
def host() -> Iterator[Host]:
    found = Host()
    yield found
    found.functions.records.validate()
    for process in found.server.processes:
        process.ends.put(None)


def test_the_process_of_a_stopped_compilation_is_killed_and_a_new_request_starts_another(host: Host) -> None:
    host.request(1)
    host.await_process(1)
    host.functions.stop_compiling("a")
    assert host.server.processes[0].is_killed
    assert host.functions.stages_of(["a"]) == (UNKNOWN,)
    host.request(2)
    host.await_process(2)
    assert host.compiled == [], "nobody awaits the outcome of the first one"
    host.server.processes[1].ends.put(None)
    until(lambda: len(host.compiled) == 1)


def test_a_function_that_is_compiled_is_not_stopped(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_functions, "IDLE_FUNCTIONS", 0)
    host.loader.is_stored = True
    host.request(1)
    host.functions.stop_compiling("a")
    host.functions.get("a")
    host.functions.drop("a")
    with pytest.raises(StatusError, match="not on this host"):
        host.functions.get("a")


def test_runs_that_await_a_stopped_compilation_go_on(host: Host) -> None:
    host.loader.is_stored = True
    host.request(1, world=5)
    host.loader.is_stored = False
    host.functions.close_world(CloseWorld(5, OK, successor=6))
    host.await_process(1)
    woken: list[None] = []
    assert host.functions.placer.awaits("a", lambda: woken.append(None))
    host.functions.stop_compiling("a")
    assert woken == [None]
    assert not host.functions.placer.awaits("a", lambda: None)


def test_a_function_whose_compilation_is_stopped_while_it_is_loaded_is_not_kept(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = threading.Event()

    def stop() -> None:
        host.functions.stop_compiling("a")
        looked_at.set()

    made = StoppedFunction(NullBackend(0, 1, MODELS["instant"], HandClock(), Collectives()), stop)
    monkeypatch.setattr(ProgramCompilation, "compile", lambda *_: CompiledProgram(b"", None, ()))
    monkeypatch.setattr(NullBackend, "compile", lambda *_, **__: (made, False, 0.0))
    host.request(1)
    assert looked_at.wait(SECONDS)
    until(lambda: all(each.name != "atoll-compile-apart" for each in threading.enumerate()))
    with pytest.raises(StatusError, match="not on this host"):
        host.functions.get("a")
    assert host.compiled == []
