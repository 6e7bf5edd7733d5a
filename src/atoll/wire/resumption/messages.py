"""What the two ends of a control connection say to each other about the connection itself.

These messages are in frames of their own kind (`wire.framing`), so they are none of what the connection carries. They
are not counted, and not sent again.

    dialed     -> its peer   Granted, Resumed, NotResumed, Elsewhere
    who dials  -> its peer   Resume
    either     -> the other  Acknowledge, Bye
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from atoll.wire.framing import link_header


class LinkMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The base of all of them."""


class Granted(LinkMessage, frozen=True, tag=1):
    """The connection may be resumed under this number and secret, for so many seconds after each loss of its socket.

    It is said again where that time is another from now on: a process that ends, and another is to go on, grants more.
    `term` rises with each start of the process that was dialed, where it goes on with what the one before did.
    """

    number: int
    secret: str
    term: int
    seconds: float


class Resume(LinkMessage, frozen=True, tag=2):
    """The first message on a new socket: it carries connection `number` from now on.

    Of yours I have so many messages, `whole` ones and those in pieces; the newest term that I know is `term`. `attempt`
    rises from socket to socket, so that an older one that is noticed later is told from a newer one.
    """

    number: int
    secret: str
    term: int
    whole: int
    pieced: int
    attempt: int


class Resumed(LinkMessage, frozen=True, tag=3):
    """It is resumed. Of yours I have so many; mine that you lack come next."""

    term: int
    whole: int
    pieced: int


class NotResumed(LinkMessage, frozen=True, tag=4):
    """It is not resumed here, and where that is `final`, nowhere."""

    reason: str
    final: bool


class Acknowledge(LinkMessage, frozen=True, tag=5):
    """Of yours I have so many, for good."""

    whole: int
    pieced: int


class Bye(LinkMessage, frozen=True, tag=6):
    """The connection is over: this side has closed it. The last message."""


class Elsewhere(LinkMessage, frozen=True, tag=7):
    """Where this side is not reached any more, the connection may be resumed at one of these addresses.

    They replace those of an earlier such message.
    """

    addresses: tuple[str, ...]


class NotResumedError(Exception):
    """Who was dialed does not go on with the connection; where that is `final`, nobody will. Stays within `wire`."""

    def __init__(self, text: str, final: bool) -> None:
        super().__init__(text)
        self.final = final


AnyLinkMessage = Granted | Resume | Resumed | NotResumed | Acknowledge | Bye | Elsewhere

_encode = msgspec.msgpack.Encoder().encode
# Raises msgspec's errors for what is none.
decode_link: Callable[[Any], AnyLinkMessage] = msgspec.msgpack.Decoder(AnyLinkMessage).decode


def encode_link(message: AnyLinkMessage) -> bytes:
    """The frame of such a message."""
    body = _encode(message)
    return link_header(len(body)) + body
