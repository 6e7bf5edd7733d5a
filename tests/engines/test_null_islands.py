"""Tests of a process with several null islands, whose engine may end at any time."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.engines.null_hosts import null_islands_main
from atoll.engines.null_hosts.null_islands_main import NullIslands
from atoll.engines.shared_islands import EndIsland, IslandEnded, Lines, StartIsland, line
from atoll.worker.worker_options import IslandOptions

SECONDS = 30.0
START = line(StartIsland(IslandOptions("", "", 3, 0, 1, 1, os.getpid())))
END = line(EndIsland(3))


class Island:
    """Replacement of a null island that starts at once."""

    def __init__(self, options: IslandOptions, process: Any, stop: asyncio.Event) -> None:
        started.append(options.island)

    async def start(self) -> None:
        pass

    def close(self) -> None:
        closed.append(1)


started: list[int] = []
closed: list[int] = []


@pytest.fixture(autouse=True)
def island(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(null_islands_main, "NullIsland", Island)
    monkeypatch.setattr(null_islands_main, "freeze_gc", lambda: None)
    started.clear()
    closed.clear()


def play(work: Callable[[socket.socket, socket.socket, asyncio.Event], Awaitable[None]]) -> list[Any]:
    """Run `work` with the engine's end of the socket, the process's end, and the event that ends the process.

    Return the unhandled errors, which a real process would report as bugs.
    """
    errors: list[Any] = []

    async def body() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        engine, own = socket.socketpair()
        with engine, own:
            NullIslands(own, SimpleNamespace(loop=loop, bugs=None), stop)  # type: ignore[arg-type]
            async with asyncio.timeout(SECONDS):
                await work(engine, own, stop)
            loop.remove_reader(own)

    asyncio.run(body())
    return errors


def test_a_message_may_arrive_in_parts() -> None:
    async def work(engine: socket.socket, own: socket.socket, stop: asyncio.Event) -> None:
        engine.setblocking(False)
        for byte in START + END:
            engine.sendall(bytes([byte]))
            await asyncio.sleep(0)
        answer = await asyncio.get_running_loop().sock_recv(engine, 1 << 16)
        assert list(Lines().messages(answer)) == [IslandEnded(3, 0)]
        assert not stop.is_set()

    assert play(work) == []
    assert started == [3]


@pytest.mark.parametrize("left", [1, len(START) // 2, len(START) - 1])
def test_the_process_ends_when_the_engine_ends_in_the_middle_of_a_message(left: int) -> None:
    async def work(engine: socket.socket, own: socket.socket, stop: asyncio.Event) -> None:
        engine.sendall(START[:-left])
        engine.close()
        await stop.wait()

    assert play(work) == []
    assert started == []


def test_an_engine_that_ends_before_it_has_read_everything_is_no_bug_of_the_process() -> None:
    async def work(engine: socket.socket, own: socket.socket, stop: asyncio.Event) -> None:
        own.sendall(line(IslandEnded(5, 0)))
        engine.close()  # the next `recv` of the process raises ConnectionResetError
        await stop.wait()

    assert play(work) == []


def test_an_island_that_ends_after_its_engine_is_no_bug_of_the_process() -> None:
    async def work(engine: socket.socket, own: socket.socket, stop: asyncio.Event) -> None:
        engine.sendall(START)
        while not started:
            await asyncio.sleep(0)
        engine.sendall(END)
        engine.close()  # the process reads the message first
        await stop.wait()
        while not closed:
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    assert play(work) == []
