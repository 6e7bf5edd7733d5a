"""Refuses `jax.experimental.transfer.start_transfer_server`, which would crash the process.

jaxlib assumes that the client's devices are in this process, and reads invalid memory if they are not.
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
                "a transfer server sends from the devices of its own process, but Atoll's devices are in other "
                "processes. Within a cluster, use jax.device_put, which copies arrays between all hosts and islands. "
                "To send arrays elsewhere, start the server for a local device: "
                "start_transfer_server(jax.devices('cpu')[0].client)"
            )
        return start(client, *others, **options)

    return start_transfer_server


PATCH = Patch(
    name="transfer server",
    enables="an error of `jax.experimental.transfer.start_transfer_server` instead of a crash (SIGSEGV)",
    changes=(
        Replacement(
            "jaxlib._jax",
            "start_transfer_server",
            _refused_on_atoll,
            ("client",),
            copies=("jax.experimental.transfer",),
        ),
    ),
)
