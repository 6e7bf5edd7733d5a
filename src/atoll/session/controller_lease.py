"""How long a session has heard nothing of its controller: it ends when that is too long, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.cluster.processes.leases import PING_SECONDS, Leases

_CONTROLLER = 0  # the one peer


class ControllerLease:
    """Calls `on_lapse(seconds)` where the lease is not renewed in time. It starts with the first renewal.

    Invariant: as with a worker's, a ping says for how long it may be trusted, which is less where the controller hears
    nothing of this side.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_lapse: Callable[[float], None]) -> None:
        self._loop = loop
        self._on_lapse = on_lapse
        self._leases = Leases(period=PING_SECONDS)
        self._timer: asyncio.TimerHandle | None = None

    def renew(self, seconds: float) -> None:
        """The lease runs for `seconds` from now on."""
        self._leases.seconds = seconds
        self._leases.renew(_CONTROLLER, self._loop.time())
        if self._timer is None:
            self._look()

    def silence(self) -> float:
        """For how many seconds nothing has been heard."""
        return self._leases.silence(_CONTROLLER, self._loop.time())

    def end(self) -> None:
        self._leases.forget(_CONTROLLER)
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        silence = self.silence()
        if self._leases.expired(self._loop.time()):
            self._on_lapse(silence)
        else:
            self._timer = self._loop.call_later(PING_SECONDS, self._look)
