"""The memory that this machine, or the container of this process, has."""

from __future__ import annotations

import os
from pathlib import Path

# The file of a control group that has its limit, by the controllers in /proc/self/cgroup: "" is version 2.
_LIMITS = {"": ("", "memory.max"), "memory": ("memory", "memory.limit_in_bytes")}


def machine_memory(root: Path = Path("/")) -> int:
    """Return the machine's memory in bytes, or the lowest limit of this process's control groups if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min((physical, *_control_group_limits(root)))


def _control_group_limits(root: Path) -> list[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        for name in {"", "memory"} & set(controllers.split(",")):
            hierarchy, file = _LIMITS[name]
            group = root / "sys/fs/cgroup" / hierarchy / path.lstrip("/")
            # The limits of all groups that contain the process's group apply.
            for each in (group, *list(group.parents)[: path.count("/")]):
                text = _read(each / file)
                if text.isdecimal():
                    found.append(int(text))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
