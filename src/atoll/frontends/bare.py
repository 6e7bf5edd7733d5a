"""A client without JAX: programs of null devices' functions, over the proxy's own link to a cluster.

What JAX and its client would cost comes on top; it is measured with real devices.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from atoll.errors import Status
from atoll.frontends.session.link import open_link
from atoll.ir.program import Call, Node, Program, Transfer
from atoll.ir.types import ArraySpec, Sharding, Tiled
from atoll.protocol import messages as m
from atoll.wire.address import parse_address
from atoll.worker.null.program import NullProgram

_PATIENCE_SECONDS = 120.0


def sharded(devices: Sequence[int], nbytes: int = 4) -> ArraySpec:
    """A vector of bytes for each device, so many on each."""
    count = len(devices)
    return ArraySpec("uint8", (count * nbytes,), Sharding(tuple(devices), Tiled((count,), tuple(range(count)))))


class SessionLink(Protocol):
    """Of `proxy.link.Link`, what a bare client uses: a simulated cluster has links of its own."""

    welcome: m.Welcome
    on_credit_returned: Callable[[int], None]

    def number(self) -> int: ...

    @property
    def send(self) -> Callable[[Any], None]: ...

    @property
    def close(self) -> Callable[[], None]: ...

    def wait(self, handles: Sequence[int], then: Callable[[Status], None]) -> None: ...

    async def register_function(
        self, source: bytes, content: str, assignment: tuple[tuple[int, ...], ...]
    ) -> tuple[int, bytes]: ...


class Later(Awaitable[Any], Protocol):
    """Of `asyncio.Future`, what a bare client uses."""

    def done(self) -> bool: ...

    @property
    def set_result(self) -> Callable[[Any], None]: ...


class BareClient:
    """One session. All methods are called on the loop that opened it, whose futures `make_future` makes."""

    def __init__(
        self, link: SessionLink, make_future: Callable[[], Later], now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._link = link
        self._make_future = make_future
        self._now = now
        self._room = link.welcome.launch_window
        self._waiting: deque[Later] = deque()
        self._handle = 1
        link.on_credit_returned = self._retired
        by_place = sorted(link.welcome.devices, key=lambda device: (device.island, device.host, device.id))
        self.devices = [device.id for device in by_place]
        hosts = sorted({(device.island, device.host) for device in by_place})
        self.hosts = [[device.id for device in by_place if (device.island, device.host) == place] for place in hosts]
        self.islands = [
            [device.id for device in by_place if device.island == island]
            for island in sorted({island for island, _ in hosts})
        ]

    @classmethod
    async def open(cls, address: str, label: str = "bare client") -> BareClient:
        """Opens a session with the cluster at `address`. Raises ConnectError."""
        link = await open_link(parse_address(address), "", label, os.getpid(), _PATIENCE_SECONDS)
        return cls(link, link.loop.create_future)

    def close(self) -> None:
        self._link.close()

    async def compile(self, program: NullProgram, devices: Sequence[int]) -> int:
        """The function's number on these devices. Raises StatusError."""
        source = program.source()
        number, _ = await self._link.register_function(source, _content(source), (tuple(devices),))
        return number

    def register(self, program: Program) -> int:
        number = self._link.number()
        self._link.send(m.RegisterProgram(number, program))
        return number

    async def launch(self, program: int, arguments: Sequence[int], results: int, room: int = 1) -> list[int]:
        """Launches a program; the handles of its results. Waits while the session's window is full."""
        while self._room < room:
            future = self._make_future()
            self._waiting.append(future)
            await future
        self._room -= room
        handles = list(range(self._handle, self._handle + results))
        self._handle += results
        self._link.send(m.Launch(program, tuple(arguments), tuple(handles), (), 0, room))
        return handles

    def release(self, handles: Sequence[int]) -> None:
        self._link.send(m.Release(tuple(handles)))

    def when_ready(self, handles: Sequence[int]) -> Coroutine[Any, Any, float]:
        """Asks at once. To be awaited: when they were ready, by the client's clock; raises the first error."""
        future = self._make_future()
        self._link.wait(handles, lambda status: future.set_result((status, self._now())))
        return _told(future)

    async def wait(self, handles: Sequence[int]) -> None:
        """Returns once they are ready. Raises StatusError for the first error."""
        await self.when_ready(handles)

    def _retired(self, room: int) -> None:
        self._room += room
        while self._waiting and self._room > 0:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)


async def _told(future: Later) -> float:
    status, at = await future
    status.raise_if_error()
    return float(at)


def call(
    function: int,
    inputs: Sequence[int],
    outputs: Sequence[ArraySpec],
    devices: Sequence[int],
    donated: tuple[int, ...] = (),
) -> Call:
    return Call(function, tuple(inputs), tuple(outputs), tuple(devices), donated)


def transfer(value: int, target: ArraySpec) -> Transfer:
    return Transfer((value,), (target,), reshard=True)


def program(name: str, arguments: Sequence[ArraySpec], nodes: Sequence[Node], results: Sequence[int]) -> Program:
    return Program(name, tuple(arguments), tuple(nodes), tuple(results))


def _content(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()
