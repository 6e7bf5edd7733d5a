"""Kills by the kernel's OOM killer, which a parent sees as SIGKILL without a reason."""

from __future__ import annotations

import signal
from pathlib import Path

from atoll.cluster.processes.control_groups import group_files

# Files with a line "oom_kill COUNT", by the controllers in /proc/self/cgroup. The kernel counts a kill in the group of
# the process that it kills, whichever group's limit was reached.
_COUNTS = {"": "memory.events", "memory": "memory.oom_control"}
_MACHINE = "proc/vmstat"  # for the whole machine, where control groups count nothing


class OomKills:
    """The kills in this process's control group since the construction of this object."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = _count(root)

    def note(self, status: int) -> str:
        """Return what to add to the description of the exit status of a child, "" if the kernel did not kill it."""
        kills = _count(self._root) - self._before
        if status != -signal.SIGKILL or kills <= 0:
            return ""
        processes = "a process" if kills == 1 else f"{kills} processes"
        return f"; since it started, the kernel has killed {processes} for lack of memory"


def _count(root: Path) -> int:
    files = [own for own, *_ in group_files(root, _COUNTS)]
    for file in (*files, root / _MACHINE):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                return int(count)
    return 0
