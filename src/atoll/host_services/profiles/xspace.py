"""An XSpace, what XLA's profiler recorded of a whole process: hides other sessions' programs in it, and joins two.

The format is protobuf's. Names stand once, in each plane's tables; events refer to them by number, so the millions of
events are passed on as they are. What is left of another session's work is when devices were busy, and with which of
XLA's operations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from atoll.errors import invalid

HIDDEN = b"another session's program"

# Field numbers (tsl/profiler/protobuf/xplane.proto)
_PLANES = 1  # of XSpace
_PLANE_NAME = 2  # of XPlane
_EVENT_NAMES, _STAT_NAMES, _PLANE_STATS = 4, 5, 6  # of XPlane; the first two are maps, which have keys and values
_VALUE = 2  # of an entry of a map
_ID, _NAME, _METADATA, _DISPLAY_NAME, _DESCRIPTION, _STATS = 1, 2, 3, 4, 3, 5
_BYTES = 2  # the wire type of what has a length


@dataclass(frozen=True)
class Others:
    """Names of programs that other sessions have. The `ambiguous` are those of programs of one's own, too."""

    hidden: Collection[str] = ()
    ambiguous: Collection[str] = ()


_WORDS = re.compile(rb"[A-Za-z0-9_.<>$-]+")


def hide(xspace: bytes, others: Others) -> bytes:
    """The XSpace without other sessions' programs. Raises INVALID_ARGUMENT for what is no XSpace."""
    hidden = {name.encode() for name in others.hidden}
    bare = hidden | {name.encode() for name in others.ambiguous}
    if not bare:
        return xspace

    def has(text: bytes, names: set[bytes]) -> bool:
        return any(word in names for word in _WORDS.findall(text))

    def name(text: bytes) -> bytes:
        return HIDDEN if has(text, hidden) else text

    def event(content: bytes) -> bytes:
        """Its stats and metadata go with its name: they may be the program itself."""
        fields = list(_fields(content))
        texts = [whole[start:] for number, start, whole in fields if number in (_NAME, _DISPLAY_NAME)]
        if not any(has(text, bare) for text in texts):
            return content
        kept = b"".join(whole for number, _, whole in fields if number == _ID)
        return kept + b"".join(_field(_NAME, name(text)) for text in texts[:1])

    def stat(content: bytes) -> bytes:
        return _rewritten(content, {_NAME: name, _DESCRIPTION: name})

    plane = {
        _EVENT_NAMES: lambda entry: _rewritten(entry, {_VALUE: event}),
        _STAT_NAMES: lambda entry: _rewritten(entry, {_VALUE: stat}),
    }
    return _rewritten(xspace, {_PLANES: lambda content: _rewritten(content, plane)})


_THREADS = b"/host:CPU"  # the plane of a process's threads: of planes with this name TensorBoard shows the first
_FURTHER = b"/device:CUSTOM:"  # what the names of planes begin with that it shows whatever they are


def joinable(xspace: bytes, name: str) -> bytes:
    """The XSpace such that it may follow another one in its file: its threads are in a plane of this name.

    To follow one another joins them: so protobuf has it. Raises INVALID_ARGUMENT for what is no XSpace.
    """

    def renamed(plane: bytes) -> bytes:
        return _rewritten(plane, {_PLANE_NAME: lambda text: _FURTHER + name.encode() if text == _THREADS else text})

    return _rewritten(xspace, {_PLANES: renamed})


def _rewritten(message: bytes, rewrites: dict[int, Callable[[bytes], bytes]]) -> bytes:
    """The message with these of its fields rewritten."""
    parts = []
    for number, start, whole in _fields(message):
        rewrite = rewrites.get(number)
        parts.append(whole if rewrite is None or start < 0 else _field(number, rewrite(whole[start:])))
    return b"".join(parts)


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(number, where in the field its content begins, the field), -1 for content without a length."""
    position, end = 0, len(message)
    while position < end:
        first = position
        key, position = _varint(message, position)
        kind = key & 7
        start = -1
        if kind == 0:
            _, position = _varint(message, position)
        elif kind == 1:
            position += 8
        elif kind == _BYTES:
            length, position = _varint(message, position)
            start = position - first
            position += length
        elif kind == 5:
            position += 4
        else:
            raise invalid("no XSpace: a field of an unknown kind")
        if position > end:
            raise invalid("no XSpace: a field that is cut off")
        yield key >> 3, start, message[first:position]


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(message) or shift > 63:
            raise invalid("no XSpace: a number that does not end")
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _field(number: int, content: bytes) -> bytes:
    return bytes((number << 3 | _BYTES,)) + _length(len(content)) + content


def _length(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
