"""The contents of a piece: buffers, memory that a function fills, a file, or several of these."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

from atoll.errors import Code, Details, Kind, StatusError, failed
from atoll.transfers.host_memory import copy
from atoll.transfers.transfer_engine import GROUP_ALIGNMENT, Contents, Group

_READ_BYTES = 1 << 30  # maximum bytes per system call


class BufferContents:
    """The concatenation of buffers, which must not change until they have been sent."""

    __slots__ = ("_ends", "_views", "in_parts", "launch", "nbytes")
    together = 0
    group: Group = ()

    def __init__(self, views: Sequence[memoryview], launch: int = 0, in_parts: bool = False) -> None:
        self._views = views
        self._ends: list[int] = []  # where each view ends; computed at the first use
        self.nbytes = sum([view.nbytes for view in views])  # a list is faster here than a generator
        self.launch = launch
        self.in_parts = in_parts

    def views(self) -> Sequence[memoryview]:
        return self._views

    def slice(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes from `start` to `stop`, without a copy."""
        if not self._ends:
            self._ends = list(accumulate(view.nbytes for view in self._views))
        return [self._views[number][first:last] for number, first, last in _cut(self._ends, start, stop)]

    def write_into(self, target: memoryview) -> None:
        position = 0
        for view in self._views:
            copy(view, target[position : position + view.nbytes])
            position += view.nbytes


class JoinedPart(Protocol):
    """A part of `Joined` contents, with the methods of `Contents` that it needs."""

    nbytes: int

    def slice(self, start: int, stop: int) -> Sequence[memoryview]: ...

    def write_into(self, target: memoryview) -> None: ...


class Joined:
    """The concatenation of contents."""

    __slots__ = ("_ends", "_parts", "nbytes")
    launch = together = 0
    in_parts = False
    group: Group = ()

    def __init__(self, parts: Sequence[JoinedPart]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.nbytes for part in parts))
        self.nbytes = self._ends[-1] if parts else 0

    def views(self) -> Sequence[memoryview]:
        return self.slice(0, self.nbytes)

    def slice(self, start: int, stop: int) -> list[memoryview]:
        cut = _cut(self._ends, start, stop)
        return [view for number, first, last in cut for view in self._parts[number].slice(first, last)]

    def write_into(self, target: memoryview) -> None:
        for part, end in zip(self._parts, self._ends, strict=True):
            part.write_into(target[end - part.nbytes : end])


def _cut(ends: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number, first, last) for each part between `start` and `stop` of a whole. `ends` has the parts' ends."""
    number = bisect_right(ends, start)
    while start < stop:
        begin = ends[number - 1] if number else 0
        yield number, start - begin, min(stop, ends[number]) - begin
        start = ends[number]
        number += 1


class Grouped(Joined):
    """The contents of several feeds, in one piece."""

    __slots__ = ("group",)

    def __init__(self, feeds: Sequence[tuple[int, Contents]]) -> None:
        parts: list[JoinedPart] = []
        for number, (_, contents) in enumerate(feeds):
            parts.append(contents)
            gap = -contents.nbytes % GROUP_ALIGNMENT
            if gap and number + 1 < len(feeds):
                parts.append(BufferContents((_ZEROS[:gap],)))
        super().__init__(parts)
        self.group = tuple([(feed, contents.nbytes) for feed, contents in feeds])


_ZEROS = memoryview(bytes(GROUP_ALIGNMENT))


class Filled:
    """Bytes that `fill(target)` writes, if possible directly into the memory that carries them."""

    __slots__ = ("_written", "nbytes", "write_into")
    launch = together = 0
    in_parts = False
    group: Group = ()

    def __init__(self, nbytes: int, fill: Callable[[memoryview], None]) -> None:
        self.nbytes = nbytes
        self.write_into = fill
        self._written: memoryview | None = None

    def views(self) -> Sequence[memoryview]:
        if self._written is None:
            self._written = _written(self)
        return (self._written,)

    def slice(self, start: int, stop: int) -> Sequence[memoryview]:
        (view,) = self.views()
        return (view[start:stop],)


class FileContents:
    """The first `nbytes` of an open file, which other processes may still change or shorten."""

    __slots__ = ("descriptor", "launch", "nbytes")
    in_parts = False
    together = 0
    group: Group = ()

    def __init__(self, nbytes: int, descriptor: int, launch: int = 0) -> None:
        self.nbytes = nbytes
        self.descriptor = descriptor
        self.launch = launch

    def views(self) -> Sequence[memoryview]:
        return (_written(self),)

    def slice(self, start: int, stop: int) -> Sequence[memoryview]:
        part = os.pread(self.descriptor, stop - start, start)
        if len(part) < stop - start:
            raise _shortened(self.nbytes, start + len(part))
        return (memoryview(part),)

    def write_into(self, target: memoryview) -> None:
        read_file(self.descriptor, target)


def _written(contents: Filled | FileContents) -> memoryview:
    """Return a copy of the contents in new memory."""
    buffer = memoryview(bytearray(contents.nbytes))
    contents.write_into(buffer)
    return buffer


def as_views(parts: Sequence[Any]) -> list[memoryview]:
    """Return the parts as views of bytes, without empty ones."""
    return [view.cast("B") for part in parts if (view := memoryview(part)).nbytes]


def read_file(descriptor: int, target: memoryview, offset: int = 0) -> None:
    """Copy bytes of a file from `offset` on. Raise StatusError (DATA_LOSS) if the file has become too short.

    The file is not mapped, because access to a mapping of a shortened file raises SIGBUS.
    """
    position = 0
    while position < target.nbytes:
        count = os.preadv(descriptor, [target[position : position + _READ_BYTES]], offset + position)
        if not count:
            raise _shortened(offset + target.nbytes, offset + position)
        position += count


def _shortened(nbytes: int, found: int) -> StatusError:
    return failed(
        Code.DATA_LOSS,
        f"a file of {nbytes} bytes was shortened to {found} before it was read: "
        "do not change the files that a client's large transfers use",
        Details(Kind.CONTENTS),
    )
