"""Tests of a process that outlives its parent, and is adopted by the parent's successor."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.cluster.processes.adopted_process import AdoptedProcess, PidFile, ProcessId, watch_holder
from tests.file_limits import no_more_files

PATIENCE = 1.5


@pytest.fixture
def holders() -> Iterator[list[subprocess.Popen[bytes]]]:
    made = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    yield made
    for each in made:
        each.kill()
        each.wait()


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_who_is_held_ends_when_nobody_has_taken_the_holders_place_in_time(
    holders: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    first, second = holders
    path = tmp_path / "note"
    here = ProcessId.of(os.getpid())

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        PidFile(here, ProcessId.of(first.pid)).write(path)
        watch_holder(first.pid, path, PATIENCE, ended.set)
        kill(first)
        await asyncio.sleep(PATIENCE / 3)
        PidFile(here, ProcessId.of(second.pid)).write(path)
        await asyncio.sleep(2 * PATIENCE)
        assert not ended.is_set(), "another one holds it"
        kill(second)
        gone = loop.time()
        async with asyncio.timeout(20):
            await ended.wait()
        assert loop.time() - gone >= PATIENCE

    asyncio.run(scene())


def test_a_note_about_another_process_is_of_no_use(holders: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    first, second = holders
    PidFile(ProcessId.of(second.pid), ProcessId.of(second.pid)).write(tmp_path / "note")

    async def scene() -> None:
        ended = asyncio.Event()
        watch_holder(first.pid, tmp_path / "note", 0.1, ended.set)
        kill(first)
        async with asyncio.timeout(20):
            await ended.wait()

    asyncio.run(scene())


def test_a_pid_that_is_used_again_is_another_process(holders: list[subprocess.Popen[bytes]]) -> None:
    named = ProcessId.of(holders[0].pid)
    assert named.runs
    assert not ProcessId(named.pid, named.began - 1).runs
    kill(holders[0])
    assert not named.runs


def test_who_is_held_does_not_end_while_it_cannot_read_who_holds_it(
    holders: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    first, second = holders
    path = tmp_path / "note"
    PidFile(ProcessId.of(os.getpid()), ProcessId.of(second.pid)).write(path)

    async def scene() -> None:
        ended = asyncio.Event()
        watch_holder(first.pid, path, 0.1, ended.set)
        with no_more_files():
            kill(first)
            await asyncio.sleep(1.0)
        assert not ended.is_set(), "the note names another holder"
        await asyncio.sleep(1.0)
        assert not ended.is_set(), "the note can be read again"
        kill(second)
        async with asyncio.timeout(20):
            await ended.wait()

    asyncio.run(scene())


def test_a_process_whose_end_cannot_be_detected_is_not_reported_as_ended(
    holders: list[subprocess.Popen[bytes]],
) -> None:
    named = ProcessId.of(holders[0].pid)
    process = AdoptedProcess(named)
    with no_more_files():
        with pytest.raises(OSError, match="Too many open files"):
            _ = named.runs
        assert not process.wait(0.05)
    kill(holders[0])
    assert process.wait(20.0)


def test_what_was_taken_over_is_awaited_and_ended(holders: list[subprocess.Popen[bytes]]) -> None:
    process = AdoptedProcess(ProcessId.of(holders[0].pid))
    assert not process.wait(0.05)
    threading.Timer(0.1, process.end).start()
    assert process.wait(20.0)


def test_where_no_note_is_or_none_that_can_be_read_there_is_none(tmp_path: Path) -> None:
    assert PidFile.read(tmp_path / "note") is None
    (tmp_path / "note").write_text("{")
    assert PidFile.read(tmp_path / "note") is None
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        PidFile.read(tmp_path / "note")
