"""Frames of the control plane: a 4-byte little-endian length, then one msgpack message. No I/O.

A message is an array-like, tagged msgspec struct. A large one may come in pieces (`wire.pieces`), each in a frame of
its own between those of other messages; and the two ends may speak about the connection itself (`wire.resumption`).
The highest bits of a length say so. `FrameDecoder` turns the bytes of a connection into messages, however they are cut.
The data plane, which reads the bytes that follow a frame straight into their own memory, shares the header and its
limits, and has neither.

Invariant: any division of the same bytes into parts gives the same messages, in the same order, and the same error at
the same place.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from atoll.errors import FrameError
from atoll.wire.pieces import PieceBuffer

_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size
MAX_FRAME = 64 * 1024 * 1024
MAX_FIRST_FRAME = 16 * 1024  # until the peer is authenticated
MAX_PIECE = 64 * 1024
# Of a length: it is that of a piece, of the last one, of what is said about the connection.
_PIECE, _LAST, _LINK = 1 << 31, 1 << 30, 1 << 29
_KINDS = _PIECE | _LAST | _LINK
_MAX_LINK = 1024
# Of a message: its array's header and its tag.
_TAG_BYTES = 6

_encode = msgspec.msgpack.Encoder().encode

# What decoding raises for bytes that are no message: the latter two for text that is no UTF-8, and for deep nesting.
NO_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

# The header of a frame of so many bytes.
frame_header: Callable[[int], bytes] = _LENGTH.pack


def encode(message: Any) -> bytes:
    """The frame of a message."""
    body = _encode(message)
    return frame_header(len(body)) + body


def piece_header(length: int, is_last: bool) -> bytes:
    """The header of the frame of a piece of so many bytes."""
    return frame_header(length | _PIECE | (_LAST if is_last else 0))


def link_header(length: int) -> bytes:
    """The header of a frame of so many bytes that is about the connection itself."""
    return frame_header(length | _LINK)


def link_length(header: bytes) -> int:
    """The length that the header of such a frame states. Raises FrameError for that of another, or a longer one."""
    length: int = _LENGTH.unpack(header)[0]
    if length & _KINDS != _LINK or length & ~_KINDS > _MAX_LINK:
        raise FrameError(f"a frame of {length} bytes is none that is about the connection")
    return length & ~_KINDS


def frame_length(header: bytes, limit: int = MAX_FRAME) -> int:
    """The length that a frame's header states, in bytes. Raises FrameError where it is over `limit`."""
    length: int = _LENGTH.unpack(header)[0]
    if length > limit:
        raise FrameError(f"a frame of {length} bytes is over the limit of {limit}")
    return length


class FrameLimits(NamedTuple):
    """Limits of frames, in bytes, of a peer that is not trusted: by the tags of their messages, and of others.

    To decode a message takes time by the number of objects in it, and the loop does nothing else meanwhile.
    """

    by_tag: Mapping[int, int]
    others: int


@functools.cache
def _decoder(message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of a type, which all connections share. A new one takes 0.2 ms and leaves reference cycles."""
    return msgspec.msgpack.Decoder(message_type)


class FrameDecoder:
    """Turns bytes into messages of `message_type` (a msgspec struct or a union of them).

    Not for several threads. Frames of more than `limit` bytes are an error, found before any of their bytes is kept,
    and so are messages in pieces that come to more: so it holds at most one of each. `pieced` of the messages came in
    pieces. `on_link(content)` gets what is said about the connection, in its place among the messages. `limit` may be
    raised at any time, also while the messages of `feed` are read: it holds for the frames that follow.
    """

    def __init__(
        self, message_type: Any, limit: int = MAX_FRAME, on_link: Callable[[memoryview], None] | None = None
    ) -> None:
        self._decode = _decoder(message_type).decode
        self.limit = limit
        self._limits: FrameLimits | None = None
        self._on_link = on_link
        self.pieced = 0
        self._pending = bytearray()  # the start of a frame whose rest has not arrived
        self._pieces = PieceBuffer()

    def feed(self, data: memoryview) -> Iterator[Any]:
        """The messages that `data` completes, in order. It may be overwritten once the iterator has ended.

        The iterator is read to its end before the next call; after an error, or where it was left early, the decoder is
        of no use any more. Raises FrameError, after the messages before it, for a frame that is too long or no message.
        """
        pending = self._pending
        if pending:
            pending += data
            data = memoryview(pending)
        position, end = 0, len(data)
        decode, unpack = self._decode, _LENGTH.unpack_from
        try:
            while end - position >= HEADER_BYTES:
                (length,) = unpack(data, position)
                kind = 0
                if length > self.limit:
                    kind, length = self._special(length, data[position + HEADER_BYTES : end])
                stop = position + HEADER_BYTES + length
                if stop > end:
                    break
                try:
                    if not kind:
                        message = decode(data[position + HEADER_BYTES : stop])
                    elif (whole := self._take(kind, data[position + HEADER_BYTES : stop])) is not None:
                        message = decode(whole)
                    else:
                        position = stop
                        continue
                except NO_MESSAGE as error:
                    raise FrameError(f"a frame that is no message: {error}") from None
                position = stop
                yield message
        finally:
            if pending:
                data.release()
        if pending:
            del pending[:position]
        elif position < end:
            self._pending = bytearray(data[position:])

    def set_limits(self, limits: FrameLimits) -> None:
        """Limit the frames that follow by the tags of their messages."""
        self.limit, self._limits = min(limits.others, *limits.by_tag.values()), limits

    def _special(self, length: int, content: memoryview) -> tuple[int, int]:
        """Of a length over the limit: the kind of its frame, and its bytes. Raises FrameError.

        `content` is what has arrived of the frame.
        """
        limits = self._limits
        if limits is not None and not length & _KINDS:
            tag = _tag_of(content)
            if tag is None or length <= limits.by_tag.get(tag, limits.others):
                return 0, length
            raise FrameError(f"a frame of {length} bytes is over the limit of its message")
        if length & _PIECE:
            kind, count = length & (_PIECE | _LAST), length & ~(_PIECE | _LAST)
            if count > MAX_PIECE:
                raise FrameError(f"a piece of {count} bytes is over the limit of {MAX_PIECE}")
            return kind, count
        if length & _KINDS != _LINK or length & ~_LINK > _MAX_LINK or self._on_link is None:
            raise FrameError(f"a frame of {length} bytes is over the limit of {self.limit}")
        return _LINK, length & ~_LINK

    def _take(self, kind: int, content: memoryview) -> bytearray | None:
        """The message that a piece completes, if any. Raises FrameError."""
        if kind == _LINK:
            assert self._on_link is not None
            self._on_link(content)
            return None
        whole = self._pieces.add(content, kind == _PIECE | _LAST, self.limit)
        self.pieced += whole is not None
        return whole

    def end(self) -> None:
        """Drop `on_link`: no more bytes come."""
        self._on_link = None

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame, and of a message in pieces, whose rest has not arrived."""
        return len(self._pending) + self._pieces.nbytes


def _tag_of(content: memoryview) -> int | None:
    """Return the tag of a message, None if too little of it has arrived, and -1 if it has none."""
    if len(content) < _TAG_BYTES:
        return None
    if content[0] & 0xF0 == 0x90:
        start = 1
    elif content[0] == 0xDC:
        start = 3
    else:
        return -1
    first = content[start]
    if first < 0x80:
        return first
    if first == 0xCC:
        return content[start + 1]
    return int.from_bytes(content[start + 1 : start + 3], "big") if first == 0xCD else -1
