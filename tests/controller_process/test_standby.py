"""Tests of a standby and its controller in one process: which peers each one serves, and which one ends."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.cluster.topology import Topology
from atoll.controller_process.controller_options import FOLLOWS, ControllerOptions
from atoll.controller_process.journal_recovery import JournalRecovery
from atoll.controller_process.process_state import ProcessState
from atoll.controller_process.shell import ControllerShell, ShellTimes, new_controller
from atoll.controller_process.standby import Standby
from atoll.controller_process.standby_status import StandbyState, standby_status
from atoll.controller_process.successor_probe import later_controller
from atoll.errors import ConnectError
from atoll.journal import journal
from atoll.journal.files import JournalDirectory
from atoll.journal.journal import Journal
from atoll.journal.successor import Successor
from atoll.leadership.lease_keeper import LeaseKeeper
from atoll.protocol import messages as m
from atoll.wire.address import Address
from atoll.wire.endpoints import listen
from atoll.wire.framing import PIECE_BYTES
from atoll.wire.resumption.accepted_link import AcceptedLink, Acceptor
from tests.controller.dumps import check_same, handled_events
from tests.controller.play import ready
from tests.controller_process.cuttable_network import Relay
from tests.controller_process.test_resumption import SETTINGS, Peer
from tests.waiting import until_async

WELCOME, READY = 60, 62
USUAL = ShellTimes()


class Pair:
    """A controller with a journal, its standby, and the peers of the controller.

    The standby, the worker and the proxy are each connected to the controller through a relay.
    """

    def __init__(
        self,
        directory: Path,
        times: ShellTimes,
        sent_by: Callable[[Journal], Any] = lambda journal: journal,
        leases: tuple[LeaseKeeper | None, LeaseKeeper | None] = (None, None),
    ) -> None:
        self.first, self.second = Address(path=str(directory / "first")), Address(path=str(directory / "second"))
        self.directory = directory
        self.sent_by = sent_by
        self.stopped = asyncio.Event()  # of the controller
        of_first = ControllerOptions(str(self.first), SETTINGS, 0)
        self.before = JournalRecovery(str(directory / "journal"), restarts=False)
        state = self.before.state(lambda: new_controller(of_first))
        of_first_lease, of_second_lease = leases
        self.shell = ControllerShell(of_first, state, self.stopped, times=times, lease=of_first_lease)
        relays = [Relay(directory / f"to-first-{each}", self.first) for each in range(3)]
        self.relays = self.of_standby, self.of_worker, self.of_proxy = relays
        self.servers: list[asyncio.Server] = []
        self.stop = asyncio.Event()
        self.reports, reported = os.pipe()
        os.set_blocking(self.reports, False)
        options = ControllerOptions(
            str(self.second),
            SETTINGS,
            0,
            ready_fd=reported,
            journal=str(directory / "standby"),
            directory=str(directory),
            standby=str(self.of_standby.address),
        )

        def make_shell(state: ProcessState) -> ControllerShell:
            return ControllerShell(options, state, self.stop, lease=of_second_lease)

        self.standby = Standby(options, make_shell, self.stop, lease=of_second_lease)
        self.running: asyncio.Task[ControllerShell | None]

    async def start(self) -> None:
        self.before.begin(self.shell)
        self.shell.journal = self.sent_by(self.shell.journal)  # type: ignore[arg-type]
        self.servers = [
            (await listen(self.first, self.shell.accept))[0],
            (await listen(self.second, self.standby.accept))[0],
        ]
        await self.mend()
        self.worker = await Peer.open(self.of_worker.address, "worker")
        self.worker.connection.send(ready(Topology.parse("1x1x1"), 0, "unix:/data-0"))
        self.proxy = await Peer.open(self.of_proxy.address, "proxy")
        await self.proxy.next_of(WELCOME)
        self.running = asyncio.get_running_loop().create_task(self.standby.run())
        await until_async(self.is_relied_on, self.running)
        assert self.shell.resumable.alternate_addresses == (str(self.second),)

    def is_relied_on(self) -> bool:
        """Whether the standby has reported that it follows the controller."""
        try:
            return FOLLOWS in os.read(self.reports, 1000)
        except BlockingIOError:
            return False

    def cut(self) -> None:
        """Interrupt all connections to the controller, as if its process had been killed."""
        for relay in self.relays:
            relay.cut()

    async def mend(self) -> None:
        for relay in self.relays:
            await relay.start()

    async def is_followed_closely(self) -> None:
        """Wait until the standby has each message that the controller has sent, and the same state.

        The standby refuses peers that have received messages which it does not know.
        """

        def sent(links: Iterable[AcceptedLink]) -> dict[int, Any]:
            return {link.number: link.buffer.sent for link in links}

        def replica() -> ProcessState:
            assert self.standby.replica is not None
            return self.standby.replica

        of_shell = self.shell.resumable
        await until_async(lambda: sent(replica().links.values()) == sent(each.link for each in of_shell.all()))
        copied = self.shell.controller
        await until_async(lambda: handled_events(replica().controller) == handled_events(copied))
        check_same(copied, replica().controller)

    async def taken_over(self) -> ControllerShell:
        """Return the shell of the standby after all peers have connected to it."""
        shell = await asyncio.wait_for(self.running, 60)
        assert shell is not None
        await until_async(lambda: not shell.controller.connections.away)
        return shell

    def end(self) -> None:
        self.running.cancel()
        for each in (*self.servers, *self.relays):
            each.close() if isinstance(each, asyncio.Server) else each.end()
        for peer in (self.worker, self.proxy):
            peer.connection.close()


Scene = Callable[[Pair], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    def run(scene: Scene, times: ShellTimes = USUAL, **options: Any) -> None:
        async def main() -> None:
            pair = Pair(tmp_path, times, **options)
            await pair.start()
            try:
                await scene(pair)
            finally:
                pair.end()
                await asyncio.sleep(0.05)

        asyncio.run(asyncio.wait_for(main(), 120))

    return run


def test_a_standby_goes_on_where_its_controller_is_killed(play):
    async def scene(pair: Pair) -> None:
        pair.proxy.connection.send(m.Await(7, ()))
        await pair.proxy.next_of(READY)
        await pair.is_followed_closely()
        status = standby_status(str(pair.directory))
        assert status is not None
        assert (status.controller, status.state) == (str(pair.of_standby.address), StandbyState.FOLLOWING)
        pair.cut()
        pair.proxy.connection.send(m.Await(8, ()))
        shell = await pair.taken_over()
        assert standby_status(str(pair.directory)) is None
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


def test_a_standby_whose_disk_is_full_takes_over_and_writes_its_journal_later(play, monkeypatch, caplog):
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def scene(pair: Pair) -> None:
        await pair.is_followed_closely()
        left = pair.directory / "standby" / "00000007.snapshot"
        left.write_bytes(b"of an earlier controller")
        with monkeypatch.context() as patched:
            patched.setattr(JournalDirectory, "write_snapshot", full)
            pair.cut()
            pair.proxy.connection.send(m.Await(8, ()))
            shell = await pair.taken_over()
        assert (await pair.proxy.next_of(READY))[1] == 8
        assert "No space left on device" in caplog.text
        assert shell.journal is not None
        assert shell.journal.is_broken
        assert not left.exists()
        monkeypatch.setattr(journal.time, "monotonic", lambda at=time.monotonic: at() + 60.0)
        await until_async(lambda: shell.journal is not None and not shell.journal.is_broken)
        shell.stop()

    play(scene)


class InTwoParts:
    """A journal that yields a snapshot in a large and a small part."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)

    def payload(self, number: int) -> Iterator[tuple[bytes, bool]]:
        snapshot = msgspec.msgpack.decode(b"".join(part for part, _ in self._journal.payload(number)))
        padding = b"." * (2 * PIECE_BYTES)  # large enough that the first part has several pieces
        content = msgspec.msgpack.encode(snapshot | {"a field of a later version": padding})
        yield content[:-100], False
        yield content[-100:], True


def test_a_snapshot_arrives_whole_also_where_its_last_part_is_small(play):
    async def scene(pair: Pair) -> None:
        assert pair.standby.replica is not None

    play(scene, sent_by=InTwoParts)


def test_the_journal_of_a_lost_controller_tells_the_next_one_who_has_taken_over(play):
    async def scene(pair: Pair) -> None:
        await pair.is_followed_closely()
        directory = pair.before.directory
        acceptor = Acceptor(1, 0.0, pair.shell.resumable.key)
        assert directory.successor() == Successor(str(pair.second))
        assert await later_controller(directory, acceptor, "") is None, "the standby follows"
        pair.cut()
        shell = await pair.taken_over()
        stranger = Acceptor(1, 0.0, b"the key of another cluster")
        assert await later_controller(directory, stranger, "") is None
        assert await later_controller(directory, acceptor, "") == Successor(str(pair.second), 1000)
        for server in pair.servers:
            server.close()
        assert await later_controller(directory, acceptor, "") == Successor(str(pair.second), 1000), "it is recorded"
        shell.stop()

    play(scene)


def test_a_standby_tells_an_earlier_controller_of_the_one_that_it_follows(play):
    async def scene(pair: Pair) -> None:
        await pair.is_followed_closely()
        directory, key = pair.before.directory, pair.shell.resumable.key
        followed = str(pair.of_standby.address)
        assert await later_controller(directory, Acceptor(1, 0.0, key), "") is None, "it follows that controller"
        assert await later_controller(directory, Acceptor(0, 0.0, b"another key"), "") is None
        assert await later_controller(directory, Acceptor(0, 0.0, key), "") == Successor(followed, 1)
        assert directory.successor() == Successor(followed, 1), "it is recorded"

    play(scene)


def test_a_controller_that_was_only_cut_off_ends_when_its_standby_has_taken_over(play):
    async def scene(pair: Pair) -> None:
        await pair.is_followed_closely()
        pair.cut()
        shell = await pair.taken_over()
        assert not pair.shell.superseded_by
        await pair.mend()
        await asyncio.wait_for(pair.stopped.wait(), 60)
        assert pair.shell.superseded_by == 1000
        assert pair.before.directory.successor() == Successor(str(pair.second), 1000)
        assert not pair.proxy.lost
        assert not pair.worker.lost
        shell.stop()

    play(scene)


def test_who_was_told_to_do_without_the_standby_finds_it_where_it_has_taken_over_nevertheless(play):
    async def scene(pair: Pair) -> None:
        beside = await Peer.open(pair.first, "proxy")  # like an engine on the machine that is cut off
        await beside.next_of(WELCOME)
        await pair.is_followed_closely()
        pair.cut()
        await until_async(lambda: pair.shell.resumable.alternate_addresses == ())
        shell = await asyncio.wait_for(pair.running, 60)
        assert shell is not None
        await pair.mend()
        await asyncio.wait_for(pair.stopped.wait(), 60)
        await until_async(lambda: not shell.controller.connections.away)
        beside.connection.send(m.Await(8, ()))
        assert (await beside.next_of(READY))[1] == 8
        assert not beside.lost
        beside.connection.close()
        shell.stop()

    # The controller does not tick any more, because its messages of that time would be lost with it.
    play(scene, ShellTimes(ping=1000.0, suspicion=0.1))


async def cut_off(pair: Pair, is_cut_off: bool = True) -> None:
    """Interrupt everything that the controller receives except from its proxy, or restore it."""
    for relay in (pair.of_standby, pair.of_worker):
        relay.hold() if is_cut_off else relay.pass_on()
    await until_async(lambda: pair.shell.replication.is_fenced == is_cut_off)


async def asked(pair: Pair) -> None:
    """Send a request from the proxy to the controller that is cut off, which holds the reply back."""
    (number,) = pair.shell.controller.connections.sessions.values()
    (link,) = [each for each in pair.shell.resumable.all() if each.number == number]
    answers, sent = link.link.buffer.sent, link.statistics().messages_out
    pair.proxy.connection.send(m.Await(7, ()))
    await until_async(lambda: link.link.buffer.sent != answers)
    assert link.statistics().messages_out == sent


def test_a_controller_that_is_cut_off_answers_when_it_hears_again(play):
    async def scene(pair: Pair) -> None:
        await cut_off(pair)
        await asked(pair)
        await cut_off(pair, False)
        assert (await pair.proxy.next_of(READY))[1] == 7
        assert not pair.shell.controller.connections.away
        pair.shell.stop()

    play(scene)


def test_what_a_controller_that_was_cut_off_has_heard_its_standby_hears_again_and_nothing_is_lost(play):
    async def scene(pair: Pair) -> None:
        await cut_off(pair)
        pair.of_standby.hold_back()
        await asked(pair)
        pair.cut()
        shell = await pair.taken_over()
        assert (await pair.proxy.next_of(READY))[1] == 7
        assert not pair.proxy.lost
        assert not pair.worker.lost
        shell.stop()

    play(scene)


def test_while_hosts_reach_the_controller_a_standby_that_does_not_serves_nobody(play):
    async def scene(pair: Pair) -> None:
        tried = asyncio.Event()
        pair.of_standby.cut()
        accept = pair.standby.accept
        pair.servers[1].close()
        await pair.servers[1].wait_closed()

        def accepted() -> Any:
            tried.set()
            return accept()

        pair.servers[1] = (await listen(pair.second, accepted))[0]
        pair.of_proxy.cut()
        await asyncio.wait_for(tried.wait(), 60)
        await pair.of_proxy.start()
        pair.proxy.connection.send(m.Await(8, ()))
        assert (await pair.proxy.next_of(READY))[1] == 8
        assert not pair.running.done()
        pair.shell.stop()

    play(scene)


def test_who_dials_anew_after_each_loss_learns_of_the_standby_too(play):
    async def scene(pair: Pair) -> None:
        there = await Peer.open(pair.first, "operator")  # its connection ends with its socket, like a host agent's
        learned: list[tuple[str, ...]] = []
        there.connection.set_handlers(
            there.inbox.put_nowait, lambda reason: None, lambda message: learned.append(message.addresses)
        )
        await until_async(lambda: learned == [(str(pair.second),)])
        pair.running.cancel()
        await until_async(lambda: learned[1:] == [()])
        there.connection.close()
        pair.shell.stop()

    play(scene)


def test_a_standby_ends_with_its_cluster(play):
    async def scene(pair: Pair) -> None:
        pair.shell.stop()
        assert await asyncio.wait_for(pair.running, 60) is None

    play(scene)


def test_a_standby_that_did_not_read_of_the_end_reads_it_when_it_connects_again(play):
    async def scene(pair: Pair) -> None:
        pair.of_standby.hold_back()
        pair.shell.stop()
        pair.of_standby.drop()
        pair.of_standby.pass_on()
        assert await asyncio.wait_for(pair.running, 60) is None

    play(scene)


def test_who_comes_back_while_the_standby_may_have_taken_over_has_to_wait(play):
    async def scene(pair: Pair) -> None:
        pair.running.cancel()
        pair.servers[1].close()
        suspicion = pair.shell.replication.takeover_suspicion
        await until_async(lambda: bool(suspicion()))
        pair.of_proxy.drop()
        pair.proxy.connection.send(m.Await(8, ()))
        assert suspicion() == f"the standby at {pair.second} may have taken over: it is silent"
        assert (await pair.proxy.next_of(READY))[1] == 8
        assert suspicion() == ""
        pair.shell.stop()

    play(scene, ShellTimes(suspicion=0.5))


def test_a_controller_has_one_standby(play, tmp_path):
    async def scene(pair: Pair) -> None:
        options = ControllerOptions(
            f"unix:{tmp_path}/third", SETTINGS, 0, journal=str(tmp_path / "another"), standby=str(pair.first)
        )
        another = Standby(options, lambda state: ControllerShell(options, state, pair.stop), asyncio.Event())
        with pytest.raises(ConnectError, match=r"this controller has a standby, at unix:.*/second"):
            await another.run()
        pair.shell.stop()

    play(scene)


def test_the_files_of_an_earlier_journal_stay_if_a_standby_cannot_make_a_shell(tmp_path: Path) -> None:
    def make_shell(state: ProcessState) -> ControllerShell:
        raise OSError("no such file: authority.pem")

    async def main() -> None:
        options = ControllerOptions(
            f"unix:{tmp_path}/second",
            SETTINGS,
            0,
            journal=str(tmp_path / "journal"),
            directory=str(tmp_path),
            standby=f"unix:{tmp_path}/first",
        )
        standby = Standby(options, make_shell, asyncio.Event())
        earlier = tmp_path / "journal" / "00000001.snapshot"
        earlier.write_bytes(b"")
        with pytest.raises(OSError, match=r"authority\.pem"):
            standby._take_over(ProcessState(new_controller(options)))
        assert earlier.exists()

    asyncio.run(main())
