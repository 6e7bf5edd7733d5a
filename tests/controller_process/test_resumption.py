"""Tests that a shell takes over the connections of another one, from its state and the events after it."""

from __future__ import annotations

import asyncio
import copy
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.topology import Topology
from atoll.controller_process.controller_options import ControllerOptions
from atoll.controller_process.process_state import ProcessState, decode_snapshot
from atoll.controller_process.shell import ControllerShell, ShellTimes, new_controller
from atoll.journal.records import decode_event
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import connect, listen
from atoll.wire.resumption.dialed_connection import DialedConnection, dial
from atoll.wire.unauthenticated import UnauthenticatedConnections
from tests.controller.play import ready
from tests.cut_connections import cut
from tests.waiting import until_async

SETTINGS = ClusterSettings("1x1x1", grace_seconds=20.0)
PING, WELCOME, REFUSED = 33, 60, 2


class Peer:
    """Worker, proxy or operator that connects to the controller."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.lost: list[str] = []
        self.connection: DialedConnection | Connection

    @classmethod
    async def open(cls, address: Address, role: str) -> Peer:
        peer = cls()
        opens = connect if role == "operator" else dial
        peer.connection = await opens(address, Any, peer.inbox.put_nowait, peer.lost.append, name="the controller")
        peer.connection.send(m.Hello(m.PROTOCOL, role, "", 1, "test", "script.py", resumes=role != "operator"))
        return peer

    async def next_of(self, tag: int) -> Any:
        """Return the next message with this tag, as plain lists."""
        while True:
            message = await asyncio.wait_for(self.inbox.get(), 10)
            if message[0] == tag:
                return message


TIMES = ShellTimes()


class Process:
    """The shell of a controller's process. `events` are those that its controller has handled."""

    def __init__(self, address: Address, state: ProcessState | None = None, times: ShellTimes = TIMES) -> None:
        options = ControllerOptions(str(address), SETTINGS, 0)
        self.address = address
        state = state or ProcessState(new_controller(options))
        self.unauthenticated = UnauthenticatedConnections()
        self.stop = asyncio.Event()
        self.shell = ControllerShell(options, state, self.stop, unauthenticated=self.unauthenticated, times=times)
        self.events: list[e.AnyEvent] = []
        self.server: asyncio.Server
        self._handles = self.shell.controller.handle
        self.shell.controller.handle = self._handle  # type: ignore[method-assign]

    def _handle(self, event: e.AnyEvent) -> Any:
        self.events.append(event)
        return self._handles(event)

    def snapshot(self) -> bytes:
        """Return the controller and the state of its shell, encoded for another process."""
        del self.shell.controller.handle  # type: ignore[attr-defined]
        content = self.shell.snapshot()
        self.shell.controller.handle = self._handle  # type: ignore[method-assign]
        self.events = []
        return content

    async def listen(self) -> None:
        self.server, _ = await listen(self.address, self.shell.accept)

    def kill(self) -> list[e.AnyEvent]:
        """Stop the shell and its connections. Return the events of whole turns since the snapshot."""
        self.server.close()
        events = copy.copy(self.events)
        while events and not isinstance(events[-1], e.Flush):
            events.pop()
        self.shell._handle = lambda event: None  # type: ignore[method-assign]
        self.shell._flush = lambda: None  # type: ignore[method-assign]
        for connection in self.shell._connections.values():
            cut(connection)
        return events


@pytest.fixture
def address(tmp_path: Path) -> Address:
    return Address(path=str(tmp_path / "socket"))


def test_a_shell_that_continues_tells_the_time_between_the_processes_and_for_which_it_was_stopped(address):
    async def main() -> None:
        earliest = time.monotonic()
        first = Process(address, times=ShellTimes(ping=1000.0))
        first.shell.start()
        await first.listen()
        snapshot = first.snapshot()
        await asyncio.sleep(0.01)
        events = first.kill()
        began, stood = time.monotonic(), first.shell._clock()
        await asyncio.sleep(0.2)
        state = ProcessState(*decode_snapshot(snapshot), 1)
        state.replay(events)
        second = Process(address, state, ShellTimes(ping=1000.0))
        least = time.monotonic() - began
        second.shell.resume(2)
        most = time.monotonic() - earliest
        (restarted,) = [each for each in second.events if isinstance(each, e.Restarted)]
        assert least - 0.05 < restarted.skipped < most + 0.05
        assert restarted.seconds <= stood, "the clock stood still"
        state.clock._read -= 4000.0  # as if the process had been stopped
        await second.listen()
        peer = await Peer.open(address, "proxy")
        await until_async(lambda: any(isinstance(each, e.ConnectionOpened) for each in second.events))
        kinds = [type(each) for each in second.events if isinstance(each, e.ConnectionOpened | e.Tick)]
        assert kinds == [e.Tick, e.Tick, e.ConnectionOpened], "it tells before everything else"
        (stopped,) = [each.skipped for each in second.events if isinstance(each, e.Tick) and each.skipped]
        assert 2999.9 < stopped < 3010.0, "but one period"
        peer.connection.close()
        second.shell.stop()
        second.server.close()
        await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_shell_goes_on_with_another_ones_connections_and_nobody_notices(address):
    async def main() -> None:
        first = Process(address)
        first.shell.start()
        await first.listen()
        operator = await Peer.open(address, "operator")
        early = await Peer.open(address, "proxy")
        snapshot = first.snapshot()
        # The snapshot contains some of the following, the events after it contain some, and the rest is lost.
        worker = await Peer.open(address, "worker")
        worker.connection.send(ready(Topology.parse("1x1x1"), 0, "unix:/data-0"))
        assert (await early.next_of(WELCOME))[1] == 1
        late = await Peer.open(address, "proxy")
        assert (await late.next_of(WELCOME))[1] == 2
        await worker.next_of(PING)

        events = first.kill()
        early.connection.send(m.Await(7, ()))
        state = ProcessState(*decode_snapshot(snapshot), 1)
        state.replay(events)
        second = Process(address, state, ShellTimes(reconnect=0.1))
        second.shell.resume(2)
        late.connection.send(m.Await(8, ()))
        await second.listen()

        assert (await early.next_of(62))[1] == 7
        assert (await late.next_of(62))[1] == 8
        await worker.next_of(PING)
        assert set(second.shell.controller.sessions) == {1, 2}
        assert second.shell.controller.resources.is_complete
        for peer in (early, late, worker):
            assert not peer.lost
            assert peer.connection.link.term == 2  # type: ignore[union-attr]
        assert operator.lost
        third = await Peer.open(address, "proxy")
        assert (await third.next_of(WELCOME))[1] == 3
        for peer in (early, late, third, worker):
            peer.connection.close()
        second.shell.stop()
        second.server.close()
        await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(main(), 30))


class Records:
    """Journal that keeps all events, and never asks for a snapshot."""

    wants_snapshot = is_broken = False

    def __init__(self) -> None:
        self.turns: list[list[e.AnyEvent]] = []

    def append(self, turn: list[bytes]) -> None:
        self.turns.append(list(map(decode_event, turn)))

    def tick(self) -> None:
        """Do nothing, because this journal is in memory."""

    def load(self, standby: str) -> e.JournalLoad:
        return e.JournalLoad(True, 0, 0.0, 0, standby)

    def leave(self) -> None:
        """Do nothing, because this journal has no files."""

    def has(self, kind: type[Any]) -> bool:
        return any(isinstance(getattr(event, "message", event), kind) for turn in self.turns for event in turn)


def test_a_controller_that_ticks_seldom_pings_nobody_in_between(address):
    uptime = 1.0

    async def main() -> None:
        nonlocal uptime
        controller = new_controller(ControllerOptions(str(address), SETTINGS, 0))
        state = ProcessState(controller, monotonic=lambda: uptime)
        process = Process(address, state, ShellTimes(ping=1000.0))
        process.shell.start()
        await process.listen()
        worker = await Peer.open(address, "worker")
        worker.connection.send(ready(Topology.parse("1x1x1"), 0, "unix:/data-0"))
        proxy = await Peer.open(address, "proxy")
        await proxy.next_of(WELCOME)
        uptime += 100.0
        proxy.connection.send(m.Await(8, ()))
        assert (await proxy.inbox.get())[0] == 62
        for peer in (worker, proxy):
            peer.connection.close()
        process.shell.stop()
        process.server.close()
        await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_what_is_handled_is_written_before_anybody_learns_of_it_and_no_sooner(address):
    async def main() -> None:
        process = Process(address, times=ShellTimes(ping=1000.0))
        journal = Records()
        process.shell.journal = journal  # type: ignore[assignment]
        process.shell.start()
        await process.listen()

        async def handled(kind: type[Any], times: int = 1) -> None:
            """Wait until this message was handled and its turn has ended."""

            def count() -> int:
                return sum(isinstance(getattr(event, "message", event), kind) for event in process.events)

            await until_async(lambda: count() >= times)
            await until_async(lambda: isinstance(process.events[-1], e.Flush))

        worker = await Peer.open(address, "worker")
        await handled(e.ConnectionOpened)
        assert journal.has(e.ConnectionOpened), "the peer learns its number next"
        worker.connection.send(ready(Topology.parse("1x1x1"), 0, "unix:/data-0"))
        proxy = await Peer.open(address, "proxy")
        await proxy.next_of(WELCOME)
        assert journal.has(m.WorkerReady)
        proxy.connection.send(m.Release((1,)))
        await handled(m.Release)
        assert not journal.has(m.Release)
        proxy.connection.send(m.Await(8, ()))
        await proxy.next_of(62)
        assert journal.has(m.Release)
        events = [event for turn in journal.turns for event in turn]
        assert [type(event) for event in events] == [type(event) for event in process.events[: len(events)]]
        proxy.connection.send(m.Release((2,)))
        await handled(m.Release, 2)
        process.shell.flush_now()  # as before the shell informs a returning peer about the outcome of its messages
        assert [type(event) for turn in journal.turns for event in turn] == [type(event) for event in process.events]
        process.shell.journal = None
        for peer in (worker, proxy):
            peer.connection.close()
        process.shell.stop()
        process.server.close()
        await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(main(), 30))
