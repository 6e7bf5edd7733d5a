"""Where this machine is, and what memory it has; `devices.accelerators` has its devices."""

from __future__ import annotations

import os


def memory_bytes() -> int:
    """Of the machine; of devices, their workers report."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
