"""The islands of this process's session as JAX's devices show them, and their current availability."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import AxisType, Mesh

from atoll.client.plugin_programs import ask, is_atoll
from atoll.decodable import decodable
from atoll.errors import BackendError, details_of
from atoll.protocol.questions import DevicesAway, IslandsQuestion

AXIS = "data"  # the axis of the meshes that `Islands.mesh` makes


def is_loss(error: BaseException) -> bool:
    """Return whether `error` reports lost arrays, rather than an invalid program or exhausted memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and details_of(error).is_loss


@dataclass(frozen=True)
class Away:
    """Unavailable islands: `lost` ones have failed or were drained, `leaving` ones are about to be drained.

    `losses` counts all losses of the session so far.
    """

    lost: frozenset[int]
    leaving: frozenset[int]
    losses: int


class Islands:
    """All islands of the session, with their devices by `slice_index`.

    With `leaves`, the session declares that it moves its own arrays off an island that is about to leave, so the
    controller migrates nothing. Raises atoll.BackendError if JAX does not run on Atoll in this process.
    """

    def __init__(self, leaves: bool = False) -> None:
        self._leaves = leaves
        devices = jax.devices()
        self._client = devices[0].client
        if not is_atoll(self._client):
            raise BackendError(
                f"only Atoll's devices have islands, and JAX runs on {self._client.platform} in this process: "
                "start it with JAX_PLATFORMS=atoll, or call atoll.connect()"
            )
        self.devices: dict[int, tuple[Any, ...]] = {}
        for device in devices:
            self.devices[device.slice_index] = (*self.devices.get(device.slice_index, ()), device)
        self._island_of = {device.id: device.slice_index for device in devices}

    def away(self) -> Away:
        """Ask the proxy which islands are unavailable. The answer does not wait for any host.

        Raises jax.errors.JaxRuntimeError if the session has ended.
        """
        found = msgspec.json.decode(ask(self._client, IslandsQuestion(self._leaves)), type=decodable(DevicesAway))
        return Away(self._of(found.lost), self._of(found.leaving), found.losses)

    def working(self) -> tuple[int, ...]:
        """Return the islands that are available and not about to leave."""
        away = self.away()
        return tuple(sorted(self.devices.keys() - away.lost - away.leaving))

    def of(self, sharding: Any) -> frozenset[int]:
        """Return the islands of a sharding's devices. Devices of other clients are ignored."""
        return frozenset(self._island_of[device.id] for device in sharding.device_set if device.client is self._client)

    def mesh(self, island: int) -> Mesh:
        """Return a mesh of all devices of an island with the single axis AXIS."""
        return Mesh(np.array(self.devices[island], object), (AXIS,), axis_types=(AxisType.Auto,))

    def _of(self, devices: Iterable[int]) -> frozenset[int]:
        return frozenset(self._island_of[device] for device in devices if device in self._island_of)
