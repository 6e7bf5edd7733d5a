"""Transfers that are being sent on one channel: what may go next. No I/O; for any thread.

Fair: transfers that have credit take turns, chunk by chunk. Bounded by the callers, each of which has one or a few.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from atoll.errors import FrameError
from atoll.transfers.stream_frames import CHUNK_BYTES, chunk_count
from atoll.transfers.transfer_engine import Contents

# Called once: with None when the peer has all bytes, else with what went wrong.
OnEnd = Callable[[BaseException | None], None]


@dataclass(slots=True, eq=False)
class Outgoing:
    """One transfer. `writing` chunks have been taken and not been written yet."""

    number: int
    session: int
    feed: int
    contents: Contents
    chunks: int
    on_end: OnEnd
    next: int = 0
    credit: int = 0
    writing: int = 0
    is_landed: bool = False
    failure: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Nobody reads its contents any more."""
        return not self.writing and (self.is_landed or self.failure is not None)


class SendQueue:
    """The transfers by number, and the line of those that may send."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._transfers: dict[int, Outgoing] = {}
        self._line: deque[Outgoing] = deque()
        self._changed = threading.Condition()
        self._next = 1
        self._closed: BaseException | None = None

    def add(self, session: int, feed: int, contents: Contents, on_end: OnEnd) -> Outgoing:
        """A transfer that awaits its first credit. Raises what the queue was closed with."""
        with self._changed:
            if self._closed is not None:
                raise self._closed
            chunks = chunk_count(contents.nbytes, self._chunk_bytes)
            transfer = Outgoing(self._next, session, feed, contents, chunks, on_end)
            self._next += 1
            self._transfers[transfer.number] = transfer
            return transfer

    def credit(self, number: int, chunks: int) -> None:
        """The peer takes the first `chunks` chunks. Raises FrameError for what no receiver gives."""
        with self._changed:
            transfer = self._known(number)
            if transfer is None:
                return
            if chunks > transfer.chunks:
                raise FrameError(f"credit for {chunks} chunks of a transfer that has {transfer.chunks}")
            was_waiting = transfer.next >= transfer.credit
            transfer.credit = max(transfer.credit, chunks)  # an older credit may come after a newer one
            if was_waiting and transfer.next < transfer.credit and transfer.failure is None:
                self._line.append(transfer)
                self._changed.notify(transfer.credit - transfer.next)

    def take(self, seconds: float, goes_on: Callable[[], bool] = lambda: True) -> tuple[Outgoing, int] | None:
        """The chunk that is to be written next; `written` is to be called for it. None where there is none for so long,
        or `goes_on()` is False.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._line or self._closed or not goes_on(), seconds):
                return None
            if self._closed is not None or not goes_on():
                return None
            transfer = self._line.popleft()
            index, transfer.next = transfer.next, transfer.next + 1
            transfer.writing += 1
            if transfer.next < transfer.credit:
                self._line.append(transfer)
            return transfer, index

    def wake(self) -> None:
        """Those in `take` ask `goes_on()` again."""
        with self._changed:
            self._changed.notify_all()

    def written(self, transfer: Outgoing) -> None:
        with self._changed:
            transfer.writing -= 1
            over = self._ended(transfer)
        if over:
            transfer.on_end(transfer.failure)

    def landed(self, number: int) -> None:
        """The peer has all of it. Raises FrameError where it cannot have it yet."""
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
        """The transfer ends by `failure` once nobody reads its contents; False where it is over."""
        with self._changed:
            transfer = self._known(number)
            if transfer is None or transfer.failure is not None:
                return False
            self._fail(transfer, failure)
            over = self._ended(transfer)
        if over:
            transfer.on_end(failure)
        return True

    def close(self, failure: BaseException) -> None:
        """All that are under way end by `failure`, as soon as nobody reads their contents; none can be added."""
        with self._changed:
            self._closed = self._closed or failure
            for transfer in self._transfers.values():
                self._fail(transfer, failure)
            over = [transfer for transfer in list(self._transfers.values()) if self._ended(transfer)]
            self._changed.notify_all()
        for transfer in over:
            transfer.on_end(transfer.failure)

    def _known(self, number: int) -> Outgoing | None:
        """None for one that is over. Raises FrameError for a number that no transfer has had."""
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
