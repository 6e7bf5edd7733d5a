"""Transfers that arrive on one channel: where each chunk goes, and when there is something to hand on.

No I/O; for any thread. Nothing that the peer says is trusted: a chunk needs credit, and comes once.

Bounded: a transfer that is handed on as a whole has the memory that it was admitted for; one in parts has
`WINDOW_PARTS` parts, and gets credit for the next when one has been read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from atoll.errors import FrameError
from atoll.transfers.receive_buffer_pool import RECEIVE_BUFFERS
from atoll.transfers.stream_frames import StreamPiece, chunk_count
from atoll.transfers.transfer_engine import nothing_to_release

WINDOW_PARTS = 4
MAX_PART_BYTES = 64 << 20
# Announced by one peer and not landed: each costs a record.
MAX_TRANSFERS = 65_536
# Transfers that the peer has given up.
_REMEMBERED = 1024

# Contents, whether more will follow, and what to call when they have been read.
Delivery = tuple[Any, bool, Callable[[], None]]


class ReceiveBuffer:
    """One transfer. All methods are called under the lock of its `ReceiveBuffers`."""

    __slots__ = (
        "_chunk_bytes",
        "_is_dropped",
        "_missing",
        "_parts",
        "_per_part",
        "_seen",
        "chunks",
        "credit",
        "delivered",
        "is_delivering",
        "left",
        "parts",
        "piece",
    )

    def __init__(self, piece: StreamPiece, chunk_bytes: int) -> None:
        self.piece = piece
        self.chunks = self.left = chunk_count(piece.nbytes, chunk_bytes)
        self._chunk_bytes = chunk_bytes
        self._per_part = piece.part or self.chunks
        self.parts = -(-self.chunks // self._per_part)
        self.credit = 0
        self.delivered = 0  # parts
        self.is_delivering = False
        self._is_dropped = False
        self._seen = bytearray()
        self._parts: dict[int, Any] = {}
        self._missing: dict[int, int] = {}  # chunks that a part lacks

    def admit(self) -> int:
        """It may begin; returns the credit. Raises MemoryError."""
        if self.piece.part:
            self.credit = min(self.chunks, WINDOW_PARTS * self._per_part)
        else:
            self._part(0)
            self.credit = self.chunks
        self._seen = bytearray(self.chunks)
        return self.credit

    def _part(self, number: int) -> Any:
        part = self._parts.get(number)
        if part is None:
            start = number * self._per_part
            count = min(self._per_part, self.chunks - start)
            nbytes = min(self.piece.nbytes, (start + count) * self._chunk_bytes) - start * self._chunk_bytes
            part = self._parts[number] = RECEIVE_BUFFERS.take(nbytes)
            self._missing[number] = count
        return part

    def target(self, index: int) -> memoryview:
        """Where the chunk is to be written. Raises FrameError, and MemoryError."""
        if not 0 <= index < self.credit:
            raise FrameError(f"chunk {index} came of a transfer with credit for {self.credit} of {self.chunks}")
        if self._seen[index]:
            raise FrameError(f"chunk {index} came twice")
        self._seen[index] = 1
        if self._is_dropped:
            start = index * self._chunk_bytes
            return memoryview(bytearray(min(self._chunk_bytes, self.piece.nbytes - start)))
        number, position = divmod(index, self._per_part)
        start = position * self._chunk_bytes
        target: memoryview = self._part(number).data[start : start + self._chunk_bytes]
        return target

    def landed(self, index: int) -> None:
        """The chunk has been written."""
        if self._is_dropped:
            return
        self.left -= 1
        self._missing[index // self._per_part] -= 1

    def next_part(self) -> Any | None:
        """The next part, where it is complete."""
        if self._missing.get(self.delivered) != 0:
            return None
        del self._missing[self.delivered]
        part = self._parts.pop(self.delivered)
        self.delivered += 1
        return part

    def drop(self) -> None:
        """Nobody wants it: what still comes goes nowhere."""
        self._is_dropped = True
        self._parts.clear()
        self._missing.clear()

    def extend(self) -> int | None:
        """A part has been read: the new credit, where that changes it."""
        credit = min(self.chunks, self.credit + self._per_part)
        if credit == self.credit:
            return None
        self.credit = credit
        return credit


class ReceiveBuffers:
    """`give_credit(transfer, chunks)` is called on any thread, and must not block."""

    def __init__(self, give_credit: Callable[[int, int], None], chunk_bytes: int) -> None:
        self._give_credit = give_credit
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._receive_buffers: dict[int, ReceiveBuffer] = {}
        self._dropped: dict[int, ReceiveBuffer] = {}
        self._last = 0

    def announce(self, piece: StreamPiece) -> ReceiveBuffer:
        """The peer has announced a transfer: it waits for `admit`. Raises FrameError."""
        if not 0 <= piece.part * self._chunk_bytes <= MAX_PART_BYTES or not piece.nbytes:
            raise FrameError(f"a transfer of {piece.nbytes} bytes in parts of {piece.part} chunks")
        with self._lock:
            if piece.transfer <= self._last:
                raise FrameError(f"transfer {piece.transfer} was announced after {self._last}")
            if len(self._receive_buffers) >= MAX_TRANSFERS:
                raise FrameError(f"more than {MAX_TRANSFERS} transfers at a time")
            self._last = piece.transfer
            buffer = self._receive_buffers[piece.transfer] = ReceiveBuffer(piece, self._chunk_bytes)
            return buffer

    def admit(self, buffer: ReceiveBuffer) -> None:
        """There is room for it. Raises MemoryError where there is none after all."""
        with self._lock:
            if buffer.piece.transfer not in self._receive_buffers:
                return
            credit = buffer.admit()
        self._give_credit(buffer.piece.transfer, credit)

    def target(self, transfer: int, index: int) -> tuple[ReceiveBuffer, memoryview]:
        """Where a chunk goes; `landed` is to be called when it is there. Raises FrameError for one without credit."""
        with self._lock:
            buffer = self._receive_buffers.get(transfer) or self._dropped.get(transfer)
            if buffer is None:
                raise FrameError(f"a chunk came of transfer {transfer}, which is not known")
            return buffer, buffer.target(index)

    def landed(self, buffer: ReceiveBuffer, index: int, deliver: Callable[[StreamPiece, Delivery], None]) -> bool:
        """The chunk is there: hands on what is complete, in order. True where that was all of its transfer."""
        with self._lock:
            buffer.landed(index)
            if buffer.is_delivering:  # by another stream's thread, which goes on with this
                return False
            buffer.is_delivering = True
        while True:
            with self._lock:
                part = buffer.next_part()
                if part is None:
                    buffer.is_delivering = False
                    return not buffer.left and self._receive_buffers.pop(buffer.piece.transfer, None) is not None
                more = buffer.delivered < buffer.parts or buffer.piece.more
            deliver(buffer.piece, (part, more, self._part_read(buffer) if buffer.piece.part else nothing_to_release))

    def _part_read(self, buffer: ReceiveBuffer) -> Callable[[], None]:
        def done() -> None:
            with self._lock:
                credit = buffer.extend()
            if credit is not None:
                self._give_credit(buffer.piece.transfer, credit)

        return done

    def drop(self, transfer: int) -> StreamPiece | None:
        """The transfer ends unfinished; None where it is not known."""
        with self._lock:
            buffer = self._receive_buffers.pop(transfer, None)
            if buffer is None:
                return None
            buffer.drop()
            self._dropped[transfer] = buffer  # chunks may be on their way on other streams
            if len(self._dropped) > _REMEMBERED:
                del self._dropped[next(iter(self._dropped))]
        return buffer.piece

    def close(self) -> list[StreamPiece]:
        """Frees everything; returns what has not landed."""
        with self._lock:
            pieces = [buffer.piece for buffer in self._receive_buffers.values()]
            self._receive_buffers.clear()
            return pieces

    def __len__(self) -> int:
        return len(self._receive_buffers)
