"""The messages that carry a host buffer's bytes: bytes in field 1, and nothing else."""

from __future__ import annotations

from atoll.errors import invalid


def contents_header(nbytes: int) -> bytes:
    """What goes before so many bytes, to make a message of them."""
    return b"\x0a" + _varint(nbytes)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def contents_of(data: bytes | memoryview) -> memoryview:
    """The bytes of field 1 in a message that has no other, without copying them."""
    view = memoryview(data)
    if not view.nbytes:
        return view
    if view[0] != 0x0A:
        raise invalid("no host buffer contents")
    size = shift = 0
    position = 1
    while True:
        if position >= view.nbytes or shift > 63:
            raise invalid("no host buffer contents")
        byte = view[position]
        position += 1
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if position + size != view.nbytes:
        raise invalid("no host buffer contents")
    return view[position:]
