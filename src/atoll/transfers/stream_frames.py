"""What the two ends of a channel say to each other about transfers in chunks.

A transfer is announced by its piece. The receiver gives credits, by chunk numbers; the sender sends those chunks, in
any order and on any of the channel's streams; the receiver says when all have landed. Chunk i of a transfer holds its
bytes from i times the size of a chunk on: all are of that size, which is the kind's, but for the last.
"""

from __future__ import annotations

import msgspec

from atoll.transfers.transfer_engine import Piece

CHUNK_BYTES = 1 << 20  # between machines


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    return -(-nbytes // chunk_bytes)


class StreamPiece(Piece, frozen=True, array_like=True, tag="t"):
    """Announces transfer number `transfer`, which counts up. Its chunks follow as credits allow.

    With `part` chunks in a part the receiver hands it on in parts; 0: as a whole. `launch` is the same for feeds that
    are needed together; 0: not known.
    """

    transfer: int = 0
    part: int = 0
    launch: int = 0


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """The bytes of a chunk follow."""

    transfer: int
    index: int


class Credit(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """The first `chunks` chunks of the transfer may be sent."""

    transfer: int
    chunks: int


class Landed(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """All bytes of the transfer have arrived."""

    transfer: int


class GivenUp(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """The sender cannot get the contents: the transfer ends here. Chunks may still be on their way."""

    transfer: int
    code: int
    message: str


class NoRoom(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """The receiver cannot take the transfer: it ends here, before its first credit."""

    transfer: int
    code: int
    message: str


class MoreStreams(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    """Bulk is about to be sent to the side that dialed: it is to dial streams on which it receives."""
