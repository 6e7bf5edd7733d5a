"""Between controller and workers: arrays that are put aside, so that they take no device memory, and come back."""

from __future__ import annotations

import msgspec

from atoll.errors import Status
from atoll.protocol.messages.opening import Message


class AsidePiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one shard of an array holds, or several equal ones of a host, under a number of the controller's.

    With a `path` it is in a file that has nothing but these bytes, as a feed would carry them; else in the host's
    memory. `checksum` is the CRC-32 of what is in a file.
    """

    number: int
    nbytes: int = 0
    path: str = ""
    checksum: int = 0


class PutAside(Message, frozen=True, tag=160):
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


class AsidePut(Message, frozen=True, tag=161):
    """The answer to PutAside, when all of it is copied, or nothing."""

    session: int
    request: int
    status: Status
    pieces: tuple[AsidePiece, ...] = ()
    seconds: float = 0.0


class SendAside(Message, frozen=True, tag=162):
    """Deliver pieces as feeds: (piece, feed, to which hosts). The pieces stay.

    They are needed together, by a launch of this number: see `transfers.admission`.
    """

    session: int
    launch: int
    pieces: tuple[tuple[AsidePiece, int, tuple[int, ...]], ...]


class AsideFailed(Message, frozen=True, tag=163):
    """A piece that was to be delivered as this feed cannot be."""

    session: int
    feed: int
    status: Status


class DropAside(Message, frozen=True, tag=164):
    """These pieces are needed no more."""

    session: int
    pieces: tuple[AsidePiece, ...]
