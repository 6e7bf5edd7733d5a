"""Tests of a controller with a worker that reads slowly: what the start of a gang waits for, using sockets."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.topology import Topology
from atoll.controller_process.controller_main import serve
from atoll.controller_process.controller_options import ControllerOptions
from atoll.ir.program import NODES_PER_CREDIT, HostBuffer, HostToDevice, Program
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol import messages as m
from atoll.protocol.messages.proxy_messages import MAX_PART_NODES
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import connect
from atoll.wire.framing import FrameDecoder, encode
from tests.controller.play import ready
from tests.launch.test_large_plans import put
from tests.waiting import PATIENCE_SECONDS

# A plan of so many nodes that put arrays of many dimensions is larger than a socket's buffers. It has at least
# `LARGE_BYTES`.
NODES = 4_096
DIMENSIONS = 64
LARGE_BYTES = 3 << 18
SECONDS = 300.0


def parts_of_a_large_program(number: int) -> list[m.ProgramPart | m.RegisterProgram]:
    shape = (2,) + (1,) * (DIMENSIONS - 1)
    output = ArraySpec("float32", shape, Sharding((0,)))
    node = HostToDevice((HostBuffer(0, shape, None, None),), (output,))
    nodes = (node,) * MAX_PART_NODES
    part = m.ProgramPart(number, Program("large", (), nodes, (), feeds=1))
    return [
        *(part for _ in range(NODES // len(nodes) - 1)),
        m.RegisterProgram(number, Program("large", (), nodes, (0,), feeds=1)),
    ]


class Worker:
    """Worker that reads only when the test calls it, and counts bytes."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._decoder = FrameDecoder(m.ToWorker)
        self.came: list[Any] = []
        self.nbytes = 0

    async def open(self, path: str) -> None:
        await asyncio.get_running_loop().sock_connect(self._socket, path)
        await self.send(m.Hello(m.PROTOCOL, "worker", "", 1, "test", host=0, incarnation=1))
        await self.send(ready(Topology.parse("1x1x1"), 0, "unix:/data-0"))

    async def send(self, message: Any) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, encode(message))

    async def next(self, kind: type[Any]) -> Any:
        """Return the next message of this type that was not returned before, and the bytes received so far."""
        while True:
            while self.came:
                message = self.came.pop(0)
                if isinstance(message, kind):
                    return message
            data = await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16)
            assert data, "the controller has closed the connection"
            self.nbytes += len(data)
            self.came.extend(self._decoder.feed(memoryview(bytearray(data))))

    def close(self) -> None:
        self._socket.close()


class Client:
    """Proxy of a session."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection = connection
        self.number = number

    @classmethod
    async def open(cls, path: str) -> Client:
        came: asyncio.Queue[Any] = asyncio.Queue()
        connection = await connect(Address(path=path), m.ToProxy, came.put_nowait, print, name="the controller")
        connection.send(m.Hello(m.PROTOCOL, "proxy", "", 1, "test", "script.py"))
        while not isinstance(message := await came.get(), m.Welcome):
            pass
        return cls(connection, message.session)

    async def launch(self, worker: Worker, handle: int, nodes: int = 1) -> None:
        await worker.send(m.FeedsArrived(self.number, (handle,)))
        self.connection.send(m.Launch(1, (), (handle,), (handle,), credits=1 + nodes // NODES_PER_CREDIT))


async def settled(path: str) -> None:
    """Wait until the controller has handled all earlier messages, and has sent its reactions to them."""
    came: asyncio.Queue[Any] = asyncio.Queue()
    operator = await connect(Address(path=path), m.ToOperator, came.put_nowait, print, name="the controller")
    operator.send(m.Hello(m.PROTOCOL, "operator", "", 1, "test"))
    for _ in range(3):
        operator.send(m.StatusRequest())
        await came.get()
    operator.close()


async def lowered(path: str) -> None:
    """Wait until the large program is lowered, and its launch waits for the plan to arrive."""
    came: asyncio.Queue[Any] = asyncio.Queue()
    operator = await connect(Address(path=path), m.ToOperator, came.put_nowait, print, name="the controller")
    operator.send(m.Hello(m.PROTOCOL, "operator", "", 1, "test"))
    waiting = 0
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not waiting:
            operator.send(m.StatusRequest())
            waiting = len(json.loads((await came.get()).content)["waits"])
            await asyncio.sleep(0.05)
    operator.close()


async def overtaking(path: str) -> None:
    worker = Worker()
    for _ in range(500):
        if Path(path).exists():
            break
        await asyncio.sleep(0.01)
    await worker.open(path)
    one, other = await Client.open(path), await Client.open(path)
    one.connection.send(m.RegisterProgram(1, put("small")))
    await one.launch(worker, 10)
    await worker.send(m.Done((((await worker.next(m.Run)).sequence, 0, 1),)))

    # The worker reads nothing while the controller sends a large plan and a launch that needs it.
    for part in parts_of_a_large_program(1):
        other.connection.send(part)
    await other.launch(worker, 10, NODES)
    await lowered(path)
    await one.launch(worker, 11)
    await settled(path)
    before = worker.nbytes
    run = await worker.next(m.Run)
    assert run.session == one.number
    assert worker.nbytes - before < LARGE_BYTES // 2, "what the socket's buffers held"

    large = await worker.next(m.RegisterPlan)
    assert large.definition.name == "large"
    assert worker.nbytes - before > LARGE_BYTES
    await worker.send(m.PlanRegistered(large.plan))
    run = await worker.next(m.Run)
    assert (run.session, run.plan) == (other.number, large.plan)
    worker.close()
    for client in (one, other):
        client.connection.close()


def test_a_gang_of_another_program_starts_before_a_large_plan_is_there(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("ATOLL_TOKEN", raising=False)
    path = str(short_directory / "socket")

    async def main() -> None:
        stop = asyncio.Event()
        options = ControllerOptions(f"unix:{path}", ClusterSettings("1x1x1", lease_seconds=SECONDS), os.getpid())
        async with asyncio.timeout(SECONDS):
            running = asyncio.create_task(serve(options, stop))
            await overtaking(path)
            stop.set()
            await running

    run: Callable[[Any], None] = asyncio.run
    run(main())
