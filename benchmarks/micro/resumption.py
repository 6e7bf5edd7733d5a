"""Measure the cost of resumable control connections: CPU time for a message, with and without, in turn.

    python -m benchmarks.micro.resumption

It prints JSON. Both ends are in this process, over a unix socket: one that dials and one that is dialed, on one event
loop (uvloop if it is installed); or a thread that dials, as a worker does. They send each other batches of messages of
50 bytes. `plain` is `wire.endpoints.connect`, `off` a connection that could be resumed and is not granted, `on` one
that is.
"""

import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from atoll.wire.address import Address
from atoll.wire.blocking import BlockingConnection
from atoll.wire.connection import Connection
from atoll.wire.endpoints import connect, listen
from atoll.wire.resumption.accepted_link import Acceptor
from atoll.wire.resumption.dialed_connection import dial
from atoll.wire.resumption.resumable_connections import ResumableConnections
from benchmarks.harness.machine import describe

ROUNDS = 15
MESSAGES = 20_000  # a round, in each direction
BATCH = 20
KINDS = ("plain", "off", "on")


class Message(msgspec.Struct, frozen=True, array_like=True, tag=1):
    content: bytes


MESSAGE = Message(b"x" * 44)


class Dialed:
    """Accepting end of the connection, which replies to each batch with another batch."""

    def __init__(self, directory: str, grants: bool) -> None:
        self.address = Address(path=f"{directory}/{'on' if grants else 'off'}")
        self._grants = grants
        self._table = ResumableConnections(
            Acceptor(1, 60.0, b"key"),
            on_away=_ignore,
            on_back=_ignore,
            acknowledge_soon=lambda each: each.acknowledge(),
            commit=lambda: None,
            watch=lambda pid, then: None,
        )

    def accept(self) -> Connection:
        count = 0
        connection: Any = None

        def on_message(message: Message) -> None:
            nonlocal count, connection
            count += 1
            if connection is None:
                connection = self._table.grant(1, transport, on_message, _ignore) if self._grants else transport
            if not count % BATCH:
                for _ in range(BATCH):
                    connection.send(message)

        transport = Connection(Message, on_message, _ignore)
        return transport


def _ignore(it: Any) -> None:
    """Do nothing."""


async def asynchronous(address: Address, kind: str) -> Callable[[], Any]:
    """Measure a round with one end on the event loop."""
    count, done = 0, asyncio.Event()

    def on_message(message: Message) -> None:
        nonlocal count
        count += 1
        if count == MESSAGES:
            done.set()
        elif not count % BATCH:
            send()

    opens = connect if kind == "plain" else dial
    connection = await opens(address, Message, on_message, _ignore, name="it")

    def send() -> None:
        for _ in range(BATCH):
            connection.send(MESSAGE)

    async def run() -> None:
        nonlocal count
        count = 0
        done.clear()
        send()
        await done.wait()

    return run


async def blocking(address: Address, kind: str) -> Callable[[], Any]:
    """Measure a round with a thread at the other end."""
    if kind == "plain":
        return lambda: asyncio.sleep(0)
    connection = await asyncio.to_thread(BlockingConnection.dial, address, Message, name="it")
    begin, done = threading.Event(), threading.Event()

    def serve() -> None:
        received = connection.receive()
        while begin.wait():
            begin.clear()
            for _ in range(MESSAGES // BATCH):
                connection.send_all([MESSAGE] * BATCH)
                for _ in range(BATCH):
                    next(received)
            done.set()

    threading.Thread(target=serve, daemon=True).start()

    def run() -> None:
        begin.set()
        done.wait()
        done.clear()

    return lambda: asyncio.to_thread(run)


async def measure(directory: str) -> dict[str, dict[str, list[float]]]:
    """Microseconds of CPU time for a message, both ends together: of each round, by kind."""
    found: dict[str, dict[str, list[float]]] = {}
    ends = {grants: Dialed(directory, grants) for grants in (False, True)}
    servers = [await listen(end.address, end.accept) for end in ends.values()]  # a server ends with its last reference
    for name, make in (("event loop", asynchronous), ("thread", blocking)):
        runs = {kind: await make(ends[kind == "on"].address, kind) for kind in KINDS}
        found[name] = {kind: [] for kind in KINDS}
        for _ in range(ROUNDS):
            for kind, run in runs.items():
                before = time.process_time()
                await run()
                found[name][kind].append(1e6 * (time.process_time() - before) / (2 * MESSAGES))
    for server, _ in servers:
        server.close()
    return found


def main() -> None:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="atoll-bench-resumption-") as directory:
        try:
            import uvloop
        except ImportError:
            found = asyncio.run(measure(directory))
        else:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                found = runner.run(measure(directory))
    del found["thread"]["plain"]
    print(
        json.dumps(
            {
                "commit": describe().commit,
                "load_before": load,
                "microseconds_a_message": {
                    name: {kind: round(statistics.median(each), 3) for kind, each in kinds.items()}
                    for name, kinds in found.items()
                },
                "lowest": {
                    name: {kind: round(min(each), 3) for kind, each in kinds.items()} for name, kinds in found.items()
                },
            },
            indent=1,
        )
    )
    os._exit(0)  # threads wait for another round


if __name__ == "__main__":
    main()
