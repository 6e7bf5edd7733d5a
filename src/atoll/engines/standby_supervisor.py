"""A standby's engine process: runs the controller that stands by, and starts it again once it has taken over.

The hosts stay those of the cluster's own engine, which goes on with the standby as all others do. So where another
controller takes over from this one, nothing here is needed any more.
"""

from __future__ import annotations

import asyncio
import logging
import os

from atoll.controller_process.controller_options import ControllerOptions
from atoll.engines.controller_child import ControllerChild
from atoll.engines.engine_options import EngineOptions
from atoll.errors import ClusterError
from atoll.security.start_security import advertised
from atoll.wire.address import parse_address

_log = logging.getLogger(__name__)


class StandbySupervisor:
    """Runs a standby: `start`, then until `stop` is set, then `end`. It sets `stop` itself when the controller ends."""

    def __init__(self, options: EngineOptions, stop: asyncio.Event) -> None:
        self._standby = options.standby
        self._stop = stop
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
            self._ended,
        )

    async def start(self) -> None:
        """Returns once it has all that the controller has. Raises ClusterError where it does not come to that."""
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
        await self._controller.end()

    def _follows(self) -> None:
        if not self._up.done():
            self._up.set_result(None)

    def _ended(self, text: str) -> None:
        if not self._up.done():
            self._up.set_exception(ClusterError(f"the standby did not start: {text}; its messages are above"))
        self._stop.set()
