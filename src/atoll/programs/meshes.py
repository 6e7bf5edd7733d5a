"""Devices that a user names in one of several ways, as a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

# Of meshes that Atoll makes of devices: what lies on them is cut along it.
AXIS = "data"


def mesh_of(given: Any, what: str, error: Callable[[str], Exception]) -> Mesh:
    """The mesh that a user gave as a mesh, a slice, a list of devices or one device. Raises `error(text)`."""
    if isinstance(given, Mesh):
        devices, names = given.devices, given.axis_names
    elif isinstance(given, jax.Device):
        devices, names = np.array([given], object), (AXIS,)
    else:
        found = list(getattr(given, "devices", given if isinstance(given, Sequence) else ()))
        if not found or not all(isinstance(each, jax.Device) for each in found):
            raise error(
                f"{what} is {given!r}, and has to be a jax.sharding.Mesh, a slice of atoll.make_virtual_device_set, a "
                "list of devices or a device"
            )
        if len(getattr(given, "shape", (1,))) != 1:
            raise error(
                f"{what} is a slice of shape {given.shape}: say what its dimensions are, as in "
                'slice.mesh(("data", "model"))'
            )
        devices, names = np.array(found, object), (AXIS,)
    # XLA chooses what a function on it does not say.
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
