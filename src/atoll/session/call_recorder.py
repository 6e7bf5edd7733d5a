"""What a front end does of its client's calls, while somebody takes a trace: see `telemetry.trace_requests`.

A front end that records sets `on_change`: it is called when recording begins, and when it ends. In between it notes
what it does; at other times it does nothing of the kind, so that a recorder costs nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from atoll.protocol import messages as m
from atoll.protocol.spans import ClientCall

# The last ones are kept.
MOST_CALLS = 20_000
_MOST_LETTERS = 100


@dataclass(slots=True)
class _Call:
    kind: str
    name: str
    received: int
    handled: int = 0
    answered: int = 0
    nbytes: int = 0


class CallRecorder:
    """Keeps the last calls. `now` is the clock, in nanoseconds. All on the session's thread."""

    def __init__(self, now: Callable[[], int] = time.monotonic_ns) -> None:
        self.now = now
        self.on_change: Callable[[bool], None] = lambda is_recording: None
        self._until = 0
        self._is_recording = False
        self._calls: deque[_Call] = deque(maxlen=MOST_CALLS)
        self._open: dict[int, _Call] = {}  # those that have no answer, by the client's number
        self._early: dict[int, int] = {}  # when requests were answered that are being handled
        self._held: _Call | None = None  # for as long as the client is held back

    # ---- by the controller

    def handle(self, message: m.RecordCalls | m.SendCalls, send: Callable[[Any], None]) -> None:
        if isinstance(message, m.SendCalls):
            send(m.CallsRecorded(message.request, message.seconds, self.now(), self._encoded()))
        elif message.seconds > 0:
            self._until = max(self._until, self.now() + int(1e9 * message.seconds))
            self._change(True)
        else:
            self._change(False)

    def _encoded(self) -> bytes:
        calls = [
            ClientCall(each.kind, each.name, each.received, each.handled, each.answered, each.nbytes)
            for each in self._calls
        ]
        content = msgspec.msgpack.encode(calls)
        while len(content) > m.MOST_CALL_BYTES:
            calls = calls[len(calls) // 2 :]
            content = msgspec.msgpack.encode(calls)
        return content

    def _change(self, is_recording: bool) -> None:
        if is_recording == self._is_recording:
            return
        self._is_recording = is_recording
        if not is_recording:
            self._until = 0
            self._calls.clear()
            self._open.clear()
            self._early.clear()
            self._held = None
        self.on_change(is_recording)

    # ---- by the front end

    def is_over(self) -> bool:
        """Whether the time of the recording is over; it has ended then."""
        if self._is_recording and self.now() > self._until:
            self._change(False)
        return not self._is_recording

    def taken(self) -> int:
        """The front end has taken a request, and is about to handle it. When."""
        self._early.clear()
        return self.now()

    def handled(self, number: int, kind: str, name: str, received: int, nbytes: int = 0) -> None:
        """The request of that number, taken at `received`, was handled just now; it may have been answered, too."""
        call = _Call(kind, name[:_MOST_LETTERS], received, self.now(), self._early.get(number, 0), nbytes)
        self._calls.append(call)
        if not call.answered:
            self._open[number] = call

    def answered(self, number: int) -> None:
        """The request is answered just now."""
        call = self._open.pop(number, None)
        if call is not None:
            call.answered = self.now()
        else:
            self._early[number] = self.now()

    def held(self, kind: str) -> None:
        """The client is held back from now on: what for."""
        if self._is_recording:
            self._held = _Call(kind, "", self.now())
            self._calls.append(self._held)

    def resumed(self) -> None:
        """It is held back no more."""
        if self._held is not None:
            self._held.handled = self._held.answered = self.now()
            self._held = None
