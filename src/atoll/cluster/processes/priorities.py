"""Priorities of processes that work for tenants, on hosts that they share with the cluster's own processes.

Linux schedules in two steps where autogroups are on, which is the default: between sessions (`setsid`), then between
the processes of one. A niceness counts within its session only, so the session needs one as well.
"""

from __future__ import annotations

import os
from pathlib import Path


def lower_priority(niceness: int) -> None:
    """Make this process, and what it starts, yield to others: by `niceness` from 0 to 19.

    Lowers the session too if this process leads one. A system without autogroups has no other priority than the
    process's, and needs none.
    """
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        try:
            _autogroup("self").write_text(str(niceness))
        except OSError:
            return


def restore_priority(leader: int) -> None:
    """Give the session of process `leader` the usual priority, so that its processes end soon once they are killed.

    A killed process frees its memory at its own priority.
    """
    try:
        _autogroup(str(leader)).write_text("0")
    except OSError:
        return


def _autogroup(process: str) -> Path:
    return Path(f"/proc/{process}/autogroup")
