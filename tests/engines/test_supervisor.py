"""Tests of the code of all engine processes: for example, a start that takes too long reports what is missing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from atoll.cluster.moved_controllers import recorded_controller
from atoll.cluster.settings import ClusterSettings
from atoll.controller_process.controller_options import (
    CANNOT_RESTART,
    FAILED,
    FOLLOWED,
    READY,
    RUNS,
    SUPERSEDED,
    ControllerOptions,
)
from atoll.engines import spare_engine, supervisor
from atoll.engines.controller_child import ControllerChild
from atoll.engines.engine_interface import HostEnd, HostStart
from atoll.engines.engine_options import EngineOptions
from atoll.engines.hosts.hosts_engine import HostsEngine
from atoll.engines.successor_supervisor import SuccessorSupervisor
from atoll.engines.supervisor import TRANSITIONS, Supervisor, SupervisorState
from atoll.errors import ClusterError, Code, IncompatibleJournalError, Status, SupersededError
from atoll.protocol.messages import BecomeEngine, ClusterEnds, Refused
from atoll.wire.address import parse_address
from tests.cluster_process import free_port
from tests.engines.controller_stand_in import ControllerStandIn
from tests.state_tables import check_table


def test_a_cluster_whose_controller_does_not_come_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControllerChild, "start", lambda _: None)
    monkeypatch.setattr(supervisor, "_LISTEN_SECONDS", 0.1)
    monkeypatch.setenv("ATOLL_INSECURE", "1")
    listen = f"127.0.0.1:{free_port()}"
    options = EngineOptions(ClusterSettings("1x1x1", engine="hosts", wait_seconds=0.1), str(tmp_path), listen=listen)

    async def start() -> None:
        await Supervisor(options, HostsEngine(options), asyncio.Event()).start()

    with pytest.raises(ClusterError, match=f"not up within 0 s: its controller does not listen at {listen}"):
        asyncio.run(start())


class LocalWorkers:
    """A local engine whose workers are no processes. `ends` has a function for each worker that was started."""

    agents = None

    def __init__(self) -> None:
        self.ends: list[Callable[[HostEnd], None]] = []

    def place(self, island: int, starts: Sequence[HostStart], then: Callable[[Sequence[str]], None]) -> None:
        then(())

    def start_host(self, start: HostStart, on_end: Callable[[HostEnd], None]) -> None:
        self.ends.append(on_end)


def test_a_cluster_whose_workers_take_long_to_start_says_so_and_which_setting_waits_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        options = EngineOptions(ClusterSettings("1x1x1", wait_seconds=0.1), str(tmp_path))
        supervised = Supervisor(options, LocalWorkers(), asyncio.Event())
        monkeypatch.setattr(supervised, "_link", SimpleNamespace(send=lambda message: None))
        await supervised.start()

    monkeypatch.setattr(ControllerChild, "start", lambda _: None)
    monkeypatch.setattr(Supervisor, "_connect", _connected)
    with pytest.raises(ClusterError, match="not up within 0 s: not all of its workers have devices yet"):
        asyncio.run(main())


def test_a_worker_that_ends_just_when_its_cluster_is_up_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = LocalWorkers()
        supervised = Supervisor(EngineOptions(ClusterSettings("1x1x1"), str(tmp_path)), engine, asyncio.Event())
        starting = asyncio.create_task(supervised.start())
        while not engine.ends:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        monkeypatch.setattr("os.read", lambda descriptor, size: RUNS + READY)
        supervised._controller._read()
        engine.ends[0](HostEnd(-signal.SIGKILL, "killed by SIGKILL"))  # before `start` continues
        await starting
        assert len(engine.ends) == 2

    monkeypatch.setattr(ControllerChild, "start", lambda _: None)
    monkeypatch.setattr(Supervisor, "_connect", _connected)
    asyncio.run(main())


async def _connected(_: Supervisor) -> None:
    """Stand for a connection to the controller."""


@pytest.mark.parametrize("status", [SUPERSEDED, -signal.SIGKILL])
def test_a_standby_ends_if_another_controller_takes_over_from_its_own(
    tmp_path: Path, controllers: list[ControllerStandIn], status: int
) -> None:
    options = EngineOptions(ClusterSettings(), str(tmp_path), standby="unix:/the-first", journal=str(tmp_path))

    async def main() -> None:
        stop = asyncio.Event()
        standby = SuccessorSupervisor(options, stop)
        starting = asyncio.create_task(standby.start())
        await asyncio.sleep(0)
        (controller,) = controllers
        controller.report(RUNS + FOLLOWED + b"unix:/the-second\n")
        controller.end(status)
        assert stop.is_set()
        assert len(controllers) == 1  # and it is not started again
        starting.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "error", "advice"),
    [
        (
            SUPERSEDED,
            SupersededError,
            "another controller has taken over. To follow it, run the command with --standby",
        ),
        (CANNOT_RESTART, IncompatibleJournalError, "To begin a new cluster, run the command once without --continue"),
        (1, ClusterError, "To begin a new cluster, run the command once without --continue"),
    ],
)
def test_a_cluster_that_cannot_continue_says_whether_another_start_could(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    controllers: list[ControllerStandIn],
    status: int,
    error: type[ClusterError],
    advice: str,
) -> None:
    monkeypatch.setattr("atoll.engines.controller_child._MAX_FAILURES", 0)
    options = EngineOptions(ClusterSettings(), str(tmp_path), journal=str(tmp_path), continues=True)

    async def main() -> None:
        cluster = SuccessorSupervisor(options, asyncio.Event())
        starting = asyncio.create_task(cluster.start())
        await asyncio.sleep(0)
        (controller,) = controllers
        controller.end(status)
        with pytest.raises(ClusterError, match=advice) as caught:
            await starting
        assert type(caught.value) is error

    asyncio.run(main())


def test_an_engine_records_where_its_controller_is_after_a_takeover(tmp_path: Path) -> None:
    class Moved(Link):
        address = parse_address("127.0.0.1:7001")

    async def main() -> None:
        options = EngineOptions(ClusterSettings(engine="hosts"), str(tmp_path), listen="127.0.0.1:7000")
        supervised = Supervisor(options, HostsEngine(options), asyncio.Event())
        supervised.take_over(Moved(), ())  # type: ignore[arg-type]
        supervised.cut_off(True)
        assert recorded_controller(str(tmp_path)) == ""
        supervised.cut_off(False)
        assert recorded_controller(str(tmp_path)) == "127.0.0.1:7001"
        await supervised.end()

    asyncio.run(main())


@pytest.mark.parametrize("is_asked", [False, True])
def test_an_engine_knows_if_a_controller_that_took_over_was_asked_to_end(tmp_path: Path, is_asked: bool) -> None:
    async def main() -> None:
        options = EngineOptions(
            ClusterSettings(engine="hosts", grace_seconds=0.0), str(tmp_path), listen="127.0.0.1:7000"
        )
        stop = asyncio.Event()
        supervised = Supervisor(options, HostsEngine(options), stop)
        supervised.take_over(Link(), ())  # type: ignore[arg-type]
        if is_asked:
            supervised.handle(ClusterEnds())
        supervised.link_lost("the controller closed the connection")
        await asyncio.wait_for(stop.wait(), 60)
        assert supervised.was_asked == is_asked
        assert ("an operator ended it" in supervised.reason) == is_asked
        await supervised.end()

    asyncio.run(main())


@pytest.mark.parametrize("is_refused", [False, True])
def test_an_engine_removes_its_workers_unless_another_one_has_its_role(tmp_path: Path, is_refused: bool) -> None:
    class Engine(HostsEngine):
        is_closed = False

        async def close(self) -> None:
            self.is_closed = True

    async def main() -> None:
        options = EngineOptions(
            ClusterSettings(engine="hosts", grace_seconds=0.0), str(tmp_path), listen="127.0.0.1:7000"
        )
        engine, stop = Engine(options), asyncio.Event()
        supervised = Supervisor(options, engine, stop)
        supervised.take_over(Link(), ())  # type: ignore[arg-type]
        if is_refused:
            supervised.handle(Refused(Status(Code.ALREADY_EXISTS, "this cluster has its engine")))
            supervised.link_lost("closed")
            assert stop.is_set()
        await supervised.end()
        assert engine.is_closed == (not is_refused)

    asyncio.run(main())


class Spares:
    """The connections of spare engines of this process, which a controller has accepted."""

    def __init__(self) -> None:
        self._accepted: asyncio.Queue[Callable[[Any], None]] = asyncio.Queue()

    async def dial_as(
        self, role: str, options: Any, address: Any, identity: Any, retry: Any, on_message: Any, *_: Any
    ) -> Link:
        self._accepted.put_nowait(on_message)
        return Link()

    async def offered(self, controller: ControllerStandIn) -> Callable[[Any], None]:
        """Have the controller of a spare engine run. Return the handler of messages to that engine."""
        controller.report(RUNS)
        return await asyncio.wait_for(self._accepted.get(), 10.0)


@pytest.fixture
def spares(monkeypatch: pytest.MonkeyPatch) -> Spares:
    made = Spares()
    monkeypatch.setattr(spare_engine, "dial_as", made.dial_as)
    return made


HAS_ROLE = BecomeEngine(ClusterSettings(engine="hosts", grace_seconds=0.0), ())


@pytest.mark.parametrize("leaves", [False, True])
def test_an_engine_serves_the_controller_that_takes_over_unless_it_leaves_clusters_to_others(
    tmp_path: Path, controllers: list[ControllerStandIn], spares: Spares, leaves: bool
) -> None:
    async def main() -> None:
        stop = asyncio.Event()
        successor = continued(tmp_path, stop, leaves=leaves)
        starting = asyncio.create_task(successor.start())
        await asyncio.sleep(0)
        (await spares.offered(controllers[0]))(HAS_ROLE)
        await starting
        controllers[0].report(FOLLOWED + b"unix:/the-second\n")
        controllers[0].end(-signal.SIGKILL)
        assert stop.is_set() == successor.leaves == leaves

    asyncio.run(main())


def test_the_offer_of_a_spare_engine_begins_again_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controllers: list[ControllerStandIn]
) -> None:
    attempts: list[Exception] = [OSError("no file descriptors"), ZeroDivisionError("a bug")]

    async def dial_as(*_: Any) -> None:
        if attempts:
            raise attempts.pop(0)
        offered.set()
        await asyncio.Event().wait()

    async def main() -> None:
        standby = SuccessorSupervisor(standby_options(tmp_path), asyncio.Event())
        starting = asyncio.create_task(standby.start())
        await asyncio.sleep(0)
        controllers[0].report(RUNS)
        await asyncio.wait_for(offered.wait(), 10.0)
        await standby.end()
        starting.cancel()

    offered = asyncio.Event()
    monkeypatch.setattr(spare_engine, "dial_as", dial_as)
    monkeypatch.setattr(spare_engine, "_SPARE_RETRY_SECONDS", 0.0)
    asyncio.run(main())


def continued(tmp_path: Path, stop: asyncio.Event, leaves: bool = False) -> SuccessorSupervisor:
    """Return the supervisor of a cluster that continues."""
    settings = ClusterSettings(engine="hosts", wait_seconds=5.0)
    listen, journal = "127.0.0.1:7000", "/the/journal"
    options = EngineOptions(settings, str(tmp_path), journal=journal, listen=listen, continues=True, leaves=leaves)
    return SuccessorSupervisor(options, stop)


def test_a_cluster_that_continues_is_up_when_this_process_is_its_engine(
    tmp_path: Path, controllers: list[ControllerStandIn], spares: Spares
) -> None:
    async def main() -> None:
        successor = continued(tmp_path, asyncio.Event())
        starting = asyncio.create_task(successor.start())
        await asyncio.sleep(0)
        (controller,) = controllers
        assert msgspec.json.decode(controller.command[-1], type=ControllerOptions).restarts
        handle = await spares.offered(controller)
        assert not starting.done()
        handle(HAS_ROLE)
        await starting
        await successor.end()

    asyncio.run(main())


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_spare_engine_with_the_role_knows_if_another_controller_was_asked_to_end(
    tmp_path: Path, controllers: list[ControllerStandIn], spares: Spares, is_asked: bool
) -> None:
    async def main() -> None:
        successor = continued(tmp_path, asyncio.Event())
        starting = asyncio.create_task(successor.start())
        await asyncio.sleep(0)
        handle = await spares.offered(controllers[0])
        handle(HAS_ROLE)
        await starting
        if is_asked:
            handle(ClusterEnds())
        assert successor.was_asked == is_asked
        await successor.end()

    asyncio.run(main())


def test_a_cluster_that_cannot_have_a_spare_engine_does_not_continue(
    tmp_path: Path, controllers: list[ControllerStandIn], spares: Spares
) -> None:
    async def main() -> None:
        successor = continued(tmp_path, asyncio.Event())
        starting = asyncio.create_task(successor.start())
        await asyncio.sleep(0)
        (await spares.offered(controllers[0]))(Refused(Status(Code.FAILED_PRECONDITION, "its engine is 'local'")))
        with pytest.raises(ClusterError, match="the journal in /the/journal cannot continue: its engine is 'local'"):
            await starting
        await successor.end()

    asyncio.run(main())


def test_peers_learn_why_the_controller_of_a_spare_engine_that_became_the_engine_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controllers: list[ControllerStandIn], spares: Spares
) -> None:
    notices: list[tuple[str, float]] = []

    async def serve_end_notice(address: Any, directory: str, reason: str, spares: float) -> None:
        notices.append((reason, spares))

    async def main() -> None:
        stop = asyncio.Event()
        standby = SuccessorSupervisor(standby_options(tmp_path), stop)
        starting = asyncio.create_task(standby.start())
        await asyncio.sleep(0)
        handle = await spares.offered(controllers[0])
        handle(BecomeEngine(ClusterSettings(engine="hosts", grace_seconds=1.0), ()))
        await starting
        controllers[0].report(FAILED + b"a bug\n")
        controllers[0].end(CANNOT_RESTART)
        assert stop.is_set()
        assert standby.reason == "the controller failed: a bug"
        await standby.end()

    monkeypatch.setattr(supervisor, "serve_end_notice", serve_end_notice)
    asyncio.run(main())
    assert notices == [("the controller failed: a bug", ClusterSettings().suspended_seconds)]


def standby_options(tmp_path: Path) -> EngineOptions:
    return EngineOptions(
        ClusterSettings(), str(tmp_path), standby="10.0.0.1:7000", journal=str(tmp_path), listen="127.0.0.1:7000"
    )


class Link:
    """A connection to a controller that does not answer."""

    address = refused_at = None

    def send(self, message: Any) -> None:
        pass

    def close(self) -> None:
        pass


def test_the_state_of_a_supervisor_changes_only_by_the_transitions_of_the_table() -> None:
    def make(state: SupervisorState) -> Supervisor:
        made = Supervisor.__new__(Supervisor)
        made.state = state
        return made

    check_table(make, SupervisorState, TRANSITIONS)
