"""A blocking connection over several sockets in a row, against a table on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
from pathlib import Path

import pytest

from atoll.wire.address import Address
from atoll.wire.blocking import BlockingConnection
from atoll.wire.endpoints import listen
from atoll.wire.framing import frame_header
from atoll.wire.resumption.link import LIMITS, LinkLimits
from tests.cut_connections import cut
from tests.wire.resumption.network import PATIENCE_SECONDS, Hello, Listener, Note, until

COUNT = 2000


class Worker:
    """The end that threads use: one receives, two send."""

    def __init__(self, address: Address, limits: LinkLimits = LIMITS, patience: float = 60.0) -> None:
        self.connection = BlockingConnection.dial(
            address, Note, name="the controller", patience=patience, limits=limits
        )
        self.connection.send(Hello())
        self.messages: list[Note] = []
        self.receives = threading.Thread(target=self._receive)
        self.receives.start()

    def _receive(self) -> None:
        self.messages.extend(self.connection.receive())

    def send_from_two_threads(self, count: int) -> list[threading.Thread]:
        def send(first: int) -> None:
            for number in range(first, count, 2):
                self.connection.send(Note(number, b"x" * (number % 300)))

        threads = [threading.Thread(target=send, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        return threads


async def begin(directory: Path, listener: Listener, limits: LinkLimits = LIMITS) -> tuple[asyncio.Server, Worker]:
    server, address = await listen(Address(path=str(directory / "socket")), listener.accept)
    worker = await asyncio.to_thread(Worker, address, limits)
    await until(lambda: worker.connection.can_resume)
    return server, worker


@pytest.mark.parametrize("seed", range(3))
def test_sockets_are_cut_while_threads_send_and_each_message_arrives_once(tmp_path, seed):
    limits = LinkLimits(acknowledge_messages=20)

    async def main() -> None:
        draw = random.Random(seed)
        listener = Listener(limits=limits)
        server, worker = await begin(tmp_path, listener, limits)
        threads = worker.send_from_two_threads(COUNT)
        cuts = 0
        for number in range(COUNT):
            listener.connection.send(Note(number))
            if draw.random() < 0.01:
                await asyncio.sleep(0.002)
                await until(lambda: not listener.connection.is_away)
                cut(listener.connection)
                cuts += 1
        await until(lambda: len(listener.messages) >= COUNT and len(worker.messages) >= COUNT)
        assert [each.number for each in worker.messages] == list(range(COUNT))
        for first in (0, 1):  # each thread's are in order
            assert [each.number for each in listener.messages if each.number % 2 == first] == list(
                range(first, COUNT, 2)
            )
        assert cuts > 3
        for thread in threads:
            thread.join()
        listener.connection.close()
        await asyncio.to_thread(worker.receives.join)
        worker.connection.close()
        server.close()

    asyncio.run(main())


def test_what_is_large_is_acknowledged_before_it_is_much(tmp_path):
    async def main() -> None:
        listener = Listener()
        server, worker = await begin(tmp_path, listener, LinkLimits(acknowledge_bytes=100_000))
        for number in range(20):
            listener.connection.send(Note(number, b"x" * 30_000))
        buffer = listener.connection.link.buffer  # type: ignore[union-attr]
        await until(lambda: buffer.nbytes <= 100_000)
        assert buffer.acknowledged.whole >= 16
        listener.connection.close()
        await asyncio.to_thread(worker.receives.join)
        worker.connection.close()
        server.close()

    asyncio.run(main())


def test_a_worker_that_waits_for_its_controller_ends_when_the_grace_is_over(tmp_path):
    async def main() -> None:
        listener = Listener(seconds=0.3)
        server, worker = await begin(tmp_path, listener)
        server.close()
        cut(listener.connection)
        await asyncio.to_thread(worker.receives.join, PATIENCE_SECONDS)
        assert not worker.receives.is_alive()
        worker.connection.close()
        await until(lambda: "did not reconnect" in listener.events[-1])

    asyncio.run(main())


def test_a_worker_whose_peer_only_sends_parts_of_a_message_ends_when_the_grace_is_over(tmp_path):
    """A process at the controller's address may send bytes now and then, but never an answer."""

    def drip(server: socket.socket, stop: threading.Event) -> None:
        sock, _ = server.accept()
        with sock, contextlib.suppress(OSError):
            sock.sendall(frame_header(10_000))
            while not stop.wait(0.5):
                sock.sendall(b"x")

    async def main() -> None:
        listener = Listener(seconds=0.3)
        server, worker = await begin(tmp_path, listener)
        server.close()
        path, stop = tmp_path / "socket", threading.Event()
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as hostile:
            hostile.bind(str(path))
            hostile.listen()
            dripping = threading.Thread(target=drip, args=(hostile, stop))
            dripping.start()
            cut(listener.connection)
            await asyncio.to_thread(worker.receives.join, PATIENCE_SECONDS)
            is_over = not worker.receives.is_alive()
            stop.set()
            await asyncio.to_thread(dripping.join)
        await asyncio.to_thread(worker.connection.close)
        assert is_over

    asyncio.run(main())


def test_a_worker_that_is_put_off_is_admitted_later_and_everything_arrives(tmp_path):
    async def main() -> None:
        listener = Listener()
        listener.puts_off = 3
        server, worker = await begin(tmp_path, listener)
        assert listener.puts_off == 0
        worker.connection.send(Note(1), Note(2))
        await until(lambda: listener.messages == [Note(1), Note(2)])
        listener.connection.close()
        await asyncio.to_thread(worker.receives.join)
        worker.connection.close()
        server.close()

    asyncio.run(main())


def test_a_worker_that_nobody_admits_ends(tmp_path):
    async def main() -> None:
        listener = Listener()
        listener.puts_off = 1000
        server, address = await listen(Address(path=str(tmp_path / "socket")), listener.accept)
        worker = await asyncio.to_thread(Worker, address, patience=0.3)
        await asyncio.to_thread(worker.receives.join, PATIENCE_SECONDS)
        assert not worker.receives.is_alive()
        assert listener.puts_off < 1000 - 2
        worker.connection.close()
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize("sent", [b"", b"x"])
def test_a_worker_whose_controller_never_answers_ends(tmp_path, sent):
    stop = threading.Event()

    def serve(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock, contextlib.suppress(OSError):
            sock.sendall(frame_header(10_000))
            while not stop.wait(0.2):
                sock.sendall(sent)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        serving = threading.Thread(target=serve, args=(server,))
        serving.start()
        worker = Worker(Address(path=str(tmp_path / "socket")), patience=0.5)
        worker.receives.join(PATIENCE_SECONDS)
        is_over = not worker.receives.is_alive()
        assert worker.connection.reason == "the controller does not answer"
        stop.set()
        serving.join()
    worker.connection.close()
    assert is_over


def test_a_worker_that_the_controller_has_given_up_ends(tmp_path):
    async def main() -> None:
        listener = Listener()
        server, worker = await begin(tmp_path, listener)
        listener.table.forget(listener.connection)  # type: ignore[arg-type]
        cut(listener.connection)
        await asyncio.to_thread(worker.receives.join, PATIENCE_SECONDS)
        assert not worker.receives.is_alive()
        worker.connection.close()
        listener.connection.close()
        server.close()

    asyncio.run(main())


def test_where_it_is_not_granted_a_lost_socket_ends_it(tmp_path):
    async def main() -> None:
        listener = Listener(grants=False)
        server, address = await listen(Address(path=str(tmp_path / "socket")), listener.accept)
        worker = await asyncio.to_thread(Worker, address)
        await until(lambda: hasattr(listener, "connection"))
        listener.connection.send(Note(1))
        await until(lambda: worker.messages == [Note(1)])
        assert not worker.connection.can_resume
        cut(listener.connection)
        await asyncio.to_thread(worker.receives.join, PATIENCE_SECONDS)
        assert not worker.receives.is_alive()
        worker.connection.close()
        server.close()

    asyncio.run(main())


def test_a_peer_of_this_machine_whose_process_has_ended_is_not_waited_for(tmp_path):
    async def main() -> None:
        listener = Listener()
        server, worker = await begin(tmp_path, listener)
        server.close()
        listener.watched[os.getpid()]()
        assert listener.events == [], "something that it has sent may still come"
        cut(listener.connection)
        await until(lambda: len(listener.events) == 1)
        assert listener.events != ["away"]
        worker.connection.close()
        await asyncio.to_thread(worker.receives.join, PATIENCE_SECONDS)

    asyncio.run(main())
