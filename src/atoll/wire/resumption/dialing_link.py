"""The dialer's end of a resumable connection, as a state machine; see `link`.

If the acceptor sends no resume token before its first message, the link keeps no frames and ends with its transport.

An acceptor that cannot admit anyone now, such as a controller that does not hold its lease, puts the link off: it
answers the first message with a ResumeRefused that is not final. The link then tries all addresses, and sends
everything again on each new transport, until one acceptor admits it or its time to open is over.
"""

from __future__ import annotations

from typing import NamedTuple

from atoll.errors import FrameError
from atoll.wire.address import Address
from atoll.wire.framing import FrameDecoder
from atoll.wire.resumption.link import LIMITS, Link, LinkEvent, LinkLimits
from atoll.wire.resumption.link import LinkState as S
from atoll.wire.resumption.link_messages import (
    Acknowledge,
    AlternateAddresses,
    AnyLinkMessage,
    Close,
    Resume,
    Resumed,
    ResumeRefused,
    ResumeToken,
)
from atoll.wire.resumption.peer_addresses import PeerAddresses
from atoll.wire.resumption.retransmit_buffer import Counts
from atoll.wire.tls.identity import Identity


class Dial(NamedTuple):
    """An attempt to open or resume the link: dial `address` after `pause` seconds.

    The connection may take `seconds`, and then the acceptor's answer as long.
    """

    address: Address
    pause: float
    seconds: float


class DialingLink(Link):
    """The dialer's end. `address` is that of the acceptor. If it is None, the link cannot be resumed.

    If it `confirms_close`, it ends only when the acceptor knows that it was closed, or the grace is over.
    """

    def __init__(
        self,
        name: str,
        address: Address | None,
        identity: Identity | None = None,
        limits: LinkLimits = LIMITS,
        confirms_close: bool = False,
    ) -> None:
        super().__init__(name, S.PLAIN if address is None else S.OPENING, limits)
        self.address = address or Address()  # of the last confirmed transport
        self._addresses = PeerAddresses(self.address)
        self._identity = identity
        self._opens_by = 0.0  # when the time to open is over
        self.put_off = ""  # why no acceptor has admitted this process yet, after one has put it off
        self.refused_at: Address | None = None  # address of the acceptor that finally refused to resume
        self.token: ResumeToken | None = None
        self.term = 0  # the latest that the acceptor has stated
        self._attempt = 0
        self._untried: list[Address] = []  # addresses of the current round of attempts
        self._rounds = 0
        self._dialed = self.address
        self._errors: list[str] = []  # why the attempts of this round failed
        self._confirms_close = confirms_close
        self._closes = False  # it was closed, which the acceptor may not know yet
        self._silent = 0  # ticks without a read
        self._fell_silent: tuple[Address, ...] = ()  # addresses of the acceptor, if the link is away because of silence
        self._progress = self.progress  # at the last tick

    @property
    def grace(self) -> float:
        return 0.0 if self.token is None else self.token.seconds

    def open(self, decoder: FrameDecoder, opens_by: float = 0.0) -> None:
        """Begin on the first transport. If the link is put off, it tries to open again until the time `opens_by`."""
        self._opens_by = opens_by
        self._attach(decoder)

    # ---- frames

    def first_message(self) -> None:
        """Handle a message that arrives while the link `is_starting`. Raise FrameError if it is being resumed."""
        if self.state is S.RESUMING:
            raise FrameError("a message arrived before the connection was resumed")
        if self.state is S.OPENING:
            self._admitted()
            self._move(S.PLAIN)
            self.buffer.clear()

    def receive(self, message: AnyLinkMessage) -> None:
        match message:
            case ResumeToken() if self.state in (S.OPENING, S.CONNECTED):
                self._granted(message)
            case AlternateAddresses():
                self._addresses.replace_alternates(message, self._identity)
            case Resumed() if self.state is S.RESUMING:
                self._resumed(message)
            case ResumeRefused() if self.state is S.RESUMING:
                self._refused(message)
            case ResumeRefused(final=False) if self.state is S.OPENING:
                self.deadline = self._opens_by
                self._fail(f"{self.name} at {self._dialed} admits nobody now: {message.reason}")
            case _:
                super().receive(message)
        if isinstance(message, Acknowledge) and self.received != self._acknowledged:
            self.acknowledge()

    def _granted(self, token: ResumeToken) -> None:
        self._check_term(token.term)
        self.token, self.term = token, token.term
        if self.state is S.OPENING:
            self._admitted()
            self._move(S.CONNECTED)
            self.effects.append(LinkEvent.GRANTED)

    def _admitted(self) -> None:
        if self._rounds:
            self.address = self._dialed
            self._addresses.answered(self._dialed)
        self._untried, self._rounds, self.deadline, self.put_off = [], 0, None, ""

    def _check_term(self, term: int) -> None:
        if term < self.term:
            raise FrameError(f"this is term {term}, and term {self.term} has begun")

    # ---- later transports

    def next_dial(self, now: float) -> Dial | None:
        """Return where and when to dial. Return None if the link is not away, or lose it if its time is over.

        The link tries all addresses in each round, and at least one round.
        """
        if self.state is not S.AWAY or self.deadline is None:
            return None
        pause = 0.0
        if not self._untried:
            if self._rounds and now > self.deadline:
                if self.put_off:
                    self.lose("; ".join(dict.fromkeys(self._errors)))
                else:
                    self.lose(f"{self.reason}; reconnecting failed for {self.grace:.0f} s: {self._errors[-1]}")
                return None
            if self._rounds:
                pause = min(self.limits.first_pause * 2 ** min(self._rounds - 1, 30), self.limits.max_pause)
            self._rounds += 1
            self._errors = []
            self._untried = list(self._addresses.in_turn)
        self._dialed = self._untried.pop(0)
        return Dial(self._dialed, pause, self._seconds(self._dialed))

    def _seconds(self, address: Address) -> float:
        """Return how long an attempt to dial `address` may take."""
        is_silent = address in self._fell_silent and self._rounds <= self.limits.short_rounds
        if is_silent and not set(self._addresses.in_turn) <= set(self._fell_silent):
            return self.limits.silent_dial_seconds
        return self.limits.dial_seconds

    def dial_failed(self, error: str) -> None:
        """Note why no transport could be made."""
        self._errors.append(error)

    def resume(self, decoder: FrameDecoder) -> None:
        """Ask the acceptor to resume the link on a new transport, which the driver has dialed.

        If the link was put off, send everything from the beginning instead.
        """
        if self.token is None:
            self._move(S.OPENING)
            self.effects += self._retransmissions()
            self._attach(decoder)
            return
        self._move(S.RESUMING)
        self._attempt += 1
        self.effects.append(Resume(self.token.number, self.token.secret, self.term, *self.received, self._attempt))
        self._attach(decoder)

    def _resumed(self, message: Resumed) -> None:
        self._check_term(message.term)
        try:
            self.buffer.acknowledge(Counts(message.whole, message.pieced))
        except FrameError as error:  # messages are lost, and no other acceptor has them
            self.lose(f"{self.reason}; {error}")
            return
        self._move(S.CONNECTED)
        self.term, self.address = message.term, self._dialed
        self._addresses.answered(self._dialed)
        self._untried, self._rounds, self._silent, self.deadline = [], 0, 0, None
        self._fell_silent = ()
        self._acknowledged = self.received  # `Resume` stated these counts
        self.effects += [*self._retransmissions(), Close() if self._closes else LinkEvent.BACK]

    def _refused(self, message: ResumeRefused) -> None:
        error = f"{self.name} at {self._dialed} does not resume the connection: {message.reason}"
        if message.final and not 0 < message.spares <= self.grace:
            self.refused_at = self._dialed
            self.lose(f"{self.reason}; {error}")
        else:
            self._addresses.answered(self._dialed)
            self._fail(error)

    def disconnect(self, now: float, reason: str) -> None:
        if self.state is S.RESUMING or (self.state is S.OPENING and self.put_off):
            self._fail(reason)
        else:
            super().disconnect(now, reason)

    def _fail(self, error: str) -> None:
        """Give up the transport that was to open or resume the link."""
        self._errors.append(error)
        if self.token is None:
            self.put_off = error
        self._decoder = None  # no message arrived on it
        self._move(S.AWAY)
        self.effects.append(LinkEvent.FAILED)

    # ---- closing

    def close(self) -> None:
        """End the link because this side closes it.

        The acceptor may be restarting, or may end before it has read `Close`, and its successor would then wait for
        this side. To confirm, the link dials again after `Close`, until it is refused because it has ended there.
        """
        if self._confirms_close and self.grace and self.state in (S.CONNECTED, S.AWAY, S.RESUMING):
            if self.state is S.CONNECTED and not self._closes:
                self.effects.append(Close())
            self._closes = True
        else:
            super().close()

    # ---- silence

    def tick(self, now: float) -> None:
        """Detect silence of the current transport. The driver calls this once per second."""
        if self.state is not S.CONNECTED:
            return
        before = self._silent
        self._silent = before + 1 if self.progress == self._progress else 0
        self._progress = self.progress
        quiet = self.limits.quiet_seconds
        if (before >= quiet) != (self._silent >= quiet):
            self.effects.append(LinkEvent.HEARD if before >= quiet else LinkEvent.QUIET)
        if self._silent >= self.limits.silent_seconds:
            self.fall_silent(now)

    def fall_silent(self, now: float) -> None:
        """Give up the current transport, which has brought nothing for `silent_seconds`."""
        self._fell_silent = self._addresses.of_one(self.address).each
        self.disconnect(now, f"{self.name} was silent for {self.limits.silent_seconds} s")
