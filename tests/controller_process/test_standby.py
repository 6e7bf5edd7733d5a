"""A standby and the controller that it follows, in one process: who serves whom, and who ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.cluster.topology import Topology
from atoll.controller_process import standby_replication
from atoll.controller_process.controller_options import ControllerOptions
from atoll.controller_process.journal_recovery import JournalRecovery
from atoll.controller_process.shell import ControllerShell
from atoll.controller_process.standby import Standby
from atoll.errors import ConnectError
from atoll.journal.journal import Journal
from atoll.protocol import messages as m
from atoll.wire.address import Address
from atoll.wire.endpoints import listen
from atoll.wire.framing import PIECE_BYTES
from atoll.wire.resumption.link_messages import Acknowledge
from atoll.wire.resumption.peer_addresses import PeerAddresses
from atoll.wire.resumption.resumable_connection import ResumableConnection
from tests.controller.play import ready
from tests.controller_process.test_resumption import SETTINGS, Peer

WELCOME, READY = 60, 62


class Pair:
    """A controller with a journal, a standby of it, and the peers of the controller."""

    def __init__(self, directory: Path) -> None:
        self.first, self.second = Address(path=str(directory / "first")), Address(path=str(directory / "second"))
        self.directory = directory
        self.shell = ControllerShell(ControllerOptions(str(self.first), SETTINGS, 0), "", asyncio.Event())
        self.servers: list[asyncio.Server] = []
        self.stop = asyncio.Event()
        options = ControllerOptions(
            str(self.second), SETTINGS, 0, journal=str(directory / "standby"), standby=str(self.first)
        )
        self.standby = Standby(options, partial(ControllerShell, options, "", self.stop), self.stop)
        self.running: asyncio.Task[ControllerShell | None]

    async def start(self) -> None:
        JournalRecovery(str(self.directory / "journal"), restarts=False).hand_over(self.shell)
        self.servers = [
            (await listen(self.first, self.shell.accept))[0],
            (await listen(self.second, self.standby.accept))[0],
        ]
        self.worker = await Peer.open(self.first, "worker")
        self.worker.connection.send(ready(Topology.parse("1x1x1"), 0, "unix:/data-0"))
        self.proxy = await Peer.open(self.first, "proxy")
        await self.proxy.next_of(WELCOME)
        self.running = asyncio.get_running_loop().create_task(self.standby.run())
        await until(lambda: self.standby._is_relied_on, self.running)
        assert self.shell.resumable.alternate_addresses == (str(self.second),)

    def kill(self) -> None:
        """The controller's process is gone."""
        self.servers[0].close()
        self.freeze()
        for connection in self.shell._connections.values():
            transport = connection._transport if isinstance(connection, ResumableConnection) else connection
            transport._transport.abort()
        standby = self.shell._replication._standby
        assert standby is not None
        assert standby._transport is not None
        standby._transport.abort()

    def freeze(self) -> None:
        """Nothing more is done by the controller's process."""
        self.shell._handle = lambda event: None  # type: ignore[method-assign]
        self.shell._flush = lambda: None  # type: ignore[method-assign]

    def is_followed_closely(self) -> bool:
        """Whether the standby knows of each message that the controller has sent."""
        copy = self.standby._shell
        assert copy is not None
        sent = {each.number: each.link.buffer.sent for each in self.shell.resumable.all()}
        return sent == {each.number: each.link.buffer.sent for each in copy.resumable.all()}

    def end(self) -> None:
        self.running.cancel()
        for server in self.servers:
            server.close()
        for peer in (self.worker, self.proxy):
            peer.connection.close()


async def until(holds: Callable[[], bool], *tasks: asyncio.Task[Any]) -> None:
    async with asyncio.timeout(15):
        while not holds():
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Callable[[Pair], Coroutine[Any, Any, None]]], None]:
    def run(scene: Callable[[Pair], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            pair = Pair(tmp_path)
            await pair.start()
            try:
                await scene(pair)
            finally:
                pair.end()
                await asyncio.sleep(0.05)

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


def test_a_standby_goes_on_where_its_controller_is_killed(play):
    async def scene(pair: Pair) -> None:
        pair.proxy.connection.send(m.Await(7, ()))
        await pair.proxy.next_of(READY)
        pair.kill()
        pair.proxy.connection.send(m.Await(8, ()))
        shell = await asyncio.wait_for(pair.running, 10)
        assert shell is not None
        assert (await pair.proxy.next_of(READY))[1] == 8
        assert shell.resumable.term == 1000
        assert shell.journal is not None
        assert not pair.proxy.lost
        assert not pair.worker.lost
        late = await Peer.open(pair.second, "proxy")
        assert (await late.next_of(WELCOME))[1] == 2
        late.connection.close()
        shell.stop()

    play(scene)


def test_a_snapshot_arrives_whole_also_where_its_last_part_is_small(play, monkeypatch):
    whole = Journal.payload

    def payload(journal: Journal, number: int) -> Iterator[tuple[bytes, bool]]:
        content = b"".join(part for part, _ in whole(journal, number))
        assert len(content) > PIECE_BYTES + 100, "the first part has several pieces"
        yield content[:-100], False
        yield content[-100:], True

    monkeypatch.setattr(Journal, "payload", payload)

    async def scene(pair: Pair) -> None:
        assert pair.standby._has_snapshot

    play(scene)


def test_a_controller_that_was_only_cut_off_ends_when_its_standby_has_taken_over(play):
    async def scene(pair: Pair) -> None:
        cut = pair.shell._handle, pair.shell._flush
        pair.freeze()
        pair.servers[0].close()
        for each in (pair.worker, pair.proxy):  # as if silent for too long
            each.connection.drop("the test")
        standby = pair.shell._replication._standby
        assert standby is not None
        standby.abort()
        shell = await asyncio.wait_for(pair.running, 10)
        assert shell is not None
        await until(lambda: not shell.controller.connections.away)
        del pair.shell._handle, pair.shell._flush  # type: ignore[attr-defined]
        assert cut == (pair.shell._handle, pair.shell._flush)
        assert not pair.shell.superseded_by
        pair.servers[0] = (await listen(pair.first, pair.shell.accept))[0]
        await asyncio.wait_for(pair.shell._stop.wait(), 10)
        assert pair.shell.superseded_by == 1000
        assert not pair.proxy.lost
        assert not pair.worker.lost
        shell.stop()

    play(scene)


def test_who_was_told_to_do_without_the_standby_finds_it_where_it_has_taken_over_nevertheless(play, monkeypatch):
    monkeypatch.setattr(standby_replication, "_SUSPICION_SECONDS", 0.1)

    async def scene(pair: Pair) -> None:
        beside = await Peer.open(pair.first, "proxy")  # as an engine on the machine that is cut off
        await beside.next_of(WELCOME)
        standby = pair.shell._replication._standby
        assert standby is not None
        # Peers may know nothing that the standby lacks: it refuses those that do.
        await until(pair.is_followed_closely)
        pair.shell._replication._drop(standby, "the test")
        pair.freeze()
        await until(lambda: pair.shell.resumable.alternate_addresses == ())
        worker = pair.worker.connection
        worker.link._addresses = PeerAddresses(pair.second)  # type: ignore[union-attr]
        worker.drop("the test")  # type: ignore[union-attr]
        shell = await asyncio.wait_for(pair.running, 10)
        assert shell is not None
        await asyncio.wait_for(pair.shell._stop.wait(), 10)
        await until(lambda: not shell.controller.connections.away)
        beside.connection.send(m.Await(8, ()))
        assert (await beside.next_of(READY))[1] == 8
        assert not beside.lost
        beside.connection.close()
        shell.stop()

    play(scene)


async def cut_off(pair: Pair, is_cut_off: bool = True) -> None:
    """The controller hears its standby and its host no more, and its proxy only; or all of them again."""
    standby, worker = pair.shell._replication._standby, pair.shell.resumable.all()[0]._transport
    for each in (standby, worker):
        assert each is not None
        assert each._transport is not None
        if is_cut_off:
            each._transport.pause_reading()
        else:
            each._transport.resume_reading()
    await until(lambda: bool(pair.shell._replication._leader_fence._fenced) == is_cut_off)


def ready_of(peer: Peer) -> list[int]:
    """The answers that have come."""
    found = []
    while not peer.inbox.empty():
        message = peer.inbox.get_nowait()
        found += [message[1]] if message[0] == READY else []
    return found


def test_a_controller_that_is_cut_off_answers_when_it_hears_again(play):
    async def scene(pair: Pair) -> None:
        await cut_off(pair)
        pair.proxy.connection.send(m.Await(7, ()))
        await asyncio.sleep(0.3)
        assert ready_of(pair.proxy) == []
        await cut_off(pair, False)
        assert (await pair.proxy.next_of(READY))[1] == 7
        assert not pair.shell.controller.connections.away
        pair.shell.stop()

    play(scene)


def test_what_a_controller_that_was_cut_off_has_heard_its_standby_hears_again_and_nothing_is_lost(play):
    async def scene(pair: Pair) -> None:
        await cut_off(pair)
        pair.shell._replication.send = lambda turn: None  # type: ignore[method-assign]  # nothing gets there
        pair.proxy.connection.send(m.Await(7, ()))
        await asyncio.sleep(0.3)
        pair.kill()
        shell = await asyncio.wait_for(pair.running, 10)
        assert shell is not None
        await until(lambda: not shell.controller.connections.away)
        assert (await pair.proxy.next_of(READY))[1] == 7
        assert not pair.proxy.lost
        assert not pair.worker.lost
        shell.stop()

    play(scene)


def test_while_hosts_reach_the_controller_a_standby_that_does_not_serves_nobody(play):
    async def scene(pair: Pair) -> None:
        pair.standby._takeover.lost()
        pair.proxy.connection.link._addresses = PeerAddresses(pair.second)  # type: ignore[union-attr]
        pair.proxy.connection.drop("the test")  # type: ignore[union-attr]
        await until(lambda: pair.standby._takeover._resume_attempts != {})
        pair.standby._takeover.lost()
        pair.standby._check_takeover()
        assert not pair.standby._is_over.done()
        pair.proxy.connection.link._addresses = PeerAddresses(pair.first)  # type: ignore[union-attr]
        pair.proxy.connection.send(m.Await(8, ()))
        assert (await pair.proxy.next_of(READY))[1] == 8
        pair.shell.stop()

    play(scene)


def test_who_dials_anew_after_each_loss_learns_of_the_standby_too(play):
    async def scene(pair: Pair) -> None:
        there = await Peer.open(pair.first, "operator")  # whose connection ends with its socket, as a host agent's does
        learned: list[tuple[str, ...]] = []
        there.connection.set_handlers(
            there.inbox.put_nowait, lambda reason: None, lambda message: learned.append(message.addresses)
        )
        await until(lambda: learned == [(str(pair.second),)])
        pair.running.cancel()
        await until(lambda: learned[1:] == [()])
        there.connection.close()
        pair.shell.stop()

    play(scene)


def test_a_standby_ends_with_its_cluster(play):
    async def scene(pair: Pair) -> None:
        pair.shell.stop()
        assert await asyncio.wait_for(pair.running, 10) is None

    play(scene)


def test_a_standby_that_is_silent_is_none_any_more(play, monkeypatch):
    async def scene(pair: Pair) -> None:
        monkeypatch.setattr(standby_replication, "_SILENT_SECONDS", -1.0)
        monkeypatch.setattr(standby_replication, "_CATCH_UP_SECONDS", -1.0)
        await until(lambda: pair.shell.resumable.alternate_addresses == ())
        pair.shell.stop()

    play(scene)


def test_who_comes_back_while_the_standby_may_have_taken_over_has_to_wait(play, monkeypatch):
    monkeypatch.setattr(standby_replication, "_SUSPICION_SECONDS", 0.5)

    async def scene(pair: Pair) -> None:
        pair.running.cancel()
        pair.servers[1].close()
        await until(lambda: pair.shell._replication._standby is None)
        pair.proxy.connection.drop("the test")  # type: ignore[union-attr]
        pair.proxy.connection.send(m.Await(8, ()))
        assert (
            pair.shell._replication.takeover_suspicion()
            == f"the standby at {pair.second} may have taken over: it is silent"
        )
        assert (await pair.proxy.next_of(READY))[1] == 8
        assert pair.shell._replication.takeover_suspicion() == ""
        pair.shell.stop()

    play(scene)


def test_what_waited_in_a_socket_is_no_sign_of_the_standby(play):
    async def scene(pair: Pair) -> None:
        of_the_controller = pair.shell._replication
        of_the_controller._heard -= 3.0
        answered = of_the_controller._answered
        of_the_controller._link(Acknowledge(1, answered))
        assert "may have taken over" in of_the_controller.takeover_suspicion()
        await until(lambda: of_the_controller.takeover_suspicion() == "")
        pair.shell.stop()

    play(scene)


def test_a_controller_has_one_standby(play, tmp_path):
    async def scene(pair: Pair) -> None:
        options = ControllerOptions(
            f"unix:{tmp_path}/third", SETTINGS, 0, journal=str(tmp_path / "another"), standby=str(pair.first)
        )
        another = Standby(options, partial(ControllerShell, options, "", pair.stop), asyncio.Event())
        with pytest.raises(ConnectError, match=r"this controller has a standby, at unix:.*/second"):
            await another.run()
        pair.shell.stop()

    play(scene)
