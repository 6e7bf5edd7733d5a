"""The islands of this process's session, as JAX's devices show them, and which of them can be used now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import AxisType, Mesh

from atoll.client.plugin_programs import ask, is_atoll
from atoll.errors import BackendError
from atoll.protocol.questions import DevicesAway, IslandsQuestion

AXIS = "data"  # of the meshes that are made here

# How the text of JAX's exception begins where an island, or a link between two, was lost under what it is of.
_CODES = ("DATA_LOSS", "DEADLINE_EXCEEDED", "UNAVAILABLE")


def is_loss(error: BaseException) -> bool:
    """Whether it says that an island failed, and not that a program is wrong or has no memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith(_CODES)


@dataclass(frozen=True)
class Away:
    """Islands that are lost, or drained, and not back yet; and those whose machines are about to leave.

    `losses` counts those that the session has lost so far.
    """

    lost: frozenset[int]
    leaving: frozenset[int]
    losses: int


class Islands:
    """All islands of the session: their devices by `slice_index`.

    `leaves` is said once for the session: it takes away what it has on an island that is about to leave, so nothing
    need be migrated. Raises atoll.BackendError where JAX does not run on Atoll in this process.
    """

    def __init__(self, leaves: bool = False) -> None:
        self._leaves = leaves
        devices = jax.devices()
        self._client = devices[0].client
        if not is_atoll(self._client):
            raise BackendError(
                f"islands are Atoll's, and this program's JAX runs on {self._client.platform} by itself: "
                "start it with JAX_PLATFORMS=atoll, or use atoll.connect()"
            )
        self.devices: dict[int, tuple[Any, ...]] = {}
        for device in devices:
            self.devices[device.slice_index] = (*self.devices.get(device.slice_index, ()), device)
        self._island_of = {device.id: device.slice_index for device in devices}

    def away(self) -> Away:
        """Asks the proxy, which waits for no host. Raises jax.errors.JaxRuntimeError where the session is over."""
        found = msgspec.json.decode(ask(self._client, IslandsQuestion(self._leaves)), type=DevicesAway)
        return Away(self._of(found.lost), self._of(found.leaving), found.losses)

    def working(self) -> tuple[int, ...]:
        """Those on which something can be put now, and that nobody is about to take away."""
        away = self.away()
        return tuple(sorted(self.devices.keys() - away.lost - away.leaving))

    def of(self, sharding: Any) -> frozenset[int]:
        """On which islands an array of this sharding is; its devices may be some that are not the session's."""
        return frozenset(self._island_of[device.id] for device in sharding.device_set if device.client is self._client)

    def mesh(self, island: int) -> Mesh:
        """All devices of an island, in one axis."""
        return Mesh(np.array(self.devices[island], object), (AXIS,), axis_types=(AxisType.Auto,))

    def _of(self, devices: Iterable[int]) -> frozenset[int]:
        return frozenset(self._island_of[device] for device in devices if device in self._island_of)
