"""Events as bytes. A record is one event. A turn, all records up to a `Flush`, is in a journal whole or not at all.

A turn's header has its length and CRC32. In it, each record stands behind its own length.

Invariant: of a file of turns whose end is torn, or in which a bit has changed, the turns before that place are read,
and no other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from zlib import crc32

import msgspec

from atoll.errors import JournalError
from atoll.protocol.events import AnyEvent

_LENGTH = struct.Struct("<I")
_TURN = struct.Struct("<II")
# Of a turn: that of the journal, and not of what a wrong length would say.
MOST_TURN_BYTES = 1 << 30

_decode = msgspec.msgpack.Decoder(AnyEvent).decode

# An event's record. This is on the path of every message.
encode_event: Callable[[AnyEvent], bytes] = msgspec.msgpack.Encoder().encode


def decode_event(record: bytes | memoryview) -> AnyEvent:
    """The event of a record. Raises JournalError for what is none."""
    try:
        event: AnyEvent = _decode(record)
    except msgspec.MsgspecError as error:
        raise JournalError(f"a record is no event: {error}") from None
    return event


def decode_events(turn: bytes | memoryview) -> Iterator[AnyEvent]:
    """The events of a turn's records. Raises JournalError where one of them is none."""
    view = memoryview(turn)
    position, end = 0, len(view)
    while position < end:
        if end - position < _LENGTH.size:
            raise JournalError("a record of an event is cut off")
        (length,) = _LENGTH.unpack_from(view, position)
        position += _LENGTH.size
        if length > end - position:
            raise JournalError("a record of an event is cut off")
        yield decode_event(view[position : position + length])
        position += length


def join_records(records: Iterable[bytes]) -> bytes:
    """A turn's records, each behind its length."""
    pack = _LENGTH.pack
    return b"".join([part for record in records for part in (pack(len(record)), record)])


def encode_turn(body: bytes) -> bytes:
    """A turn's records, as they are in the file, with their length and checksum before them."""
    return _TURN.pack(len(body), crc32(body)) + body


def read_turns(content: bytes | memoryview) -> Iterator[tuple[int, memoryview]]:
    """The turns of a file, each as its records, with where it ends; up to the first that is not whole."""
    view = memoryview(content)
    position = 0
    while len(view) - position >= _TURN.size:
        length, checksum = _TURN.unpack_from(view, position)
        end = position + _TURN.size + length
        if length == 0 or length > MOST_TURN_BYTES or end > len(view):
            return
        body = view[position + _TURN.size : end]
        if crc32(body) != checksum:
            return
        position = end
        yield position, body
