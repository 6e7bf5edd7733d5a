"""Tests of processes with several islands: which islands share one, and which end together."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from atoll.engines.shared_process import MAX_PROCESSES, IslandHandle, SharedProcesses
from atoll.worker.worker_options import IslandOptions

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 60.0


class Islands:
    """Islands in processes of the stand-in, with the ends that were reported."""

    def __init__(self, *, deaf: bool = False, end_seconds: float = _PATIENCE) -> None:
        path = os.pathsep.join((str(_ROOT), *filter(None, (os.environ.get("PYTHONPATH"),))))
        self._environment = {**os.environ, "PYTHONPATH": path} | ({"DEAF": "1"} if deaf else {})
        self.processes = SharedProcesses("tests.engines.shared_process_stand_in", _PATIENCE, end_seconds)
        self.ends: dict[int, int] = {}
        self._changed = asyncio.Event()

    def start(self, island: int) -> IslandHandle:
        def ended(status: int, silence: str) -> None:
            assert not silence
            assert island not in self.ends, "reported twice"
            self.ends[island] = status
            self._changed.set()

        return self.processes.start(IslandOptions("", "", island, island, 1, 1, os.getpid()), self._environment, ended)

    async def until(self, count: int) -> dict[int, int]:
        while len(self.ends) < count:
            self._changed.clear()
            await self._changed.wait()
        return self.ends

    def pid(self, island: int) -> int:
        return self.processes._processes[island % MAX_PROCESSES]._process.pid


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def body() -> None:
        async with asyncio.timeout(_PATIENCE):
            await work()

    asyncio.run(body())


def test_an_island_ends_and_starts_again_beside_another_one_of_its_process() -> None:
    async def work() -> None:
        islands = Islands()
        first, second = islands.start(0), islands.start(MAX_PROCESSES)
        pid = islands.pid(0)
        first.kill()
        assert await islands.until(1) == {0: 3}
        first.kill()  # a late one has no effect
        islands.ends.clear()
        again = islands.start(0)
        assert islands.pid(MAX_PROCESSES) == islands.pid(0) == pid
        again.terminate()
        second.terminate()
        assert await islands.until(2) == {0: 3, MAX_PROCESSES: 3}
        while Path(f"/proc/{pid}").exists():  # it ends after its last island
            await asyncio.sleep(0.01)

    run(work)


def test_all_islands_of_a_process_end_with_it_and_start_in_a_new_one() -> None:
    async def work() -> None:
        islands = Islands()
        for island in (0, MAX_PROCESSES):
            islands.start(island)
        pid = islands.pid(0)
        os.kill(pid, signal.SIGKILL)
        assert await islands.until(2) == {0: -9, MAX_PROCESSES: -9}
        islands.ends.clear()
        last = islands.start(0)
        assert islands.pid(0) != pid
        last.kill()
        assert await islands.until(1) == {0: -9}, "the only one of a process is killed with it"

    run(work)


def test_a_process_that_does_not_end_an_island_in_time_is_killed() -> None:
    async def work() -> None:
        islands = Islands(deaf=True, end_seconds=0.01)
        islands.start(0)
        islands.start(MAX_PROCESSES).kill()
        assert await islands.until(2) == {0: -9, MAX_PROCESSES: -9}

    run(work)
