"""Learns when runs have ended, and reports it.

One line of runs a device: what one device is busy with for long delays the news of no other. Along a line, ends are
reported in the order of starts, many in one message where they come quickly.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from atoll.errors import Status, status_of
from atoll.transport import messages as m

# With so many runs behind the next one, its end can be learnt a little later, together with that of others: each waking
# of a thread costs the others the interpreter's lock.
_BUSY = 12
_BUSY_PAUSE_SECONDS = 5e-4


class RunToken:
    """The end of one run. XLA's token waits and fails; the first output, while it lives, tells without waiting."""

    __slots__ = ("_output", "_token")

    def __init__(self, token: Any, outputs: Sequence[Any]) -> None:
        self._token = token
        self._output = outputs[0] if outputs else None

    def is_ready(self) -> bool:
        return self._output is not None and bool(self._output.is_ready())

    def block_until_ready(self) -> None:
        self._token.block_until_ready()


class Ends:
    """Runs whose end is awaited, by the device that they are on (an ordinal)."""

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        self._lines: dict[int, queue.SimpleQueue[tuple[int, int, Sequence[Any]]]] = {}

    def expect(self, device: int, sequence: int, started: int, waits: Sequence[Any]) -> None:
        """Run `sequence`, started at `started` nanoseconds, ends when all of `waits` are ready.

        Called by one thread.
        """
        line = self._lines.get(device)
        if line is None:
            line = self._lines[device] = queue.SimpleQueue()
            threading.Thread(target=self._await, args=(line,), name=f"atoll-ends-{device}", daemon=True).start()
        line.put((sequence, started, waits))

    def _await(self, line: queue.SimpleQueue[tuple[int, int, Sequence[Any]]]) -> None:
        ended: list[tuple[int, int, int]] = []
        while True:
            if ended and line.empty():
                self._report(m.Done(tuple(ended)))
                ended = []
            sequence, started, waits = line.get()
            if ended and not all(is_ready(waited) for waited in waits):
                self._report(m.Done(tuple(ended)))
                ended = []
                if line.qsize() >= _BUSY:
                    time.sleep(_BUSY_PAUSE_SECONDS)
            failure = _outcome(waits)
            if failure is not None:
                self._report(m.Done(tuple(ended)), m.Failed(sequence, failure))
                ended = []
            else:
                ended.append((sequence, started, time.monotonic_ns()))
            del waits  # or the last run's outputs live until the next one


def _outcome(waits: Sequence[Any]) -> Status | None:
    failure: Status | None = None
    for waited in waits:
        try:
            waited.block_until_ready()
        except Exception as error:
            if getattr(waited, "is_deleted", bool)():
                continue  # a later run has consumed it, and so has it been ready
            failure = failure or status_of(error)
    return failure


def is_ready(waited: Any) -> bool:
    """Whether waiting would not block; False where that cannot be told."""
    try:
        return bool(waited.is_ready())
    except (AttributeError, RuntimeError):
        return False
