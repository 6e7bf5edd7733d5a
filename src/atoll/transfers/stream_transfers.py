"""Transfers in chunks: their frames, and what the sender and the receiver keep of them. No I/O.

The sender announces a transfer with its piece. The receiver gives credits, by chunk numbers, and the sender sends those
chunks in any order and on any of the channel's streams. Once all have landed, the receiver confirms the transfer. Chunk
i starts at i times the chunk size, which depends on the kind of transfer. Only the last chunk may be shorter.

Nothing that the peer sends is trusted: a chunk needs credit, and may arrive once.

Bounded: a transfer that is delivered as a whole uses the memory that it was admitted for. A transfer in parts uses
`WINDOW_PARTS` parts, and gets credit for the next part when one has been read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from atoll.errors import FrameError, copied
from atoll.transfers.receive_buffer_pool import RECEIVE_BUFFERS
from atoll.transfers.transfer_engine import Contents, Group, Piece, nothing_to_release

CHUNK_BYTES = 1 << 20  # between machines
MAX_PART_BYTES = 64 << 20
# Transfers that one peer has announced and that have not landed. Each costs a record.
MAX_TRANSFERS = 65_536
WINDOW_PARTS = 4
# Dropped transfers, whose chunks may still arrive.
_REMEMBERED = 1024


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    return -(-nbytes // chunk_bytes)


class StreamPiece(Piece, frozen=True, array_like=True, tag="t"):
    """Announces a transfer, whose chunks follow as credits allow."""

    transfer: int = 0  # increases with each transfer of a channel
    part: int = 0  # chunks in each part that the receiver delivers; 0 delivers the piece as a whole
    launch: int = 0  # the same for feeds that are needed together; 0 if unknown
    group: Group = ()


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """The bytes of a chunk follow this frame."""

    transfer: int
    index: int


class Credit(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """The first `chunks` chunks of the transfer may be sent."""

    transfer: int
    chunks: int


class Landed(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """All bytes of the transfer have arrived."""

    transfer: int


class GivenUp(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """The contents failed, so the sender ends the transfer. Chunks may still be under way."""

    transfer: int
    code: int
    message: str


class NoRoom(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """The receiver has no memory for the transfer, and ends it before its first credit."""

    transfer: int
    code: int
    message: str


class MoreStreams(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    """Asks the side that dialed to open streams on which it receives, because bulk data is about to be sent."""


# Called once: with None when the peer has all bytes, or with the error.
OnEnd = Callable[[BaseException | None], None]


class Outgoing(msgspec.Struct, eq=False):
    """A transfer that is being sent."""

    number: int
    session: int
    feed: int
    contents: Contents
    chunks: int
    on_end: OnEnd
    next: int = 0
    credit: int = 0
    writing: int = 0  # chunks that were taken and have not been written yet
    is_landed: bool = False
    failure: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether the transfer has ended and no thread reads its contents."""
        return not self.writing and (self.is_landed or self.failure is not None)


class SendQueue:
    """The transfers that one channel sends. Safe to use from any thread.

    Transfers with credit take turns, chunk by chunk. The callers bound their number: each sends one or a few.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._transfers: dict[int, Outgoing] = {}
        self._line: deque[Outgoing] = deque()  # transfers with credit, in the order of their turns
        self._changed = threading.Condition()
        self._next = 1
        self._closed: OSError | None = None

    def add(self, session: int, feed: int, contents: Contents, on_end: OnEnd) -> Outgoing:
        """Return a new transfer that awaits its first credit. Raise the failure that the queue was closed with."""
        with self._changed:
            if self._closed is not None:
                raise copied(self._closed)
            chunks = chunk_count(contents.nbytes, self._chunk_bytes)
            transfer = Outgoing(self._next, session, feed, contents, chunks, on_end)
            self._next += 1
            self._transfers[transfer.number] = transfer
            return transfer

    def credit(self, number: int, chunks: int) -> None:
        """Allow the first `chunks` chunks to be sent. Raise FrameError if the credit is invalid."""
        with self._changed:
            transfer = self._known(number)
            if transfer is None:
                return
            if chunks > transfer.chunks:
                raise FrameError(f"credit for {chunks} chunks of a transfer that has {transfer.chunks}")
            was_waiting = transfer.next >= transfer.credit
            transfer.credit = max(transfer.credit, chunks)  # an older credit may arrive after a newer one
            if was_waiting and transfer.next < transfer.credit and transfer.failure is None:
                self._line.append(transfer)
                self._changed.notify(transfer.credit - transfer.next)

    def take(self, seconds: float, continues: Callable[[], bool] = lambda: True) -> tuple[Outgoing, int] | None:
        """Return the chunk to write next, for which the caller has to call `written`.

        Return None if no chunk becomes available within `seconds`, or if `continues()` is False.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._line or self._closed or not continues(), seconds):
                return None
            if self._closed is not None or not continues():
                return None
            transfer = self._line.popleft()
            index, transfer.next = transfer.next, transfer.next + 1
            transfer.writing += 1
            if transfer.next < transfer.credit:
                self._line.append(transfer)
            return transfer, index

    def wake(self) -> None:
        """Make the threads in `take` call `continues()` again."""
        with self._changed:
            self._changed.notify_all()

    def written(self, transfer: Outgoing) -> None:
        with self._changed:
            transfer.writing -= 1
            over = self._ended(transfer)
        if over:
            transfer.on_end(transfer.failure)

    def landed(self, number: int) -> None:
        """End a transfer that the peer has confirmed. Raise FrameError if not all of it was sent."""
        with self._changed:
            transfer = self._known(number)
            if transfer is None:
                return
            if transfer.next < transfer.chunks:
                raise FrameError(f"transfer {number} has landed before all of it was sent")
            transfer.is_landed = True
            over = self._ended(transfer)
        if over:
            transfer.on_end(transfer.failure)

    def fail(self, number: int, failure: BaseException) -> bool:
        """Fail the transfer, which ends once no thread reads its contents. Return False if it is over."""
        with self._changed:
            transfer = self._known(number)
            if transfer is None or transfer.failure is not None:
                return False
            self._fail(transfer, failure)
            over = self._ended(transfer)
        if over:
            transfer.on_end(failure)
        return True

    def close(self, failure: OSError) -> None:
        """Fail all transfers, which end once no thread reads their contents, and refuse new ones."""
        with self._changed:
            self._closed = self._closed or copied(failure)
            for transfer in self._transfers.values():
                self._fail(transfer, copied(failure))
            over = [transfer for transfer in list(self._transfers.values()) if self._ended(transfer)]
            self._changed.notify_all()
        for transfer in over:
            transfer.on_end(transfer.failure)

    def _known(self, number: int) -> Outgoing | None:
        """Return the transfer, or None if it is over. Raise FrameError if no transfer has had the number."""
        if not 0 < number < self._next:
            raise FrameError(f"there is no transfer {number}")
        return self._transfers.get(number)

    def _fail(self, transfer: Outgoing, failure: BaseException) -> None:
        transfer.failure = transfer.failure or failure
        transfer.next = transfer.credit = transfer.chunks
        if transfer in self._line:
            self._line.remove(transfer)

    def _ended(self, transfer: Outgoing) -> bool:
        return transfer.is_over and self._transfers.pop(transfer.number, None) is not None

    def __len__(self) -> int:
        return len(self._transfers)


# Contents, whether more will follow, and a function to call when the contents have been read.
Delivery = tuple[Any, bool, Callable[[], None]]


class ReceiveBuffer:
    """A transfer that is being received. Guarded by the lock of its `ReceiveBuffers`."""

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
        self._seen = bytearray()  # by chunk with credit, whether it has arrived
        self._parts: dict[int, Any] = {}
        self._missing: dict[int, int] = {}  # by part, the number of chunks that have not landed

    def admit(self) -> int:
        """Allocate memory, and return the initial credit. Raise MemoryError."""
        if self.piece.part:
            self.credit = min(self.chunks, WINDOW_PARTS * self._per_part)
        else:
            self._part(0)
            self.credit = self.chunks
        self._seen = bytearray(self.credit)
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
        """Return the memory for a chunk. Raise FrameError if it has no credit or is repeated, or MemoryError."""
        if not 0 <= index < self.credit:
            raise FrameError(f"chunk {index} arrived of a transfer with credit for {self.credit} of {self.chunks}")
        if self._seen[index]:
            raise FrameError(f"chunk {index} arrived twice")
        self._seen[index] = 1
        if self._is_dropped:
            start = index * self._chunk_bytes
            return memoryview(bytearray(min(self._chunk_bytes, self.piece.nbytes - start)))
        number, position = divmod(index, self._per_part)
        start = position * self._chunk_bytes
        target: memoryview = self._part(number).data[start : start + self._chunk_bytes]
        return target

    def landed(self, index: int) -> None:
        """Count a chunk that has been written."""
        if self._is_dropped:
            return
        self.left -= 1
        self._missing[index // self._per_part] -= 1

    def next_part(self) -> Any | None:
        """Return the next part to deliver, or None if it is not complete."""
        if self._missing.get(self.delivered) != 0:
            return None
        del self._missing[self.delivered]
        part = self._parts.pop(self.delivered)
        self.delivered += 1
        return part

    def drop(self) -> None:
        """Free the memory, and discard the chunks that still arrive."""
        self._is_dropped = True
        self._parts.clear()
        self._missing.clear()

    def extend(self) -> int | None:
        """Return the new credit after a part has been read, or None if it is unchanged."""
        credit = min(self.chunks, self.credit + self._per_part)
        if credit == self.credit:
            return None
        self._seen += bytes(credit - self.credit)
        self.credit = credit
        return credit


class ReceiveBuffers:
    """The transfers that one channel receives. Safe to use from any thread.

    `give_credit(transfer, chunks)` is called on any thread, and must not block.
    """

    def __init__(self, give_credit: Callable[[int, int], None], chunk_bytes: int) -> None:
        self._give_credit = give_credit
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._receive_buffers: dict[int, ReceiveBuffer] = {}
        self._dropped: dict[int, ReceiveBuffer] = {}
        self._last = 0

    def announce(self, piece: StreamPiece) -> ReceiveBuffer:
        """Return a buffer for a transfer that the peer has announced, to be passed to `admit`. Raise FrameError."""
        if not 0 <= piece.part * self._chunk_bytes <= MAX_PART_BYTES or not piece.nbytes:
            raise FrameError(f"a transfer of {piece.nbytes} bytes in parts of {piece.part} chunks is invalid")
        with self._lock:
            if piece.transfer <= self._last:
                raise FrameError(f"transfer {piece.transfer} was announced after {self._last}")
            if len(self._receive_buffers) >= MAX_TRANSFERS:
                raise FrameError(f"the peer has announced more than {MAX_TRANSFERS} transfers at a time")
            self._last = piece.transfer
            buffer = self._receive_buffers[piece.transfer] = ReceiveBuffer(piece, self._chunk_bytes)
            return buffer

    def admit(self, buffer: ReceiveBuffer) -> None:
        """Give a transfer its first credit. Raise MemoryError if its memory cannot be allocated."""
        with self._lock:
            if buffer.piece.transfer not in self._receive_buffers:
                return
            credit = buffer.admit()
        self._give_credit(buffer.piece.transfer, credit)

    def target(self, transfer: int, index: int) -> tuple[ReceiveBuffer, memoryview]:
        """Return the memory for a chunk. The caller has to call `landed` once the chunk is written.

        Raise FrameError if the chunk has no credit.
        """
        with self._lock:
            buffer = self._receive_buffers.get(transfer) or self._dropped.get(transfer)
            if buffer is None:
                raise FrameError(f"a chunk arrived of transfer {transfer}, which is not known")
            return buffer, buffer.target(index)

    def landed(self, buffer: ReceiveBuffer, index: int, deliver: Callable[[StreamPiece, Delivery], None]) -> bool:
        """Record a chunk, and deliver complete parts in order. Return whether the transfer is complete."""
        with self._lock:
            buffer.landed(index)
            if buffer.is_delivering:  # another stream's thread delivers this part as well
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
        """End an unfinished transfer. Return its piece, or None if the transfer is unknown."""
        with self._lock:
            buffer = self._receive_buffers.pop(transfer, None)
            if buffer is None:
                return None
            buffer.drop()
            self._dropped[transfer] = buffer  # chunks may be under way on other streams
            if len(self._dropped) > _REMEMBERED:
                del self._dropped[next(iter(self._dropped))]
        return buffer.piece

    def close(self) -> list[StreamPiece]:
        """Free all memory, and return the pieces that have not landed."""
        with self._lock:
            pieces = [buffer.piece for buffer in self._receive_buffers.values()]
            self._receive_buffers.clear()
            return pieces

    def __len__(self) -> int:
        return len(self._receive_buffers)
