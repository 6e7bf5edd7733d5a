"""Edits an XSpace, XLA's profile of a whole process: hides other sessions' programs, and joins two profiles.

An XSpace is a protobuf message. Each plane has tables of names, and events refer to names by number, so events are
copied without changes. A profile still shows when devices were busy with another session's work, and with which XLA
operations.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator

import msgspec

from atoll.errors import invalid
from atoll.protocol.protobuf_fields import field

HIDDEN = b"another session's program"

# Field numbers (tsl/profiler/protobuf/xplane.proto)
_PLANES = 1  # of XSpace
_PLANE_NAME = 2  # of XPlane
_EVENT_NAMES, _STAT_NAMES = 4, 5  # of XPlane; both are maps
_VALUE = 2  # of an entry of a map
_ID, _NAME, _DISPLAY_NAME, _DESCRIPTION = 1, 2, 4, 3
_BYTES = 2  # the wire type of fields with a length

_THREADS = b"/host:CPU"  # the plane of a process's threads; TensorBoard shows only the first plane with this name
_FURTHER = b"/device:CUSTOM:"  # a prefix for names of planes that TensorBoard always shows
_WORDS = re.compile(rb"[A-Za-z0-9_.<>$-]+")
# Number of program names that are kept after their functions were dropped.
_PAST_NAMES = 4096


class Others(msgspec.Struct, frozen=True):
    """Names of other sessions' programs. The session itself also has programs with the `ambiguous` names."""

    hidden: Collection[str] = ()
    ambiguous: Collection[str] = ()


class Programs:
    """The names of a host's programs, by function, and the sessions that have compiled them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, tuple[str, set[int]]] = {}
        self._past: OrderedDict[str, None] = OrderedDict()  # names of dropped programs, oldest first

    def compiled(self, function: str, program: str, session: int) -> None:
        """Record that a session has compiled a program, maybe after other sessions."""
        with self._lock:
            self._names.setdefault(function, (program, set()))[1].add(session)

    def dropped(self, function: str) -> None:
        with self._lock:
            program, _ = self._names.pop(function)
            self._past[program] = None
            while len(self._past) > _PAST_NAMES:
                self._past.popitem(last=False)

    def close(self, session: int) -> None:
        """Forget a session that has ended."""
        with self._lock:
            for _, sessions in self._names.values():
                sessions.discard(session)

    def others(self, session: int) -> Others:
        """Return the current and past programs of this host that the session has not compiled."""
        own: set[str] = set()
        with self._lock:
            others = set(self._past)
            for program, sessions in self._names.values():
                (own if session in sessions else others).add(program)
        return Others(others - own, others & own)


def hide(xspace: bytes, others: Others) -> bytes:
    """Return an XSpace without other sessions' programs. Raise INVALID_ARGUMENT if it is not an XSpace."""
    hidden = {name.encode() for name in others.hidden}
    bare = hidden | {name.encode() for name in others.ambiguous}
    if not bare:
        return xspace

    def has(text: bytes, names: set[bytes]) -> bool:
        return any(word in names for word in _WORDS.findall(text))

    def name(text: bytes) -> bytes:
        return HIDDEN if has(text, hidden) else text

    def event(content: bytes) -> bytes:
        """Remove the stats and metadata along with the name, because they may contain the program itself."""
        fields = list(_fields(content))
        texts = [whole[start:] for number, start, whole in fields if number in (_NAME, _DISPLAY_NAME)]
        if not any(has(text, bare) for text in texts):
            return content
        kept = b"".join(whole for number, _, whole in fields if number == _ID)
        return kept + b"".join(field(_NAME, name(text)) for text in texts[:1])

    def stat(content: bytes) -> bytes:
        return _rewritten(content, {_NAME: name, _DESCRIPTION: name})

    plane = {
        _EVENT_NAMES: lambda entry: _rewritten(entry, {_VALUE: event}),
        _STAT_NAMES: lambda entry: _rewritten(entry, {_VALUE: stat}),
    }
    return _rewritten(xspace, {_PLANES: lambda content: _rewritten(content, plane)})


def joinable(xspace: bytes, name: str) -> bytes:
    """Return an XSpace that can be appended to another one, with its threads in a plane called `name`.

    Protobuf merges concatenated messages. Raises INVALID_ARGUMENT if the bytes are not an XSpace.
    """

    def renamed(plane: bytes) -> bytes:
        return _rewritten(plane, {_PLANE_NAME: lambda text: _FURTHER + name.encode() if text == _THREADS else text})

    return _rewritten(xspace, {_PLANES: renamed})


def _rewritten(message: bytes, rewrites: dict[int, Callable[[bytes], bytes]]) -> bytes:
    parts = []
    for number, start, whole in _fields(message):
        rewrite = rewrites.get(number)
        parts.append(whole if rewrite is None or start < 0 else field(number, rewrite(whole[start:])))
    return b"".join(parts)


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number, offset of the content in the field, field); the offset is -1 for a field without a length."""
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
            raise invalid("invalid XSpace: a field has an unknown wire type")
        if position > end:
            raise invalid("invalid XSpace: a field is truncated")
        yield key >> 3, start, message[first:position]


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(message) or shift > 63:
            raise invalid("invalid XSpace: a number is truncated or too long")
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
