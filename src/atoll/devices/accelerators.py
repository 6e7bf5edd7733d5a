"""The accelerators of this machine, and how its workers divide them.

A GPU worker uses all devices that are visible to it, so its environment restricts which ones are visible. Devices have
numbers or UUIDs as names, as in the vendor's runtime. Devices that the user's environment hides are not divided.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll.cluster.environment_variables import CUDA_DEVICES, HIP_DEVICES
from atoll.errors import ClusterError, SettingsError
from atoll.quantities import counted

Devices = Mapping[str, tuple[str, ...]]  # names of devices, by platform

# By platform: directory and pattern of the device files.
_FILES = {"cuda": ("/dev", "nvidia[0-9]*"), "rocm": ("/dev/dri", "renderD*"), "tpu": ("/dev", "accel[0-9]*")}
# By platform: the variable that selects the devices that a process sees.
_VISIBLE = {"cuda": CUDA_DEVICES.variable, "rocm": HIP_DEVICES.variable}


def devices(environment: Mapping[str, str] = os.environ, root: str = "/") -> Devices:
    """Return the accelerators that are visible to a process with this environment.

    A platform without known devices is not listed, although it may have devices that this function cannot detect. The
    CPU is not listed: the number of CPU devices is a setting of the worker.
    """
    found = {}
    for platform, (directory, pattern) in _FILES.items():
        count = len(list(Path(root, directory.removeprefix("/")).glob(pattern)))
        selected = environment.get(_VISIBLE.get(platform, ""))
        names = [str(number) for number in range(count)]
        if count and selected is not None:
            names = _up_to_invalid(selected.split(","))
        if count:
            found[platform] = tuple(names)
    return {platform: names for platform, names in found.items() if names}


def _up_to_invalid(names: Iterable[str]) -> list[str]:
    """Return the names before the first invalid one, such as -1: CUDA ignores it and all that follow."""
    seen: list[str] = []
    for name in map(str.strip, names):
        if name in ("", "-1"):
            break
        seen.append(name)
    return seen


def parts(found: Devices, workers: int) -> list[Devices]:
    """Divide this machine's devices evenly among `workers` workers, in contiguous blocks per platform.

    Raises SettingsError if the devices cannot be divided in this way.
    """
    if workers == 1:
        return [found]
    if "tpu" in found:
        raise SettingsError(f"one worker must have all {len(found['tpu'])} TPU chips of this machine: remove --workers")
    for platform, names in found.items():
        if len(names) < workers:
            raise SettingsError(
                f"this machine has {counted(len(names), f'{platform} device')}, too few for {workers} workers"
            )
    return [
        {
            platform: names[number * (len(names) // workers) : (number + 1) * (len(names) // workers)]
            for platform, names in found.items()
        }
        for number in range(workers)
    ]


def visible(names: Sequence[str], platform: str, count: int) -> dict[str, str]:
    """Return the environment that makes only the first `count` of these devices visible to a worker.

    It is empty if the platform has no such variable, or if its devices are not known.
    """
    variable = _VISIBLE.get(platform, "")
    return {variable: ",".join(names[:count])} if variable and names else {}


@dataclass
class DeviceShares:
    """The devices of this machine that no worker uses. Platforms without known devices are not counted."""

    found: Devices
    _free: dict[str, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        self._free = {platform: list(names) for platform, names in self.found.items() if platform in _VISIBLE}

    def check(self, platform: str, needed: int) -> None:
        """Raise ClusterError if the machine has fewer than `needed` devices."""
        if platform in self._free and needed > len(self.found[platform]):
            raise ClusterError(
                f"this machine has {counted(len(self.found[platform]), f'{platform} device')}, and the cluster's hosts "
                f"need {needed} in all: use fewer hosts or devices, or `--engine hosts` on several machines"
            )

    def take(self, platform: str, count: int) -> tuple[str, ...]:
        """Take `count` free devices for one worker; return () if the platform's devices are not counted.

        Raises OSError if too few are free.
        """
        free = self._free.get(platform)
        if free is None:
            return ()
        if len(free) < count:
            text = f"one more host needs {counted(count, f'{platform} device')}, but only {len(free)} of the"
            raise OSError(f"{text} {len(self.found[platform])} of this machine are free")
        taken = tuple(free[:count])
        del free[:count]
        return taken

    def give_back(self, platform: str, taken: tuple[str, ...]) -> None:
        if taken:
            order = self.found[platform].index
            self._free[platform] = sorted([*self._free[platform], *taken], key=order)
