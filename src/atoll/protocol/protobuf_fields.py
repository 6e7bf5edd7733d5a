"""Encodes fields of protobuf messages whose schemas are not compiled, or whose contents must not be copied."""

from __future__ import annotations

_NUMBER, _BYTES = 0, 2  # wire types


def field(number: int, content: int | bytes) -> bytes:
    """Return a field with a number that is not negative, or with bytes: a string, bytes or message."""
    if isinstance(content, int):
        return varint(number << 3 | _NUMBER) + varint(content)
    return header(number, len(content)) + content


def header(number: int, nbytes: int) -> bytes:
    """Return what precedes the contents of a field of `nbytes` bytes."""
    return varint(number << 3 | _BYTES) + varint(nbytes)


def varint(value: int) -> bytes:
    """Return the encoding of a number that is not negative."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
