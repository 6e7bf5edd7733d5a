"""Learns when runs have ended, and reports it.

One line of runs a device: what one device is busy with for long delays the news of no other. Along a line, ends are
reported in the order of starts, many in one message where they come quickly.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from atoll.errors import Status, status_of
from atoll.transport import messages as m

# With so many runs on their way the next end need not be known at once: ends are looked for now and then, without
# waiting on any. To wait would cost XLA and the interpreter two thread switches a run, and the controller a message.
_BUSY = 8
_LOOK_SECONDS = 6e-4


class RunToken:
    """The end of one run. XLA's token waits and fails; the first output, while it lives, tells without waiting."""

    __slots__ = ("_output", "_token")

    def __init__(self, token: Any, outputs: Sequence[Any]) -> None:
        self._token = token
        self._output = outputs[0] if outputs else None

    def is_ready(self) -> bool:
        """Raises RuntimeError where only waiting can tell."""
        if self._output is None:
            raise RuntimeError("a run without outputs")
        return bool(self._output.is_ready())

    def block_until_ready(self) -> None:
        self._token.block_until_ready()


# Sequence number, start in nanoseconds, and what is ready once the run has ended.
_Run = tuple[int, int, Sequence[Any]]


class Ends:
    """Runs whose end is awaited, by the device that they are on (an ordinal)."""

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        self._lines: dict[int, queue.SimpleQueue[_Run]] = {}

    def expect(self, device: int, sequence: int, started: int, waits: Sequence[Any]) -> None:
        """Run `sequence`, started at `started` nanoseconds, ends when all of `waits` are ready.

        Called by one thread.
        """
        line = self._lines.get(device)
        if line is None:
            line = self._lines[device] = queue.SimpleQueue()
            threading.Thread(target=self._await, args=(line,), name=f"atoll-ends-{device}", daemon=True).start()
        line.put((sequence, started, waits))

    def _await(self, line: queue.SimpleQueue[_Run]) -> None:
        running: deque[_Run] = deque()
        while True:
            if not running:
                running.append(line.get())
            while not line.empty():
                running.append(line.get())
            if len(running) >= _BUSY and _is_running(running[0]):
                time.sleep(_LOOK_SECONDS)
                if _is_running(running[0]):
                    continue
            self._report_ended(running)

    def _report_ended(self, running: deque[_Run]) -> None:
        """Waits for the first run, and reports it with all that have ended since."""
        ended: list[tuple[int, int, int]] = []
        while running and not (ended and _is_running(running[0])):
            sequence, started, waits = running.popleft()
            failure = _outcome(waits)
            if failure is None:
                ended.append((sequence, started, time.monotonic_ns()))
            else:
                self._report(m.Done(tuple(ended)), m.Failed(sequence, failure))
                ended = []
        if ended:
            self._report(m.Done(tuple(ended)))


def _is_running(run: _Run) -> bool:
    """Whether the run surely goes on; False where it has ended, or where only waiting can tell."""
    for waited in run[2]:
        try:
            if not waited.is_ready():
                return True
        except (AttributeError, RuntimeError):
            continue
    return False


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
