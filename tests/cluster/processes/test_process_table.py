"""Tests of reading the CPU time of processes, which may end during that."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from atoll.cluster.processes.process_table import cpu_ticks


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
