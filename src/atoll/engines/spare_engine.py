"""A spare engine, which takes the role of a cluster's engine if that is lost, and adopts the workers that still run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from atoll.engines.controller_child import ControllerChild
from atoll.engines.engine_identity import EngineIdentity
from atoll.engines.engine_interface import make_engine
from atoll.engines.engine_options import EngineOptions
from atoll.engines.supervisor import DIAL_RETRY_SECONDS, Supervisor, dial_as
from atoll.errors import AtollError, ClusterError
from atoll.protocol.messages import BecomeEngine, Refused
from atoll.retries import Retry
from atoll.wire.address import parse_address
from atoll.wire.resumption.dialed_connection import DialedConnection

_log = logging.getLogger(__name__)

_SPARE_RETRY_SECONDS = 2.0


class SpareEngine:
    """Offers the controller a spare engine, which takes the role of the engine if that is lost.

    `controller` is the child of this process. `on_role()` is called when this process has the role, and
    `on_refused(text)` when it cannot have it.
    """

    def __init__(
        self,
        options: EngineOptions,
        stop: asyncio.Event,
        controller: ControllerChild,
        on_role: Callable[[], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self._options = options
        self._stop = stop
        self._controller = controller
        self._address = parse_address(options.controller_address)
        self._identity = EngineIdentity(options.directory, "the spare engine")
        self._link: DialedConnection | None = None
        self._lost = asyncio.Event()
        self._problem = ""  # why there is no spare engine, as it was logged last
        self._supervisor: Supervisor | None = None
        self._on_role = on_role
        self._on_refused = on_refused
        self._offering: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None  # of an offer that failed

    @property
    def supervisor(self) -> Supervisor | None:
        """The supervisor of the islands, if this process has the role of the engine."""
        return self._supervisor

    def offer(self) -> None:
        """Offer the spare engine from now on. Repeated calls do nothing."""
        if self._offering is None:
            self._begin()

    def close(self) -> None:
        """End the offer, and stop renewing the certificate, which the supervisor's connection also uses."""
        if self._offering is not None:
            self._offering.cancel()
        if self._retry is not None:
            self._retry.cancel()
        self._identity.close()

    def _begin(self) -> None:
        self._offering = asyncio.get_running_loop().create_task(self._run())
        self._offering.add_done_callback(self._offering_ended)

    def _offering_ended(self, task: asyncio.Task[None]) -> None:
        """Offer a spare engine again if a bug ended `_run`. At the end of this process, do nothing."""
        if task.cancelled():
            return
        _log.critical("the offer of a spare engine failed and begins again", exc_info=task.exception())
        self._retry = asyncio.get_running_loop().call_later(_SPARE_RETRY_SECONDS, self._begin)

    async def _run(self) -> None:
        while True:
            self._lost.clear()
            retry = Retry(DIAL_RETRY_SECONDS, _SPARE_RETRY_SECONDS)
            try:
                self._link = await dial_as(
                    "spare engine",
                    self._options,
                    self._address,
                    self._identity,
                    retry,
                    self._handle,
                    self._link_lost,
                    self._cut_off,
                )
                await self._lost.wait()
            except (AtollError, OSError) as error:
                self._log_problem(f"cannot offer a spare engine: {error}")
            await asyncio.sleep(_SPARE_RETRY_SECONDS)

    def _handle(self, message: Any) -> None:
        match message:
            case BecomeEngine() if self._supervisor is None:
                self._become_engine(message)
            case _ if self._supervisor is not None:
                self._supervisor.handle(message)
            case Refused(status=status):
                self._log_problem(f"the controller accepts no spare engine: {status.message}")
                self._on_refused(status.message)

    def _log_problem(self, text: str) -> None:
        """Log a problem once, although the attempts continue."""
        if text != self._problem:
            self._problem = text
            _log.warning("%s", text)

    def _become_engine(self, message: BecomeEngine) -> None:
        assert self._link is not None
        options = replace(self._options, settings=message.settings, standby="")
        try:
            engine = make_engine(options)
            if engine.agents is None:
                raise ClusterError(f"the engine {message.settings.engine!r} cannot continue on another machine")
            supervisor = Supervisor(options, engine, self._stop, self._controller)
        except AtollError as error:
            _log.error("this process cannot become the engine: %s", error)
            self._on_refused(str(error))
            self._link.close()
            self._lost.set()
            return
        _log.warning("the engine is lost: this process takes its role, for %d islands", len(message.islands))
        if not self._options.standby and self._options.settings.islands != message.settings.islands:
            _log.warning("the cluster continues with its islands, %s", message.settings.islands)
        self._supervisor = supervisor
        supervisor.take_over(self._link, message.islands)
        self._on_role()

    def _link_lost(self, reason: str) -> None:
        if self._supervisor is not None:
            self._supervisor.link_lost(reason)
        else:
            self._lost.set()

    def _cut_off(self, is_cut_off: bool) -> None:
        if self._supervisor is not None:
            self._supervisor.cut_off(is_cut_off)
