"""Records how a front end handles its client's calls while somebody takes a trace: see `telemetry.trace_requests`.

Outside a recording, the front end does not report its calls, so the recorder has no cost.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from atoll.protocol import messages as m
from atoll.protocol.spans import ClientCall

MAX_CALLS = 20_000  # the recorder keeps the last calls
_MAX_LETTERS = 100


class _Call(msgspec.Struct):
    kind: str
    name: str
    received: int
    handled: int = 0
    answered: int = 0
    nbytes: int = 0


class CallRecorder:
    """The last calls of a client. Use it on the session's thread.

    `on_change(is_recording)` is called when a recording starts and when it ends. `now` is the clock, in nanoseconds.
    """

    def __init__(self, on_change: Callable[[bool], None], now: Callable[[], int] = time.monotonic_ns) -> None:
        self.now = now
        self._on_change = on_change
        self._until = 0
        self._is_recording = False
        self._calls: deque[_Call] = deque(maxlen=MAX_CALLS)
        self._open: dict[int, _Call] = {}  # calls without an answer, by the client's number
        self._early: dict[int, int] = {}  # answer times of requests that are still being handled
        self._held: _Call | None = None  # the entry of the current pause of the client

    # ---- called for the controller

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
        while len(content) > m.MAX_CALL_BYTES:
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
        self._on_change(is_recording)

    # ---- called by the front end

    def is_over(self) -> bool:
        """End the recording if its time is over. Return whether no recording is in progress."""
        if self._is_recording and self.now() > self._until:
            self._change(False)
        return not self._is_recording

    def taken(self) -> int:
        """Note that the front end is about to handle a request. Return the current time."""
        self._early.clear()
        return self.now()

    def handled(self, number: int, kind: str, name: str, received: int, nbytes: int = 0) -> None:
        """Note that request `number`, taken at `received`, has been handled, and possibly answered."""
        call = _Call(kind, name[:_MAX_LETTERS], received, self.now(), self._early.get(number, 0), nbytes)
        self._calls.append(call)
        if not call.answered:
            self._open[number] = call

    def answered(self, number: int) -> None:
        """Note that the request has been answered."""
        call = self._open.pop(number, None)
        if call is not None:
            call.answered = self.now()
        else:
            self._early[number] = self.now()

    def held(self, kind: str) -> None:
        """Note that the client is held back from now on, for the reason `kind`."""
        if self._is_recording:
            self._held = _Call(kind, "", self.now())
            self._calls.append(self._held)

    def resumed(self) -> None:
        """Note that the client is no longer held back."""
        if self._held is not None:
            self._held.handled = self._held.answered = self.now()
            self._held = None
