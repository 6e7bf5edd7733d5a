"""Tests of reading the table of processes, which may end during that, or which the kernel may not show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from atoll.cluster.processes.process_table import began, cpu_ticks, processes_of_session, switches
from tests.file_limits import no_more_files


def test_the_cpu_time_of_a_process_that_ends_while_its_children_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: Any) -> None:
        raise FileNotFoundError

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, ended)
    assert cpu_ticks(os.getpid(), with_children=True) > 0


@pytest.mark.skipif(not os.path.exists(f"/proc/self/task/{os.getpid()}/children"), reason="needs CONFIG_PROC_CHILDREN")
def test_the_cpu_time_of_a_process_may_include_that_of_its_children() -> None:
    code = "import time\nwhile time.process_time() < 0.1: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        own, together = cpu_ticks(os.getpid()), cpu_ticks(os.getpid(), with_children=True)
        child.stdin.write(b"\n")
        child.stdin.flush()
    assert together >= own + 0.05 * os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("read", [began, cpu_ticks, switches, processes_of_session])
def test_a_process_that_cannot_be_examined_does_not_count_as_ended(read: Callable[[int], object]) -> None:
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        read(os.getpid())


def test_children_that_cannot_be_listed_do_not_count_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(PermissionError):
        cpu_ticks(os.getpid(), with_children=True)


def test_a_process_that_has_ended_is_reported_as_ended() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""], start_new_session=True)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert began(child.pid) is None
    assert processes_of_session(child.pid) == []  # it has no parent that waits for it yet
    child.wait()
    assert began(child.pid) is None
    assert cpu_ticks(child.pid) == switches(child.pid) == 0
    assert processes_of_session(child.pid) == []


def test_the_processes_of_a_session_are_its_leader_and_its_children() -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        child = int(leader.stdout.readline())
        assert sorted(processes_of_session(leader.pid)) == sorted((leader.pid, child))
        os.killpg(leader.pid, signal.SIGKILL)


def test_processes_in_other_time_namespaces_see_the_same_start_times() -> None:
    """Otherwise, each would remove the directories of the others, as those of processes that have ended."""
    code = f"from atoll.cluster.processes.process_table import began; print(began({os.getpid()}))"
    command = ["unshare", "--time", "--boottime", "100000", "--fork", sys.executable, "-c", code]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("needs root and time namespaces")
    assert int(found.stdout) == began(os.getpid())
