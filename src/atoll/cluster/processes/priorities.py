"""Priorities of processes that work for tenants, on hosts that they share with the cluster's own processes.

Linux schedules in two steps where autogroups are on, which is the default: between sessions (`setsid`), then between
the processes of one. A niceness counts within its session only, so the session needs one as well.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def lower_priority(niceness: int) -> None:
    """Make this process, and what it starts, yield to others: by `niceness` from 0 to 19.

    Lowers the session too if this process leads one. A system without autogroups has no other priority than the
    process's, and needs none.
    """
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        _set_session_niceness("self", niceness)


def restore_priority(leader: int) -> None:
    """Give the session of process `leader` the usual priority, so that its processes end soon once they are killed.

    A killed process frees its memory at its own priority.
    """
    _set_session_niceness(str(leader), 0)


def _set_session_niceness(process: str, niceness: int) -> None:
    """Set the niceness of the process's session. Does nothing if the process has ended, or there are no autogroups."""
    with suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text(str(niceness))
