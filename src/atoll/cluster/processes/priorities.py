"""Priorities of processes that work for tenants, on hosts that they share with the cluster's own processes.

Linux schedules in two steps where autogroups are on, which is the default: between sessions (`setsid`), then between
the processes of one. A niceness counts within its session only, so the session needs one as well.
"""

from __future__ import annotations

import os
from pathlib import Path

_AUTOGROUP = Path("/proc/self/autogroup")


def lower_priority(niceness: int) -> None:
    """Make this process, and what it starts, yield to others: by `niceness` from 0 to 19.

    Lowers the session too if this process leads one. A system without autogroups has no other priority than the
    process's, and needs none.
    """
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        try:
            _AUTOGROUP.write_text(str(niceness))
        except OSError:
            return
