"""Refuses `jax.experimental.transfer.start_transfer_server`, which would end the process.

jaxlib takes every client there for one of its own with devices in this process, and reads what is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll
from atoll.errors import BackendError


def _refused_on_atoll(start: Callable[..., Any]) -> Callable[..., Any]:
    def start_transfer_server(client: Any, *others: Any, **options: Any) -> Any:
        if is_atoll(client):
            raise BackendError(
                "a transfer server sends from the devices of its own process, and Atoll's devices are in others. On "
                "one cluster jax.device_put moves arrays between all hosts and islands; to send them elsewhere, start "
                "the server for a local device: start_transfer_server(jax.devices('cpu')[0].client)"
            )
        return start(client, *others, **options)

    return start_transfer_server


PATCH = Patch(
    name="transfer server",
    lifts="jax.experimental.transfer.start_transfer_server ends the process (SIGSEGV)",
    replacements=(
        Replacement(
            "jaxlib._jax",
            "start_transfer_server",
            _refused_on_atoll,
            ("client",),
            copies=("jax.experimental.transfer",),
        ),
    ),
)
