"""Read what the kernel reports about this machine, its processes and its memory.

The functions for processes raise OSError if the kernel does not answer, for example because this process has too many
open files. Then it is unknown whether a process runs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

from atoll.cluster.processes.machine_memory import group_memory
from atoll.missing import MISSING, read_if_exists


def this_machine() -> str:
    """Return a name that distinguishes this machine from others that share its directories, but not its pids."""
    return os.uname().nodename


def pid_namespace() -> str:
    """Return the number of the kernel's PID namespace of this process. A pid has a meaning only in its namespace.

    Systems other than Linux have one namespace.
    """
    return str(os.stat("/proc/self/ns/pid").st_ino) if _has_table() else "1"


def boot() -> str:
    """Return an identifier of the machine's present boot: pids and start times of an earlier one mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def began(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it has ended, reaped or not.

    The pid and the start time together identify a process, since the kernel reuses pids. If the system has no /proc,
    the start time is 0 for all processes that run, so that a process is identified by its pid only.
    """
    if not _has_table():
        return 0 if _exists(pid) else None
    fields = _stat(pid)
    return int(fields[19]) - _boot_offset() if fields else None


@functools.cache
def _boot_offset() -> int:
    """Return the clock ticks that the kernel adds to start times for processes in this time namespace."""
    lines = (read_if_exists("/proc/self/timens_offsets") or b"").splitlines()
    for name, seconds, nanoseconds in map(bytes.split, lines):
        if name == b"boottime":
            return (int(seconds) * 10**9 + int(nanoseconds)) * os.sysconf("SC_CLK_TCK") // 10**9
    return 0


def _has_table() -> bool:
    """Return whether the system has a table of processes in /proc. Scripts also run on systems without one."""
    return os.path.exists("/proc/self")


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True


def ancestors(pid: int) -> Iterator[int]:
    """Yield the process, its parent, the parent's parent, and so on, as far as this process can see."""
    while pid > 0:
        yield pid
        try:
            fields = _stat(pid)
        except PermissionError:  # /proc is mounted with the option hidepid, and this is another user's process
            return
        pid = int(fields[1]) if fields else 0


def processes_of_session(leader: int) -> list[int]:
    """Return the processes that run in the session that process `leader` leads or has led."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if _session_of(pid) == leader and _stat(pid)]


def _session_of(pid: int) -> int:
    """Return the leader of the process's session, also for processes of other users; -1 if the process has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def cpu_ticks(pid: int, with_children: bool = False) -> int:
    """Return the CPU time that a process has used, in ticks of usually 10 ms; 0 if it has ended.

    With children, add the time of those that run, if the kernel lists them, and of those that it has waited for.
    """
    fields = _stat(pid)
    if not fields:
        return 0
    used = int(fields[11]) + int(fields[12])
    if not with_children:
        return used
    return used + int(fields[13]) + int(fields[14]) + sum(map(cpu_ticks, _children(pid)))


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except MISSING:  # the process has ended
        return []
    lines = [read_if_exists(f"/proc/{pid}/task/{thread}/children") for thread in threads]
    return [int(child) for line in lines if line is not None for child in line.split()]


def switches(pid: int) -> int:
    """Return the number of context switches of a process's main thread; 0 if the process has ended."""
    lines = (read_if_exists(f"/proc/{pid}/status") or b"").splitlines()
    return sum(int(line.rpartition(b":")[2]) for line in lines if b"_ctxt_switches:" in line)


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third (the state) on; [] if the process has ended."""
    content = read_if_exists(f"/proc/{pid}/stat")
    if content is None:
        return []
    fields = content[content.rindex(b")") + 2 :].split()
    return [] if fields[0] in b"ZX" else fields


# The part of the memory that must stay free. With less, the kernel may end any process.
_MIN_FREE = 1 / 16


def has_memory_for(nbytes: int) -> bool:
    """Return whether enough memory remains free if `nbytes` more are used. Page cache counts as free.

    The limits of this process's control groups count, such as those of its container. If the system does not report
    its memory in /proc, the answer is yes.
    """
    if any(unused - nbytes < limit * _MIN_FREE for limit, unused in group_memory()):
        return False
    if not _has_table():
        return True
    with open("/proc/meminfo") as lines:
        found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return (found["MemAvailable"] << 10) - nbytes >= (found["MemTotal"] << 10) * _MIN_FREE
