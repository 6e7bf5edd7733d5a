"""Processes that yield to others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os
from pathlib import Path
from atoll.cluster.processes.priorities import lower_priority

before = os.nice(0)
lower_priority(7)
print(os.nice(0) - before, Path("/proc/self/autogroup").read_text().split()[-1])
"""


def _priorities(leads: bool) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, start_new_session=leads
    )
    return ended.stdout.split()


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel has no autogroups")
def test_a_process_that_leads_its_session_lowers_the_session() -> None:
    assert _priorities(leads=True) == ["7", "7"]


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel has no autogroups")
def test_a_process_that_leads_none_leaves_the_priority_of_its_session() -> None:
    own = Path("/proc/self/autogroup").read_text().split()[-1]
    assert _priorities(leads=False) == ["7", own]
