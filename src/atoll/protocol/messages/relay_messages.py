"""Between the controller, the relay of a group of hosts, and the other hosts of the group: see `worker.host_group`."""

from __future__ import annotations

import msgspec

from atoll.errors import Status
from atoll.protocol.messages.opening_messages import Message

# ---- controller -> worker


class JoinGroup(Message, frozen=True, tag=36):
    """From here on, what is for this host comes by way of `relay`, one of the group's `hosts`, perhaps itself.

    Pings and the end still come directly. What the relay sends before this has come waits for it: so the order in which
    the controller has sent to a host is kept.
    """

    relay: int
    hosts: tuple[int, ...]


class Forward(Message, frozen=True, tag=37):
    """To a relay: an encoded message for these hosts of its group. `units` are the dispatch units that it starts.

    With `in_pieces`, what is forwarded later may overtake it.
    """

    hosts: tuple[int, ...]
    content: bytes
    units: tuple[int, ...] = ()
    in_pieces: bool = False


# ---- relay -> controller


class GroupEnds(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A dispatch unit that has ended on these hosts: for each its start and its end, as in `Done`."""

    sequence: int
    hosts: tuple[int, ...]
    times: tuple[int, ...]


class Gathered(Message, frozen=True, tag=18):
    """Dispatch units that have ended on hosts of the group."""

    units: tuple[GroupEnds, ...]


class LinkLost(Message, frozen=True, tag=39):
    """This host and another of its group cannot reach each other: messages between them are lost."""

    host: int
    text: str


# ---- host of a group -> relay


class MemberDone(Message, frozen=True, tag=38):
    """As `Done`, of another host of the group."""

    host: int
    runs: tuple[tuple[int, int, int], ...]


class MemberFailed(Message, frozen=True, tag=51):
    """As `Failed`, of another host of the group; the relay passes it on."""

    host: int
    sequence: int
    status: Status


# ---- relay -> host of its group


class RelayedPiece(Message, frozen=True, tag=54):
    """A part of an encoded message, which what is sent later may overtake; pieces of two messages do not mix."""

    content: bytes
    is_last: bool


FromRelay = Gathered | LinkLost | MemberFailed
