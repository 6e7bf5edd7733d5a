"""Lets a device say how much of its memory is in use: `device.memory_stats()`.

jaxlib asks a device of its own process only. Atoll's numbers are those of the controller, which reserves memory for all
sessions, and those of the platform itself where it has any. They are about the device, whoever's arrays are on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import ask, is_atoll
from atoll.protocol.questions import MemoryQuestion


def _asked_of_the_cluster(stats: Callable[..., Any]) -> Callable[..., Any]:
    def memory_stats(self: Any) -> Any:
        if not is_atoll(self.client):
            return stats(self)
        return json.loads(ask(self.client, MemoryQuestion(self.id)))

    return memory_stats


PATCH = Patch(
    name="memory statistics",
    lifts="MemoryStats is only supported for addressable PjRt devices",
    replacements=(Replacement("jaxlib._jax:Device", "memory_stats", _asked_of_the_cluster, ("self",)),),
)
