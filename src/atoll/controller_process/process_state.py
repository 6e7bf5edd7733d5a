"""The state of a controller's process: how it is replayed, and how it is stored for another process. Pure.

A process continues from another one in three steps: it reads a snapshot, replays the turns after the snapshot
(`ProcessState.replay`), and serves the state (`shell.ControllerShell`). `journal_recovery`, `standby` and
`killed_clusters` differ in where the turns come from.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from atoll.cluster.processes.bugs import described
from atoll.cluster.processes.leases import PING_SECONDS
from atoll.cluster.processes.process_table import boot
from atoll.controller.controller_dumps import dump_controller, load_controller
from atoll.controller.core import Controller
from atoll.errors import AtollError, JournalError
from atoll.journal.event_log import with_skips
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.state.versions import decode_versioned, encode_versioned
from atoll.wire.framing import encode
from atoll.wire.resumption.accepted_link import AcceptedLink, Acceptor
from atoll.wire.resumption.link_record import LinkRecord
from atoll.wire.resumption.retransmit_buffer import Counts

_log = logging.getLogger(__name__)

MAX_EARLIER = 8  # addresses of earlier controllers that a cluster keeps

# ---- storing


class ShellDump(msgspec.Struct):
    """The stored state of a controller's process, except for the controller."""

    seconds: float = 0.0  # of the monotonic clock
    next: int = 1  # number of a connection
    key: bytes = msgspec.field(default_factory=lambda: os.urandom(32))  # of the secrets that resume connections
    links: list[LinkRecord] = []
    others: dict[int, str] = {}  # roles of connections that end with the process
    timers: dict[int, float] = {}  # when they are due
    reading: e.ClockReading | None = None  # of the machine's clocks at `seconds`
    earlier: tuple[str, ...] = ()  # addresses of the controllers from which standbys have taken over


# Increase the first number if you change `ShellDump` or `LinkRecord`: see CONTRIBUTING.md.
_SHELL, _SHELL_VERSION = "shell", (3, 1)


def encode_shell(shell: ShellDump) -> bytes:
    return encode_versioned(_SHELL, _SHELL_VERSION, shell)


def decode_shell(content: bytes | msgspec.Raw) -> ShellDump:
    """Return the state that `encode_shell` encoded. Raises JournalError if it cannot be read."""
    return decode_versioned(content, _SHELL, _SHELL_VERSION, ShellDump)


class _Snapshot(msgspec.Struct, frozen=True):
    shell: msgspec.Raw
    controller: Any


class _StoredSnapshot(_Snapshot, frozen=True):
    controller: msgspec.Raw


_SNAPSHOT, _SNAPSHOT_VERSION = "snapshot", (1, 1)


def encode_snapshot(controller: Controller, shell: ShellDump) -> bytes:
    """Return the payload of a snapshot."""
    snapshot = _Snapshot(msgspec.Raw(encode_shell(shell)), dump_controller(controller))
    return encode_versioned(_SNAPSHOT, _SNAPSHOT_VERSION, snapshot)


def decode_snapshot(payload: bytes) -> tuple[Controller, ShellDump]:
    """Return the controller and the state of its connections. Raises JournalError if they cannot be read."""
    found = decode_versioned(payload, _SNAPSHOT, _SNAPSHOT_VERSION, _StoredSnapshot)
    return load_controller(found.controller), decode_shell(found.shell)


# ---- replaying

# Periods between two readings of a controller's clock from which on the controller was stopped in between.
_MAX_PERIODS = 3
# The most that a trace counts as the time between two processes. Wall clocks may be set to any time.
MAX_SKIPPED_SECONDS = 7 * 86400.0


class ContinuedClock:
    """A monotonic clock that continues the clock of an earlier process, even of one on another machine.

    `seconds` is the last known time of the earlier process, if there is one.

    The time between two processes does not count, and neither does the time for which this process is stopped, for
    example in a frozen container: nobody observed then whether peers kept their deadlines or made progress. A running
    controller reads the clock once a period, so a longer time between two readings counts as one period.

    `skipped` is the time, in seconds, for which this process was stopped since it was last set to 0.
    """

    def __init__(self, seconds: float | None = None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        # Negative if this machine has been up longer than that of the earlier process. Not relative to the loop's
        # clock, since that of uvloop counts milliseconds.
        self._read = monotonic()  # when the clock was read last
        self._offset = 0.0 if seconds is None else seconds - self._read
        self._boot = boot()
        self._period = PING_SECONDS
        self.skipped = 0.0

    def read_every(self, seconds: float) -> None:
        """Set the period of the readings."""
        self._period = seconds

    def now(self) -> float:
        read = self._monotonic()
        if read - self._read > _MAX_PERIODS * self._period:
            self._skip(read - self._read - self._period)
        self._read = read
        return read + self._offset

    def _skip(self, seconds: float) -> None:
        self._offset -= seconds
        self.skipped += seconds

    def reading(self) -> tuple[float, e.ClockReading]:
        """Return the time of this clock, and those of the machine's clocks at the same time."""
        now = self.now()
        return now, e.ClockReading(time.time(), now - self._offset, self._boot)

    def advance_to(self, seconds: float) -> None:
        """Continue from this time if the clock is behind it."""
        self._read = self._monotonic()
        self._offset = max(self._offset, seconds - self._read)


def skipped_between(before: tuple[float, e.ClockReading], after: tuple[float, e.ClockReading]) -> float:
    """Return the seconds between two readings that the continued clock, whose time is first in each, did not count.

    Readings of one start of one machine are compared by its monotonic clock. Others are compared by wall clocks, with
    the error of these. The result is at least 0, so that later times stay later, and at most `MAX_SKIPPED_SECONDS`.
    """
    (seconds, earlier), (later_seconds, later) = before, after
    is_same = bool(earlier.boot) and earlier.boot == later.boot
    passed = later.uptime - earlier.uptime if is_same else later.wall - earlier.wall
    return min(max(0.0, passed - (later_seconds - seconds)), MAX_SKIPPED_SECONDS)


class ProcessState:
    """A controller with its clock, connections and timers.

    It begins with a new controller, or with the `controller` and the `dump` of an earlier process, of which it replays
    the later events. Its connections have no sockets. The `ControllerShell` that serves it takes over its parts, and
    nothing is replayed from then on.

    Attributes:
      links: The connections that peers can resume, with the messages that peers lack.
      others: The roles of the peers of other connections, which end with the earlier process.
      timers: When the controller's timers are due, in seconds of `clock`.
      next: The number of the next connection.
      reading: The last known time of `clock`, with the readings of the machine's clocks then.
      earlier: The addresses of the controllers from which standbys have taken over, the latest last.
      suspects: The connections of sessions that sent messages in the last turn that failed; see `controller.faults`.
    """

    def __init__(
        self,
        controller: Controller,
        dump: ShellDump | None = None,
        term: int = 1,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.controller = controller
        self.clock = ContinuedClock(dump.seconds if dump is not None else None, monotonic)
        dump = dump or ShellDump()
        self.reading = None if dump.reading is None else (dump.seconds, dump.reading)
        self.acceptor = Acceptor(term, controller.settings.grace_seconds, dump.key)
        self.links = {link.number: AcceptedLink(self.acceptor, link) for link in dump.links}
        self.others = dict(dump.others)
        self.timers = dict(dump.timers)
        self.next = dump.next
        self.earlier = dump.earlier
        self.suspects: tuple[int, ...] = ()
        self._encoded: tuple[Any, bytes] = (None, b"")  # the last message sent, and its frame

    def replay(self, turn: Iterable[e.AnyEvent]) -> None:
        """Repeat what the earlier process did with the events of a turn. Raises JournalError.

        Events at which it failed change the connections, and the controller skips them.
        """
        senders: dict[int, None] = {}  # since the last flush
        for event, is_skipped in with_skips(turn):
            self._take(event)
            if not is_skipped:
                for action in self._handled(event):
                    self._do(action, event.seconds)
            match event:
                case e.Received(connection=number):
                    senders[number] = None
                case e.Flush():
                    if is_skipped:
                        sessions = self.controller.connections.sessions.values()
                        self.suspects = tuple(each for each in senders if each in sessions)
                    senders = {}

    def acknowledged(self, number: int, counts: Counts) -> None:
        """Drop messages of a connection, if it still exists, that its peer acknowledged to the earlier process."""
        link = self.links.get(number)
        if link is not None:
            link.acknowledged(counts)

    def begin(self, term: int) -> None:
        """Begin a term. The messages sent until now are all that this process knows of earlier terms."""
        self.acceptor.term = term
        for link in self.links.values():
            link.begin(term)

    def take_over_from(self, controller: str, own: str) -> None:
        """Note that the process at `own` takes over from the controller at this address."""
        others = [each for each in self.earlier if each not in (controller, own)]
        self.earlier = (*others, controller)[-MAX_EARLIER:]

    def _take(self, event: e.AnyEvent) -> None:
        """Apply an event to the clock, the connections and the timers."""
        self.clock.advance_to(event.seconds)
        match event:
            case e.ConnectionOpened(connection=number, role=role):
                self.next = max(self.next, number + 1)
                self.others[number] = role
            case e.ConnectionLost(connection=number):
                self._forget(number)
            case e.Received(connection=number, message=message):
                if isinstance(message, m.Hello) and message.resumes and number in self.others:
                    record = LinkRecord(number, self.others.pop(number), "a client of the controller")
                    self.links[number] = AcceptedLink(self.acceptor, record)
                if number in self.links:
                    self.links[number].count()
            case e.TimerEnded(timer=timer):
                self.timers.pop(timer, None)
            case e.Tick(reading=e.ClockReading() as reading):
                self.reading = event.seconds, reading
            case e.Restarted(term=term):
                self.begin(term)

    def _handled(self, event: e.AnyEvent) -> list[a.AnyAction]:
        try:
            return self.controller.handle(event)
        except AtollError:  # as in the earlier process: a later event is the loss of the connection
            _log.info("a message was refused again during replay")
            return []
        except Exception as error:
            _log.critical("cannot replay the journal", exc_info=error)
            raise JournalError(f"cannot replay the journal: {described(error)}") from None

    def _do(self, action: a.AnyAction, seconds: float) -> None:
        """Apply an action that was decided at the time `seconds`. Links keep messages for peers that lack them."""
        match action:
            case a.Send(connection=number, message=message) if number in self.links:
                if message is not self._encoded[0]:  # many hosts in sequence get the same message
                    self._encoded = message, encode(message)
                frame = self._encoded[1]
                self.links[number].send_in_pieces(frame) if action.in_pieces else self.links[number].send(frame)
            case a.Name(connection=number, name=name) if number in self.links:
                self.links[number].name = name
            case a.SetPatience(connection=number, seconds=patience) if number in self.links:
                self.links[number].set_patience(patience)
            case a.Close(connection=number):
                self._forget(number)
            case a.SetTimer(timer=timer, seconds=delay):
                self.timers[timer] = seconds + delay

    def _forget(self, number: int) -> None:
        self.others.pop(number, None)
        self.links.pop(number, None)
