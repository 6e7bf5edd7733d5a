"""Transfers that are landing on one channel: where each chunk goes, and when there is something to hand on.

No I/O; for any thread. Nothing that the peer says is trusted: a chunk needs credit, and comes once.

Bounded: a transfer that is handed on as a whole has the memory that it was admitted for; one in parts has
`WINDOW_PARTS` parts, and gets credit for the next when one has been read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from atoll.errors import FrameError
from atoll.transfers.receive_buffer_pool import LANDING
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


class Landing:
    """One transfer. All methods are called under the lock of its `Landings`."""

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
            part = self._parts[number] = LANDING.take(nbytes)
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


class Landings:
    """`give_credit(transfer, chunks)` is called on any thread, and must not block."""

    def __init__(self, give_credit: Callable[[int, int], None], chunk_bytes: int) -> None:
        self._give_credit = give_credit
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._landings: dict[int, Landing] = {}
        self._dropped: dict[int, Landing] = {}
        self._last = 0

    def announce(self, piece: StreamPiece) -> Landing:
        """The peer has announced a transfer: it waits for `admit`. Raises FrameError."""
        if not 0 <= piece.part * self._chunk_bytes <= MAX_PART_BYTES or not piece.nbytes:
            raise FrameError(f"a transfer of {piece.nbytes} bytes in parts of {piece.part} chunks")
        with self._lock:
            if piece.transfer <= self._last:
                raise FrameError(f"transfer {piece.transfer} was announced after {self._last}")
            if len(self._landings) >= MAX_TRANSFERS:
                raise FrameError(f"more than {MAX_TRANSFERS} transfers at a time")
            self._last = piece.transfer
            landing = self._landings[piece.transfer] = Landing(piece, self._chunk_bytes)
            return landing

    def admit(self, landing: Landing) -> None:
        """There is room for it. Raises MemoryError where there is none after all."""
        with self._lock:
            if landing.piece.transfer not in self._landings:
                return
            credit = landing.admit()
        self._give_credit(landing.piece.transfer, credit)

    def target(self, transfer: int, index: int) -> tuple[Landing, memoryview]:
        """Where a chunk goes; `landed` is to be called when it is there. Raises FrameError for one without credit."""
        with self._lock:
            landing = self._landings.get(transfer) or self._dropped.get(transfer)
            if landing is None:
                raise FrameError(f"a chunk came of transfer {transfer}, which is not known")
            return landing, landing.target(index)

    def landed(self, landing: Landing, index: int, deliver: Callable[[StreamPiece, Delivery], None]) -> bool:
        """The chunk is there: hands on what is complete, in order. True where that was all of its transfer."""
        with self._lock:
            landing.landed(index)
            if landing.is_delivering:  # by another stream's thread, which goes on with this
                return False
            landing.is_delivering = True
        while True:
            with self._lock:
                part = landing.next_part()
                if part is None:
                    landing.is_delivering = False
                    return not landing.left and self._landings.pop(landing.piece.transfer, None) is not None
                more = landing.delivered < landing.parts or landing.piece.more
            deliver(landing.piece, (part, more, self._part_read(landing) if landing.piece.part else nothing_to_release))

    def _part_read(self, landing: Landing) -> Callable[[], None]:
        def done() -> None:
            with self._lock:
                credit = landing.extend()
            if credit is not None:
                self._give_credit(landing.piece.transfer, credit)

        return done

    def drop(self, transfer: int) -> StreamPiece | None:
        """The transfer ends unfinished; None where it is not known."""
        with self._lock:
            landing = self._landings.pop(transfer, None)
            if landing is None:
                return None
            landing.drop()
            self._dropped[transfer] = landing  # chunks may be on their way on other streams
            if len(self._dropped) > _REMEMBERED:
                del self._dropped[next(iter(self._dropped))]
        return landing.piece

    def close(self) -> list[StreamPiece]:
        """Frees everything; returns what has not landed."""
        with self._lock:
            pieces = [landing.piece for landing in self._landings.values()]
            self._landings.clear()
            return pieces

    def __len__(self) -> int:
        return len(self._landings)
