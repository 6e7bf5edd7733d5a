"""Tests of processes with lowered priorities."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.cluster.processes.priorities import restore_priority

CODE = """
import os
from pathlib import Path
from atoll.cluster.processes.priorities import lower_priority

before = os.nice(0)
lower_priority(7)
print(os.nice(0) - before, Path("/proc/self/autogroup").read_text().split()[-1])
"""


WITHIN_A_SESSION = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"


def _priorities(*arguments: str) -> list[str]:
    """Run Python in a new session. Return by how much it lowers its priority, and the priority of the session."""
    ended = subprocess.run(
        [sys.executable, "-c", *arguments], capture_output=True, text=True, check=True, start_new_session=True
    )
    return ended.stdout.split()


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel has no autogroups")
def test_a_process_that_leads_its_session_lowers_the_session() -> None:
    assert _priorities(CODE) == ["7", "7"]


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel has no autogroups")
def test_a_process_that_leads_none_leaves_the_priority_of_its_session() -> None:
    assert _priorities(WITHIN_A_SESSION, CODE) == ["7", "0"]


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel has no autogroups")
def test_a_session_that_is_about_to_be_killed_gets_its_priority_back() -> None:
    code = CODE + "print(flush=True)\ninput()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    autogroup = Path(f"/proc/{process.pid}/autogroup")
    assert autogroup.read_text().split()[-1] == "7"
    restore_priority(process.pid)
    assert autogroup.read_text().split()[-1] == "0"
    process.kill()
    process.communicate()
    restore_priority(process.pid)  # no effect on a process that has ended
