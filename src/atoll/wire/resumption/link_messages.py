"""The messages between the two ends of a control connection about the connection itself.

These messages have their own kind of frame (`wire.framing`) and are not part of what the connection carries. They are
not counted and not retransmitted.

    acceptor   -> dialer     ResumeToken, Resumed, ResumeRefused, AlternateAddresses
    dialer     -> acceptor   Resume
    either     -> the other  Acknowledge, Close
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from atoll.wire.framing import link_header


class LinkMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The base class of these messages."""


class ResumeToken(LinkMessage, frozen=True, tag=1):
    """Allow the dialer to resume connection `number` with `secret`, up to `seconds` after each loss of its socket.

    The acceptor sends it again if `seconds` changes: a process that ends and has a successor allows more time. `term`
    increases with each start of an acceptor that continues the work of the one before.
    """

    number: int
    secret: str
    term: int
    seconds: float


class Resume(LinkMessage, frozen=True, tag=2):
    """The first message on a new socket, which carries connection `number` from now on.

    The dialer has received `whole` messages, and `pieced` messages in pieces. The newest term that it knows is `term`.
    `attempt` increases with each socket, so that the acceptor can tell an old socket from a newer one.
    """

    number: int
    secret: str
    term: int
    whole: int
    pieced: int
    attempt: int


class Resumed(LinkMessage, frozen=True, tag=3):
    """The connection is resumed. The counts are those of the received messages; the missing messages come next."""

    term: int
    whole: int
    pieced: int


class ResumeRefused(LinkMessage, frozen=True, tag=4):
    """The connection is not resumed here, and if `final`, not anywhere."""

    reason: str
    final: bool


class Acknowledge(LinkMessage, frozen=True, tag=5):
    """The counts of the messages that the sender of this message has received durably."""

    whole: int
    pieced: int


class Close(LinkMessage, frozen=True, tag=6):
    """Close the connection. The last message of a side."""


class AlternateAddresses(LinkMessage, frozen=True, tag=7):
    """The addresses at which the connection may be resumed if this side cannot be reached.

    They replace the addresses of earlier messages.
    """

    addresses: tuple[str, ...]


class ResumeRefusedError(Exception):
    """The acceptor does not resume the connection; if `final`, no other will. Stays within `wire`."""

    def __init__(self, text: str, final: bool) -> None:
        super().__init__(text)
        self.final = final


AnyLinkMessage = ResumeToken | Resume | Resumed | ResumeRefused | Acknowledge | Close | AlternateAddresses

_encode = msgspec.msgpack.Encoder().encode
# Raises an error of msgspec if the content is no such message.
decode_link: Callable[[Any], AnyLinkMessage] = msgspec.msgpack.Decoder(AnyLinkMessage).decode


def encode_link(message: AnyLinkMessage) -> bytes:
    """Return the frame of `message`."""
    body = _encode(message)
    return link_header(len(body)) + body
