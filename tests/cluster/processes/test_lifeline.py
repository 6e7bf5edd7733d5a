"""Tests of watching the end of a process, with and without pidfds."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from atoll.cluster.processes.lifeline import open_pid


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
