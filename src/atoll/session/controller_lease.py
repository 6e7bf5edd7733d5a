"""How long a session has heard nothing of its controller: it ends when that is too long, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.cluster.processes.leases import PING_SECONDS, Leases
from atoll.errors import Status

_CONTROLLER = 0  # the one peer
# It is heard once a second: where it is silent for longer, that is what is wrong.
_SILENT_SECONDS = 3.0
_MISSED = 1.5  # pings


class ControllerLease:
    """Calls `on_lapse(reason)` where the lease is not renewed in time.

    It starts with the welcome, and once more when it is renewed after that.

    Invariant: as with a worker's, a ping says for how long it may be trusted, which is less where the controller hears
    nothing of this side.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_lapse: Callable[[str], None]) -> None:
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

    def explain(self, broken: Status) -> Status:
        """Why a data channel has ended whose host the controller does not report lost: it may be lost itself."""
        silence = self._silence()
        if silence < _SILENT_SECONDS:
            return broken
        return Status(broken.code, f"the Atoll controller is gone: {_text(silence)}, and {broken.message}")

    @property
    def is_silent(self) -> bool:
        """Whether the controller may be gone: a word of it is missing."""
        return self._silence() > _MISSED * PING_SECONDS

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
    return f"nothing was heard of it for {silence:.0f} s"
