"""Events as bytes.

A record is one event. A turn is all records up to a `Flush`, and a journal contains it completely or not at all. A turn
begins with its length and CRC32; each record in it follows its own length.

Invariant: if the end of a file of turns is torn, or a bit has changed, exactly the turns before that position are read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from zlib import crc32

import msgspec

from atoll.decodable import decodable
from atoll.errors import JournalError
from atoll.protocol.events import AnyEvent

_LENGTH = struct.Struct("<I")
_TURN = struct.Struct("<II")
# Of a turn. Bounds the length that a damaged header can declare.
MAX_TURN_BYTES = 1 << 30

_decode = msgspec.msgpack.Decoder(decodable(AnyEvent)).decode

# Encode an event as a record. This is on the path of every message.
encode_event: Callable[[AnyEvent], bytes] = msgspec.msgpack.Encoder().encode


def decode_event(record: bytes | memoryview) -> AnyEvent:
    """Return the event of a record. Raises JournalError if it is invalid."""
    try:
        event: AnyEvent = _decode(record)
    except msgspec.MsgspecError as error:
        raise JournalError(f"invalid record of an event: {error}") from None
    return event


def decode_events(turn: bytes | memoryview) -> Iterator[AnyEvent]:
    """Yield the events of a turn's records. Raises JournalError if one is invalid."""
    return map(decode_event, records_of(turn))


def records_of(turn: bytes | memoryview) -> Iterator[memoryview]:
    """Yield the records of a turn. Raises JournalError if one is incomplete."""
    view = memoryview(turn)
    position, end = 0, len(view)
    while position < end:
        if end - position < _LENGTH.size:
            raise JournalError("the record of an event is cut off")
        (length,) = _LENGTH.unpack_from(view, position)
        position += _LENGTH.size
        if length > end - position:
            raise JournalError("the record of an event is cut off")
        yield view[position : position + length]
        position += length


def join_records(records: Iterable[bytes]) -> bytes:
    """Return the records of a turn, each after its length."""
    pack = _LENGTH.pack
    return b"".join([part for record in records for part in (pack(len(record)), record)])


def encode_turn(body: bytes) -> bytes:
    """Return a turn with its header, from the joined and possibly encrypted records."""
    return _TURN.pack(len(body), crc32(body)) + body


def read_turns(content: bytes | memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the body of each turn in a file, and the position of its end, up to the first turn that is incomplete."""
    view = memoryview(content)
    position = 0
    while len(view) - position >= _TURN.size:
        length, checksum = _TURN.unpack_from(view, position)
        end = position + _TURN.size + length
        if length == 0 or length > MAX_TURN_BYTES or end > len(view):
            return
        body = view[position + _TURN.size : end]
        if crc32(body) != checksum:
            return
        position = end
        yield position, body
