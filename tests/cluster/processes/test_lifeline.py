"""Tests of watching the end of a process, with and without pidfds."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import threading
import time

import pytest

from atoll.cluster.processes.lifeline import open_pid, watch_in_loop, watch_in_thread
from tests.file_limits import no_more_files


@pytest.fixture(params=["pidfd", "polling"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "polling":
        monkeypatch.delattr(os, "pidfd_open")


def is_readable(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


@pytest.mark.usefixtures("system")
def test_the_descriptor_is_readable_when_a_child_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        descriptor = open_pid(child.pid)
        assert descriptor is not None
        assert not is_readable(descriptor, 0)
        assert child.stdin is not None
        child.stdin.close()
        assert is_readable(descriptor, 60)
        os.close(descriptor)


@pytest.mark.usefixtures("system")
def test_a_process_that_has_ended_has_no_descriptor() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    assert open_pid(child.pid) is None


def test_the_end_of_a_process_is_noticed_also_after_a_time_with_too_many_open_files() -> None:
    async def scene(child: subprocess.Popen[bytes]) -> None:
        ended, in_thread = asyncio.Event(), threading.Event()
        with no_more_files():
            watch_in_loop(child.pid, ended.set)
            watch_in_thread(child.pid, in_thread.set)
            time.sleep(0.3)
            await asyncio.sleep(0.3)
        assert not ended.is_set()
        assert not in_thread.is_set()
        assert child.stdin is not None
        child.stdin.close()
        async with asyncio.timeout(60):
            await ended.wait()
        assert await asyncio.to_thread(in_thread.wait, 60)

    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as running:
        asyncio.run(scene(running))
