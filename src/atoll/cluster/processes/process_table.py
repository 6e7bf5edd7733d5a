"""What the kernel knows about the processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def this_machine() -> str:
    """Return a name that distinguishes this machine from others that share its directories, but not its pids."""
    return os.uname().nodename


def began(pid: int) -> int | None:
    """When a process began, in ticks of the machine's clock; None for one that has ended, reaped or not.

    Together with its pid, that names a process for good: pids are used again.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def ancestors(pid: int) -> Iterator[int]:
    """The process itself, its parent, the parent's parent, and so on, as far as this process can see."""
    while pid > 0:
        yield pid
        fields = _stat(pid)
        pid = int(fields[1]) if fields else 0


def session_of(pid: int) -> int:
    """The leader of the process's session; -1 for one that has ended."""
    fields = _stat(pid)
    return int(fields[3]) if fields else -1


def cpu_ticks(pid: int) -> int:
    """The CPU time that a process has used, in ticks of 10 ms as a rule; 0 for one that has ended."""
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def switches(pid: int) -> int:
    """How often the main thread of a process has given up its CPU, or lost it; 0 for one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.rpartition(":")[2]) for line in lines if "_ctxt_switches:" in line)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third (the state) on; none for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    fields = text[text.rindex(")") + 2 :].split()
    return [] if fields[0] in "ZX" else fields
