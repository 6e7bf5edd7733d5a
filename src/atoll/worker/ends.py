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
from concurrent.futures import Future
from typing import Any, Protocol

from atoll.errors import Status, status_of
from atoll.protocol import messages as m

# With so many short runs on their way the next end need not be known at once: ends are looked for now and then, without
# waiting on any. To wait would cost XLA and the interpreter two thread switches a run, and the controller a message.
# The next look comes when a quarter of them should have ended, by how long the last ones took. Longer runs are waited
# for: to look meanwhile would take the processor from them.
_BUSY = 3
_SHORT_SECONDS = 7e-4
_LEAST_LOOK_SECONDS, _MOST_LOOK_SECONDS = 8e-4, 2e-3
_POLL_SECONDS = 2e-4


class Deletions:
    """Keeps arrays from being deleted or donated while another thread asks about them.

    jaxlib ends the process where a deleted array is asked whether it is ready. Whoever deletes holds `lock` meanwhile;
    whoever asks does not wait for it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def is_ready(self, array: Any) -> bool:
        """Raises RuntimeError where that cannot be told: the array is gone, or just going."""
        if not self.lock.acquire(blocking=False):
            raise RuntimeError("arrays are being deleted")
        try:
            if array.is_deleted():
                raise RuntimeError("the array is gone")
            return bool(array.is_ready())
        finally:
            self.lock.release()


class RunEnd:
    """The end of a compiled function's run. XLA's token waits and fails; an output, while it lives, tells at once.

    On several devices the first output may be ready a while before the last device has ended: only on one does it tell
    all (`is_whole`).
    """

    __slots__ = ("_deletions", "_devices", "_output", "is_whole", "token")

    def __init__(self, token: Any, outputs: Sequence[Any], deletions: Deletions, devices: tuple[int, ...]) -> None:
        self.token = token
        self._output = outputs[0] if outputs else None
        self._deletions = deletions
        self._devices = devices
        self.is_whole = len(devices) == 1

    def is_within(self, arguments: Sequence[Any], devices: tuple[int, ...]) -> bool:
        """Whether a run on `devices` that takes these arguments needs its output on each of its devices: that the later
        run has ended tells that this one has, and it fails where this one did.
        """
        return self._output is not None and devices == self._devices and any(a is self._output for a in arguments)

    def is_ready(self) -> bool:
        """Raises RuntimeError where only waiting can tell."""
        if self._output is None:
            raise RuntimeError("a run without outputs")
        return self._deletions.is_ready(self._output)

    def block_until_ready(self) -> None:
        self.token.block_until_ready()


class ArrayEnd:
    """The end of what makes an array without a compiled function: a transfer, a copy."""

    __slots__ = ("_deletions", "array")
    is_whole = True

    def __init__(self, array: Any, deletions: Deletions) -> None:
        self.array = array
        self._deletions = deletions

    def is_ready(self) -> bool:
        return self._deletions.is_ready(self.array)

    def block_until_ready(self) -> None:
        """Waits by asking now and then: a thread inside jaxlib would not notice that the array goes."""
        while True:
            with self._deletions.lock:
                if self.array.is_deleted():
                    return  # a later run has consumed it, and so has it been ready
                if self.array.is_ready():
                    self.array.block_until_ready()  # does not wait; raises what went wrong
                    return
            time.sleep(_POLL_SECONDS)


class ReadEnd:
    """The end of what a thread reads and sends off."""

    __slots__ = ("_future",)
    is_whole = True

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_ready(self) -> bool:
        return self._future.done()

    def block_until_ready(self) -> None:
        """Waits for the thread; raises what went wrong there."""
        self._future.result()

    def when_done(self, call: Callable[[], object]) -> None:
        """Calls it then, on the reading thread."""
        self._future.add_done_callback(lambda _: call())


class Wait(Protocol):
    """The end of something that a turn has begun. `is_whole`: that it is ready tells that all of it has ended."""

    is_whole: bool

    def is_ready(self) -> bool:
        """Raises RuntimeError where only waiting can tell."""

    def block_until_ready(self) -> None:
        """Raises what went wrong."""


# Sequence number, start in nanoseconds, and what is ready once the run has ended.
_Run = tuple[int, int, Sequence[Wait]]


class Ends:
    """Runs whose end is awaited, by the device that they are on (an ordinal)."""

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        self._lines: dict[int, queue.SimpleQueue[_Run]] = {}

    def expect(self, device: int, sequence: int, started: int, waits: Sequence[Wait]) -> None:
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
        each, last = _LEAST_LOOK_SECONDS, time.monotonic()  # what a run takes, and when some last ended
        while True:
            if not running:
                running.append(line.get())
                last = time.monotonic()
            while not line.empty():
                running.append(line.get())
            if len(running) >= _BUSY and each < _SHORT_SECONDS and _is_running(running[0]):
                time.sleep(min(max(each * len(running) / 4, _LEAST_LOOK_SECONDS), _MOST_LOOK_SECONDS))
                if _is_running(running[0]):
                    continue
            count = self._report_ended(running)
            now = time.monotonic()
            each, last = (now - last) / count, now

    def _report_ended(self, running: deque[_Run]) -> int:
        """Waits for the first run, and reports it with all that have ended since; how many these are."""
        count = len(running)
        ended: list[tuple[int, int, int]] = []
        while running and not (ended and _is_running(running[0])):
            sequence, started, waits = running.popleft()
            failure = outcome(waits)
            if failure is None:
                ended.append((sequence, started, time.monotonic_ns()))
            else:
                self._report(m.Done(tuple(ended)), m.Failed(sequence, failure))
                ended = []
        if ended:
            self._report(m.Done(tuple(ended)))
        return count - len(running)


def _is_running(run: _Run) -> bool:
    """Whether the run surely goes on; False where it has ended, or where only waiting can tell."""
    for waited in run[2]:
        try:
            if not waited.is_ready():
                return True
        except RuntimeError:
            continue
    return False


def is_over(waits: Sequence[Wait]) -> bool:
    """Whether all have surely ended, so that `outcome` waits for nothing."""
    try:
        return all(waited.is_whole and waited.is_ready() for waited in waits)
    except RuntimeError:
        return False


def outcome(waits: Sequence[Wait]) -> Status | None:
    """Waits for all; the first error among them.

    The last one first: most often it needs the others' results, so that this thread sleeps and wakes once.
    """
    failure: Status | None = None
    for waited in reversed(waits):
        try:
            waited.block_until_ready()
        except Exception as error:
            failure = status_of(error)
    return failure
