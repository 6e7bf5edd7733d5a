"""Priorities of tenants' processes, which share hosts with the processes of the cluster.

With autogroups, which are the default, Linux schedules in two steps: between sessions (`setsid`), then between the
processes of a session. The niceness of a process counts only within its session, so the session also needs one.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def lower_priority(niceness: int) -> None:
    """Lower the priority of this process and its future children by `niceness`, 0 to 19.

    If this process leads a session, lower that of the session as well. Systems without autogroups do not need that.
    """
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        _set_session_niceness("self", niceness)


def restore_priority(leader: int) -> None:
    """Give the session of process `leader` the usual priority, so that its processes end soon when they are killed.

    A killed process frees its memory with its own priority.
    """
    _set_session_niceness(str(leader), 0)


def _set_session_niceness(process: str, niceness: int) -> None:
    """Set the niceness of a process's session. Do nothing if the process has ended or there are no autogroups."""
    with suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text(str(niceness))
