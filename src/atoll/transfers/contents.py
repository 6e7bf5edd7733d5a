"""What a piece is made of: buffers, memory that a function fills, or a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from atoll.errors import Code, StatusError

_READ_BYTES = 1 << 30  # that one system call may be asked for


class Buffers:
    """Buffers, one after the other. They must not change until they have been sent."""

    __slots__ = ("_views", "nbytes")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self.nbytes = sum([view.nbytes for view in views])  # a list is quicker here than a generator

    def views(self) -> Sequence[memoryview]:
        return self._views

    def write_into(self, target: memoryview) -> None:
        position = 0
        for view in self._views:
            target[position : position + view.nbytes] = view
            position += view.nbytes


class Filled:
    """Bytes that `fill(target)` writes, straight into the memory that they travel in where there is such."""

    __slots__ = ("nbytes", "write_into")

    def __init__(self, nbytes: int, fill: Callable[[memoryview], None]) -> None:
        self.nbytes = nbytes
        self.write_into = fill

    def views(self) -> Sequence[memoryview]:
        return (_written(self),)


class FileContents:
    """The first `nbytes` of an open file, which others may still change or shorten."""

    __slots__ = ("descriptor", "nbytes")

    def __init__(self, nbytes: int, descriptor: int) -> None:
        self.nbytes = nbytes
        self.descriptor = descriptor

    def views(self) -> Sequence[memoryview]:
        return (_written(self),)

    def write_into(self, target: memoryview) -> None:
        read_file(self.descriptor, target)


def _written(contents: Filled | FileContents) -> memoryview:
    """The contents in memory of their own."""
    buffer = memoryview(bytearray(contents.nbytes))
    contents.write_into(buffer)
    return buffer


def as_views(parts: Sequence[Any]) -> list[memoryview]:
    """The parts as bytes, without those that are empty."""
    return [view.cast("B") for part in parts if (view := memoryview(part)).nbytes]


def read_file(descriptor: int, target: memoryview) -> None:
    """Copies the beginning of a file. Raises StatusError (DATA_LOSS) where the file has become too short.

    It is read and not mapped: who touches a mapping whose file was shortened is ended by SIGBUS.
    """
    position = 0
    while position < target.nbytes:
        count = os.preadv(descriptor, [target[position : position + _READ_BYTES]], position)
        if not count:
            raise StatusError(
                Code.DATA_LOSS,
                f"a file of {target.nbytes} bytes was shortened to {position} before it was read: "
                "a client must leave the files of its large transfers alone",
            )
        position += count
