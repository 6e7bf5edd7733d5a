"""Converts the ways in which users specify devices into a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

# The axis of meshes that Atoll makes from lists of devices. Arrays are sharded along it.
AXIS = "data"


def mesh_of(given: Any, what: str, error: Callable[[str], Exception]) -> Mesh:
    """Return the mesh that a user specified as a mesh, a slice, a list of devices or one device. Raise `error(text)`.

    `what` names the argument in errors.
    """
    if isinstance(given, Mesh):
        devices, names = given.devices, given.axis_names
    elif isinstance(given, jax.Device):
        devices, names = np.array([given], object), (AXIS,)
    else:
        found = list(getattr(given, "devices", given if isinstance(given, Sequence) else ()))
        if not found or not all(isinstance(each, jax.Device) for each in found):
            raise error(
                f"{what} is {given!r}: expected a jax.sharding.Mesh, a slice of atoll.make_virtual_device_set, a "
                "list of devices or a device"
            )
        if len(getattr(given, "shape", (1,))) != 1:
            raise error(
                f'{what} is a slice of shape {given.shape}: name its dimensions, as in slice.mesh(("data", "model"))'
            )
        devices, names = np.array(found, object), (AXIS,)
    # With automatic axes, XLA chooses the shardings that a function leaves open.
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
