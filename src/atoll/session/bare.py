"""A client without JAX, which runs programs on null devices through a session like the IFRT front end's.

Its measurements do not include the time that JAX and its client take.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

from atoll.ir.program import Call, Node, Program, Transfer
from atoll.ir.types import ArraySpec, Sharding, Tiled
from atoll.protocol.messages import CloseVersion
from atoll.session.cluster_session import ClusterSession
from atoll.session.session_interfaces import ReplyFuture
from atoll.session.session_opening import open_session
from atoll.wire.address import parse_address

_PATIENCE_SECONDS = 120.0


def sharded(devices: Sequence[int], nbytes: int = 4) -> ArraySpec:
    """Return the type of a byte vector that is sharded over `devices`, with `nbytes` bytes per device."""
    count = len(devices)
    return ArraySpec("uint8", (count * nbytes,), Sharding(tuple(devices), Tiled((count,), tuple(range(count)))))


class Compilable(Protocol):
    """A function that the cluster's workers can compile, such as a `devices.null.null_program.NullProgram`."""

    def source(self) -> bytes: ...


class BareClient:
    """A client with one session. Call all methods on the loop that opened it. `now` is the client's clock."""

    def __init__(self, session: ClusterSession, now: Callable[[], float] = time.perf_counter) -> None:
        self._session = session
        self._now = now
        ordered = sorted(session.welcome.devices, key=lambda device: (device.island, device.host, device.id))
        self.devices = [device.id for device in ordered]
        hosts = sorted({(device.island, device.host) for device in ordered})
        self.hosts = [[device.id for device in ordered if (device.island, device.host) == host] for host in hosts]
        self.islands = [
            [device.id for device in ordered if device.island == island]
            for island in sorted({island for island, _ in hosts})
        ]

    @classmethod
    async def open(cls, address: str, label: str = "bare client", token: str = "") -> BareClient:
        """Open a session with the cluster at `address`. Raise ConnectError."""
        return cls(await open_session(parse_address(address), token, label, os.getpid(), _PATIENCE_SECONDS))

    @property
    def session(self) -> int:
        """The number of the session in the cluster's report."""
        return self._session.welcome.session

    def close(self) -> None:
        self._session.close()

    async def compile(self, program: Compilable, devices: Sequence[int]) -> int:
        """Compile `program` for `devices` and return the function's number. Raise StatusError."""
        source = program.source()
        content = hashlib.sha256(source).hexdigest()
        number, _ = await self._session.register_function(source, content, (tuple(devices),))
        return number

    def register(self, program: Program) -> int:
        return self._session.register_program(program)

    async def launch(self, program: int, arguments: Sequence[int], results: int) -> list[int]:
        """Launch a program and return the handles of its results. Wait while the session's window is full."""
        window = self._session.window
        limit = window.limit_for(self._session.credits(program))
        while window.in_flight > limit:
            has_drained = self._session.make_future()
            window.when_at_most(limit, partial(has_drained.set_result, None))
            await has_drained
        handles = [self._session.mint() for _ in range(results)]
        self._session.launch(program, arguments, handles)
        return handles

    def release(self, handles: Sequence[int]) -> None:
        self._session.release(handles)

    async def publish(self, name: str, handles: Sequence[int], keep: int = 2) -> int:
        """Publish arrays, which belong to the controller from now on. Return the number of the version."""
        paths = [str(position) for position in range(len(handles))]
        return await self._session.publish(name, keep, handles, paths, b"", 1, on_disk=False)

    async def subscribe(self, name: str, targets: Sequence[ArraySpec], seconds: float = 60.0) -> list[int]:
        """Return the handles of the newest version's arrays, of these types. They may not be ready.

        Wait for a version for `seconds`, and then raise StatusError.
        """
        opened = await self._session.open_version(name, -1, 0, seconds)
        handles = [self._session.mint() for _ in targets]
        self._session.read_version(opened.reader, targets, handles)
        self._session.send(CloseVersion(opened.reader))
        return handles

    def when_ready(self, handles: Sequence[int]) -> Coroutine[Any, Any, float]:
        """Request the time at which the arrays are ready, immediately. Return a coroutine that waits for it.

        The coroutine returns the time on the client's clock, or raises the arrays' first error.
        """
        future = self._session.make_future()
        self._session.wait(handles, lambda status: future.set_result((status, self._now())))
        return _ready(future)

    async def wait(self, handles: Sequence[int]) -> None:
        """Wait until the arrays are ready. Raise StatusError for the first error."""
        await self.when_ready(handles)


async def _ready(future: ReplyFuture) -> float:
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
