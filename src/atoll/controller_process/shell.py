"""The shell of a controller: sockets, clock and randomness around `core.Controller`, which makes all decisions."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from atoll.cluster.processes.bugs import described
from atoll.cluster.processes.leases import PING_SECONDS
from atoll.cluster.processes.lifeline import watch_in_loop
from atoll.cluster.processes.process_logging import FIELDS
from atoll.cluster.state_machine import StateMachine
from atoll.cluster.tenant_settings import persisted_tenants
from atoll.cluster.usage.keeper import Keeper
from atoll.controller.core import Controller
from atoll.controller.faults import NothingChangedError, failure
from atoll.controller_process.collector import Collector
from atoll.controller_process.controller_identities import own_identity
from atoll.controller_process.controller_options import CHARGED, FAILED, FOLLOWED, READY, ControllerOptions, report
from atoll.controller_process.earlier_controllers import EarlierControllers
from atoll.controller_process.entry import CLEANED, clean
from atoll.controller_process.incoming_connection import IncomingConnection, PeerServices
from atoll.controller_process.process_state import (
    ProcessState,
    ShellDump,
    encode_shell,
    encode_snapshot,
    skipped_between,
)
from atoll.controller_process.standby_replication import SUSPICION_SECONDS, StandbyReplication
from atoll.controller_process.step_budget import StepBudget
from atoll.controller_process.takeover import first_term
from atoll.errors import AtollError, Code, Status
from atoll.journal.files import JournalDirectory
from atoll.journal.journal import Journal
from atoll.journal.persisted_state import PersistedCluster, PersistedState, encode_persisted
from atoll.journal.records import decode_event
from atoll.leadership.lease_keeper import LeaseKeeper
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.security.enrollment import Joiners
from atoll.security.roles import Role
from atoll.security.start_security import load_certificate_authority
from atoll.security.tokens import digest
from atoll.state.stepped_work import TurnFailedError
from atoll.telemetry.load import LoadMeter
from atoll.wire import late_timers
from atoll.wire.connection import Connection
from atoll.wire.framing import encode
from atoll.wire.resumption.accepted_link import CONTROLLERS
from atoll.wire.resumption.link_messages import AlternateAddresses, Resume
from atoll.wire.resumption.resumable_connections import AcceptedConnection, ResumableConnections
from atoll.wire.unauthenticated import UnauthenticatedConnections

_log = logging.getLogger(__name__)

# The error of sessions that end with the cluster.
CLUSTER_ENDED = "the cluster has ended: `atoll status` on its machine shows why; start the script again on another one"
# For the last replies to be sent.
_END_SECONDS = 0.05
# Messages on connections that cannot be fenced. They are not sent without the lease.
_CANNOT_WAIT = (m.TellAgent, m.OperationReply)


class ShellTimes(msgspec.Struct, frozen=True):
    """Times of a controller's process, in seconds."""

    ping: float = PING_SECONDS  # between two ticks
    # After a restart, for peers whose connections cannot be resumed, such as host agents, to connect before the old
    # connections are lost.
    reconnect: float = 5.0
    suspicion: float = SUSPICION_SECONDS  # for which a lost standby may have taken over


USUAL_TIMES = ShellTimes()


def new_controller(options: ControllerOptions, token: str = "", host_token: str = "") -> Controller:
    """Return the controller of a new cluster. Raises SettingsError if its persisted tenants are invalid."""
    settings = msgspec.structs.replace(options.settings, tenants=persisted_tenants(options.directory))
    return Controller(settings, digest(token), host_token=digest(host_token))


class ShellState(enum.Enum):
    """The state of a shell. In all states but the first, it does nothing more."""

    RUNNING = enum.auto()
    FAILED = enum.auto()  # by the bug in `failure`
    SUPERSEDED = enum.auto()  # by the controller of the term `superseded_by`, which has taken over
    LEFT = enum.auto()  # another process continues from the journal


TRANSITIONS: dict[ShellState, frozenset[ShellState]] = {
    # `_fail`; `_end_superseded`; `leave_journal`
    ShellState.RUNNING: frozenset({ShellState.FAILED, ShellState.SUPERSEDED, ShellState.LEFT}),
    ShellState.FAILED: frozenset(),
    ShellState.SUPERSEDED: frozenset(),
    ShellState.LEFT: frozenset(),
}


class ControllerShell(StateMachine[ShellState]):
    """Turns what happens into events, and executes the controller's decisions once per turn of the loop.

    It serves `state`, and sets `stop` when it ends. The state is that of a new controller, which `start` begins, or
    that of an earlier process, which `resume` continues. It sends messages only while it holds its external `lease`, if
    there is one.
    """

    transitions = TRANSITIONS

    def __init__(
        self,
        options: ControllerOptions,
        state: ProcessState,
        stop: asyncio.Event,
        *,
        has_tls: bool = False,
        unauthenticated: UnauthenticatedConnections | None = None,
        times: ShellTimes = USUAL_TIMES,
        lease: LeaseKeeper | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._call_later = partial(late_timers.call_later, self._loop)  # for deadlines of peers
        self._times = times
        self._own_clock = state.clock
        self._own_clock.read_every(times.ping)
        self._clock = state.clock.now
        self._last_reading = state.reading  # of an earlier process
        self.controller = state.controller
        self.joiners = (
            Joiners(load_certificate_authority(options.directory), self.controller.tokens) if has_tls else None
        )
        self.keeper = Keeper(options.usage_file, options.cache_directory)
        self._report = partial(report, options.ready_fd)
        self._stop = stop
        self._next = state.next
        self._timers = state.timers
        self._others = state.others
        self._connections: dict[int, Connection | AcceptedConnection] = {}
        self.resumable = ResumableConnections(
            state.acceptor,
            on_away=lambda number: self._handle(e.ConnectionAway(self._clock(), number)),
            on_back=lambda number: self._handle(e.ConnectionBack(self._clock(), number)),
            acknowledge_soon=lambda each: self._to_acknowledge.append(each),  # at the end of this turn, when it is safe
            commit=self.flush_now,
            watch=watch_in_loop,
            on_superseded=self._later_term,
            takeover_suspicion=lambda: self.replication.takeover_suspicion(),
        )
        self._own = (options.advertise or options.listen,) if options.standby else ()  # peers dialed another address
        self.resumable.alternate_addresses = self._own
        self.replication = StandbyReplication(
            self.controller,
            journal=lambda: self.journal,
            report=self._report,
            announce=self._announce,
            connections=self.resumable,
            suspicion_seconds=times.suspicion,
            lease=lease,
        )
        self._earlier = state.earlier
        self._identity_at = partial(own_identity, directory=options.directory, role=Role.ENGINE, name="a controller")
        self._notices: EarlierControllers | None = None  # in later terms
        self.lease = lease
        if lease is not None:
            lease.watch(self._lease_changed_in_thread)
            self._loop.call_soon(self._lease_changed)  # it may have been lost before
        self._peer_services = PeerServices(
            controller=self.controller,
            connections=self._connections,
            replication=self.replication,
            resumable=self.resumable,
            unauthenticated=unauthenticated or UnauthenticatedConnections(),
            has_lease=lease is not None,
            resumes=self.controller.settings.grace_seconds > 0,
        )
        self.state = ShellState.RUNNING
        self.failure = ""
        self.superseded_by = 0
        self.journal: Journal | None = None
        self._uncommitted: list[bytes] = []  # records of turns that are not in the journal yet
        self.collector = Collector()
        self._budget = StepBudget()
        self._has_work = False  # after the last turn
        self._has_opened = False  # a connection, whose number the peer learns and which must not be used again
        self._flush_scheduled = False
        self._to_acknowledge: list[AcceptedConnection] = []
        self._encoded: tuple[Any, bytes] = (None, b"")  # the last message sent, and its frame
        self._load = LoadMeter(self._connections, time.monotonic)
        self._has_done_turn = False
        self._suspects = state.suspects
        self._turn = 0.0  # monotonic time of the first event in this turn
        self._to_persist: list[a.PersistSessions] = []
        self._does = self._actions()
        for number, link in state.links.items():
            self._connections[number] = self.resumable.add(link, *self._callbacks(number))

    def _actions(self) -> dict[type[Any], Callable[[Any], None]]:
        """Return what to call for each action of the controller, by its type."""
        return {
            a.Send: self._send,
            a.Close: self._close,
            a.Name: self._name,
            a.Log: _log_event,
            a.SetTimer: self._set_timer,
            a.SetPatience: self._set_patience,
            a.ReportReady: lambda action: self._report(READY),
            a.End: self._end,
            a.PersistSessions: self._to_persist.append,
            a.StoreUsage: lambda action: self.keeper.store_usage(action.present_ns, action.usage),
            a.StoreEstimates: lambda action: self.keeper.store_estimates(action.estimates),
            a.AnswerUsage: self._answer_usage,
        }

    @property
    def _is_over(self) -> bool:
        return self.state is not ShellState.RUNNING

    # ---- events

    def start(self, persisted: bytes = b"", secrets: dict[int, str] | None = None) -> None:
        """Begin the cluster, with the `persisted` sessions of an ended one and their `secrets`."""
        self._handle(e.Started(self._clock()))
        if persisted:
            self._handle(e.SessionsPersisted(self._clock(), persisted, secrets or {}))
            self._await_peers("their cluster was ended")
        estimates = self.keeper.read_estimates()
        if estimates:
            self._handle(e.EstimatesRead(self._clock(), estimates))
        self._tick()

    def _later_term(self, message: Resume) -> None:
        """End if a peer that is trusted says that a later term has begun: a controller, a host or the engine."""
        if self._is_over:
            return
        if message.number == CONTROLLERS:
            self._end_superseded(message.term, message.address)
        elif message.number in self.controller.connections.trusted:
            self._end_superseded(message.term)

    def _lease_changed_in_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._lease_changed)

    def _lease_changed(self) -> None:
        """End if another controller has the lease."""
        if self.lease is not None and self.lease.is_lost and not self._is_over:
            self._end_superseded(first_term(self.lease.transitions))

    def _end_superseded(self, term: int, address: str = "") -> None:
        """End at once: decide and write nothing more, and tell all peers only the address of the other controller.

        That is `address`, or the address of the standby if that is "".
        """
        _log.error("term %d has begun elsewhere: this controller, of term %d, ends", term, self.resumable.term)
        self.enter(ShellState.SUPERSEDED)
        self.superseded_by = term
        there = (address,) if address else self.replication.successor
        if self.journal is not None:
            self.journal.superseded(term, address)
            self.journal.close()
            self.journal = None
        self.replication.drop()
        if self._notices is not None:
            self._notices.end()
        if there:
            self._report(FOLLOWED + there[0].encode() + b"\n")
        for connection in list(self._connections.values()):
            if isinstance(connection, AcceptedConnection):
                connection.hand_over(there)
            else:
                connection.close_with(AlternateAddresses(there))
        self._stop.set()

    def accept(self) -> Connection:
        """Return a connection object for an incoming connection. It counts after its TLS handshake, if any."""
        number = self._next
        self._next += 1
        on_message, on_lost = self._callbacks(number)
        incoming = IncomingConnection(
            self._peer_services,
            number,
            on_made=partial(self._made, number),
            on_message=on_message,
            on_lost=on_lost,
        )
        return incoming.connection

    def _made(self, number: int, connection: Connection) -> None:
        if self._is_over:
            connection.abort()
            return
        if self.joiners is not None and not connection.peer_role:
            self.joiners.serve(connection)
            return
        self._connections[number] = connection
        self._has_opened = True
        opened = self._clock(), number, os.urandom(16).hex(), connection.peer_role, connection.peer
        self._handle(e.ConnectionOpened(*opened))

    def _callbacks(self, number: int) -> tuple[Callable[[Any], None], Callable[[str], None]]:
        """Return the callbacks for the messages and the loss of a connection."""
        handle, clock, received, cleaned = self._handle, self._clock, e.Received, CLEANED

        def on_message(message: Any) -> None:
            if message.__class__ in cleaned:
                message = clean(message)
            handle(received(clock(), number, message))

        def on_lost(reason: str) -> None:
            connection = self._connections.pop(number, None)
            if connection is not None:
                self._load.closed(connection)
            handle(e.ConnectionLost(clock(), number, reason))

        return on_message, on_lost

    def stop(self, persist: bool = False) -> bytes:
        """Ask workers to end. Return the state to persist, once all decided messages have been sent."""
        self._handle(e.StopAsked(self._clock(), persist))
        self._flush()
        self.replication.end()
        if self.joiners is not None:
            self.joiners.close()
        return self._persist_sessions()

    def keep_journal(self, directory: JournalDirectory, term: int, number: int = 1) -> Journal:
        """Keep a journal from now on, whose first segment has this number. The caller begins the segment."""
        self.journal = Journal(directory, term, number, self.snapshot)
        return self.journal

    def leave_journal(self) -> None:
        """Complete the journal, and do nothing more, so that another process can continue from it."""
        assert self.journal is not None
        self.flush_now()
        if not self._is_over:  # the last turn may have failed
            self.enter(ShellState.LEFT)
        self.replication.leave()
        self.journal.close()
        self.journal = None

    def _persist_sessions(self) -> bytes:
        """Close all connections except those of persisted sessions, which wait for the next cluster.

        Return the state that the next cluster needs, or b"" if nothing is persisted.
        """
        dump = self._dump()  # before the connections are closed
        numbers = {number for each in self._to_persist for number in each.sessions.values()}
        for number in sorted(set(self.controller.connections.sessions.values()) - numbers):
            self._tell(number, Status(Code.UNAVAILABLE, CLUSTER_ENDED))
        for connection in self.resumable.all():
            if connection.number in numbers:
                connection.detach(self.controller.settings.suspended_seconds)
            else:
                connection.close()
        if not self._to_persist:
            return b""
        last = self._to_persist[-1]
        dump.links = [link for link in dump.links if link.number in numbers]
        dump.others, dump.timers = {}, {}
        shapes = self.controller.resources.topology.shapes
        tenants = {number: self.controller.sessions[number].tenant.name for number in last.sessions}
        cluster = PersistedCluster(shapes, tenants, last.versions)
        return encode_persisted(PersistedState(cluster, encode_shell(dump), last.content, last.secrets))

    def _tick(self) -> None:
        self._call_later(self._times.ping, self._tick)  # first, so that workers are pinged again after an error
        load = self._measure_load()
        now, reading = self._own_clock.reading()
        self._handle(e.Tick(now, load, reading=reading))
        self._to_acknowledge = self.resumable.all()
        if self.journal is not None:
            self.journal.tick()
        if not self.controller.sessions:
            self.collector.collect_all()

    def _measure_load(self) -> e.Load:
        journal = self.journal.load(self.replication.follower) if self.journal is not None else None
        if journal is not None and self.lease is not None:
            journal = msgspec.structs.replace(journal, lease=self.lease.name, holds_lease=self.lease.holds())
        seconds = self.joiners.identity.certificate.ends - time.time() if self.joiners is not None else -1.0
        load = self._load.measure(self._times.ping)
        return msgspec.structs.replace(load, journal=journal, certificate_seconds=seconds)

    def _handle(self, event: e.AnyEvent) -> None:
        if self.state is not ShellState.RUNNING:  # `_is_over` is a call, and this is on the path of every message
            return
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._turn = time.monotonic()
            self._loop.call_soon(self._flush)
        if self._own_clock.skipped:  # before an event that has a time of a peer in it
            skipped, self._own_clock.skipped = self._own_clock.skipped, 0.0
            self._handle(e.Tick(event.seconds, skipped=skipped))
        try:
            self.controller.handle(event)
        except Exception as error:
            if isinstance(error, AtollError) and isinstance(event, e.Received):
                raise  # the connection layer stops serving the sender
            self._failed_at(event, error)

    # ---- bugs

    def _failed_at(self, event: e.AnyEvent, error: Exception) -> None:
        """Handle a bug: skip the event and end the sender's session. See `controller.faults`."""
        message = getattr(event, "message", None)
        cause = _bug(error)
        reason = f"{'' if message is None else f'{type(message).__name__}: '}{described(cause)}"
        connections = (event.connection,) if isinstance(event, e.Received) else ()
        of = getattr(message, "session", 0) if isinstance(message, m.FromWorker) else 0
        skipped = e.Skipped(self._clock(), reason, connections, (of,) if of else ())
        if isinstance(error, NothingChangedError):
            _log.critical("the controller failed at a message and skips it: %s", reason, exc_info=cause)
            self.controller.handle(skipped)
        else:
            self._fail(skipped, cause)

    def _failed_in_turn(self, error: Exception) -> None:
        """Handle a bug in the work that follows from all events of a turn, which no single session caused.

        If such a bug also ended the previous process, and this one has not completed a turn yet, it ends the sessions
        whose messages arrived in that turn. If the bug occurred at a message that had waited, it ends the session that
        sent the message.
        """
        if isinstance(error, TurnFailedError):
            cause = _bug(error.__cause__ or error)
            self._fail(e.Skipped(self._clock(), described(cause), error.connections, error.sessions), cause)
            return
        ended = () if self._has_done_turn else self._suspects
        self._fail(e.Skipped(self._clock(), described(error), ended, suspects=self._senders()), error)

    def _senders(self) -> tuple[int, ...]:
        """Return the connections whose messages came in this turn."""
        events = map(decode_event, self.controller.log.turn)
        return tuple({each.connection: None for each in events if isinstance(each, e.Received)})

    def _fail(self, skipped: e.Skipped, error: BaseException) -> None:
        """End this process, whose state may be wrong. The next process skips the event when it replays the journal."""
        if self._is_over:
            return
        self.enter(ShellState.FAILED)
        self.failure = skipped.reason
        _log.critical("the controller failed and ends: %s", skipped.reason, exc_info=error)
        log = self.controller.log
        log.record(skipped)
        log.trim()
        if self.journal is not None:
            self._uncommitted += log.turn
            self.commit()
        restarts = self.journal is not None and not self.journal.is_broken
        if self.journal is not None:
            self.journal.close()
        for number, connection in self.controller.connections.sessions.items():
            if connection in skipped.connections or number in skipped.sessions:
                self._tell(connection, failure(skipped.reason))
            elif not restarts:
                text = f"the controller failed, and the cluster has ended ({skipped.reason}); its log has the traceback"
                self._tell(connection, Status(Code.INTERNAL, text))
        charged = CHARGED if self.controller.is_charged(skipped) else b""
        self._report(charged + FAILED + skipped.reason.encode() + b"\n")
        self._stop.set()

    def _tell(self, number: int, status: Status) -> None:
        """Notify a session that it has ended. This is immediate, since the next process will not know the session."""
        connection = self._connections.pop(number, None)
        if connection is not None:
            connection.send_encoded(encode(m.Closing(status)))
            connection.close()

    # ---- actions

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._is_over:
            return
        try:
            self._do_turn()
        except Exception as error:
            self._failed_in_turn(error)
        else:
            self._has_done_turn = True

    def _do_turn(self) -> None:
        does, load, now = self._does, self._load, self._clock()
        load.longest = max(load.longest, time.monotonic() - self._turn)
        budget, has_worked = self._budget, self._has_work
        began = time.thread_time() if has_worked else 0.0
        try:
            actions = self.controller.handle(e.Flush(now, budget.steps))
        finally:
            if self.journal is not None:
                self._uncommitted += self.controller.log.turn
        if has_worked:
            budget.observe(time.thread_time() - began)
        self._has_work = has_work = self.controller.has_work
        if actions or self._to_acknowledge or self._has_opened:
            self.commit()
        if self.lease is not None:
            self.replication.check_fence()
        for action in actions:
            does[type(action)](action)
        if has_work:  # a message that the controller failed at still waits
            for bug, connections, sessions in self.controller.bugs():
                _log.critical("the controller failed at a message and drops it: %s\n%s", *bug)
                self._handle(e.Skipped(self._clock(), bug.reason, connections, sessions, skips=False))
        if has_work and not self._flush_scheduled:
            self._flush_scheduled, self._turn = True, time.monotonic()
            self._loop.call_soon(self._flush)
        if self._to_acknowledge:
            for connection in self._to_acknowledge:
                connection.acknowledge()
            self._to_acknowledge = []
        if self.journal is not None and (self.journal.wants_snapshot or self.replication.wants_snapshot):
            self.commit()
            self.journal.snapshot()
            self.replication.begin(self.journal)
        self.collector.turn_ended(now)

    def flush_now(self) -> None:
        """Handle all events so far, and commit them."""
        if self._flush_scheduled:
            self._flush()
        self.commit()

    def commit(self) -> None:
        """Make the next process know all turns so far. This must precede all effects that others can observe.

        A turn without such effects (messages, acknowledgements, numbers of connections) is written with the next one.
        """
        self._has_opened = False
        if self.journal is not None and self._uncommitted:
            turn, self._uncommitted = self._uncommitted, []
            self.journal.append(turn)
            self.replication.send(turn)

    def _announce(self, addresses: tuple[str, ...]) -> None:
        """Tell all peers that a controller may also be found at these addresses."""
        self.resumable.alternate_addresses = (*self._own, *addresses)

    def _send(self, action: a.Send) -> None:
        connection = self._connections.get(action.connection)
        if connection is None:
            return
        message = action.message
        if (
            self.lease is not None  # seldom, so first
            and isinstance(message, _CANNOT_WAIT)
            and isinstance(connection, Connection)
            and not self.lease.holds()
        ):
            self._drop_unfenced(action.connection, connection)
            return
        encoded, frame = self._encoded
        if message is not encoded:  # many hosts in sequence get the same message
            frame = encode(message)
            self._encoded = message, frame
        if action.in_pieces:
            connection.send_in_pieces(frame)
        else:
            connection.send_encoded(frame)

    def _drop_unfenced(self, number: int, connection: Connection) -> None:
        """End the connection of an agent or a command, which cannot be fenced. It also tries other controllers."""
        connection.abort()
        _, on_lost = self._callbacks(number)
        self._loop.call_soon(on_lost, "this controller does not hold its lease")

    def _close(self, action: a.Close) -> None:
        connection = self._connections.pop(action.connection, None)
        if action.reason and isinstance(connection, Connection) and not connection.is_authenticated:
            connection.refuse(action.reason)
        elif action.reason:
            _log.warning("%s", action.reason)
        if connection is not None:
            self._load.closed(connection)
            connection.close()

    def _name(self, action: a.Name) -> None:
        connection = self._connections.get(action.connection)
        if connection is not None:
            connection.name = action.name

    def _set_timer(self, action: a.SetTimer) -> None:
        self._timers[action.timer] = self._clock() + action.seconds
        self._call_later(action.seconds, partial(self._timer_ended, action.timer))

    def _set_patience(self, action: a.SetPatience) -> None:
        connection = self._connections.get(action.connection)
        if self.journal is not None and isinstance(connection, AcceptedConnection):
            connection.set_patience(action.seconds)

    def _timer_ended(self, timer: int) -> None:
        del self._timers[timer]
        self._handle(e.TimerEnded(self._clock(), timer))

    def _answer_usage(self, action: a.AnswerUsage) -> None:
        def reply(message: m.UsageReply | m.OperationReply) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so the peer is gone
                self._loop.call_soon_threadsafe(self._send, a.Send(action.cause, action.connection, message))

        self.keeper.report(
            action.by,
            action.seconds,
            action.tenant,
            action.expected,
            lambda content: reply(m.UsageReply(content)),
            lambda reason: reply(m.OperationReply(Status(Code.INTERNAL, reason), "")),
        )

    def _end(self, action: a.End) -> None:
        engine = self.controller.connections.engine
        if engine is not None:  # this process may not be its child, and then it does not see the exit status
            self._send(a.Send(action.cause, engine, m.ClusterEnds()))
        self._loop.call_later(_END_SECONDS, self._stop.set)

    # ---- continuing from another process

    def snapshot(self) -> bytes:
        """Return the encoded state that another process needs to continue. Call this between two turns."""
        return encode_snapshot(self.controller, self._dump())

    def _dump(self) -> ShellDump:
        links = [connection.record() for connection in self.resumable.all()]
        resumable = {link.number for link in links}
        others = {number: each.peer_role for number, each in self._connections.items() if number not in resumable}
        others |= self._others
        now, reading = self._own_clock.reading()
        key, timers = self.resumable.key, dict(self._timers)
        return ShellDump(now, self._next, key, links, others, timers, reading, self._earlier)

    def _lose_others(self, reason: str) -> None:
        for number in self._others:
            self._handle(e.ConnectionLost(self._clock(), number, reason))
        self._others = {}

    def resume(self, term: int) -> None:
        """Continue an earlier process in this term: peers have time to reconnect, and timers continue."""
        now, reading = self._own_clock.reading()
        skipped = self._own_clock.skipped  # since the last event of the earlier process
        if self._last_reading is not None:
            skipped = skipped_between(self._last_reading, (now, reading))
        self._own_clock.skipped = 0.0
        self.resumable.begin(term)
        self._handle(e.Restarted(now, term, skipped))
        for timer, due in self._timers.items():
            self._call_later(max(0.0, due - now), partial(self._timer_ended, timer))
        reason = "the controller was restarted"
        self._call_later(self._times.reconnect, partial(self._lose_others, reason))
        self._await_peers(reason)
        own = self._own[0] if self._own else ""
        notice = Resume(CONTROLLERS, self.resumable.secret(CONTROLLERS), term, 0, 0, 1, own)
        self._notices = EarlierControllers(self._earlier, notice, self._identity_at)
        self._tick()

    def _await_peers(self, reason: str) -> None:
        """Wait for peers to reconnect, since none has a socket yet."""
        for connection in self.resumable.all():
            connection.wait(reason)
            self._handle(e.ConnectionAway(self._clock(), connection.number))


def _log_event(action: a.Log) -> None:
    names = "event", "island", "session", "tenant", "actor"
    absent = "", -1, 0, "", ""
    values = (getattr(action, name) for name in names)
    fields = {name: value for name, value, none in zip(names, values, absent, strict=True) if value != none}
    _log.log(logging.WARNING if action.is_warning else logging.INFO, "%s", action.text, extra={FIELDS: fields})


def _bug(error: BaseException) -> BaseException:
    """Return the exception that describes the bug."""
    return error.__cause__ if isinstance(error, NothingChangedError) and error.__cause__ else error
