"""The supervisor of an engine process whose controller continues a cluster that another one has begun.

The controller is a standby of a cluster that runs, or continues from the journal of a cluster whose controller and
engine have ended. In both cases the process offers the controller a spare engine. It takes the role of the engine if
that is lost, and adopts the workers that still run.
"""

from __future__ import annotations

import asyncio
import os

from atoll.controller_process.controller_options import ControllerOptions
from atoll.engines.controller_child import ControllerChild
from atoll.engines.engine_options import EngineOptions
from atoll.engines.spare_engine import SpareEngine
from atoll.errors import ClusterError
from atoll.security.start_security import advertised
from atoll.wire.address import parse_address

_WITHOUT_CONTINUE = (
    "To begin a new cluster, run the command once without --continue: sessions on disk stay, and a damaged journal is "
    "set aside"
)
_CLUSTER_ENDED = "the cluster that it followed has ended"


class SuccessorSupervisor:
    """Runs the controller, and restarts it after it has taken over.

    Call `start`, wait until `stop` is set, then call `end`. It sets `stop` itself when the controller ends, or when
    another controller takes over. If the controller is a standby, the hosts remain those of the cluster's own engine,
    which follows the standby, until that engine is lost.
    """

    def __init__(self, options: EngineOptions, stop: asyncio.Event) -> None:
        self._standby = options.standby
        self._what = "the standby" if options.standby else f"the cluster of the journal in {options.journal}"
        self._stop = stop
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
                restarts=not options.standby,
                standby=options.standby,
                advertise=str(advertised(listen, options.advertise)) if options.standby else "",
                continues=options.continues,
                lease=options.lease,
            ),
            self._set_up,
            self._ended,
            self._replaced,
            lambda: self._spare.offer(),
        )
        self._spare = SpareEngine(options, stop, self._controller, self._set_up, self._refused)

    @property
    def reason(self) -> str:
        """The reason for which this supervisor has set `stop`, or ""."""
        supervisor = self._spare.supervisor
        return self._reason or (supervisor.reason if supervisor is not None else "")

    @property
    def was_asked(self) -> bool:
        """Whether it has set `stop` because an operator has ended the cluster."""
        supervisor = self._spare.supervisor  # knows whether another controller that it serves has ended the cluster
        return self._controller.was_asked if supervisor is None else supervisor.was_asked

    @property
    def leaves(self) -> bool:
        """Whether it has set `stop` to leave the cluster to another controller and its engine."""
        supervisor = self._spare.supervisor
        return supervisor is not None and supervisor.leaves

    async def start(self) -> None:
        """Return when the standby has a copy of the controller's state, or when this process is the engine.

        Raise ClusterError if that fails.
        """
        try:
            self._controller.start()
        except OSError as error:
            raise ClusterError(f"{self._what} did not start: {error}") from None
        try:
            async with asyncio.timeout(self._seconds):
                await self._up
        except TimeoutError:
            text = f"the controller at {self._standby} sent no snapshot" if self._standby else "it has no engine"
            raise ClusterError(f"{self._what} did not start: {text} within {self._seconds:.0f} s") from None

    async def end(self) -> None:
        self._spare.close()
        if self._spare.supervisor is not None:
            await self._spare.supervisor.end()
        else:
            await self._controller.end()

    def _set_up(self) -> None:
        if not self._up.done():
            self._up.set_result(None)

    def _refused(self, text: str) -> None:
        """Fail the start of a cluster that would not have an engine."""
        if not self._standby and not self._up.done():
            self._up.set_exception(ClusterError(f"{self._what} cannot continue: {text}"))

    def _replaced(self, text: str) -> None:
        """End, unless this process has the role of the engine, which may then serve the other controller."""
        if self._spare.supervisor is None:
            self._ended(text)
        else:
            self._spare.supervisor.controller_replaced(text)

    def _ended(self, text: str) -> None:
        if not self._up.done():
            advice = ""
            if not self._standby:
                is_superseded = self._controller.was_superseded
                advice = f". {_with_standby(self._controller.followed_by) if is_superseded else _WITHOUT_CONTINUE}"
            self._up.set_exception(self._controller.start_error(self._what, text, advice))
        if self._spare.supervisor is not None:  # it gives peers the reason
            self._spare.supervisor.controller_ended(text)
            return
        if not self._stop.is_set():
            self._reason = _CLUSTER_ENDED if self._controller.was_asked and self._standby else text
        self._stop.set()


def _with_standby(address: str) -> str:
    """Return how to follow the controller at `address`, or at an unknown one, that has taken over."""
    given = f"--standby {address.removeprefix('tls://')}" if address else "--standby and its address"
    return (
        f"To follow it, run the command with {given}, and with another --journal instead of --continue. If its cluster "
        "has ended, run the command once without --continue"
    )
