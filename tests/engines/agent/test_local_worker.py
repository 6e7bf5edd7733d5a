"""Tests of a host agent's worker that cannot be started."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.engines.agent import local_worker
from atoll.engines.agent.local_worker import LocalWorker
from atoll.engines.worker_command import WorkerPlace
from atoll.protocol import messages as m
from tests.file_limits import no_more_files

START = m.StartWorker(
    incarnation=3,
    island=0,
    host=0,
    rank=0,
    hosts=1,
    devices=1,
    platform="null",
    coordinator_address="",
    bulk_tls=False,
    lease=1.0,
)


@pytest.fixture(autouse=True)
def directory(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_directory))
    return short_directory


def failed(ends: list[str]) -> LocalWorker:
    """Return a worker that could not be started for lack of files."""
    worker = LocalWorker({}, lambda: None, ends.append)
    with no_more_files():
        worker.start(START, WorkerPlace("unix:/none", "", ""), ())
    return worker


def test_a_worker_that_lacks_files_is_reported_later_so_that_restarts_last(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_worker, "_REPORT_SECONDS", 0.3)

    async def scene() -> None:
        ends: list[str] = []
        worker = failed(ends)
        assert not ends
        await asyncio.sleep(0.6)
        assert len(ends) == 1
        assert "it cannot be started" in ends[0]
        assert "Too many open files" in ends[0]
        assert worker.last_end == (3, 1)
        assert not list(directory.iterdir())

    asyncio.run(scene())


def test_a_worker_that_lacks_files_is_reported_at_once_if_it_is_to_end() -> None:
    async def scene() -> None:
        ends: list[str] = []
        worker = failed(ends)
        await worker.end(0.05)
        assert len(ends) == 1
        worker.kill()
        assert len(ends) == 1

    asyncio.run(scene())
