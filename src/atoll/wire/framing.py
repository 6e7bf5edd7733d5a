"""Frames of the control plane: a 4-byte little-endian length and a msgpack message. No I/O.

A message is an array-like, tagged msgspec struct. A large message can be sent in pieces, each in its own frame between
those of other messages, so that small messages do not wait for it. Link messages (`wire.resumption.link_messages`) are
about the connection itself. The highest bits of a length mark pieces and link messages. The data plane uses the same
header and limits, but no pieces and no link messages.

Invariants: any division of the same bytes into parts gives the same messages in the same order, and the same error at
the same position. Pieces of two messages never mix: a sender sends one large message after the other, so a receiver
keeps at most one incomplete message.
"""

from __future__ import annotations

import functools
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from atoll.decodable import decodable
from atoll.errors import FrameError

_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size
MAX_FRAME = 64 * 1024 * 1024
MAX_FIRST_FRAME = 16 * 1024  # until the peer is authenticated
# Limit for received pieces.
MAX_PIECE = 64 * 1024
# Size of sent pieces. On a slow link, a small message waits for one piece on the sender's side.
PIECE_BYTES = 16 * 1024
# Bits of a length: a piece, the last piece of a message, a link message.
_PIECE, _LAST, _LINK = 1 << 31, 1 << 30, 1 << 29
_KINDS = _PIECE | _LAST | _LINK
# Limit for the length of a message that is sent: higher bits would make a frame of another kind.
MAX_LENGTH = _LINK - 1
_MAX_LINK = 1024
# Size of a message's array header and tag.
_TAG_BYTES = 6

_encode = msgspec.msgpack.Encoder().encode

# Exceptions of decoding invalid bytes. The latter two are for text that is not UTF-8 and for deep nesting.
NO_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

# Returns the header of a frame of the given number of bytes.
frame_header: Callable[[int], bytes] = _LENGTH.pack


def encode(message: Any) -> bytes:
    """Return the frame of a message. Raise FrameError if the message is too long for a header."""
    body = _encode(message)
    if len(body) > MAX_LENGTH:
        raise too_long(message, len(body))
    return frame_header(len(body)) + body


def too_long(message: Any, length: int) -> FrameError:
    """Return the error for a message of more than `MAX_LENGTH` bytes."""
    return FrameError(
        f"a {type(message).__name__} of {length} bytes cannot be sent: a message has at most {MAX_LENGTH} bytes, and "
        f"most peers accept {MAX_FRAME}"
    )


def piece_header(length: int, is_last: bool) -> bytes:
    """Return the header of the frame of a piece of `length` bytes."""
    return frame_header(length | _PIECE | (_LAST if is_last else 0))


def link_header(length: int) -> bytes:
    """Return the header of the frame of a link message of `length` bytes."""
    return frame_header(length | _LINK)


def frame_length(header: bytes, limit: int = MAX_FRAME) -> int:
    """Return the length in a frame's header, in bytes. Raise FrameError if it exceeds `limit`."""
    length: int = _LENGTH.unpack(header)[0]
    if length > limit:
        raise FrameError(f"a frame of {length} bytes is over the limit of {limit}")
    return length


class FrameLimits(NamedTuple):
    """Limits in bytes for the frames of an untrusted peer: by tag of the message, and for all other tags.

    The time to decode a message grows with its number of objects and blocks the event loop.
    """

    by_tag: Mapping[int, int]
    others: int


@functools.cache
def _decoder(message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the shared decoder of a type. Creating one takes 0.2 ms and leaves reference cycles."""
    return msgspec.msgpack.Decoder(decodable(message_type))


class FrameDecoder:
    """Decodes bytes into messages of `message_type` (a msgspec struct or a union of them). Not thread-safe.

    Frames, and messages in pieces, of more than `limit` bytes are errors, detected before their bytes are kept, so the
    decoder holds at most one of each. `limit` can be raised at any time, also during the iteration of `feed`, and
    applies to the following frames. `on_link(content)` receives link messages, in order with the other messages.
    `messages` is the number of messages that were yielded, and `pieced` the number of those that arrived in pieces.
    """

    def __init__(
        self, message_type: Any, limit: int = MAX_FRAME, on_link: Callable[[memoryview], None] | None = None
    ) -> None:
        self._decode = _decoder(message_type).decode
        self.limit = limit
        self._limits: FrameLimits | None = None
        self._on_link = on_link
        self.messages = self.pieced = 0
        self._pending = bytearray()  # the received part of an incomplete frame
        self._pieces = PieceBuffer()

    def feed(self, data: memoryview) -> Iterator[Any]:
        """Yield the messages that `data` completes, in order. `data` can be overwritten once the iterator has ended.

        The caller must exhaust the iterator before the next call. After an error or an early exit, the decoder cannot
        be used again. Raise FrameError for a frame that is too long or invalid, after the messages before it.
        """
        pending = self._pending
        if pending:
            pending += data
            data = memoryview(pending)
        position, end = 0, len(data)
        decode, unpack = self._decode, _LENGTH.unpack_from
        try:
            while (start := position + HEADER_BYTES) <= end:
                (length,) = unpack(data, position)
                kind = 0
                if length > self.limit:
                    kind, length = self._special(length, data[start:end])
                stop = start + length
                if stop > end:
                    break
                try:
                    if not kind:
                        message = decode(data[start:stop])
                    elif (whole := self._take(kind, data[start:stop])) is not None:
                        message = decode(whole)
                    else:
                        position = stop
                        continue
                except NO_MESSAGE as error:
                    raise FrameError(f"invalid message: {error}") from None
                position = stop
                self.messages += 1
                yield message
        finally:
            if pending:
                data.release()
        if pending:
            del pending[:position]
        elif position < end:
            self._pending = bytearray(data[position:])

    def set_limits(self, limits: FrameLimits) -> None:
        """Limit the following frames by the tags of their messages."""
        self.limit, self._limits = min(limits.others, *limits.by_tag.values()), limits

    def _special(self, length: int, content: memoryview) -> tuple[int, int]:
        """Return the kind and the size of a frame whose length exceeds `limit`. Raise FrameError if it is too long.

        `content` is the received part of the frame.
        """
        limits = self._limits
        if limits is not None and not length & _KINDS:
            tag = _tag_of(content)
            if tag is None or (tag >= 0 and length <= limits.by_tag.get(tag, limits.others)):
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
        """Handle a link message or a piece. Return the message if the piece completes one."""
        if kind == _LINK:
            assert self._on_link is not None
            self._on_link(content)
            return None
        whole = self._pieces.add(content, kind == _PIECE | _LAST, self.limit)
        self.pieced += whole is not None
        return whole

    def end(self) -> None:
        """Drop the reference to `on_link` because no more bytes arrive."""
        self._on_link = None

    @property
    def pending_bytes(self) -> int:
        """Number of bytes of an incomplete frame and of an incomplete message in pieces."""
        return len(self._pending) + self._pieces.nbytes


class PieceQueue:
    """Large messages to send, in order; `nbytes` is the number of bytes left."""

    def __init__(self) -> None:
        self._messages: deque[memoryview] = deque()
        self._position = 0  # in the first message
        self.nbytes = 0

    def put(self, content: memoryview) -> None:
        """Add a message without copying it, because one message may be in the queues of many connections."""
        self._messages.append(content)
        self.nbytes += len(content)

    def take(self) -> tuple[memoryview, bool]:
        """Remove and return the next piece, and whether it is the last of its message. The queue must not be empty."""
        message = self._messages[0]
        piece = message[self._position : self._position + PIECE_BYTES]
        self._position += len(piece)
        self.nbytes -= len(piece)
        is_last = self._position == len(message)
        if is_last:
            self._messages.popleft()
            self._position = 0
        return piece, is_last

    def clear(self) -> None:
        self._messages.clear()
        self._position = self.nbytes = 0


class PieceBuffer:
    """Assembles messages from their pieces. It cannot be used again after an error."""

    def __init__(self) -> None:
        self._content = bytearray()

    def add(self, piece: bytes | memoryview, is_last: bool, limit: int) -> bytearray | None:
        """Add a piece, and return the message if it is complete.

        Raise FrameError if the piece is empty or the message has more than `limit` bytes.
        """
        if not piece:
            raise FrameError("a piece of a message has no bytes")
        if len(self._content) + len(piece) > limit:
            raise FrameError(f"a message in pieces is over the limit of {limit} bytes")
        self._content += piece
        if not is_last:
            return None
        content, self._content = self._content, bytearray()
        return content

    @property
    def nbytes(self) -> int:
        """Number of bytes of the incomplete message."""
        return len(self._content)


def _tag_of(content: memoryview) -> int | None:
    """Return the tag of a message, or None if too little of the message has arrived.

    Return -1 if the message does not begin as senders encode it. msgspec also decodes longer forms of a tag, in which a
    peer could hide it from its limit.
    """
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
