"""Replicate this controller to a standby: a snapshot, then each turn before its decisions leave the process.

A turn is handed to the kernel without waiting for the standby, so nothing is lost if this process ends. If the machine
or the network fails, turns in transit are lost. The standby then refuses peers that know more than it does
(`wire.resumption.resumable_connections`).
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from atoll._version import __version__
from atoll.cluster.state_machine import StateMachine
from atoll.controller.core import Controller
from atoll.controller_process.controller_options import ALONE, FOLLOWED
from atoll.controller_process.lease_fence import LeaseFence
from atoll.controller_process.takeover import LEASE_SECONDS, LeaderFence
from atoll.errors import AtollError, Code, Details, Status, failure
from atoll.journal.journal import Journal
from atoll.journal.records import join_records
from atoll.leadership.lease_keeper import HeldLease
from atoll.protocol import messages as m
from atoll.protocol.messages.standby_messages import STANDBY, Heartbeat, LogBatchChunk, SnapshotChunk
from atoll.security.roles import may_claim
from atoll.wire.connection import Connection
from atoll.wire.framing import encode
from atoll.wire.late_timers import call_later
from atoll.wire.resumption.link_messages import Acknowledge, AnyLinkMessage, Close, ResumeRefused
from atoll.wire.resumption.resumable_connections import ResumableConnections

_log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
# Drop a standby that is silent for this long; the engine then restarts a controller that fails. A standby that is still
# catching up, with a large snapshot or on a busy machine, is not relied on and has more time.
_SILENT_SECONDS = 5.0
_CATCH_UP_SECONDS = 60.0
SUSPICION_SECONDS = 6.0
_PART_BYTES = 1 << 20
# Bytes of a snapshot in this process's memory at a time, and the time between checks if the standby has taken some.
MAX_QUEUED = 16 << 20
_FULL_SECONDS = 0.01


class ReplicationState(enum.IntEnum):
    """How far the standby is. From `WRITING` on, it is sent all turns."""

    ALONE = 0  # no standby is connected
    ENDED = 1  # the cluster has ended, so no other process must continue
    LEFT = 2  # another controller continues
    WAITING = 3  # the standby waits until a snapshot begins
    WRITING = 4  # a snapshot for it is being written
    LOADING = 5  # it is being sent the snapshot, and loads it
    REPLAYING = 6  # it has loaded the snapshot, and replays turns
    FOLLOWING = 7  # it is relied on: it continues if this process ends


_S = ReplicationState

# The states that may follow each state, apart from `ENDED` and `LEFT`, which `end`, `leave` and `drop` enter from any
# other one. The comments name the methods that cause the transitions.
_NEXT: Mapping[ReplicationState, frozenset[ReplicationState]] = {
    # `serve`
    _S.ALONE: frozenset({_S.WAITING}),
    # `begin`; `_lost`
    _S.WAITING: frozenset({_S.WRITING, _S.ALONE}),
    # `_begin_snapshot`; `_lost`
    _S.WRITING: frozenset({_S.LOADING, _S.ALONE}),
    # `_link`, by the first acknowledgement of turns; `_lost`
    _S.LOADING: frozenset({_S.REPLAYING, _S.ALONE}),
    # `_rely_on`; `_lost`
    _S.REPLAYING: frozenset({_S.FOLLOWING, _S.ALONE}),
    # `_lost`
    _S.FOLLOWING: frozenset({_S.ALONE}),
}
_OVER = frozenset({_S.ENDED, _S.LEFT})
TRANSITIONS: Mapping[ReplicationState, frozenset[ReplicationState]] = {
    **{state: following | _OVER for state, following in _NEXT.items()},
    _S.ENDED: _OVER,
    _S.LEFT: _OVER,
}


class StandbyReplication(StateMachine[ReplicationState]):
    """Replicates to one standby at a time.

    `journal()` returns the controller's journal, and `report` tells its engine if it is followed. `announce(addresses)`
    tells all peers of other addresses of a controller. `connections` are those of the peers. For `suspicion_seconds`
    after its loss, a standby may have taken over, for instance while this process was frozen: it announces itself then.
    With an external `lease`, a standby takes over only if the record of the lease names it.
    """

    transitions = TRANSITIONS

    def __init__(
        self,
        controller: Controller,
        journal: Callable[[], Journal | None],
        report: Callable[[bytes], None],
        announce: Callable[[tuple[str, ...]], None],
        connections: ResumableConnections,
        suspicion_seconds: float = SUSPICION_SECONDS,
        lease: HeldLease | None = None,
    ) -> None:
        self._suspicion_seconds = suspicion_seconds
        self._tokens = controller.tokens
        self._journal = journal
        self._report = report
        self._announce = announce
        self._connections = connections
        self._lease = lease
        self._leader_fence = (
            LeaderFence(self._standby_suspicion, lambda: controller.connections.deciders, connections)
            if lease is None
            else LeaseFence(lease, self._standby_suspicion, lambda: controller.connections.deciders, connections)
        )
        self._loop = asyncio.get_running_loop()
        self._standby: Connection | None = None
        self._address = ""  # of the standby
        self.state = ReplicationState.ALONE
        self._snapshot_number = 0  # of the snapshot that it begins with, once that has begun
        self._announced = ""  # the address that all peers know
        self._relied_on = ""  # the address of the last standby that followed
        self._heartbeats: deque[float] = deque()  # send times of unacknowledged heartbeats
        self._answered = 0  # acknowledged heartbeats
        # Send time of the last acknowledged one, because an acknowledgement may wait in a socket.
        self._last_acknowledged = 0.0
        self._suspected_until = 0.0
        if lease is not None:
            self._leader_fence.begin()

    def serve(self, connection: Connection, hello: m.Hello) -> None:
        """Serve a connection whose first message is the Hello of a standby."""
        refused = self._refusal(connection, hello)
        if refused is not None:
            refuse_hello(connection, refused)
            return
        if self.state is ReplicationState.ENDED:  # the standby lost its connection before it read the Close
            connection.close_with(Close())
            return
        connection.authenticated()
        connection.name = f"the standby at {hello.label}"
        connection.set_handlers(lambda message: None, self._lost, self._link)  # a standby sends only link messages
        self._standby, self._address = connection, hello.label
        self.enter(ReplicationState.WAITING)
        self._heartbeats.clear()
        self._answered = 0
        self._last_acknowledged = self._loop.time()
        self._heartbeat(connection)

    def _refusal(self, connection: Connection, hello: m.Hello) -> Status | None:
        if not may_claim(connection.peer_role, hello.role) or not self._tokens.are_right(hello.role, hello.token):
            return Status(Code.PERMISSION_DENIED, "a standby must authenticate like the cluster's engine")
        if (hello.protocol, hello.version) != (m.PROTOCOL, __version__):
            text = f"the controller runs atoll {__version__}, the standby {hello.version}: install the same version"
            return Status(Code.FAILED_PRECONDITION, text)
        if self._journal() is None:
            text = "this cluster has no journal to follow: start it with `atoll up --journal DIRECTORY`"
            return Status(Code.FAILED_PRECONDITION, text)
        here = self._lease.name if self._lease is not None else "no lease"
        if (hello.lease or "no lease") != here:
            there = hello.lease or "no lease"
            text = f"the controller uses {here}, the standby {there}: give both the same --leader-lease"
            return Status(Code.FAILED_PRECONDITION, text)
        if self._standby is not None:
            return Status(Code.ALREADY_EXISTS, f"this controller has a standby, at {self._address}")
        return None

    @property
    def successor(self) -> tuple[str, ...]:
        """The address of the standby that was relied on last, also by an earlier process, which may have taken over.

        Peers may not know it anymore: a standby waits longer for hosts than this process relies on it.
        """
        journal = self._journal()
        address = self._relied_on or (journal.successor.address if journal is not None else "")
        return (address,) if address else ()

    def takeover_suspicion(self) -> str:
        """Return the reason not to serve peers that reconnect, which is that the standby may have taken over, or "".

        Peers that are connected have not gone to the standby.
        """
        if self._lease is None:
            return self._standby_suspicion()
        return (
            "" if self._lease.holds() else f"it does not hold {self._lease.name}, and another one may have taken over"
        )

    def _standby_suspicion(self) -> str:
        now = self._loop.time()
        may_follow = self.state in (ReplicationState.FOLLOWING, ReplicationState.LEFT)
        if now < self._suspected_until or (may_follow and now - self._last_acknowledged > LEASE_SECONDS):
            return f"the standby at {self._address} may have taken over: it is silent"
        return ""

    @property
    def is_fenced(self) -> bool:
        """Whether messages to peers are held back."""
        return self._leader_fence.is_active

    def check_fence(self) -> None:
        """Hold messages back from now on if another controller may have taken over. Call this before sending them."""
        self._leader_fence.check()

    # ---- messages to the standby

    @property
    def follower(self) -> str:
        """The address of the standby that has all events and takes over if this process ends, or ""."""
        return self._address if self.state is ReplicationState.FOLLOWING else ""

    @property
    def wants_snapshot(self) -> bool:
        """Whether to begin a snapshot between two turns."""
        journal = self._journal()
        return self.state is ReplicationState.WAITING and journal is not None and not journal.is_snapshotting

    def begin(self, journal: Journal) -> None:
        """Send all later turns to a standby that waits for a snapshot, because a snapshot has begun."""
        if self.state is ReplicationState.WAITING:
            self.enter(ReplicationState.WRITING)
            self._snapshot_number = journal.number

    def send(self, turn: Sequence[bytes]) -> None:
        """Send a turn that was handled. The kernel has it on return, unless the standby does not read."""
        standby = self._standby
        if standby is None or self.state < ReplicationState.WRITING:
            return
        for part, is_last in _parts(join_records(turn)):
            standby.send(LogBatchChunk(part, is_last))
        standby.flush()

    def _heartbeat(self, standby: Connection) -> None:
        if self._standby is not standby:
            return
        silent = self._loop.time() - self._last_acknowledged
        most = _SILENT_SECONDS if self.state is ReplicationState.FOLLOWING else _CATCH_UP_SECONDS
        if silent > most:
            self._drop(standby, f"it was silent for {most:.0f} s")
            return
        journal = self._journal()
        if (
            journal is not None
            and self.state is ReplicationState.WRITING
            and not self._begin_snapshot(standby, journal)
        ):
            self._drop(standby, "its snapshot failed")  # it reconnects
            return
        if self.state is ReplicationState.REPLAYING and silent < LEASE_SECONDS:  # otherwise it is still behind
            self._rely_on(standby)
        self._send_heartbeat(standby)
        call_later(self._loop, HEARTBEAT_SECONDS, partial(self._heartbeat, standby))

    def _send_heartbeat(self, standby: Connection) -> None:
        self._heartbeats.append(self._loop.time())
        acknowledged = ((each.number, *each.link.buffer.acknowledged) for each in self._connections.all())
        is_fenced = self._lease is not None and not self._lease.holds()
        is_copying = self.state >= ReplicationState.WRITING
        is_followed = self.state is ReplicationState.FOLLOWING
        standby.send(Heartbeat(tuple(acknowledged) if is_copying else (), is_followed, is_fenced))

    def _begin_snapshot(self, standby: Connection, journal: Journal) -> bool:
        """Begin to send the snapshot if it is complete. Return False if it will never be."""
        parts = journal.payload(self._snapshot_number)
        try:
            first = next(parts)
        except (AtollError, OSError):
            return journal.is_snapshotting
        self.enter(ReplicationState.LOADING)
        self._send_snapshot(standby, journal.term, chain([first], parts))
        return True

    def _send_snapshot(self, standby: Connection, term: int, parts: Iterator[tuple[bytes, bool]]) -> None:
        """Send one part of the snapshot per turn of the loop, and no more than the standby accepts."""
        if self._standby is not standby:
            return
        pause = _FULL_SECONDS
        if standby.statistics().unsent_bytes < MAX_QUEUED:
            try:
                part, is_last = next(parts)
            except (AtollError, OSError) as error:
                self._drop(standby, f"cannot read its snapshot: {error}")
                return
            standby.send_in_pieces(encode(SnapshotChunk(part, term, is_last)))
            if is_last:
                return
            pause = 0.0
        self._loop.call_later(pause, self._send_snapshot, standby, term, parts)

    # ---- messages from the standby

    def _link(self, message: AnyLinkMessage) -> None:
        """Handle acknowledgements: of heartbeats in `pieced`, and of turns in `whole` once the standby has loaded."""
        if isinstance(message, Acknowledge):
            while self._heartbeats and self._answered < message.pieced:
                self._answered += 1
                self._last_acknowledged = self._heartbeats.popleft()
            if message.whole > 0 and self.state is ReplicationState.LOADING:
                self.enter(ReplicationState.REPLAYING)

    def _rely_on(self, standby: Connection) -> None:
        """Rely on the standby: first tell peers its address, and one heartbeat later tell the engine not to restart.

        The journal, and the record of an external lease, must also name the standby.

        If this process ends in between, both it and the standby continue, and their terms decide.
        """
        if self._announced != self._address:
            self._announced = self._address
            self._announce((self._address,))
            return
        journal = self._journal()
        if journal is not None and not journal.names(self._address):
            return
        if self._lease is not None:
            self._lease.name_standby(self._address)
            if self._lease.named_standby != self._address:
                return
        self.enter(ReplicationState.FOLLOWING)
        self._relied_on = self._address
        self._leader_fence.begin()
        self._send_heartbeat(standby)
        standby.flush()
        _log.info("a standby at %s follows this controller", self._address)
        self._report(FOLLOWED + self._address.encode() + b"\n")

    def _drop(self, standby: Connection, reason: str) -> None:
        standby.abort()
        self._lost(reason)

    def _lost(self, reason: str) -> None:
        has_followed = self.state is ReplicationState.FOLLOWING
        self._standby = None
        self.enter(ReplicationState.ALONE)
        if not has_followed:
            self._forget()
            return
        _log.warning("the standby at %s does not follow anymore: %s", self._address, reason)
        self._suspected_until = self._loop.time() + self._suspicion_seconds
        self._report(ALONE)
        # If the standby has taken over, peers that reconnect here meanwhile must be able to find it.
        self._loop.call_later(self._suspicion_seconds, self._forget)

    def _forget(self) -> None:
        """Withdraw the address of a standby that has not taken over, unless it has connected again.

        A different standby that has connected meanwhile is announced once its copy is complete.
        """
        if self._loop.time() < self._suspected_until:
            return  # until then the last standby that was relied on may have taken over
        if self._standby is not None and self._address == self._announced:
            return
        self._leader_fence.end()
        if self._lease is not None:
            self._lease.name_standby("")
        if self._announced:
            self._announced = ""
            self._announce(())

    def end(self) -> None:
        """End the replication, because the cluster ends and no controller must continue."""
        self.enter(ReplicationState.ENDED)
        if self._lease is not None:  # a standby that does not receive the Close must not continue either
            self._lease.name_standby("")
        self._leader_fence.end()
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.send_link(Close())
            standby.close()

    def leave(self) -> None:
        """Send the standby what is left, because this controller ends and leaves the cluster to the standby."""
        self.enter(ReplicationState.LEFT)
        self._leader_fence.stop()
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.close()

    def drop(self) -> None:
        """Drop the standby, because another controller has taken over."""
        self.enter(ReplicationState.LEFT)
        self._leader_fence.stop()
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.abort()


def refuse_hello(connection: Connection, status: Status) -> None:
    """Refuse a peer whose Hello has arrived, and close its connection."""
    connection.ignore()
    connection.refuse(status.message)
    connection.send(m.Refused(status))
    connection.close()


def put_off(connection: Connection, message: object, reason: str) -> None:
    """Refuse a peer whose first message has arrived, because this process admits nobody now. The peer tries again."""
    if isinstance(message, m.Hello) and message.redials:
        connection.ignore()
        connection.refuse(reason)
        connection.send_link(ResumeRefused(reason, final=False))
        connection.close()
    else:
        refuse_hello(connection, failure(Code.UNAVAILABLE, reason, Details(retriable=True)))


def _parts(content: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield the parts of content that is sent as several messages, and whether each is the last."""
    for start in range(0, len(content), _PART_BYTES):
        part = content[start : start + _PART_BYTES]
        yield part, start + len(part) == len(content)


def is_standby(message: object) -> bool:
    """Whether a connection's first message is from a standby."""
    return isinstance(message, m.Hello) and message.role == STANDBY
