"""What a session sends to the controller, in order.

What its client releases waits for the session's next launch, and goes along with it: clients release arrays about as
often as they launch. It waits for no longer than `SECONDS`, and nothing but launches overtakes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atoll.protocol import messages as m
from atoll.session.session_interfaces import ControlConnection

SECONDS = 1e-3
_MOST_WAITING = 256

# Calls something after so many seconds, on the session's thread.
Later = Callable[[float, Callable[[], None]], object]


class Outgoing:
    """Without `later`, for sessions that have no loop, nothing waits."""

    def __init__(self, control: ControlConnection, later: Later | None = None) -> None:
        self.close = control.close
        self._send = control.send
        self._later = later
        self._released: list[int] = []
        self._is_timed = False  # the timer runs: it need not be set for each release

    def send(self, message: Any) -> None:
        """Anything but a launch."""
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
    ) -> None:
        released, self._released = tuple(self._released), []
        self._send(m.Launch(program, tuple(arguments), tuple(results), tuple(feeds), traceback_id, credits, released))

    def release(self, handles: Sequence[int], delete: bool) -> None:
        """The client needs these handles no more; with `delete`, nobody may use their memory either."""
        if delete or len(handles) > _MOST_WAITING:
            for first in range(0, len(handles), m.MAX_HANDLES):
                self.send(m.Release(tuple(handles[first : first + m.MAX_HANDLES]), delete))
            return
        self._released += handles
        if self._later is None or len(self._released) >= _MOST_WAITING:
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
