"""Ends a session when its controller has been silent for too long."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from atoll.cluster.processes.leases import PING_SECONDS, Leases
from atoll.errors import Status

_CONTROLLER = 0  # number of the only peer
_SILENT_SECONDS = 3.0  # longer silence explains other failures: the controller sends a ping per second
_MISSED = 1.5  # ping periods without a message after which the controller counts as silent


class ControllerLease:
    """The session's lease on its controller. Calls `on_lapse(reason)` if the lease is not renewed in time.

    The first renewal starts the lease; a renewal after its end starts it again. Each ping has the remaining duration of
    the lease, which is shorter if the controller receives nothing from this side.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_lapse: Callable[[str], None]) -> None:
        self._loop = loop
        self._on_lapse = on_lapse
        self._leases = Leases(period=PING_SECONDS)
        self._timer: asyncio.TimerHandle | None = None
        self._resumed = -math.inf  # when the connection to the controller was resumed last

    def renew(self, seconds: float) -> None:
        """Renew the lease for `seconds` from now."""
        self._leases.seconds = seconds
        self._leases.renew(_CONTROLLER, self._loop.time())
        if self._timer is None:
            self._look()

    def explain(self, broken: Status) -> Status:
        """Return the status for a broken data channel, or for the loss of the controller if that is silent as well."""
        silence = self._silence()
        if silence < _SILENT_SECONDS:
            return broken
        return broken.reworded(f"the Atoll controller is gone: {_text(silence)}, and {broken.message}")

    def resumed(self) -> None:
        """Note that the connection to the controller was resumed, perhaps at another controller."""
        self._resumed = self._loop.time()

    def may_miss_losses(self, grace: float) -> bool:
        """Whether the controller may not know yet which hosts are lost.

        A ping is overdue, or the connection was resumed less than `grace` seconds ago. For this time, a controller that
        continues after another one waits for hosts to reconnect.
        """
        is_silent = self._silence() > _MISSED * PING_SECONDS
        return is_silent or self._loop.time() - self._resumed < grace

    def _silence(self) -> float:
        return self._leases.silence(_CONTROLLER, self._loop.time())

    def end(self) -> None:
        self._leases.forget(_CONTROLLER)
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        silence = self._silence()
        if self._leases.expired(self._loop.time()):
            self._timer = None
            self._leases.forget(_CONTROLLER)
            self._on_lapse(_text(silence))
        else:
            self._timer = self._loop.call_later(PING_SECONDS, self._look)


def _text(silence: float) -> str:
    return f"it was silent for {silence:.0f} s"
