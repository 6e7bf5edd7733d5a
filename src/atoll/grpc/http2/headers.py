"""Assembles HTTP/2 header blocks from frames, decompresses them, and checks that they are requests.

Invariant: a block holds at most `Limits.max_header_bytes`, before and after decompression, regardless of its number of
frames. See RFC 9113, sections 4.3, 6.2, 6.10, 8.2 and 8.3. The hpack library implements the compression (RFC 7541).
"""

from __future__ import annotations

from typing import cast

import hpack

from atoll.grpc.http2 import frames
from atoll.grpc.http2.frames import ConnectionFailure, ErrorCode, HeaderList
from atoll.grpc.http2.http2_limits import Limits


class MalformedRequest(Exception):
    """A header list that is not a valid request (section 8.1.1). It ends only its stream."""


class HeaderBlocks:
    """Assembles the header blocks that a connection receives, one at a time."""

    def __init__(self, limits: Limits) -> None:
        self.stream = 0
        """The stream whose block is incomplete, or 0. The next frame must then continue this block."""
        self.end_stream = False
        """Whether the current or last block ends its stream."""
        self._limits = limits
        self._decoder = hpack.Decoder(max_header_list_size=limits.max_header_bytes)
        self._block = bytearray()
        self._continuations = 0

    def begin(self, flags: int, stream: int, payload: bytes) -> HeaderList | None:
        """Add a HEADERS frame. Return the headers if the block is complete."""
        self._block = bytearray(_unpadded(payload, flags))
        self.stream = stream
        self.end_stream = bool(flags & frames.END_STREAM)
        self._continuations = 0
        return self._decode() if flags & frames.END_HEADERS else None

    def extend(self, flags: int, payload: bytes) -> HeaderList | None:
        """Add a CONTINUATION frame. Return the headers if the block is complete."""
        if not self.stream:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "CONTINUATION outside a header block")
        self._continuations += 1
        self._block += payload
        limits = self._limits
        if len(self._block) > limits.max_header_bytes or self._continuations > limits.max_continuations:
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "header block too long")
        return self._decode() if flags & frames.END_HEADERS else None

    def _decode(self) -> HeaderList:
        self.stream = 0
        block, self._block = bytes(self._block), bytearray()
        try:
            return cast(HeaderList, self._decoder.decode(block, raw=True))
        except hpack.OversizedHeaderListError as error:
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, str(error)) from error
        except Exception as error:  # the decoder raises IndexError and others on some malformed blocks
            raise ConnectionFailure(ErrorCode.COMPRESSION_ERROR, "cannot decode the header block") from error


def _unpadded(payload: bytes, flags: int) -> bytes:
    """Return a HEADERS payload without padding and priority."""
    start, stop = 0, len(payload)
    if flags & frames.PADDED:
        if not stop or payload[0] + 1 > stop:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "HEADERS padding exceeds its frame")
        start, stop = 1, stop - payload[0]
    if flags & frames.PRIORITY_FLAG:
        start += 5
        if start > stop:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
    return payload[start:stop]


_REQUEST_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_CONNECTION_SPECIFIC = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_BAD_IN_NAME = frozenset(range(0x21)) | frozenset(range(0x41, 0x5B)) | frozenset(range(0x7F, 0x100))


def check_request(headers: HeaderList) -> None:
    """Raise MalformedRequest if the list is not the header section of a request."""
    pseudo: set[bytes] = set()
    regular = False
    for name, value in headers:
        if b"\0" in value or b"\r" in value or b"\n" in value:
            raise MalformedRequest(f"invalid value of header {name!r}")
        if name[:1] == b":":
            if regular or name in pseudo or name not in _REQUEST_PSEUDO:
                raise MalformedRequest(f"pseudo-header {name!r} out of place")
            pseudo.add(name)
            continue
        regular = True
        if not name or b":" in name or not _BAD_IN_NAME.isdisjoint(name):
            raise MalformedRequest(f"invalid header name {name!r}")
        if name in _CONNECTION_SPECIFIC or (name == b"te" and value != b"trailers"):
            raise MalformedRequest(f"connection-specific header {name!r}")
    if (b":path", b"") in headers:
        raise MalformedRequest("empty :path")
    missing = {b":method", b":scheme", b":path"} - pseudo
    if missing:
        raise MalformedRequest(f"missing {sorted(missing)!r}")
