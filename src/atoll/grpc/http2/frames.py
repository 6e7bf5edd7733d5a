"""HTTP/2 frames as bytes: types, flags, settings, error codes, and encoders for control frames.

Section numbers refer to RFC 9113.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
DEFAULT_MAX_FRAME = 16_384

# One word holds the 24-bit length and the 8-bit type, because `struct` has no 24-bit integer.
frame_header = struct.Struct(">IBI")
_setting = struct.Struct(">HI")
_word = struct.Struct(">I")
_goaway = struct.Struct(">II")

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY_FLAG = 0x20

HeaderList = list[tuple[bytes, bytes]]


class ErrorCode(IntEnum):
    """Error codes of section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class Setting(IntEnum):
    """Settings of section 6.5.2."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ConnectionFailure(Exception):
    """A protocol error of the peer that ends the connection (section 5.4.1)."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def settings_frame(settings: Iterable[tuple[int, int]]) -> bytes:
    payload = b"".join(_setting.pack(*each) for each in settings)
    return frame_header.pack(len(payload) << 8 | SETTINGS, 0, 0) + payload


def parse_settings(payload: bytes) -> dict[int, int]:
    """Return the last value of each setting in a frame. Raise ConnectionFailure if a value breaks section 6.5.2."""
    if len(payload) % 6:
        raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS length is not a multiple of 6")
    settings: dict[int, int] = {}
    for key, value in _setting.iter_unpack(payload):
        if key == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH is {value}")
        if key == Setting.INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE is {value}")
        if key == Setting.MAX_FRAME_SIZE and not DEFAULT_MAX_FRAME <= value < 2**24:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE is {value}")
        settings[key] = value
    return settings


def window_update(stream_id: int, increment: int) -> bytes:
    return frame_header.pack(4 << 8 | WINDOW_UPDATE, 0, stream_id) + _word.pack(increment)


def rst_stream(stream_id: int, code: int) -> bytes:
    return frame_header.pack(4 << 8 | RST_STREAM, 0, stream_id) + _word.pack(code)


def goaway(last_stream_id: int, code: int, reason: bytes = b"") -> bytes:
    head = frame_header.pack(8 + len(reason) << 8 | GOAWAY, 0, 0)
    return head + _goaway.pack(last_stream_id, code) + reason


def ping_ack(payload: bytes) -> bytes:
    return frame_header.pack(8 << 8 | PING, ACK, 0) + payload


SETTINGS_ACK = frame_header.pack(SETTINGS, ACK, 0)


def header_frames(stream_id: int, block: bytes, max_frame: int, end_stream: bool) -> bytes:
    """Return a HEADERS frame and the CONTINUATION frames that the block needs."""
    pieces = [block[i : i + max_frame] for i in range(0, len(block), max_frame)] or [b""]
    frames = bytearray()
    for number, piece in enumerate(pieces):
        kind = CONTINUATION if number else HEADERS
        flags = END_HEADERS if number == len(pieces) - 1 else 0
        if end_stream and not number:
            flags |= END_STREAM
        frames += frame_header.pack(len(piece) << 8 | kind, flags, stream_id) + piece
    return bytes(frames)
