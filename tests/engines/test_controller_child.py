"""Tests of how often a failing controller is restarted, with real processes as stand-ins for controllers."""

from __future__ import annotations

import asyncio
import errno
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.cluster.processes.child import LocalProcess
from atoll.cluster.processes.leases import FAILED_STATUS
from atoll.cluster.settings import ClusterSettings
from atoll.controller_process.controller_options import (
    CANNOT,
    CANNOT_RESTART,
    CHARGED,
    FAILED,
    FOLLOWED,
    RUNS,
    ControllerOptions,
)
from atoll.engines import controller_child
from atoll.engines.controller_child import ControllerChild
from atoll.engines.restart_rules import MAX_RESTARTS
from atoll.leadership.lease_address import open_lease
from atoll.leadership.lease_record import LeaseRecord
from tests.leadership.lease_servers import FakeEtcd
from tests.waiting import until

STARTS = MAX_RESTARTS + 4
_CONTROLLER = """
import json, os, sys, time
options = json.loads(sys.argv[1])
with open(sys.argv[2], "a") as file:
    file.write("x")
is_last = os.path.getsize(sys.argv[2]) == {starts}
os.write(options["ready_fd"], {runs!r} if is_last else {runs!r} + {output!r})
os._exit(0 if is_last else {status})
"""


def test_the_lease_of_a_followed_controller_is_released_in_its_name_when_it_is_killed(tmp_path, monkeypatch):
    etcd = FakeEtcd()
    with etcd.serving():
        lease = f"etcd://{etcd.address}/atoll"
        output = FOLLOWED + b"tls://two:1\n"

        def command(module: str, options: ControllerOptions) -> list[str]:
            open_lease(lease).write(LeaseRecord(options.lease_holder, 3, "tls://two:1"), "")
            source = f"import os; os.write({options.ready_fd}, {RUNS + output!r}); os.kill(os.getpid(), 9)"
            return [sys.executable, "-SEs", "-c", source]

        monkeypatch.setattr(controller_child, "command", command)

        async def run() -> None:
            replaced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            options = ControllerOptions("", ClusterSettings("1x1x1"), 1, journal=str(tmp_path), lease=lease)
            ControllerChild(options, lambda: None, lambda text: None, replaced.set_result).start()
            await asyncio.wait_for(replaced, 60.0)

        asyncio.run(run())
        until(lambda: open_lease(lease).read().record == LeaseRecord("", 3, "tls://two:1"))


def test_the_lease_of_a_controller_that_does_not_end_with_its_cluster_is_released_without_a_standby(
    tmp_path, monkeypatch
):
    etcd = FakeEtcd()
    with etcd.serving():
        lease = f"etcd://{etcd.address}/atoll"

        def command(module: str, options: ControllerOptions) -> list[str]:
            open_lease(lease).write(LeaseRecord(options.lease_holder, 3, "tls://two:1"), "")
            source = (
                f"import os, signal, time; signal.signal(15, signal.SIG_IGN); os.write({options.ready_fd}, {RUNS!r})"
            )
            return [sys.executable, "-SEs", "-c", f"{source}; time.sleep(600)"]

        monkeypatch.setattr(controller_child, "command", command)
        monkeypatch.setattr(controller_child, "RELEASE_SECONDS", 0.0)

        async def run() -> None:
            runs = asyncio.Event()
            options = ControllerOptions("", ClusterSettings("1x1x1"), 1, journal=str(tmp_path), lease=lease)
            child = ControllerChild(options, lambda: None, lambda text: None, on_runs=runs.set)
            child.start()
            await asyncio.wait_for(runs.wait(), 60.0)
            await child.end()

        asyncio.run(run())
        assert open_lease(lease).read().record == LeaseRecord("", 3, "")


def starts_of(
    output: bytes, directory: Path, monkeypatch: pytest.MonkeyPatch, status: int = FAILED_STATUS
) -> tuple[int, str]:
    """Return how often a controller is started that prints this text and fails, and the reason for the end."""
    file = directory / "starts"
    source = _CONTROLLER.format(starts=STARTS, runs=RUNS, output=output, status=status)

    def command(module: str, options: ControllerOptions) -> list[str]:
        text = f'{{"ready_fd": {options.ready_fd}}}'
        return [sys.executable, "-SEs", "-c", source, text, str(file)]

    monkeypatch.setattr(controller_child, "command", command)

    async def run() -> str:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        options = ControllerOptions("", ClusterSettings("1x1x1"), 1, journal=str(directory))
        ControllerChild(options, lambda: None, ended.set_result).start()
        return await asyncio.wait_for(ended, 60.0)

    reason = asyncio.run(run())
    return len(file.read_text()), reason


def test_a_controller_that_fails_again_and_again_ends(tmp_path, monkeypatch):
    count, reason = starts_of(FAILED + b"a bug\n", tmp_path, monkeypatch)
    assert count == MAX_RESTARTS + 1
    assert reason == "the controller failed: a bug; the controller ended 9 times within 60 s"


def test_restarts_for_bugs_that_are_charged_to_tenants_do_not_count(tmp_path, monkeypatch):
    count, reason = starts_of(CHARGED + FAILED + b"a bug\n", tmp_path, monkeypatch)
    assert count == STARTS
    assert reason.startswith("the controller ended")


def test_a_controller_that_cannot_read_its_journal_is_not_started_again(tmp_path, monkeypatch):
    count, reason = starts_of(CANNOT + b"protocol 1\n", tmp_path, monkeypatch, status=CANNOT_RESTART)
    assert (count, reason) == (1, "the controller cannot run: protocol 1")


def test_a_controller_is_started_again_when_files_are_lacking_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(controller_child, "RETRY_SECONDS", 0.05)
    attempts: list[int] = []

    class Process(LocalProcess):
        def __init__(self, *arguments: Any) -> None:
            attempts.append(1)
            if 1 < len(attempts) < 8:
                raise OSError(errno.EMFILE, "Too many open files")
            super().__init__(*arguments)

    monkeypatch.setattr(controller_child, "LocalProcess", Process)
    count, reason = starts_of(CHARGED + FAILED + b"a bug\n", tmp_path, monkeypatch)
    assert count == STARTS
    assert reason.startswith("the controller ended")
    assert len(attempts) == STARTS + 6


def test_a_cluster_can_end_while_its_controller_cannot_be_started(tmp_path, monkeypatch, controllers):
    class Process:
        def __init__(self, *_: Any) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    async def run() -> None:
        ended: list[str] = []
        options = ControllerOptions("", ClusterSettings("1x1x1"), 1, journal=str(tmp_path), restarts=True)
        child = ControllerChild(options, lambda: None, ended.append)
        child.start()
        monkeypatch.setattr(controller_child, "LocalProcess", Process)
        controllers[0].end(-9)
        assert not ended
        await child.end()
        assert ended == ["the cluster ended while its controller could not be restarted"]

    asyncio.run(run())


def test_the_log_names_the_standby_that_takes_over(tmp_path, controllers, caplog):
    replaced: list[str] = []

    async def run() -> None:
        options = ControllerOptions("", ClusterSettings("1x1x1"), 1, journal=str(tmp_path))
        ControllerChild(options, lambda: None, print, replaced.append).start()
        controllers[0].report(RUNS + FOLLOWED + b"tls://two:7000\n")
        controllers[0].end(-9)

    asyncio.run(run())
    assert replaced == ["the controller ended: killed by SIGKILL"]
    assert "killed by SIGKILL; the standby at tls://two:7000 takes over" in caplog.text
