"""Groups of hosts. One host of a group, the relay, forwards the controller's messages and gathers ends of units.

So for a gang on hundreds of hosts, the controller sends and reads one message per group instead of one per host. The
relay also gathers the answers to pings.

Invariant: a host handles the controller's messages in the order in which they were sent, directly or through the relay.
Only messages in pieces may be overtaken. Messages arrive directly until `JoinGroup`, and then through the relay.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from atoll.cluster.state_machine import StateMachine
from atoll.decodable import decodable
from atoll.errors import FrameError
from atoll.protocol import messages as m
from atoll.wire.framing import MAX_FRAME, NO_MESSAGE, PieceBuffer

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(decodable(m.InGroup)).decode


class SendToHost(Protocol):
    """Sends an encoded message to a host of the group, after earlier ones, without waiting for the host.

    Later messages may overtake a message that is sent `in_pieces`.
    """

    def __call__(self, host: int, content: bytes, in_pieces: bool = False, /) -> None: ...


def decoded(content: Any) -> m.InGroup:
    """Decode a message of another host of the group. Raise FrameError if it is invalid."""
    try:
        message: m.InGroup = _decode(content)
    except NO_MESSAGE as error:
        raise FrameError(f"a host of the group sent an invalid message: {error}") from None
    return message


class Ends(Protocol):
    """Takes the ends of dispatch units on hosts of a group, and their answers to pings, from any thread."""

    def ended(self, host: int, runs: tuple[tuple[int, int, int], ...]) -> None:
        """Take units that have ended on a host, as in `Done`."""

    def failed(self, failure: m.MemberFailed) -> None:
        """Take the failure of a unit on a host."""

    def answered(self, host: int, pong: m.Pong) -> None:
        """Take the answer of a host to a ping that the relay has forwarded."""


class Membership(enum.IntEnum):
    """The state of a host's membership in a group."""

    NONE = 0  # of no group yet: messages from the relay that arrive early wait
    JOINING = 1  # handles the messages that have waited, and later ones wait for these
    JOINED = 2  # handles messages from the relay when they arrive


_S = Membership

# `HostGroup._join` causes all transitions.
TRANSITIONS: dict[Membership, frozenset[Membership]] = {
    _S.NONE: frozenset({_S.JOINING}),
    _S.JOINING: frozenset({_S.JOINED}),
    _S.JOINED: frozenset({_S.JOINING}),  # another group
}


class HostGroup(StateMachine[Membership]):
    """This host's membership in its group. Safe to use from any thread.

    `handle(message)` handles the messages for this host, and returns whether more may follow. `send` sends to another
    host of the group, and `to_controller` to the controller. `process` takes the ends if the host's process has a
    relay.
    """

    transitions = TRANSITIONS

    def __init__(
        self,
        host: int,
        handle: Callable[[Any], bool],
        send: SendToHost,
        to_controller: Callable[..., None],
        process: Ends | None = None,
    ) -> None:
        self.state: Membership = Membership.NONE
        self._host = host
        self._handle = handle
        self._send_to = send
        self._to_controller = to_controller
        self._relay_host: int | None = None
        self._process = process
        self._ends: Ends | None = None  # takes the ends of this host's units, once it has a relay
        self._lock = threading.Lock()  # guards `_early`; held while its messages are handled
        self._early: list[Any] = []  # messages from the relay that arrived before the host joined the group
        self._asked = float("nan")  # `seconds` of the last ping from the relay
        self._relay = GroupRelay(self._send, to_controller)
        self._pieces = PieceBuffer()  # from the relay; used by its link's thread

    # ---- receiving

    def take(self, message: Any) -> bool:
        """Handle a message on the connection to the controller. Return False if it was the last."""
        if type(message) is m.Forward:
            self._relay.forward(message)
            return True
        if type(message) is m.JoinGroup:
            self._join(message)
            return True
        if type(message) is m.Ping and self._relay_host == self._host:
            self._relay.tick()
        return self._handle(message)

    def _handle_relayed(self, message: Any) -> None:
        """Handle a message of the controller that the relay has forwarded."""
        if type(message) is m.Ping:
            self._asked = message.seconds
            if self._relay_host == self._host:
                self._relay.tick()
        self._handle(message)

    def receive(self, content: Any) -> None:
        """Handle an encoded message from a host of the group. Raise FrameError if it is invalid or too large."""
        self.receive_message(decoded(content))

    def receive_message(self, message: m.InGroup) -> None:
        """Handle a message from a host of the group. Raise FrameError if one in pieces is invalid or too large."""
        if type(message) is m.MemberDone:
            if message.pong is not None:
                self._relay.answered(message.host, message.pong)
            if message.runs:
                self._relay.ended(message.host, message.runs)
        elif type(message) is m.MemberFailed:
            self._relay.failed(message)
        elif type(message) is m.RelayedPiece:
            whole = self._pieces.add(message.content, message.is_last, MAX_FRAME)
            if whole is not None:
                self.receive(whole)
        elif self.state is _S.JOINED:
            self._handle_relayed(message)
        else:
            with self._lock:
                if self.state is _S.NONE:
                    self._early.append(message)
                else:
                    self._handle_relayed(message)

    def _join(self, message: m.JoinGroup) -> None:
        with self._lock:
            self.enter(_S.JOINING)
            self._relay_host = message.relay
            self._ends = self._ends_to(message.relay)
            early, self._early = self._early, []
            for each in early:
                self._handle_relayed(each)
            self.enter(_S.JOINED)

    def _described(self) -> str:
        return f"the membership of host {self._host} in its group"

    def _ends_to(self, relay: int) -> Ends:
        if relay == m.PROCESS_RELAY:
            assert self._process is not None
            return self._process
        return self._relay if relay == self._host else _EndsToHost(relay, self._send_to)

    # ---- sending

    def report(self, *messages: Any) -> None:
        """Send messages to the controller.

        If there is a relay, ends of dispatch units are sent through it, and so are answers to its pings.
        """
        ends = self._ends
        if ends is None:
            self._to_controller(*messages)
            return
        for message in messages:
            if type(message) is m.Done:
                ends.ended(self._host, message.runs)
            elif type(message) is m.Failed:
                ends.failed(m.MemberFailed(self._host, message.sequence, message.status))
            elif type(message) is m.Pong and message.seconds == self._asked and not message.compiles:
                ends.answered(self._host, message)
            else:
                self._to_controller(message)

    def _send(self, host: int, content: bytes, in_pieces: bool = False) -> None:
        if host == self._host:
            self.receive(content)
        elif in_pieces:
            self._send_to(host, content, True)
        else:
            self._send_to(host, content)


class _EndsToHost:
    """Sends ends to the relay of the group, which is another host."""

    def __init__(self, relay: int, send: SendToHost) -> None:
        self._relay = relay
        self._send = send

    def ended(self, host: int, runs: tuple[tuple[int, int, int], ...]) -> None:
        self._send(self._relay, _encode(m.MemberDone(host, runs)))

    def failed(self, failure: m.MemberFailed) -> None:
        self._send(self._relay, _encode(failure))

    def answered(self, host: int, pong: m.Pong) -> None:
        self._send(self._relay, _encode(m.MemberDone(host, (), pong)))


class PongRound:
    """The answers to a ping that a relay has forwarded. `now` returns nanoseconds."""

    def __init__(self, now: Callable[[], int] = time.monotonic_ns) -> None:
        self._now = now
        self._left = 0  # hosts that have not answered
        self._answers: list[tuple[int, int, m.Pong]] = []  # that are not reported: when each came, and its host

    def begin(self, hosts: int) -> tuple[m.RelayedPong, ...]:
        """Note that the next ping was forwarded to this number of hosts. Return the answers to the last one."""
        late = self._take()
        self._left = hosts
        return late

    def answered(self, host: int, pong: m.Pong) -> tuple[m.RelayedPong, ...]:
        """Take an answer. Return the answers if all hosts have answered."""
        self._answers.append((self._now(), host, pong))
        self._left -= 1
        return () if self._left > 0 else self._take()

    def _take(self) -> tuple[m.RelayedPong, ...]:
        answers, self._answers = self._answers, []
        now = self._now() if answers else 0
        return tuple(
            [m.RelayedPong(host, pong.seconds, pong.clock, pong.running, now - came) for came, host, pong in answers]
        )


class _Unit(msgspec.Struct):
    """A dispatch unit that runs on hosts of the group."""

    left: int  # hosts on which it has not ended
    hosts: list[int] = msgspec.field(default_factory=list)  # on which it has ended, not reported yet
    times: list[int] = msgspec.field(default_factory=list)
    is_late: bool = False  # whether it had ended on some host at the last tick

    def take(self, sequence: int) -> m.GroupEnds:
        ends = m.GroupEnds(sequence, tuple(self.hosts), tuple(self.times))
        self.hosts, self.times = [], []
        return ends


class GroupRelay:
    """The relay of a group. Safe to use from any thread.

    `send` sends to a host of the group, and `report` to the controller. The end of a unit is reported once it has ended
    on all hosts of the group that run it. If some take a second longer, the other ends are reported, so that the
    controller knows which hosts are missing. The same holds for the answers to a ping.
    """

    def __init__(self, send: SendToHost, report: Callable[..., None]) -> None:
        self._send = send
        self._report = report
        self._lock = threading.Lock()
        self._units: dict[int, _Unit] = {}  # by sequence
        self._pongs = PongRound()

    def forward(self, message: m.Forward) -> None:
        """Forward a message to hosts of the group, without blocking."""
        if message.units:
            with self._lock:
                for sequence in message.units:
                    self._units[sequence] = _Unit(len(message.hosts))
        if message.asks:
            with self._lock:
                late = self._pongs.begin(len(message.hosts))
            self._report_pongs(late)
        content = message.content
        for host in message.hosts:
            self._send(host, content, message.in_pieces)

    def ended(self, host: int, runs: tuple[tuple[int, int, int], ...]) -> None:
        """Record units that have ended on a host of the group, and report those that have ended on all."""
        gathered = []
        with self._lock:
            for sequence, started, ended in runs:
                unit = self._units.get(sequence)
                if unit is None:  # the unit was started before the group was formed
                    gathered.append(m.GroupEnds(sequence, (host,), (started, ended)))
                    continue
                unit.hosts.append(host)
                unit.times += (started, ended)
                unit.left -= 1
                if not unit.left:
                    del self._units[sequence]
                    gathered.append(unit.take(sequence))
        if gathered:
            self._report(m.Gathered(tuple(gathered)))

    def failed(self, failure: m.MemberFailed) -> None:
        """Report at once that a unit has failed on a host of the group."""
        self._report(failure)
        with self._lock:
            unit = self._units.get(failure.sequence)
            if unit is None:
                return
            unit.left -= 1
            if unit.left:
                return
            del self._units[failure.sequence]
        if unit.hosts:
            self._report(m.Gathered((unit.take(failure.sequence),)))

    def answered(self, host: int, pong: m.Pong) -> None:
        """Take the answer of a host to a ping, and report the answers if all hosts have answered."""
        with self._lock:
            answers = self._pongs.answered(host, pong)
        self._report_pongs(answers)

    def _report_pongs(self, answers: tuple[m.RelayedPong, ...]) -> None:
        if answers:
            self._report(m.Gathered((), answers))

    def tick(self) -> None:
        """Report the ends of units that have not ended on some hosts since the last tick. Called once per second."""
        gathered = []
        with self._lock:
            for sequence, unit in self._units.items():
                if unit.is_late and unit.hosts:
                    gathered.append(unit.take(sequence))
                unit.is_late = bool(unit.hosts)
        if gathered:
            self._report(m.Gathered(tuple(gathered)))

    def statistics(self) -> dict[str, int]:
        """Return the number of units in flight."""
        return {"units": len(self._units)}
