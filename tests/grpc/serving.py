"""Run a GrpcServer on an event loop in a separate thread, for tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from atoll.grpc import Call, GrpcServer
from tests.grpc.http2.http2_peer import DEADLINE_SECONDS

T = TypeVar("T")


def echo(call: Call) -> None:
    call.set_handlers(lambda message: call.send(bytes(message)), call.finish)


class Serving:
    """Server that listens on a unix socket, in a thread. It is a context manager."""

    def __init__(
        self,
        methods: Mapping[str, Callable[[Call], None]],
        path: str,
        loop_factory: Any = None,
        **options: Any,
    ):
        self.path = path
        self.address = f"unix:{path}"
        self._loop: asyncio.AbstractEventLoop = (loop_factory or asyncio.new_event_loop)()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._arguments = (methods, options)

    def __enter__(self) -> Serving:
        self._thread.start()
        self.server = self.run(self._listen())
        return self

    def __exit__(self, *details: object) -> None:
        self.run(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> GrpcServer:
        methods, options = self._arguments
        server = GrpcServer(methods, **options)
        await server.listen_unix(self.path)
        return server

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_SECONDS)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function on the loop's thread, and return its result."""

        async def run() -> T:
            return function(*args)

        return self.run(run())
