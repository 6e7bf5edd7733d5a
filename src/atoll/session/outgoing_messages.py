"""The messages that a session sends to the controller, and the window that limits its launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atoll.protocol import messages as m
from atoll.session.session_interfaces import ControlConnection

SECONDS = 1e-3
_MAX_WAITING = 256

# Calls a function after a number of seconds, on the session's thread.
Later = Callable[[float, Callable[[], None]], object]


class OutgoingMessages:
    """Sends a session's messages in order, and the client's releases together with launches.

    Clients release arrays about as often as they launch, so a release waits for the session's next launch, for
    `SECONDS` at most. Only launches overtake it. Without `later`, for sessions without a loop, releases do not wait.
    """

    def __init__(self, control: ControlConnection, later: Later | None = None) -> None:
        self.close = control.close
        self._control = control
        self._send = control.send
        self._later = later
        self._released: list[int] = []
        self._is_timed = False  # whether the timer is running

    @property
    def is_closed(self) -> bool:
        """Whether the connection has ended: see `ControlConnection`."""
        return self._control.is_closed

    def send(self, message: Any) -> None:
        """Send a message other than a launch."""
        if self._released:
            self._flush()
        self._send(message)

    def launch(
        self,
        program: int,
        arguments: Sequence[int],
        results: Sequence[int],
        feeds: Sequence[int],
        traceback_id: int,
        credits: int,
        contents: bytes | None = None,
        wait: int = 0,
    ) -> None:
        released, self._released = tuple(self._released), []
        inputs, outputs = tuple(arguments), tuple(results)
        message = m.Launch(program, inputs, outputs, tuple(feeds), traceback_id, credits, released, contents, wait)
        self._send(message)

    def release(self, handles: Sequence[int], delete: bool) -> None:
        """Release handles of the client. With `delete`, delete their buffers, so that no later launch can use them."""
        if delete or len(handles) > _MAX_WAITING:
            for first in range(0, len(handles), m.MAX_HANDLES):
                self.send(m.Release(tuple(handles[first : first + m.MAX_HANDLES]), delete))
            return
        self._released += handles
        if self._later is None or len(self._released) >= _MAX_WAITING:
            self._flush()
        elif not self._is_timed:
            self._is_timed = True
            self._later(SECONDS, self._time_is_over)

    def _time_is_over(self) -> None:
        self._is_timed = False
        if self._released:
            self._flush()

    def _flush(self) -> None:
        released, self._released = tuple(self._released), []
        self._send(m.Release(released))


class LaunchWindow:
    """The launches of a session that the controller has not acknowledged yet, in credits: `in_flight` of `size`.

    A launch takes credits, which the controller returns when the launch has ended on its devices. The window does not
    refuse launches: a front end holds its client back while the window is full.

    Attributes:
      reserved: the credits of launches that the next request may cause.
    """

    __slots__ = ("_waiting", "in_flight", "reserved", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.in_flight = 0
        self.reserved = 0
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    @property
    def is_full(self) -> bool:
        return self.in_flight + self.reserved >= self.size

    def reserve(self, credits: int) -> None:
        """Reserve credits for launches, or end their reservation if the number is negative."""
        self.reserved += credits

    def take(self, credits: int) -> None:
        self.in_flight += credits

    def give_back(self, credits: int) -> None:
        """Return credits. A negative number stands for launches of the controller on behalf of the session."""
        self.in_flight -= credits
        if self._waiting:
            self._wake()

    def limit_for(self, credits: int) -> int:
        """Return how many credits may be in flight when a launch of `credits` starts; 0 if it exceeds the window."""
        return max(0, self.size - credits)

    def when_at_most(self, credits: int, call: Callable[[], None]) -> None:
        """Call `call` once, as soon as at most `credits` are in flight, possibly immediately."""
        if self.in_flight <= credits:
            call()
        else:
            self._waiting.append((credits, call))

    def _wake(self) -> None:
        ready = [call for credits, call in self._waiting if self.in_flight <= credits]
        self._waiting = [each for each in self._waiting if self.in_flight > each[0]]
        for call in ready:
            call()
