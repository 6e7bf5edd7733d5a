"""Notify the earlier controllers of a cluster, from which standbys have taken over, that a later one serves it.

Such a controller may still run without being reachable. Or its machine starts it again from its journal, which names
only the standby that took over first. If that standby is lost, nobody else tells the controller that its cluster is
outdated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from atoll.errors import ConnectError
from atoll.retries import Retry
from atoll.wire.address import Address, parse_address
from atoll.wire.endpoints import connect
from atoll.wire.resumption.link_messages import Resume, ResumeRefused
from atoll.wire.tls.identity import Identity

_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.25, 5.0
_REPEAT_SECONDS = 30.0  # after an answer: the machine of the answering process may start another one


class EarlierControllers:
    """Sends `message`, of the controller that serves, to the processes at `addresses` until `end`.

    `identity_at` returns the identity for a connection to an address, or None without TLS.
    """

    def __init__(
        self,
        addresses: tuple[str, ...],
        message: Resume,
        identity_at: Callable[[Address], Identity | None],
    ) -> None:
        self._message = message
        self._identity_at = identity_at
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._notify(parse_address(each))) for each in addresses]

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _notify(self, address: Address) -> None:
        """Notify the process at the address again and again, unless it belongs to another cluster."""
        identity = self._identity_at(address)
        while True:
            retry = Retry(_RETRY_SECONDS, _MAX_RETRY_SECONDS)
            answer = await retry.call_async(lambda: self._ask(address, identity), (ConnectError, TimeoutError))
            if isinstance(answer, ResumeRefused) and answer.final and not answer.term:
                return
            await asyncio.sleep(_REPEAT_SECONDS)

    async def _ask(self, address: Address, identity: Identity | None) -> Any:
        """Return the answer of the process at the address. Raises ConnectError or TimeoutError."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(received: Any) -> None:
            if not answer.done():
                answer.set_result(received)

        connection = await connect(
            address, Any, done, done, name="the earlier controller", on_link=done, identity=identity
        )
        try:
            connection.send_link(self._message)
            async with asyncio.timeout(_MAX_RETRY_SECONDS):
                return await answer
        finally:
            connection.abort()
