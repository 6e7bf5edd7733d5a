"""Messages between controller and workers about spilled arrays, which take no device memory until they are restored."""

from __future__ import annotations

import msgspec

from atoll.errors import Status
from atoll.protocol.messages.opening_messages import Message


class SpilledPiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The contents of one shard of an array, or of several equal ones of a host, with a number that the controller
    gives.

    With a `path` it is in a file that has nothing but these bytes, as a feed would carry them; else in the host's
    memory. `checksum` is the CRC-32 of what is in a file.
    """

    number: int
    nbytes: int = 0
    path: str = ""
    checksum: int = 0


class SpillRequest(Message, frozen=True, tag=160):
    """Copy shards to the host's memory, or to files in a `directory`; the arrays stay as they are.

    `shards` are (number of the piece, handle, which of this host's shards of it). `manifest` is written beside files:
    what the controller knows of the session. `directory` is absolute, or relative to the host's own for this purpose.
    """

    session: int
    request: int
    shards: tuple[tuple[int, int, int], ...]
    to_files: bool = False
    directory: str = ""
    manifest: bytes = b""


class SpillReply(Message, frozen=True, tag=161):
    """The answer to SpillRequest, when all of it is copied, or nothing."""

    session: int
    request: int
    status: Status
    pieces: tuple[SpilledPiece, ...] = ()
    seconds: float = 0.0


class SendSpilled(Message, frozen=True, tag=162):
    """Deliver pieces as feeds: (piece, feed, to which hosts). The pieces stay.

    They are needed together, by a launch of this number: see `transfers.inbox`.
    """

    session: int
    launch: int
    pieces: tuple[tuple[SpilledPiece, int, tuple[int, ...]], ...]


class SendSpilledFailed(Message, frozen=True, tag=163):
    """A piece that was to be delivered as this feed cannot be."""

    session: int
    feed: int
    status: Status


class DropSpilled(Message, frozen=True, tag=164):
    """These pieces are needed no more."""

    session: int
    pieces: tuple[SpilledPiece, ...]
