"""The supervisor of an engine process that runs a standby controller.

When the standby has taken over, the process offers the controller a spare engine. If the cluster's engine is lost with
its machine, the spare engine takes its role, and adopts the workers that still run.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from msgspec.structs import replace

from atoll.controller_process.controller_options import ControllerOptions
from atoll.engines.controller_child import ControllerChild
from atoll.engines.engine_identity import EngineIdentity
from atoll.engines.engine_interface import make_engine
from atoll.engines.engine_options import EngineOptions
from atoll.engines.supervisor import RETRY_SECONDS, Supervisor, dial_as
from atoll.errors import AtollError, ClusterError
from atoll.protocol.messages import BecomeEngine, Refused
from atoll.retries import Retry
from atoll.security.start_security import advertised
from atoll.wire.address import parse_address
from atoll.wire.resumption.dialed_connection import DialedConnection

_log = logging.getLogger(__name__)

_SPARE_RETRY_SECONDS = 2.0


class SpareEngine:
    """Offers the controller a spare engine, which takes the role of the engine if that is lost.

    `run` does not return before it is cancelled. `controller` is the child of this process.
    """

    def __init__(self, options: EngineOptions, stop: asyncio.Event, controller: ControllerChild) -> None:
        self._options = options
        self._stop = stop
        self._controller = controller
        self._address = parse_address(options.controller_address)
        self._identity = EngineIdentity(options.directory, "the spare engine")
        self._link: DialedConnection | None = None
        self._lost = asyncio.Event()
        self._problem = ""  # why there is no spare engine, as it was logged last
        self._supervisor: Supervisor | None = None

    @property
    def supervisor(self) -> Supervisor | None:
        """The supervisor of the islands, if this process has the role of the engine."""
        return self._supervisor

    def close(self) -> None:
        """Stop renewing the certificate, which the supervisor's connection also uses. Call it at the end."""
        self._identity.close()

    async def run(self) -> None:
        while True:
            self._lost.clear()
            retry = Retry(RETRY_SECONDS, _SPARE_RETRY_SECONDS)
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
            self._link.close()
            self._lost.set()
            return
        _log.warning("the engine is lost: this process takes its role, for %d islands", len(message.islands))
        self._supervisor = supervisor
        supervisor.take_over(self._link, message.islands)

    def _link_lost(self, reason: str) -> None:
        if self._supervisor is not None:
            self._supervisor.link_lost(reason)
        else:
            self._lost.set()

    def _cut_off(self, is_cut_off: bool) -> None:
        if self._supervisor is not None:
            self._supervisor.cut_off(is_cut_off)


class StandbySupervisor:
    """Runs a standby controller, and restarts it after it has taken over.

    Call `start`, wait until `stop` is set, then call `end`. It sets `stop` itself when the controller ends, or when
    another controller takes over. The hosts remain those of the cluster's own engine, which follows the standby. If
    that engine is lost, this process takes its role.
    """

    def __init__(self, options: EngineOptions, stop: asyncio.Event) -> None:
        self._options = options
        self._standby = options.standby
        self._stop = stop
        self._offering: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None  # of an offer that failed
        self._reason = ""
        self._seconds = options.settings.start_seconds
        self._up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        listen = parse_address(options.controller_address)
        self._controller = ControllerChild(
            ControllerOptions(
                str(listen),
                options.settings,
                os.getpid(),
                directory=options.directory,
                usage_file=options.usage_file,
                cache_directory=options.cache_directory,
                journal=options.journal,
                standby=options.standby,
                advertise=str(advertised(listen, options.advertise)),
            ),
            self._follows,
            self._ended,
            self._replaced,
            self._took_over,
        )
        self._spare = SpareEngine(options, stop, self._controller)

    @property
    def reason(self) -> str:
        """The reason for which this supervisor has set `stop`, or ""."""
        supervisor = self._spare.supervisor
        return self._reason or (supervisor.reason if supervisor is not None else "")

    @property
    def was_asked(self) -> bool:
        """Whether it has set `stop` because an operator has ended the cluster."""
        return self._controller.was_asked

    async def start(self) -> None:
        """Return when the standby has a copy of the controller's state. Raise ClusterError if that fails."""
        try:
            self._controller.start()
        except OSError as error:
            raise ClusterError(f"the standby did not start: {error}") from None
        try:
            async with asyncio.timeout(self._seconds):
                await self._up
        except TimeoutError:
            text = f"the controller at {self._standby} sent no snapshot within {self._seconds:.0f} s"
            raise ClusterError(f"the standby did not start: {text}") from None

    async def end(self) -> None:
        if self._offering is not None:
            self._offering.cancel()
        if self._retry is not None:
            self._retry.cancel()
        self._spare.close()
        if self._spare.supervisor is not None:
            await self._spare.supervisor.end()
        else:
            await self._controller.end()

    def _took_over(self) -> None:
        """Offer a spare engine. Called when the standby has taken over, and when it has restarted later."""
        if self._offering is None:
            self._offer()

    def _offer(self) -> None:
        self._offering = asyncio.get_running_loop().create_task(self._spare.run())
        self._offering.add_done_callback(self._offering_ended)

    def _offering_ended(self, task: asyncio.Task[None]) -> None:
        """Offer a spare engine again if a bug ended `SpareEngine.run`. At the end of this process, do nothing."""
        if task.cancelled():
            return
        _log.critical("the offer of a spare engine failed and begins again", exc_info=task.exception())
        self._retry = asyncio.get_running_loop().call_later(_SPARE_RETRY_SECONDS, self._offer)

    def _follows(self) -> None:
        if not self._up.done():
            self._up.set_result(None)

    def _replaced(self, text: str) -> None:
        """End, unless this process has the role of the engine, which then serves the other controller."""
        if self._spare.supervisor is None:
            self._ended(text)

    def _ended(self, text: str) -> None:
        if not self._up.done():
            self._up.set_exception(ClusterError(f"the standby did not start: {text}; its messages are above"))
        if self._spare.supervisor is not None:  # it gives peers the reason
            self._spare.supervisor.controller_ended(text)
            return
        if not self._stop.is_set():
            self._reason = text
        self._stop.set()
