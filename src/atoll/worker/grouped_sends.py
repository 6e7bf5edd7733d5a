"""Sends arrays of one run to other hosts in few messages: the pieces of small and medium arrays go together.

A message costs both hosts more time than copying half a megabyte: threads change, frames are encoded, feeds are
awaited. So a thread sends the pieces of consecutive arrays of a plan in one message per host (`transfers.Grouped`).
Arrays that are not computed yet do not delay those that are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from atoll.devices.device import DeviceArray
from atoll.host_services import host_data
from atoll.host_services.slabs import ArrayContents
from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.transfers.channel import DataChannel
from atoll.transfers.piece_contents import BufferContents
from atoll.transfers.transfer_engine import Contents

# Larger pieces are messages of their own.
MAX_GROUPED_PIECE = 1 << 20
# Bytes and pieces that are sent together.
GROUP_BYTES = 4 << 20
GROUP_PIECES = 1024
# Up to this size, the executor's thread itself does a read if it would not block.
SMALL_BYTES = 16 * 1024
_FRAME_BYTES = 96  # what a message needs beside the bytes of a piece, at most
_NONE: Mapping[int, DataChannel] = MappingProxyType({})


class SentArray:
    """An array of which a host sends pieces. `release` is called once they have been read."""

    __slots__ = ("array", "grouped_bytes", "is_encoded", "itemsize", "release", "shards", "step")

    def __init__(self, step: p.Send, array: DeviceArray, shards: Sequence[Any], release: Callable[[], None]) -> None:
        self.step = step
        self.array = array
        self.shards = shards
        self.release = release
        dtype = shards[0].dtype
        self.itemsize: int = dtype.itemsize
        self.is_encoded: bool = dtype.kind == "T"  # strings are encoded, so the size of what is sent is unknown
        elements = step.elements
        nbytes, largest = sum(elements) * self.itemsize, max(elements, default=0) * self.itemsize
        is_alone = self.is_encoded or nbytes > GROUP_BYTES or largest > MAX_GROUPED_PIECE
        self.grouped_bytes = -1 if is_alone else nbytes  # the bytes of its pieces, or -1 if it is sent by itself


class Sender(Protocol):
    """The methods of a `HostNetwork` that a group needs."""

    def send_pieces(
        self, run: m.Run, host: int, pieces: Sequence[tuple[int, Contents]], channel: DataChannel | None
    ) -> None:
        """Send pieces, with their feeds, to a host."""

    def try_send_reserved(self, sizes: Mapping[int, int], send: Callable[[Mapping[int, DataChannel]], object]) -> bool:
        """Call `send` with the channels to hosts, each reserved for so many bytes. Return False if that would wait."""


class SendGroup:
    """Arrays that one thread sends. The executor's thread adds arrays until the group is started."""

    def __init__(self, sender: Sender, run: m.Run) -> None:
        self._sender = sender
        self._run = run
        self._arrays: list[SentArray] = []
        self._pieces = self._bytes = 0
        self._is_closed = False

    def try_add(self, sent: SentArray) -> bool:
        """Add an array and return True, or return False if it has to be sent in another group."""
        nbytes, count = sent.grouped_bytes, len(sent.step.pieces)
        if self._arrays:
            is_over = self._bytes + nbytes > GROUP_BYTES or self._pieces + count > GROUP_PIECES
            if nbytes < 0 or self._is_closed or is_over:
                return False
        self._arrays.append(sent)
        self._is_closed = nbytes < 0
        self._bytes += nbytes
        self._pieces += count
        return True

    def wait(self) -> None:
        """Wait until the first array is computed. Raise the error of its computation."""
        first = self._arrays[0]
        for number in sorted({piece.shard for piece in first.step.pieces}):
            first.shards[number].block_until_ready()

    def read(self, channels: Mapping[int, DataChannel] = _NONE) -> None:
        """Send all arrays. If one fails, send the others, and raise its error."""
        failures: list[Exception] = []
        pieces: dict[int, list[tuple[int, Contents]]] = {}  # by host
        read: list[SentArray] = []

        def flush() -> None:
            for host, some in pieces.items():
                try:
                    self._sender.send_pieces(self._run, host, some, channels.get(host))
                except Exception as error:
                    failures.append(error)
            pieces.clear()
            while read:
                read.pop().release()

        arrays, self._arrays = self._arrays, []
        try:
            for each in arrays:
                if pieces and not each.array.is_ready():
                    flush()
                read.append(each)
                try:
                    self._add(each, pieces)
                except Exception as error:
                    failures.append(error)
        finally:
            flush()
        if failures:
            del failures[1:]
            raise failures.pop()  # otherwise the errors and these frames, with the arrays, would refer to each other

    def _add(self, sent: SentArray, pieces: dict[int, list[tuple[int, Contents]]]) -> None:
        """Add the pieces of an array. Wait until it is computed."""
        elements, itemsize = sent.step.by_host, sent.itemsize
        for piece in sent.step.pieces:
            part = host_data.cut(np.asarray(sent.shards[piece.shard]), piece.box)
            contents: Contents
            if sent.is_encoded:
                contents = BufferContents([memoryview(host_data.encode_strings(part))])
            else:
                contents = ArrayContents(part, elements[piece.host] * itemsize)
            pieces.setdefault(piece.host, []).append((self._run.host_feeds + piece.feed, contents))

    def read_nowait(self) -> bool:
        """Do the same and return True, or return False if that would block."""
        sizes: dict[int, int] = {}
        read_bytes = 0
        for each in self._arrays:
            read_bytes += each.array.nbytes
            # Strings may be long.
            if read_bytes > SMALL_BYTES or each.is_encoded or not each.array.is_ready():
                return False
            for host, elements in each.step.by_host.items():
                nbytes = elements * each.itemsize + _FRAME_BYTES * len(each.step.pieces)
                sizes[host] = sizes.get(host, 0) + nbytes
        return self._sender.try_send_reserved(sizes, self.read)


def are_grouped(pieces: Sequence[tuple[int, Contents]]) -> bool:
    """Return whether pieces for one host are sent in one message."""
    if len(pieces) < 2:
        return False
    sizes = [contents.nbytes for _, contents in pieces]
    return sum(sizes) <= GROUP_BYTES and max(sizes) <= MAX_GROUPED_PIECE
