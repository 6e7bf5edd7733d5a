"""The memory that this machine, or the container of this process, has."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.cluster.processes.control_groups import group_files

_LIMITS = {"": "memory.max", "memory": "memory.limit_in_bytes"}
_USED = ("memory.current", "memory.usage_in_bytes")  # beside the limits
_CACHE = ("inactive_file ", "total_inactive_file ")  # lines of memory.stat: page cache that the kernel can free


def machine_memory(root: Path = Path("/")) -> int:
    """Return the machine's memory in bytes, or the lowest limit of this process's control groups if that is less."""
    return min((physical_memory(), *_limits(root)))


def group_memory(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Return the limit and the unused bytes of each control group of this process that has a limit.

    Ignore limits above the machine's memory. Page cache that the kernel can free counts as unused.
    """
    found = []
    physical = physical_memory()
    for file in [file for files in group_files(root, _LIMITS) for file in files]:
        text = _read(file)
        if not text.isdecimal() or (limit := int(text)) >= physical:
            continue
        used = next(filter(str.isdecimal, (_read(file.with_name(name)) for name in _USED)), "")
        if used:
            lines = _read(file.with_name("memory.stat")).splitlines()
            cache = [int(line.split()[1]) for line in lines if line.startswith(_CACHE)]
            found.append((limit, limit - int(used) + max(cache, default=0)))
    return found


def physical_memory() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits(root: Path) -> list[int]:
    # The limits of all groups that contain the process's group apply.
    texts = [_read(file) for files in group_files(root, _LIMITS) for file in files]
    return [int(text) for text in texts if text.isdecimal()]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
