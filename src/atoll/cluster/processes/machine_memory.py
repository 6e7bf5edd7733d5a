"""The memory that this machine, or the container of this process, has."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.cluster.processes.control_groups import group_files

_LIMITS = {"": "memory.max", "memory": "memory.limit_in_bytes"}


def machine_memory(root: Path = Path("/")) -> int:
    """Return the machine's memory in bytes, or the lowest limit of this process's control groups if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min((physical, *_limits(root)))


def _limits(root: Path) -> list[int]:
    # The limits of all groups that contain the process's group apply.
    texts = [_read(file) for files in group_files(root, _LIMITS) for file in files]
    return [int(text) for text in texts if text.isdecimal()]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
