"""gRPC headers: metadata in both directions, and the trailers that carry a call's status.

The encoding follows grpc/grpc, doc/PROTOCOL-HTTP2.md. Values of keys that end in "-bin" are base64, with or without
padding. The status message is percent-encoded UTF-8.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from atoll.grpc.http2.frames import HeaderList
from atoll.grpc.status import GrpcError, StatusCode

MAX_ENCODED_MESSAGE = 4096
"""Limit for the encoded status message, because clients reject trailers above 8 KiB by default."""

RESPONSE_HEADERS: HeaderList = [
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", b"identity"),
]


def check_grpc_request(headers: HeaderList) -> int:
    """Return 200 for a gRPC request, otherwise the HTTP status with which to reject the request."""
    if (b":method", b"POST") not in headers:
        return 405
    content_type = next((value for name, value in headers if name == b"content-type"), b"")
    return 200 if content_type.startswith(b"application/grpc") else 415


def parse_metadata(headers: HeaderList) -> dict[str, bytes]:
    """Return the metadata of a request, with decoded "-bin" values. Values of a repeated key are joined by commas.

    Raise GrpcError (INVALID_ARGUMENT) if a "-bin" value is not base64.
    """
    metadata: dict[str, bytes] = {}
    for name, value in headers:
        if name[:1] == b":":
            continue
        key = name.decode("ascii")
        if key.endswith("-bin"):
            value = b",".join(_decode_base64(key, each) for each in value.split(b","))
        metadata[key] = metadata[key] + b"," + value if key in metadata else value
    return metadata


def _decode_base64(key: str, value: bytes) -> bytes:
    bare = value.strip().rstrip(b"=")
    try:
        return base64.b64decode(bare + b"=" * (-len(bare) % 4), validate=True)
    except binascii.Error as error:
        raise GrpcError(StatusCode.INVALID_ARGUMENT, f"metadata {key!r} is not valid base64") from error


def encode_metadata(metadata: Mapping[str, bytes]) -> HeaderList:
    """Return metadata as headers, with "-bin" values in base64."""
    return [
        (key.encode("ascii"), base64.b64encode(value).rstrip(b"=") if key.endswith("-bin") else value)
        for key, value in metadata.items()
    ]


def status_trailers(code: int, message: str) -> HeaderList:
    trailers = [(b"grpc-status", b"%d" % code)]
    if message:
        trailers.append((b"grpc-message", _percent_encode(message)))
    return trailers


def _percent_encode(message: str) -> bytes:
    """Encode `message` as percent-encoded UTF-8, truncated between characters to `MAX_ENCODED_MESSAGE`."""
    encoded = bytearray()
    for character in message:
        if " " <= character <= "~" and character != "%":
            piece = character.encode("ascii")
        else:
            piece = b"".join(b"%%%02X" % byte for byte in character.encode("utf-8", "replace"))
        if len(encoded) + len(piece) > MAX_ENCODED_MESSAGE:
            break
        encoded += piece
    return bytes(encoded)
