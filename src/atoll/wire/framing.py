"""Frames of the control plane: a 4-byte little-endian length, then one msgpack message. No I/O.

A message is an array-like, tagged msgspec struct. `FrameDecoder` turns the bytes of a connection into messages,
however they are cut. The data plane, which reads the bytes that follow a frame straight into their own memory, shares
the header and its limits.

Invariant: any division of the same bytes into parts gives the same messages, in the same order, and the same error at
the same place.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from atoll.errors import FrameError

_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size
MAX_FRAME = 64 * 1024 * 1024

# The header of a frame of so many bytes.
frame_header: Callable[[int], bytes] = _LENGTH.pack


def frame_length(header: bytes, limit: int = MAX_FRAME) -> int:
    """The length that a frame's header states, in bytes. Raises FrameError where it is over `limit`."""
    length: int = _LENGTH.unpack(header)[0]
    if length > limit:
        raise FrameError(f"a frame of {length} bytes is over the limit of {limit}")
    return length


class FrameDecoder:
    """Turns bytes into messages of `message_type` (a msgspec struct or a union of them).

    Not for several threads. Frames of more than `limit` bytes are an error, found before any of their bytes is kept:
    so it holds at most one frame.
    """

    def __init__(self, message_type: Any, limit: int = MAX_FRAME) -> None:
        self._decode = msgspec.msgpack.Decoder(message_type).decode
        self._limit = limit
        self._pending = bytearray()  # the start of a frame whose rest has not arrived

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
        decode, limit, unpack = self._decode, self._limit, _LENGTH.unpack_from
        try:
            while end - position >= HEADER_BYTES:
                (length,) = unpack(data, position)
                if length > limit:
                    raise FrameError(f"a frame of {length} bytes is over the limit of {limit}")
                stop = position + HEADER_BYTES + length
                if stop > end:
                    break
                try:
                    message = decode(data[position + HEADER_BYTES : stop])
                except msgspec.MsgspecError as error:
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

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame whose rest has not arrived."""
        return len(self._pending)
