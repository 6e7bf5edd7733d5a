"""A standby: replicates a controller on another machine, and continues in its place when it is lost.

It always listens at its own address. Peers that cannot reach the controller connect there and are asked to wait. When
enough of them are there (`takeover`), the standby takes the next term and serves them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from atoll._version import __version__
from atoll.controller_process.controller_identities import own_identity
from atoll.controller_process.controller_options import FOLLOWS, RUNS, ControllerOptions, report
from atoll.controller_process.process_state import ProcessState, decode_snapshot
from atoll.controller_process.shell import ControllerShell
from atoll.controller_process.standby_replication import put_off
from atoll.controller_process.standby_status import StandbyProgress
from atoll.controller_process.takeover import Takeover, first_term, next_term, transitions_of
from atoll.errors import ConnectError
from atoll.journal.files import JournalDirectory
from atoll.journal.records import decode_events
from atoll.leadership.election import Claim, LeaseState
from atoll.leadership.lease_keeper import LeaseKeeper
from atoll.protocol import messages as m
from atoll.protocol.messages.standby_messages import STANDBY, Heartbeat, LogBatchChunk, SnapshotChunk, ToStandby
from atoll.security.access import token_for
from atoll.security.enrollment import FromJoiner
from atoll.security.roles import Role
from atoll.wire.address import Address, parse_address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import connect
from atoll.wire.resumption.accepted_link import CONTROLLERS
from atoll.wire.resumption.link_messages import Acknowledge, AnyLinkMessage, Close, Resume, ResumeRefused
from atoll.wire.resumption.retransmit_buffer import Counts
from atoll.wire.tls.identity import Identity
from atoll.wire.unauthenticated import UnauthenticatedConnections

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.25
# Allows for turns of the loop, each of which reads a part of the received data.
_LATE_SECONDS = 0.05
# Between attempts to notify the earlier controller of the takeover.
_STANDS_BY = "it is a standby that has not taken over"


class Standby:
    """A standby. `run` follows the controller until this process takes over or has nothing to follow anymore.

    `make_shell` makes the shell of the replicated state when this process takes over. `accept` is called for each
    connection to this process's address; `identity` is for TLS. With an external `lease`, this process takes over when
    it has acquired the lease. Raises JournalError or AccessError.
    """

    def __init__(
        self,
        options: ControllerOptions,
        make_shell: Callable[[ProcessState], ControllerShell],
        stop: asyncio.Event,
        unauthenticated: UnauthenticatedConnections | None = None,
        lease: LeaseKeeper | None = None,
    ) -> None:
        self._lease = lease
        self._where = options.advertise or options.listen
        self._make_shell = make_shell
        self._stop = stop
        self._report = partial(report, options.ready_fd)
        self._loop = asyncio.get_running_loop()
        self._address: Address = parse_address(options.standby)
        self.identity, self._own_identity = _identities(options)
        self._directory = JournalDirectory(options.journal)
        self._takeover = Takeover()
        self._state: ProcessState | None = None  # a replica of the controller's state
        self._shell: ControllerShell | None = None  # after the takeover
        self._term = 0  # of the controller
        self._unauthenticated = unauthenticated or UnauthenticatedConnections()
        self._is_over: asyncio.Future[bool] = self._loop.create_future()  # whether it takes over
        self._progress = StandbyProgress(options.directory, options.standby, lease=lease.name if lease else "")
        self._reset()
        if lease is not None:
            lease.watch(self._lease_changed_in_thread)

    def _reset(self) -> None:
        self._chunks: list[bytes] = []  # of a snapshot
        self._early: list[bytes] = []  # turns that arrived before the end of the snapshot
        self._turn: list[bytes] = []  # parts of a turn
        self._turns = self._heartbeats = 0
        self._has_snapshot = False

    async def run(self) -> ControllerShell | None:
        """Return the shell that takes over, in its term, or None. Raises ConnectError if the first connection fails."""
        following = self._loop.create_task(self._follow())
        stopping = self._loop.create_task(self._stop.wait())
        try:
            either: set[asyncio.Future[Any]] = {self._is_over, following, stopping}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            following.cancel()
            stopping.cancel()
        if self._state is None or not self._is_over.done() or not self._is_over.result():
            return None
        return self._take_over(self._state)

    @property
    def replica(self) -> ProcessState | None:
        """The replica of the controller's state, if a snapshot has arrived."""
        return self._state if self._has_snapshot else None

    # ---- following

    async def _follow(self) -> None:
        has_followed = False
        while not self._is_over.done():
            lost: asyncio.Future[str] = self._loop.create_future()
            reason = "it cannot be reached"
            try:
                connection = await self._connect(lost)
                try:
                    reason = await lost
                finally:  # the connection has ended, or this process has taken over and ignores the controller
                    connection.abort()
                if not has_followed and not self._has_snapshot:
                    raise ConnectError(f"cannot follow the controller at {self._address}: {reason}")
                _log.warning("lost the controller at %s: %s", self._address, reason)
            except ConnectError:
                if not has_followed and not self._has_snapshot:
                    raise
            has_followed = True
            self._progress.lost(reason)
            self._takeover.lost()
            self._check_takeover()
            await asyncio.sleep(_RETRY_SECONDS)
            while self._lease is not None and self._lease.may_be_acquired:
                # The copy must be kept until that is certain, and the controller would begin another one.
                await asyncio.sleep(_RETRY_SECONDS)

    async def _connect(self, lost: asyncio.Future[str]) -> Connection:
        def on_lost(reason: str) -> None:
            if not lost.done():
                lost.set_result(reason)

        def on_message(message: Any) -> None:
            if isinstance(message, m.Refused):
                on_lost(message.status.message)
            elif not self._continues_to_follow(message):
                on_lost("this standby may have acquired the lease")
            else:
                self._handle(connection, message)

        def on_link(message: AnyLinkMessage) -> None:
            if isinstance(message, Close) and not self._is_over.done():
                _log.warning("the cluster of the controller at %s has ended", self._address)
                self._is_over.set_result(False)

        connection = await connect(
            self._address,
            ToStandby,
            on_message,
            on_lost,
            name="the controller",
            on_link=on_link,
            identity=self._own_identity,
        )
        self._reset()
        token = token_for(self._address, Role.ENGINE)
        lease = self._lease.name if self._lease is not None else ""
        connection.send(m.Hello(m.PROTOCOL, STANDBY, token, os.getpid(), __version__, self._where, lease=lease))
        return connection

    def _handle(self, connection: Connection, message: Any) -> None:
        if not self._has_snapshot:
            self._state = None  # the state from an earlier connection is outdated
            self._progress.copies()
        self._takeover.received(self._loop.time())
        match message:
            case LogBatchChunk(content=content, is_last=is_last):
                self._turn.append(content)
                if is_last:
                    turn, self._turn = b"".join(self._turn), []
                    self._turns += 1
                    self._replay(turn) if self._has_snapshot else self._early.append(turn)
            case SnapshotChunk(content=content, term=term, is_last=is_last):
                self._chunks.append(content)
                if is_last:
                    self._load_snapshot(b"".join(self._chunks), term)
                    self._acknowledge(connection)
            case Heartbeat(acknowledged=acknowledged, is_relied_on=is_relied_on):
                self._heartbeats += 1
                if self._has_snapshot and self._state is not None:
                    for number, whole, pieced in acknowledged:
                        self._state.acknowledged(number, Counts(whole, pieced))
                if is_relied_on and self._has_snapshot and not self._progress.may_take_over:
                    self._progress.follows()
                    self._report(FOLLOWS)
                self._acknowledge(connection)

    def _continues_to_follow(self, message: Any) -> bool:
        """Withdraw the claim to the lease if the controller serves again. Return False if that is too late.

        A controller that is fenced can be followed and replaced. But the copy of its state must not be given up for a
        new one while this process may have acquired the lease.
        """
        is_back = not self._has_snapshot
        if isinstance(message, Heartbeat):
            self._takeover.fenced(message.is_fenced)
            is_back = is_back or not message.is_fenced
        return self._lease is None or not is_back or self._lease.withdraw()

    def _load_snapshot(self, payload: bytes, term: int) -> None:
        """Begin from the snapshot and the turns after it."""
        self._state, self._term = ProcessState(*decode_snapshot(payload), term), term
        self._has_snapshot = True
        self._chunks = []
        early, self._early = self._early, []
        for turn in early:
            self._replay(turn)
        _log.info("following the controller at %s: %d turns since its snapshot", self._address, len(early))

    def _acknowledge(self, connection: Connection) -> None:
        """Acknowledge the snapshot and all turns received so far."""
        connection.send_link(Acknowledge(self._turns + 1 if self._has_snapshot else 0, self._heartbeats))

    def _replay(self, turn: bytes) -> None:
        assert self._state is not None
        self._state.replay(decode_events(turn))

    # ---- peers

    def accept(self) -> Connection:
        """Return a connection object for an incoming connection."""
        if self._shell is not None:
            return self._shell.accept()

        def refuse(message: Any) -> None:
            put_off(connection, message, _STANDS_BY)

        def on_made(connection: Connection) -> None:
            # A process that wants a certificate tries again, here or at another address.
            if self.identity is not None and not connection.peer_role:
                connection.expect(FromJoiner, lambda message: connection.abort(), lambda reason: None)

        def on_link(message: AnyLinkMessage) -> None:
            if isinstance(message, Resume):
                answer = self._answer_to_controller(message)
                connection.send_link(answer or ResumeRefused(_STANDS_BY, final=False))
                connection.close()
                if message.number != CONTROLLERS:
                    self._on_resume_attempt(message)

        connection = Connection(
            m.ToController,
            refuse,
            lambda reason: None,
            name="a peer",
            on_made=on_made,
            on_link=on_link,
            unauthenticated=self._unauthenticated,
        )
        return connection

    def _answer_to_controller(self, message: Resume) -> ResumeRefused | None:
        """Return the answer to an earlier controller of the cluster that this process follows; None for other peers."""
        state = self.replica
        return state.acceptor.answer_to_controller(message, str(self._address)) if state is not None else None

    def _on_resume_attempt(self, message: Resume) -> None:
        state = self._state
        if state is not None and message.term <= self._term and state.acceptor.is_secret_of(message):
            self._takeover.on_resume_attempt(self._loop.time(), message.number)
            # If this process was late, messages of the controller may still be unread: that is not silence.
            self._loop.call_later(_LATE_SECONDS, self._check_takeover)

    def _check_takeover(self) -> None:
        state = self._state
        if state is None or not self._progress.may_take_over or self._is_over.done():
            return
        if self._lease is not None:
            if self._takeover.may_claim(self._loop.time()):
                self._lease.claim(Claim(transitions_of(self._term), self._where))
        elif self._takeover.is_due(self._loop.time(), state.controller.connections.deciders):
            self._is_over.set_result(True)

    def _lease_changed_in_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._lease_changed)

    def _lease_changed(self) -> None:
        """Take over if this process has acquired the lease, because nobody else can from now on."""
        if self._lease is not None and self._lease.state is LeaseState.HELD and not self._is_over.done():
            self._is_over.set_result(True)

    # ---- taking over

    def _take_over(self, state: ProcessState) -> ControllerShell:
        term = next_term(self._term) if self._lease is None else first_term(self._lease.transitions)
        _log.warning("the controller at %s is lost: this standby takes over in term %d", self._address, term)
        state.take_over_from(str(self._address), self._where)
        shell = self._make_shell(state)  # if this fails, the files of an earlier journal stay
        shell.keep_journal(self._directory, term).begin_or_retry()
        shell.resume(term)
        self._shell = shell
        self._progress.takes_over()
        self._report(RUNS)
        return shell


def _identities(options: ControllerOptions) -> tuple[Identity | None, Identity | None]:
    """Return the identities as a controller and towards one, from the cluster's CA; None without TLS."""
    listen, standby = parse_address(options.listen), parse_address(options.standby)
    return (
        own_identity(listen, options.directory, Role.CONTROLLER, "the controller"),
        own_identity(standby, options.directory, Role.ENGINE, "a standby"),
    )
