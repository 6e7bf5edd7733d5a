"""Tests of the replication to a standby in virtual time: the snapshot, and when the controller relies on the
standby.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from atoll._version import __version__
from atoll.controller_process.standby_replication import (
    MAX_QUEUED,
    SUSPICION_SECONDS,
    TRANSITIONS,
    ReplicationState,
    StandbyReplication,
)
from atoll.journal.files import JournalDirectory
from atoll.journal.journal import Journal
from atoll.protocol import messages as m
from atoll.protocol.messages.standby_messages import Heartbeat, SnapshotChunk
from atoll.security.tokens import Tokens
from atoll.wire.framing import HEADER_BYTES
from atoll.wire.resumption.link_messages import Acknowledge
from tests.state_tables import check_table
from tests.wire.resumption.network import play

PART = 1 << 20
ADDRESS, OTHER_ADDRESS = "tls://there:1", "tls://elsewhere:1"
# of a controller without peers
CONTROLLER: Any = SimpleNamespace(tokens=Tokens(), connections=SimpleNamespace(deciders=()))
CONNECTIONS: Any = SimpleNamespace(all=tuple)


class OneSnapshot:
    """Journal with one snapshot of this size, which was taken or is being taken."""

    term = 5
    number = 1

    def __init__(self, nbytes: int = 1, is_written: bool = True) -> None:
        self.content = bytes(i % 251 for i in range(PART)) * (nbytes // PART + 1)
        self.content = self.content[:nbytes]
        self.is_written = is_written
        self.is_snapshotting = not is_written

    def names(self, standby: str) -> bool:
        """Name the standby, as a journal whose disk is fast."""
        return True

    def payload(self, number: int) -> Iterator[tuple[bytes, bool]]:
        if not self.is_written:
            raise FileNotFoundError
        for start in range(0, len(self.content), PART):
            yield self.content[start : start + PART], start + PART >= len(self.content)


class Standby:
    """The controller's connection to a standby that reads when `take` is called."""

    peer_role = ""
    name = ""

    def __init__(self) -> None:
        self.queued: list[SnapshotChunk] = []
        self.taken: list[SnapshotChunk] = []
        self.limit = 0
        self.heartbeats = 0
        self.is_aborted = False
        self.on_lost: Callable[[str], None]
        self.on_link: Callable[[Any], None]

    def set_handlers(self, on_message: Any, on_lost: Any, on_link: Any) -> None:
        self.on_lost, self.on_link = on_lost, on_link

    def authenticated(self) -> None:
        """Do nothing, as after a valid Hello."""

    def send_in_pieces(self, frame: bytes) -> None:
        self.queued.append(msgspec.msgpack.decode(frame[HEADER_BYTES:], type=SnapshotChunk))
        self.limit = max(self.limit, self._unsent())

    def send(self, message: Any) -> None:
        self.heartbeats += isinstance(message, Heartbeat)

    def flush(self) -> None:
        """Do nothing, because messages are sent at once."""

    def statistics(self) -> Any:
        return SimpleNamespace(unsent_bytes=self._unsent())

    def _unsent(self) -> int:
        return sum(len(each.content) for each in self.queued)

    def take(self) -> None:
        self.taken += self.queued
        self.queued = []

    def acknowledge(self, is_loaded: bool = True) -> None:
        """Acknowledge all heartbeats so far, and report whether the snapshot is loaded."""
        self.on_link(Acknowledge(int(is_loaded), self.heartbeats))

    def abort(self) -> None:
        self.is_aborted = True


class NamedStandby:
    """Lease that the controller holds, and whose record names a standby at once."""

    name = "the lease of a test"
    named_standby = ""

    def holds(self) -> bool:
        return True

    def name_standby(self, address: str) -> None:
        self.named_standby = address


class Scene:
    """A controller with a journal, to which a standby has connected."""

    def __init__(self, journal: Any, lease: NamedStandby | None = None) -> None:
        self.journal = journal
        self.sent: list[tuple[str, ...]] = []
        self.reports: list[bytes] = []
        self.lease: Any = lease
        self.replication = StandbyReplication(
            CONTROLLER, lambda: journal, self.reports.append, self.sent.append, CONNECTIONS, lease=self.lease
        )
        self.connect(ADDRESS)

    def connect(self, address: str) -> None:
        """Connect a standby at this address, which waits for its snapshot."""
        self.standby: Any = Standby()
        lease = self.lease.name if self.lease is not None else ""
        hello = m.Hello(m.PROTOCOL, "standby", "", 1, __version__, address, lease=lease)
        self.replication.serve(self.standby, hello)
        self.replication.begin(self.journal)

    async def relied_on(self) -> None:
        """Let the standby answer until the controller relies on it."""
        async with asyncio.timeout(5):
            while not self.reports:
                self.standby.acknowledge()
                await asyncio.sleep(0.1)


def played(scene: Callable[[Scene], Awaitable[None]], journal: Any = None, lease: NamedStandby | None = None) -> None:
    async def main() -> None:
        made = Scene(journal or OneSnapshot(), lease)
        await scene(made)
        made.replication.drop()

    play(main, 100.0)


def test_little_of_a_snapshot_is_in_memory_however_slowly_it_is_read():
    journal = OneSnapshot(3 * MAX_QUEUED + 7)

    async def scene(made: Scene) -> None:
        await asyncio.sleep(1.0)
        assert made.standby.limit == MAX_QUEUED, "it reads nothing"
        async with asyncio.timeout(10):
            while not made.standby.taken or not made.standby.taken[-1].is_last:
                made.standby.take()
                await asyncio.sleep(0.1)
        assert made.standby.limit <= MAX_QUEUED
        assert b"".join(each.content for each in made.standby.taken) == journal.content
        assert [each.is_last for each in made.standby.taken].count(True) == 1
        assert {each.term for each in made.standby.taken} == {5}

    played(scene, journal)


def test_the_controller_has_other_things_to_do_between_two_parts():
    async def scene(made: Scene) -> None:
        async with asyncio.timeout(5):
            while not made.standby.queued:
                await asyncio.sleep(0)
        parts = []
        for _ in range(4):
            parts.append(len(made.standby.queued))
            await asyncio.sleep(0)
        assert parts[-1] < 5
        assert parts == sorted(parts)

    played(scene, OneSnapshot(8 * PART))


def test_a_snapshot_that_is_damaged_on_the_disk_does_not_arrive_whole(tmp_path: Path):
    directory = JournalDirectory(tmp_path / "journal")
    directory.write_snapshot(1, 5, bytes(4 * PART))
    path = directory.snapshot(1)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)

    async def scene(made: Scene) -> None:
        async with asyncio.timeout(10):
            while not made.standby.is_aborted:
                made.standby.take()
                await asyncio.sleep(0.1)
        made.standby.take()
        assert len(made.standby.taken) == 3
        assert not any(each.is_last for each in made.standby.taken)

    played(scene, Journal(directory, 5, 1, dict))


def test_a_snapshot_is_waited_for_while_it_is_written():
    journal = OneSnapshot(is_written=False)

    async def scene(made: Scene) -> None:
        await asyncio.sleep(3.0)
        assert (made.standby.queued, made.standby.is_aborted) == ([], False)
        journal.is_written, journal.is_snapshotting = True, False
        await asyncio.sleep(1.0)
        assert [each.is_last for each in made.standby.queued] == [True]

    played(scene, journal)


def test_a_standby_whose_snapshot_will_never_be_written_is_dropped():
    journal = OneSnapshot(is_written=False)

    async def scene(made: Scene) -> None:
        journal.is_snapshotting = False
        await asyncio.sleep(1.0)
        assert made.standby.is_aborted

    played(scene, journal)


def test_peers_know_of_a_lost_standby_for_as_long_as_it_may_have_taken_over():
    async def scene(made: Scene) -> None:
        await made.relied_on()
        assert made.sent == [(ADDRESS,)]
        made.standby.on_lost("it was frozen")
        await asyncio.sleep(SUSPICION_SECONDS - 0.1)
        assert made.replication.takeover_suspicion() == f"the standby at {ADDRESS} may have taken over: it is silent"
        assert made.sent == [(ADDRESS,)]
        await asyncio.sleep(0.2)
        assert made.sent == [(ADDRESS,), ()]
        assert not made.replication.takeover_suspicion()

    played(scene)


def test_a_lost_standby_is_forgotten_although_another_one_copies():
    lease = NamedStandby()

    async def scene(made: Scene) -> None:
        await made.relied_on()
        assert lease.named_standby == ADDRESS
        made.standby.on_lost("its machine is lost")
        made.connect(OTHER_ADDRESS)
        await asyncio.sleep(SUSPICION_SECONDS - 0.1)
        assert (made.sent, lease.named_standby) == ([(ADDRESS,)], ADDRESS)
        await asyncio.sleep(0.2)
        assert (made.sent, lease.named_standby) == ([(ADDRESS,), ()], "")

    played(scene, lease=lease)


def test_the_loss_of_another_standby_does_not_shorten_the_time_for_which_the_first_may_have_taken_over():
    async def scene(made: Scene) -> None:
        await made.relied_on()
        made.standby.on_lost("it was frozen")
        made.connect(OTHER_ADDRESS)
        made.standby.on_lost("it had no complete copy")
        await asyncio.sleep(SUSPICION_SECONDS - 0.1)
        assert made.sent == [(ADDRESS,)]
        await asyncio.sleep(0.2)
        assert made.sent == [(ADDRESS,), ()]

    played(scene)


def test_a_standby_that_connects_again_is_not_forgotten():
    lease = NamedStandby()

    async def scene(made: Scene) -> None:
        await made.relied_on()
        made.standby.on_lost("its connection was interrupted")
        made.connect(ADDRESS)
        await asyncio.sleep(SUSPICION_SECONDS + 1.0)
        assert (made.sent, lease.named_standby) == ([(ADDRESS,)], ADDRESS)

    played(scene, lease=lease)


def test_the_lease_of_a_cluster_that_ends_names_no_standby_and_that_of_one_that_is_left_does():
    lease = NamedStandby()

    async def scene(made: Scene) -> None:
        await made.relied_on()
        made.replication.drop()
        assert lease.named_standby == ADDRESS
        made.replication.end()
        assert lease.named_standby == ""

    played(scene, lease=lease)


def test_a_standby_that_is_behind_is_relied_on_by_nobody_and_may_catch_up():
    async def scene(made: Scene) -> None:
        await asyncio.sleep(3.0)
        made.standby.on_link(Acknowledge(1, 0))  # the standby has loaded the snapshot, and is busy with later messages
        await asyncio.sleep(30.0)
        assert not made.standby.is_aborted
        assert (made.sent, made.reports) == ([], [])
        await made.relied_on()
        assert made.sent == [(ADDRESS,)]

    played(scene)


def test_a_standby_that_does_not_catch_up_is_dropped():
    async def scene(made: Scene) -> None:
        await asyncio.sleep(59.0)
        assert not made.standby.is_aborted
        await asyncio.sleep(3.0)
        assert made.standby.is_aborted

    played(scene)


def test_a_standby_that_falls_silent_is_dropped_and_then_unknown():
    async def scene(made: Scene) -> None:
        await made.relied_on()
        await asyncio.sleep(4.0)
        assert not made.standby.is_aborted
        await asyncio.sleep(3.0)
        assert made.standby.is_aborted
        await asyncio.sleep(SUSPICION_SECONDS)
        assert made.sent == [(ADDRESS,), ()]

    played(scene)


def test_what_waited_in_a_socket_is_no_sign_of_the_standby():
    """An acknowledgment counts from the time at which its heartbeat was sent."""

    async def scene(made: Scene) -> None:
        await made.relied_on()
        made.standby.acknowledge()
        sent = made.standby.heartbeats
        await asyncio.sleep(4.0)
        made.standby.on_link(Acknowledge(1, sent + 1))
        assert "may have taken over" in made.replication.takeover_suspicion()
        made.standby.acknowledge()
        assert made.replication.takeover_suspicion() == ""

    played(scene)


def test_the_state_of_the_replication_changes_only_by_the_transitions_of_the_table():
    def make(state: ReplicationState) -> StandbyReplication:
        made = StandbyReplication.__new__(StandbyReplication)
        made.state = state
        return made

    check_table(make, ReplicationState, TRANSITIONS)
