"""Lets a standby follow this controller: it gets a snapshot, and each turn after that before anything decided leaves.

A turn is handed to the kernel, and nobody waits for the standby to have it. So the end of this process loses nothing.
Where its machine is lost, or the network, what was on its way is lost, too: peers that know more than the standby are
refused there (`wire.resumption.resumable_connections`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from atoll._version import __version__
from atoll.controller.core import Controller
from atoll.controller_process.controller_options import ALONE, FOLLOWED
from atoll.controller_process.leader_fence import LeaderFence
from atoll.controller_process.takeover import LEASE_SECONDS
from atoll.errors import AtollError, Code, Status
from atoll.journal.journal import Journal
from atoll.journal.records import join_records
from atoll.protocol import messages as m
from atoll.protocol.messages.standby_messages import STANDBY, Heartbeat, LogBatchChunk, SnapshotChunk
from atoll.security.roles import may_say
from atoll.wire.connection import Connection
from atoll.wire.framing import encode
from atoll.wire.resumption.link_messages import Acknowledge, AnyLinkMessage, Close
from atoll.wire.resumption.resumable_connections import ResumableConnections

_log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
# For a standby that is silent: then it is none any more, and the engine starts the controller again by itself. One that
# has yet to catch up, with a large snapshot or on a busy machine, is relied on by nobody, and has more time.
_SILENT_SECONDS = 5.0
_CATCH_UP_SECONDS = 60.0
# After its loss: if it has taken over, because this process was frozen, say, it says so by then (`standby`).
_SUSPICION_SECONDS = 6.0
_PART_BYTES = 1 << 20
# Of a snapshot, in this process's memory at a time; and until it is looked again whether the standby has taken some.
MOST_QUEUED = 16 << 20
_FULL_SECONDS = 0.01


class StandbyReplication:
    """One standby at a time. `journal()` is the controller's, `report` tells its engine whether it is followed.

    `announce(addresses)` tells all peers where else they find a controller; these have the `connections`.
    """

    def __init__(
        self,
        controller: Controller,
        journal: Callable[[], Journal | None],
        report: Callable[[bytes], None],
        announce: Callable[[tuple[str, ...]], None],
        connections: ResumableConnections,
    ) -> None:
        self._tokens = controller.tokens
        self._journal = journal
        self._report = report
        self._announce = announce
        self._connections = connections
        self._leader_fence = LeaderFence(self.takeover_suspicion, lambda: controller.connections.deciders, connections)
        self._loop = asyncio.get_running_loop()
        self._standby: Connection | None = None
        self._address = ""  # of the standby
        self._snapshot_number = 0  # number of the snapshot that it begins with; 0: that is to be taken yet
        self._has_snapshot = False  # that is there, and on its way
        self._stands_by = False  # it has the snapshot, and handles what comes
        self._announced = ""  # the address that all peers know
        self._is_followed = False  # it is the standby that goes on where this process ends
        self._relied_on = ""  # the address of the last for which that was so
        self._heartbeats: deque[float] = deque()  # when those were sent that it has not answered
        self._answered = 0  # heartbeats
        self._heard = 0.0  # when that was sent which it has answered: what waits in a socket is no news
        self._suspected_until = 0.0

    def serve(self, connection: Connection, hello: m.Hello) -> None:
        """A standby has said Hello."""
        refused = self._refusal(connection, hello)
        if refused is not None:
            connection.on_lost = lambda reason: None
            connection.refuse(refused.message)
            connection.send(m.Refused(refused))
            connection.close()
            return
        connection.authenticated()
        connection.name = f"the standby at {hello.label}"
        connection.on_lost, connection.on_link = self._lost, self._link
        self._standby, self._address = connection, hello.label
        self._snapshot_number, self._has_snapshot, self._stands_by = 0, False, False
        self._heartbeats.clear()
        self._answered = 0
        self._heard = self._loop.time()
        self._heartbeat(connection)

    def _refusal(self, connection: Connection, hello: m.Hello) -> Status | None:
        if not may_say(connection.peer_role, hello.role) or not self._tokens.are_right(hello.role, hello.token):
            return Status(Code.PERMISSION_DENIED, "a standby has to prove itself as the cluster's engine does")
        if (hello.protocol, hello.version) != (m.PROTOCOL, __version__):
            text = f"the controller is of atoll {__version__}, and the standby of {hello.version}: install the same"
            return Status(Code.FAILED_PRECONDITION, text)
        if self._journal() is None:
            text = "this cluster has no journal to follow: start it with `atoll up --journal DIRECTORY`"
            return Status(Code.FAILED_PRECONDITION, text)
        if self._standby is not None:
            return Status(Code.ALREADY_EXISTS, f"this controller has a standby, at {self._address}")
        return None

    @property
    def successor(self) -> tuple[str, ...]:
        """The address of the standby that was relied on last: who has taken over is there.

        Peers may have been told to do without it: it waits longer for hosts to come than this process believes in it.
        """
        return (self._relied_on,) if self._relied_on else ()

    def takeover_suspicion(self) -> str:
        """Why peers that come back are not served for now: the standby may have taken over; "" where that is excluded.

        Those that are here have not gone there.
        """
        now = self._loop.time()
        if now < self._suspected_until or (self._is_followed and now - self._heard > LEASE_SECONDS):
            return f"the standby at {self._address} may have taken over: nothing is heard of it"
        return ""

    # ---- what it gets

    @property
    def wants_snapshot(self) -> bool:
        """Whether one is to be begun, between two turns."""
        journal = self._journal()
        return (
            self._standby is not None
            and not self._snapshot_number
            and journal is not None
            and not journal.is_snapshotting
        )

    def begin(self, journal: Journal) -> None:
        """A snapshot has been begun: all that comes from now on is for a standby that waits for one."""
        self._snapshot_number = self._snapshot_number or journal.number

    def send(self, turn: Sequence[bytes]) -> None:
        """A turn that has been handled. When this returns the kernel has it, unless the standby does not read."""
        standby = self._standby
        if standby is None or not self._snapshot_number:
            return
        for part, is_last in _parts(join_records(turn)):
            standby.send(LogBatchChunk(part, is_last))
        standby.flush()

    def _heartbeat(self, standby: Connection) -> None:
        if self._standby is not standby:
            return
        silent = self._loop.time() - self._heard
        most = _SILENT_SECONDS if self._is_followed else _CATCH_UP_SECONDS
        if silent > most:
            self._drop(standby, f"nothing was heard of it for {most:.0f} s")
            return
        journal = self._journal()
        if (
            journal is not None
            and self._snapshot_number
            and not self._has_snapshot
            and not self._begin_snapshot(standby, journal)
        ):
            self._drop(standby, "there is no snapshot for it")  # it dials again
            return
        if self._stands_by and not self._is_followed and silent < LEASE_SECONDS:  # else it is behind still
            self._rely_on(standby)
        self._send_heartbeat(standby)
        self._loop.call_later(HEARTBEAT_SECONDS, self._heartbeat, standby)

    def _send_heartbeat(self, standby: Connection) -> None:
        self._heartbeats.append(self._loop.time())
        acknowledged = ((each.number, *each.retransmit_buffer.acknowledged) for each in self._connections.all())
        standby.send(Heartbeat(tuple(acknowledged) if self._snapshot_number else (), self._is_followed))

    def _begin_snapshot(self, standby: Connection, journal: Journal) -> bool:
        """Sends the snapshot, where it is there; False where it will not be."""
        parts = journal.payload(self._snapshot_number)
        try:
            first = next(parts)
        except (AtollError, OSError):
            return journal.is_snapshotting
        self._has_snapshot = True
        self._send_snapshot(standby, journal.term, chain([first], parts))
        return True

    def _send_snapshot(self, standby: Connection, term: int, parts: Iterator[tuple[bytes, bool]]) -> None:
        """One part a turn of the loop, which has other things to do, and no more than the standby takes."""
        if self._standby is not standby:
            return
        pause = _FULL_SECONDS
        if standby.statistics().unsent_bytes < MOST_QUEUED:
            try:
                part, is_last = next(parts)
            except (AtollError, OSError) as error:
                self._drop(standby, f"its snapshot cannot be read: {error}")
                return
            standby.send_in_pieces(encode(SnapshotChunk(part, term, is_last)))
            if is_last:
                return
            pause = 0.0
        self._loop.call_later(pause, self._send_snapshot, standby, term, parts)

    # ---- what it says

    def _link(self, message: AnyLinkMessage) -> None:
        """It acknowledges heartbeats, as what comes in pieces; and once it stands by, turns."""
        if isinstance(message, Acknowledge):
            while self._heartbeats and self._answered < message.pieced:
                self._answered += 1
                self._heard = self._heartbeats.popleft()
            self._stands_by = self._stands_by or message.whole > 0

    def _rely_on(self, standby: Connection) -> None:
        """From one heartbeat to the next: peers know of it before this process is not started again.

        Should this process end in here, both it and the standby go on, and terms decide; not neither.
        """
        if self._announced != self._address:
            self._announced = self._address
            self._announce((self._address,))
            return
        self._is_followed, self._relied_on = True, self._address
        self._leader_fence.begin()
        self._send_heartbeat(standby)
        standby.flush()
        _log.warning("a standby at %s follows this controller", self._address)
        self._report(FOLLOWED)

    def _drop(self, standby: Connection, reason: str) -> None:
        standby.abort()
        self._lost(reason)

    def _lost(self, reason: str) -> None:
        self._standby = None
        if not self._is_followed:
            self._forget()
            return
        _log.warning("the standby at %s does not follow any more: %s", self._address, reason)
        self._is_followed = False
        self._suspected_until = self._loop.time() + _SUSPICION_SECONDS
        self._report(ALONE)
        # Where it has taken over, peers that come here meanwhile are to find it.
        self._loop.call_later(_SUSPICION_SECONDS, self._forget)

    def _forget(self) -> None:
        """It has not taken over: peers need not look for it, unless there is another one."""
        if self._standby is not None:
            return
        self._leader_fence.end()
        if self._announced:
            self._announced = ""
            self._announce(())

    def end(self) -> None:
        """The cluster ends, and nobody is to go on."""
        self._leader_fence.end()
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.send_link(Close())
            standby.close()

    def drop(self) -> None:
        """Another controller has taken over."""
        self._leader_fence.stop()
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.abort()


def _parts(content: bytes) -> Iterator[tuple[bytes, bool]]:
    """What is sent as several messages, and whether each is the last."""
    for start in range(0, len(content), _PART_BYTES):
        part = content[start : start + _PART_BYTES]
        yield part, start + len(part) == len(content)


def is_standby(message: object) -> bool:
    """Whether a connection's first message is that of a standby."""
    return isinstance(message, m.Hello) and message.role == STANDBY
