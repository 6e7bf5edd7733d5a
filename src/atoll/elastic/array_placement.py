"""How an array that lies so on some devices lies on others: as much alike as these allow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

_AXIS = "devices"


def moved(sharding: Any, shape: Sequence[int], devices: Sequence[Any]) -> Any:
    """The sharding of an array of this shape on `devices`.

    With as many devices it is the same one, device for device. With others the array is cut along its longest dimension
    that they divide, where it was cut at all; else each of them has all of it.
    """
    kind = sharding.memory_kind
    if isinstance(sharding, SingleDeviceSharding):
        return SingleDeviceSharding(devices[0], memory_kind=kind)
    if isinstance(sharding, NamedSharding) and sharding.mesh.devices.size == len(devices):
        mesh = sharding.mesh
        there = np.empty(len(devices), object)
        there[:] = devices
        same = Mesh(there.reshape(mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types)
        return NamedSharding(same, sharding.spec, memory_kind=kind)
    line = np.empty(len(devices), object)
    line[:] = devices
    spec = PartitionSpec() if sharding.is_fully_replicated else _cut(shape, len(devices))
    return NamedSharding(Mesh(line, (_AXIS,), axis_types=(AxisType.Auto,)), spec, memory_kind=kind)


def _cut(shape: Sequence[int], count: int) -> PartitionSpec:
    fits = [(size, -axis) for axis, size in enumerate(shape) if size and size % count == 0]
    if not fits:
        return PartitionSpec()
    axis = -max(fits)[1]
    return PartitionSpec(*[None] * axis, _AXIS)


def other_island(home: int, working: Sequence[int], sizes: dict[int, int]) -> int | None:
    """Where the second copy of what is on island `home` goes; None where no other works.

    The next one of the same number of devices, in a ring, so that the copies of all islands do not meet on one; else
    the next of any.
    """
    others = [island for island in working if island != home]
    alike = [island for island in others if sizes[island] == sizes[home]]
    candidates = alike or others
    return min(candidates, key=lambda island: (island < home, island), default=None)
