"""Makes `Device.task_id` the host of a device of the cluster.

In jaxlib, `task_id` is the former name of `process_index`, which is 0 for all devices of a single-controller runtime.
Libraries for Pathways count the devices of each host by `task_id`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll


def _host(process_index: Callable[[Any], int]) -> Callable[[Any], int]:
    def task_id(self: Any) -> int:
        return int(self.host if is_atoll(self.client) else process_index(self))

    return task_id


PATCH = Patch(
    name="hosts of devices",
    enables="`device.task_id`, as libraries for Pathways read it",
    changes=(Replacement("jaxlib._jax:Device", "task_id", _host, ("self",)),),
)
