"""The accelerators of this machine, and how its workers share them: each sees its own, and no other.

A worker of GPUs takes all that it sees, so what it may see is said in its environment. The names there are numbers or
UUIDs, as the vendor's runtime has them; where the user's own environment hides some, the others are shared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll.errors import ClusterError, SettingsError

Devices = Mapping[str, tuple[str, ...]]  # names of devices, by platform

# By platform: where its devices are, as files, and the variable that says which of them a process sees.
_FILES = {"cuda": ("/dev", "nvidia[0-9]*"), "rocm": ("/dev/dri", "renderD*"), "tpu": ("/dev", "accel[0-9]*")}
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}


def devices(environment: Mapping[str, str] = os.environ, root: str = "/") -> Devices:
    """The accelerators that a process with this environment sees.

    A platform with none here may have some that this does not know of, and is not listed; nor is the CPU, of which a
    worker makes as many devices as it is asked for.
    """
    found = {}
    for platform, (directory, pattern) in _FILES.items():
        count = len(list(Path(root, directory.removeprefix("/")).glob(pattern)))
        said = environment.get(_VISIBLE.get(platform, ""))
        names = [str(number) for number in range(count)]
        if count and said is not None:
            names = _until_none(said.split(","))
        if count:
            found[platform] = tuple(names)
    return {platform: names for platform, names in found.items() if names}


def _until_none(names: Iterable[str]) -> list[str]:
    """CUDA sees no device behind one that does not exist, such as -1."""
    seen: list[str] = []
    for name in map(str.strip, names):
        if name in ("", "-1"):
            break
        seen.append(name)
    return seen


def parts(found: Devices, workers: int) -> list[Devices]:
    """What each of so many workers of this machine has: as many of each kind, those that are near one another.

    Raises SettingsError where devices cannot be divided so.
    """
    if workers == 1:
        return [found]
    if "tpu" in found:
        raise SettingsError(
            f"the {len(found['tpu'])} TPU chips of this machine are all one worker's: leave --workers away"
        )
    for platform, names in found.items():
        if len(names) < workers:
            raise SettingsError(f"this machine has {len(names)} {platform} devices, too few for {workers} workers")
    return [
        {
            platform: names[number * (len(names) // workers) : (number + 1) * (len(names) // workers)]
            for platform, names in found.items()
        }
        for number in range(workers)
    ]


def visible(names: Sequence[str], platform: str, count: int) -> dict[str, str]:
    """The environment of a worker that sees the first `count` of these devices.

    {} where nothing is to be said, since the platform has no such variable, or it is not known what there is.
    """
    variable = _VISIBLE.get(platform, "")
    return {variable: ",".join(names[:count])} if variable and names else {}


@dataclass
class DeviceShares:
    """Which of this machine's devices no worker has. A platform of which none is known is not counted."""

    found: Devices
    _free: dict[str, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        self._free = {platform: list(names) for platform, names in self.found.items() if platform in _VISIBLE}

    def check(self, platform: str, needed: int) -> None:
        """Raises ClusterError where the machine does not have so many."""
        if platform in self._free and needed > len(self.found[platform]):
            raise ClusterError(
                f"this machine has {len(self.found[platform])} {platform} devices, and the cluster's hosts need "
                f"{needed} in all: fewer hosts or devices, or `--engine hosts` on several machines"
            )

    def take(self, platform: str, count: int) -> tuple[str, ...]:
        """So many for one worker; () where they are not counted. Raises OSError where there are too few."""
        free = self._free.get(platform)
        if free is None:
            return ()
        if len(free) < count:
            text = f"{count} {platform} devices are needed for one more host, and {len(free)} are free"
            raise OSError(f"{text} of the {len(self.found[platform])} of this machine")
        taken = tuple(free[:count])
        del free[:count]
        return taken

    def give_back(self, platform: str, taken: tuple[str, ...]) -> None:
        if taken:
            order = self.found[platform].index
            self._free[platform] = sorted([*self._free[platform], *taken], key=order)
