"""Events as bytes. A record is one event. A turn, all records up to a `Flush`, is in a journal whole or not at all.

A record's header has its length, kind, time and connection. A message stands behind it as it came, and is not encoded
anew. A turn's header has its length and CRC32.

Invariant: of a file of turns whose end is torn, or in which a bit has changed, the turns before that place are read,
and no other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any
from zlib import crc32

import msgspec

from atoll.errors import JournalError
from atoll.protocol import messages as m
from atoll.protocol.events import AnyEvent, Flush, Received

_RECORD = struct.Struct("<IBdI")  # the body's length, the event's kind, its time, its connection
_TURN = struct.Struct("<II")
_RECEIVED, _FLUSH, _OTHER = 1, 2, 3
# Of a turn: that of the journal, and not of what a wrong length would say.
MOST_TURN_BYTES = 1 << 30

_pack = _RECORD.pack
_encode = msgspec.msgpack.Encoder().encode
_decode_event = msgspec.msgpack.Decoder(AnyEvent).decode
_decode_message = msgspec.msgpack.Decoder(m.ToController).decode


def encode_event(event: AnyEvent) -> bytes:
    """Its record. This is on the path of every message."""
    if event.__class__ is Received:
        body = event.body or _encode(event.message)
        return _pack(len(body), _RECEIVED, event.seconds, event.connection) + body
    if event.__class__ is Flush:
        return _pack(0, _FLUSH, event.seconds, 0)
    body = _encode(event)
    return _pack(len(body), _OTHER, event.seconds, 0) + body


def decode_events(records: bytes | memoryview) -> Iterator[AnyEvent]:
    """The events of these records. Raises JournalError for what is none."""
    view = memoryview(records)
    position, end = 0, len(view)
    while position < end:
        if end - position < _RECORD.size:
            raise JournalError("a record of an event is cut off")
        length, kind, seconds, connection = _RECORD.unpack_from(view, position)
        position += _RECORD.size
        if length > end - position:
            raise JournalError("a record of an event is cut off")
        body = view[position : position + length]
        position += length
        try:
            if kind == _RECEIVED:
                yield Received(seconds, connection, _decode_message(body), bytes(body))
            elif kind == _FLUSH:
                yield Flush(seconds)
            else:
                event: Any = _decode_event(body)
                yield event
        except msgspec.MsgspecError as error:
            raise JournalError(f"a record is no event: {error}") from None


def encode_turn(records: Iterable[bytes]) -> bytes:
    """All of a turn's records, with their length and checksum before them."""
    body = b"".join(records)
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
