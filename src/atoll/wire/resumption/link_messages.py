"""Link messages: the messages between the two ends of a control connection about the connection itself.

Link messages have their own kind of frame (`wire.framing`). They are not counted and not retransmitted.

    acceptor   -> dialer     ResumeToken, Resumed, ResumeRefused, AlternateAddresses
    dialer     -> acceptor   Resume
    either     -> the other  Acknowledge, Close
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from atoll.decodable import decodable
from atoll.wire.framing import link_header


class LinkMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The base class of link messages."""


class ResumeToken(LinkMessage, frozen=True, tag=1):
    """Allow the dialer to resume connection `number` with `secret`, up to `seconds` after each loss of its socket.

    The acceptor sends the token again if `seconds` changes; a process that ends and has a successor allows more time.
    `term` increases with each start of an acceptor that continues the work of an earlier one.
    """

    number: int
    secret: str
    term: int
    seconds: float


class Resume(LinkMessage, frozen=True, tag=2):
    """Resume connection `number` on this socket. This is the first message on a new socket.

    The dialer has received `whole` messages, and `pieced` messages in pieces. The newest term that it knows is `term`.
    `attempt` increases with each socket, so that the acceptor can tell an old socket from a newer one.

    As the message of a controller that has taken over to an earlier one, `address` is that of the sender, or "".
    """

    number: int
    secret: str
    term: int
    whole: int
    pieced: int
    attempt: int
    address: str = ""


class Resumed(LinkMessage, frozen=True, tag=3):
    """Confirm that the connection is resumed. The counts are those of received messages; missing messages follow."""

    term: int
    whole: int
    pieced: int


class ResumeRefused(LinkMessage, frozen=True, tag=4):
    """Refuse to resume the connection. If `final`, no other process resumes it either.

    As the answer to the first message of a new connection, it is not final: the sender admits nobody now. If `spares`
    is not 0, it is also not final for a link whose token allows at least this many seconds. As the answer to an earlier
    controller, `term` is that of the controller that serves: at `address`, or the sender if that is "".
    """

    reason: str
    final: bool
    spares: float = 0.0
    term: int = 0
    address: str = ""


class Acknowledge(LinkMessage, frozen=True, tag=5):
    """Acknowledge the messages that the sender of this message has received durably."""

    whole: int
    pieced: int


class Close(LinkMessage, frozen=True, tag=6):
    """Close the connection. This is the last message of a side."""


class AlternateAddresses(LinkMessage, frozen=True, tag=7):
    """Set the addresses at which the dialer can resume the connection if this acceptor cannot be reached."""

    addresses: tuple[str, ...]


AnyLinkMessage = ResumeToken | Resume | Resumed | ResumeRefused | Acknowledge | Close | AlternateAddresses

_encode = msgspec.msgpack.Encoder().encode
# Raises an error of msgspec if the content is not a link message.
decode_link: Callable[[Any], AnyLinkMessage] = msgspec.msgpack.Decoder(decodable(AnyLinkMessage)).decode


def encode_link(message: AnyLinkMessage) -> bytes:
    """Return the frame of `message`."""
    body = _encode(message)
    return link_header(len(body)) + body
