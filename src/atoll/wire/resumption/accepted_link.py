"""The acceptor's end of a resumable connection, as a state machine; see `link`."""

from __future__ import annotations

import hashlib
import hmac

from atoll.errors import FrameError
from atoll.wire.framing import FrameDecoder
from atoll.wire.resumption.link import LIMITS, Link, LinkEvent, LinkLimits
from atoll.wire.resumption.link import LinkState as S
from atoll.wire.resumption.link_messages import (
    AlternateAddresses,
    Close,
    Resume,
    Resumed,
    ResumeRefused,
    ResumeToken,
)
from atoll.wire.resumption.link_record import LinkRecord
from atoll.wire.resumption.retransmit_buffer import NONE, Counts

# Number of no link, with whose secret controllers authenticate to each other.
CONTROLLERS = 0


class Acceptor:
    """The term, the key and the addresses that all links of an accepting process share.

    `term` increases with each start of the process. `key` is the source of the links' secrets and does not change. A
    link may be away for `seconds`. Peers can also resume their links at the alternate `addresses`.
    """

    def __init__(self, term: int, seconds: float, key: bytes) -> None:
        self.term = term
        self.seconds = seconds
        self.addresses: tuple[str, ...] = ()
        self.key = key

    def secret(self, number: int) -> str:
        return hmac.new(self.key, str(number).encode(), hashlib.sha256).hexdigest()

    def is_secret_of(self, message: Resume) -> bool:
        """Return whether the message has the secret of its link, which is the same in all terms."""
        return hmac.compare_digest(message.secret.encode(), self.secret(message.number).encode())

    def later_term(self, message: Resume) -> ResumeRefused | None:
        """Return the refusal of a peer that knows its secret and has seen a later term, or None for other peers."""
        if message.term <= self.term or not self.is_secret_of(message):
            return None
        return ResumeRefused(f"this is term {self.term}, and term {message.term} has begun", final=False)

    def answer_to_controller(self, message: Resume, address: str = "") -> ResumeRefused | None:
        """Return the answer to an earlier controller that asks who serves, or None for other peers.

        That is this process, or the controller at `address`, which this process follows.
        """
        if message.number != CONTROLLERS or not self.is_secret_of(message):
            return None
        where = f"at {address}" if address else "here"
        return ResumeRefused(f"term {self.term} serves {where}", final=True, term=self.term, address=address)

    def refusal(self, message: Resume, link: AcceptedLink | None, role: str) -> ResumeRefused | None:
        """Return the reason why a peer with `role` must not resume the link with the number in its message, if any."""
        if link is None or not self.is_secret_of(message):
            return ResumeRefused("it is unknown here or has ended", final=True)
        if link.role != role:
            return ResumeRefused(f"it belongs to a {link.role}", final=True)
        return None


class AcceptedLink(Link):
    """The acceptor's end, made from a record. `grant` begins a new link, and `resume` continues an earlier one."""

    def __init__(self, acceptor: Acceptor, record: LinkRecord, limits: LinkLimits = LIMITS) -> None:
        super().__init__(record.name, S.RESTORED, limits)
        self.buffer.restore(record.acknowledged, record.whole, record.pieced)
        self._acceptor = acceptor
        self.number = record.number
        self.role = record.role  # from the peer's certificate
        self._received_before = record.received
        # terms that began since the peer was last connected, each with the counts of sent messages when it began
        self.term_history = record.term_history.copy()
        self._patience = record.patience
        self.attempt = 0  # last attempt of the peer
        self._peer_has_ended = False
        self._fenced_at = NONE  # counts of sent messages at the time of `fence`

    def record(self) -> LinkRecord:
        """Return a copy of the state that survives this process."""
        return LinkRecord(
            self.number,
            self.role,
            self.name,
            self.received,
            self.buffer.acknowledged,
            list(self.buffer.whole),
            list(self.buffer.pieced),
            self.term_history.copy(),
            self._patience,
        )

    @property
    def grace(self) -> float:
        return self._acceptor.seconds

    # ---- transports

    def grant(self, decoder: FrameDecoder) -> None:
        """Begin on the first transport, and allow the peer to resume the link."""
        self._move(S.CONNECTED)
        self._attach(decoder)
        self.effects.append(self._token())
        if self._acceptor.addresses:
            self.effects.append(AlternateAddresses(self._acceptor.addresses))

    def resume(self, message: Resume, decoder: FrameDecoder) -> None:
        """Continue on a new transport. Raise FrameError if the peer's counts do not match those of this side."""
        self._check_descent(message)
        self.buffer.acknowledge(Counts(message.whole, message.pieced))
        was_away = self.is_away or self.state is S.FENCED
        self.attempt, self.term_history, self.deadline = message.attempt, [], None
        if self.state not in (S.CONNECTED, S.CLOSING):
            self._move(S.CONNECTED)
        self._attach(decoder)
        self._acknowledged = self.received
        self.effects.append(Resumed(self._acceptor.term, *self._acknowledged))
        self.effects.append(self._token())  # an earlier process may have granted a longer time
        self.effects += self._retransmissions()
        self.effects.append(AlternateAddresses(self._acceptor.addresses))
        if self.state is S.CLOSING:
            self._end(Close(), LinkEvent.CLOSED)
        elif was_away:
            self.effects.append(LinkEvent.BACK)

    def _check_descent(self, message: Resume) -> None:
        """Raise FrameError if the peer has messages of an earlier term that this process does not know."""
        for term, sent in self.term_history:
            if message.term < term and (message.whole > sent.whole or message.pieced > sent.pieced):
                raise FrameError(
                    f"the peer has messages of term {message.term} that were not known when term {term} began: "
                    "their effects are lost, although the peer may have acted on them"
                )

    def wait(self, now: float, reason: str) -> None:
        super().wait(now, reason)
        if self.state is S.RESTORED:
            self._move(S.AWAY)
        if self._peer_has_ended:
            self.lose(reason)

    def expire(self, now: float) -> None:
        """Lose the link if its peer has been away for too long."""
        if self.deadline is not None and now >= self.deadline:
            self.lose(f"{self.reason}, and it did not reconnect within {self.grace:.0f} s")

    def peer_ended(self) -> None:
        """Note that the peer's process has ended. Messages that it sent before may still arrive."""
        self._peer_has_ended = True
        if self.is_away:
            self.lose("its process has ended")

    # ---- fences

    def fence(self) -> None:
        """Send no messages and acknowledgements until `unfence` or a new transport."""
        if self.state is S.CONNECTED:
            self._fenced_at = self.buffer.sent
            self._move(S.FENCED)
            self.effects.append(LinkEvent.FENCED)

    def unfence(self) -> None:
        """Allow sending again, and send the messages that were queued since `fence`."""
        if self.state is S.FENCED:
            self._move(S.CONNECTED)
            self.effects += [*self._retransmissions(self._fenced_at), LinkEvent.BACK]
        elif self.state is S.CLOSING and self._decoder is None:
            self._end(LinkEvent.CLOSED)
        elif self.state is S.CLOSING:
            self.effects += self._retransmissions(self._fenced_at)
            self._end(Close(), LinkEvent.CLOSED)

    # ---- token and addresses

    def _token(self, seconds: float = 0.0) -> ResumeToken:
        acceptor = self._acceptor
        seconds = seconds or self._patience or acceptor.seconds
        return ResumeToken(self.number, acceptor.secret(self.number), acceptor.term, seconds)

    def set_patience(self, seconds: float) -> None:
        """Let the peer wait for `seconds` after a loss of its socket, or as long as all others if it is 0."""
        self._patience = seconds
        if self._decoder is not None:
            self.effects.append(self._token())

    def announce(self) -> None:
        """Send the peer the addresses at which it can also resume the link."""
        if self._decoder is not None:
            self.effects.append(AlternateAddresses(self._acceptor.addresses))

    # ---- leaving the link to another process

    def detach(self, seconds: float) -> None:
        """Leave the link to a later process. The peer waits for it for `seconds`."""
        self._leave(self._token(seconds))

    def hand_over(self, addresses: tuple[str, ...]) -> None:
        """Leave the link to another process at `addresses`."""
        self._leave(AlternateAddresses(addresses))

    def _leave(self, message: ResumeToken | AlternateAddresses) -> None:
        if self.has_ended:
            return
        if self._decoder is None:
            self._end(LinkEvent.CLOSED)
        else:
            self._end(message, LinkEvent.CLOSED)

    # ---- events of an earlier process

    def begin(self, term: int) -> None:
        """Note that a term begins. The messages sent until now are all that this process knows of earlier terms."""
        self.term_history.append((term, self.buffer.sent))

    def count(self) -> None:
        """Count one more message that an earlier process received."""
        whole, pieced = self._received_before
        self._received_before = Counts(whole + 1, pieced)

    def acknowledged(self, counts: Counts) -> None:
        """Apply an acknowledgement that an earlier process received."""
        self.buffer.acknowledge(counts)
