"""What this machine is called, where it is, and what it has."""

from __future__ import annotations

import os
from pathlib import Path

# By platform: where its devices are, as files.
_DEVICE_FILES = {"cuda": ("/dev", "nvidia[0-9]*"), "rocm": ("/dev/dri", "renderD*"), "tpu": ("/dev", "accel[0-9]*")}


def devices() -> dict[str, int]:
    """How many accelerators of each platform there are. Those that CUDA_VISIBLE_DEVICES hides do not count.

    A platform that counts none here may have some that this does not know of, and is not listed; nor is the CPU, of
    which a worker makes as many devices as it is asked for.
    """
    found = {platform: len(list(Path(folder).glob(name))) for platform, (folder, name) in _DEVICE_FILES.items()}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if found["cuda"] and visible is not None:
        found["cuda"] = len([each for each in visible.split(",") if each.strip() not in ("", "-1")])
    return {platform: count for platform, count in found.items() if count}


def memory_bytes() -> int:
    """Of the machine; of devices, their workers report."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
