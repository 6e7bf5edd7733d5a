"""Tests of OOM kills: they are counted in the process's control group or for the machine, and only reported with
SIGKILL.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from atoll.cluster.processes.oom_kills import OomKills

KILLED = -signal.SIGKILL


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        ("0::/a\n", "sys/fs/cgroup/a/memory.events", "oom 9\noom_kill {}\noom_group_kill 0\n"),
        ("4:memory:/a/b\n0::/\n", "sys/fs/cgroup/memory/a/b/memory.oom_control", "under_oom 0\noom_kill {}\n"),
        ("0::/\n", "proc/vmstat", "nr_free_pages 5\noom_kill {}\n"),
        ("", "proc/vmstat", "oom_kill {}\n"),
    ],
)
def test_kills_since_the_start_are_named(tmp_path: Path, groups: str, file: str, text: str) -> None:
    _write(tmp_path / "proc/self/cgroup", groups)
    _write(tmp_path / file, text.format(3))
    kills = OomKills(tmp_path)
    assert kills.note(KILLED) == ""
    _write(tmp_path / file, text.format(4))
    assert kills.note(KILLED) == "; since it started, the kernel has killed a process for lack of memory"
    _write(tmp_path / file, text.format(5))
    assert "2 processes" in kills.note(KILLED)
    assert kills.note(1) == kills.note(-signal.SIGTERM) == "", "the OOM killer sends SIGKILL"


def test_without_a_count_nothing_is_said(tmp_path: Path) -> None:
    assert OomKills(tmp_path).note(KILLED) == ""
