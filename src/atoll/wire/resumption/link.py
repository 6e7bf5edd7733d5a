"""The state machine of a resumable connection, without I/O and without a clock.

A *link* is one end of a connection that can have several sockets in succession, its *transports*. Between two
transports, the link is *away*: it keeps frames, and sends them on the next transport. `dialing_link` and
`accepted_link` have the two ends. A driver owns the sockets: `resumable_connection` on an event loop, `wire.blocking`
with threads.

A driver passes times in seconds of one clock. After each call except `send`, it takes the effects of the call and
executes them in order before the next call.

Invariants: each frame arrives once and in order, or the link ends. A link keeps at most `LinkLimits.retained` bytes. A
peer that breaks the protocol causes a FrameError before the state changes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from atoll.errors import FrameError
from atoll.wire.framing import FrameDecoder
from atoll.wire.resumption.link_messages import Acknowledge, AnyLinkMessage, Close
from atoll.wire.resumption.retransmit_buffer import NONE, Counts, RetransmitBuffer
from atoll.wire.sockets import NEXT_SECONDS


class LinkLimits(NamedTuple):
    """Limits of a link. The two ends may have different ones."""

    # A side acknowledges after this number of messages or bytes, and once per second. An acknowledgement wakes the
    # peer, which costs more than keeping the messages for longer.
    acknowledge_messages: int = 1024
    acknowledge_bytes: int = 1 << 20
    # Bytes kept for a peer that is away or does not acknowledge; equal to the limit of a connection (`MAX_UNSENT`).
    retained: int = 256 << 20
    # The acceptor sends at least once per second. The dialer reports silence, and then tries another socket.
    quiet_seconds: int = 2
    silent_seconds: int = 5
    # Between two rounds of attempts to dial again; each pause is twice as long as the one before.
    first_pause: float = 0.02
    max_pause: float = 0.5
    # How long an attempt may take: for the connection, and then for the acceptor's answer. If the dialer knows other
    # addresses, those that fell silent get less time in the first rounds, so that a successor is found soon.
    dial_seconds: float = NEXT_SECONDS
    silent_dial_seconds: float = 1.0
    short_rounds: int = 5


LIMITS = LinkLimits()


class LinkState(enum.Enum):
    """The states of a link. Only a dialer is opening, plain or resuming, and only an acceptor the others below it."""

    CONNECTED = "connected"  # has a transport
    AWAY = "away"  # has no transport, and waits for the next one until its deadline
    ENDED = "ended"
    OPENING = "opening"  # on a transport that has brought neither a resume token nor a message
    PLAIN = "plain"  # its first message arrived before a resume token: it keeps nothing, and ends with its transport
    RESUMING = "resuming"  # on a new transport that the acceptor has not confirmed
    RESTORED = "restored"  # made from the record of an earlier process, whose later events are being replayed
    FENCED = "fenced"  # has a transport, but sends nothing
    CLOSING = "closing"  # was fenced when it was closed: it ends when it may send again


S = LinkState

TRANSITIONS: dict[LinkState, frozenset[LinkState]] = {
    S.CONNECTED: frozenset({S.AWAY, S.FENCED, S.ENDED}),
    S.AWAY: frozenset({S.RESUMING, S.OPENING, S.CONNECTED, S.ENDED}),
    S.ENDED: frozenset(),
    S.OPENING: frozenset({S.PLAIN, S.CONNECTED, S.AWAY, S.ENDED}),
    S.PLAIN: frozenset({S.ENDED}),
    S.RESUMING: frozenset({S.CONNECTED, S.AWAY, S.ENDED}),
    S.RESTORED: frozenset({S.CONNECTED, S.AWAY, S.ENDED}),
    S.FENCED: frozenset({S.CONNECTED, S.AWAY, S.CLOSING, S.ENDED}),
    S.CLOSING: frozenset({S.ENDED}),
}

_WRITES = frozenset({S.CONNECTED, S.OPENING, S.PLAIN})
_KEEPS = frozenset(set(S) - {S.PLAIN, S.CLOSING, S.ENDED})
_STARTING = frozenset({S.OPENING, S.RESUMING})


class LinkEvent(enum.Enum):
    """Effects of a link besides link messages and retransmissions.

    The driver drops the current transport, if there is one, at AWAY, FAILED and LOST.
    """

    GRANTED = "granted"  # the acceptor allows the dialer to resume the link
    AWAY = "away"
    FENCED = "fenced"
    BACK = "back"
    FAILED = "failed"  # a new transport did not open or resume the link: dial the next one
    QUIET = "quiet"  # the transport is silent
    HEARD = "heard"  # the transport is not silent anymore
    LOST = "lost"  # because of `Link.reason`
    CLOSED = "closed"  # this side has closed the link: send what is queued, and close the transport


class Retransmission(NamedTuple):
    """A frame to send again."""

    frame: bytes
    in_pieces: bool


Effect = LinkEvent | Retransmission | AnyLinkMessage


class Link:
    """One end of a resumable connection; the base class of both ends."""

    def __init__(self, name: str, state: LinkState, limits: LinkLimits = LIMITS) -> None:
        self.name = name  # of the peer
        self.limits = limits
        self.buffer = RetransmitBuffer(limits.retained)
        self.effects: list[Effect] = []
        self.reason = ""  # why the link is away or has ended
        self.deadline: float | None = None  # while the link is away
        self._decoder: FrameDecoder | None = None  # of the current transport
        self._received_before = NONE  # on earlier transports
        self._acknowledged = NONE  # last counts sent to the peer
        self._due_messages = 0  # messages of the transport at which to acknowledge
        self._due_bytes = limits.acknowledge_bytes  # bytes to read until then
        self._acknowledgements = 0
        self._set(state)

    def _set(self, state: LinkState) -> None:
        self.state = state
        self.writes, self.is_starting = state in _WRITES, state in _STARTING
        self.kept = self.buffer if state in _KEEPS else None

    def _move(self, state: LinkState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self._set(state)

    # ---- frames

    def send(self, frame: bytes) -> bool:
        """Keep a frame that the user sends. Return whether to write it to the current transport.

        If it returns False, the link may have ended, because its frames exceed the limit; take the effects then.
        `resumable_connection` has a copy of this method, because every message takes this path.
        """
        kept = self.kept
        if kept is not None:
            kept.whole.append(frame)
            kept.nbytes += len(frame)
            if kept.nbytes > kept.limit:
                self.overflow()
        return self.writes

    def send_all(self, parts: list[bytes]) -> bool:
        """Keep several frames, whose headers and contents alternate in `parts`; see `send`."""
        kept = self.kept
        if kept is not None:
            frames = [header + content for header, content in zip(parts[::2], parts[1::2], strict=True)]
            kept.whole.extend(frames)
            kept.nbytes += sum(map(len, frames))
            if kept.nbytes > kept.limit:
                self.overflow()
        return self.writes

    def send_in_pieces(self, frame: bytes) -> bool:
        """Keep a frame that the user sends in pieces; see `send`."""
        kept = self.kept
        if kept is not None:
            kept.retain_pieced(frame)
            if kept.nbytes > kept.limit:
                self.overflow()
        return self.writes

    def overflow(self) -> None:
        """Lose the link because it keeps too much, unless it is restored from a process in which it did not."""
        if self.state is not S.RESTORED:
            self.lose(f"{self.name} has not acknowledged {self.limits.retained >> 20} MiB of messages")

    def read(self, nbytes: int) -> bool:
        """Count a read of the current transport, after its messages. Return whether to call `acknowledge`."""
        self._due_bytes = due = self._due_bytes - nbytes
        decoder = self._decoder
        if decoder is None or (due > 0 and decoder.messages < self._due_messages):
            return False
        self._acknowledge_later(decoder)
        return self.received != self._acknowledged

    def receive(self, message: AnyLinkMessage) -> None:
        """Handle a link message of the current transport. Raise FrameError if the peer must not send it now."""
        match message:
            case Acknowledge(whole=whole, pieced=pieced) if self.state in (S.CONNECTED, S.FENCED, S.CLOSING):
                self.buffer.acknowledge(Counts(whole, pieced))
            case Close() if self.state is not S.RESUMING:
                self.lose(f"{self.name} closed the connection")
            case _:
                raise FrameError(f"a {type(message).__name__} is not expected from this peer")

    def acknowledge(self) -> None:
        """Acknowledge all received messages. They must be safe even if this process ends."""
        if self.state is S.CONNECTED:
            self._acknowledged = self.received
            self.effects.append(Acknowledge(*self._acknowledged))

    def take_effects(self) -> list[Effect]:
        """Return the effects since the last call, in order."""
        effects, self.effects = self.effects, []
        return effects

    # ---- transports

    def disconnect(self, now: float, reason: str) -> None:
        """Handle the loss of the current transport, which the link may survive."""
        if self.state in (S.OPENING, S.PLAIN):
            self.lose(reason)
        elif self.state in (S.CONNECTED, S.FENCED, S.CLOSING):
            self._detach()
            if self.state is not S.CLOSING:
                self._move(S.AWAY)
            self.wait(now, reason)
            if not self.has_ended:
                self.effects.append(LinkEvent.AWAY)

    def wait(self, now: float, reason: str) -> None:
        """Wait for the next transport for as long as the link may be away."""
        self.reason, self.deadline = reason, now + self.grace

    @property
    def grace(self) -> float:
        """The time in seconds for which the link may be away."""
        raise NotImplementedError

    def _attach(self, decoder: FrameDecoder) -> None:
        """Count the messages of a new transport."""
        self._detach()
        self._decoder = decoder
        self._acknowledge_later(decoder)

    def _detach(self) -> None:
        self._received_before, self._decoder = self.received, None

    def _acknowledge_later(self, decoder: FrameDecoder) -> None:
        self._due_messages = decoder.messages + self.limits.acknowledge_messages
        self._due_bytes = self.limits.acknowledge_bytes
        self._acknowledgements += 1

    def _retransmissions(self, beyond: Counts = NONE) -> Iterator[Retransmission]:
        """Yield the frames after `beyond` that the peer has not acknowledged."""
        return (Retransmission(frame, in_pieces) for frame, in_pieces in self.buffer.unacknowledged(beyond))

    # ---- ending

    def lose(self, reason: str) -> None:
        """End the link because of an error or of the peer."""
        if not self.has_ended:
            self.reason = reason
            self._end(LinkEvent.LOST)

    def close(self) -> None:
        """End the link because this side closes it."""
        match self.state:
            case S.CONNECTED | S.OPENING:  # the acceptor may have sent a token to a link that is opening
                self._end(Close(), LinkEvent.CLOSED)
            case S.FENCED:
                self._move(S.CLOSING)
            case S.PLAIN | S.AWAY | S.RESUMING | S.RESTORED:
                self._end(LinkEvent.CLOSED)

    def _end(self, *effects: Effect) -> None:
        self._move(S.ENDED)
        self._detach()
        self.buffer = RetransmitBuffer(self.limits.retained)
        self.deadline = None
        self.effects += effects

    # ---- properties

    @property
    def progress(self) -> tuple[int, int]:
        """A value that changes with each read."""
        return self._acknowledgements, self._due_bytes

    @property
    def has_ended(self) -> bool:
        return self.state is S.ENDED

    @property
    def received(self) -> Counts:
        """The numbers of messages received from the peer over all transports."""
        if self._decoder is None:
            return self._received_before
        whole, pieced = self._received_before
        here = self._decoder.pieced
        return Counts(whole + self._decoder.messages - here, pieced + here)

    @property
    def is_away(self) -> bool:
        """Whether the link has no transport now, and has not ended."""
        return self.state is S.RESUMING or (self._decoder is None and not self.has_ended)
