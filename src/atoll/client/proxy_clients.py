"""Scripts on the platform "proxy" of Google's `pathwaysutils`, whose server is `atoll proxy`.

They make jaxlib's client by themselves. Where this package is installed beside them, such a client gets what Atoll's
own gets: the patches of JAX, so callbacks work. A server that is not Atoll is left alone.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from atoll.client.plugin_programs import is_atoll


def patch_google_proxy_client() -> None:
    """Patch JAX in processes whose jaxlib client connects to an `atoll proxy`. The plug-in calls it; idempotent."""
    from jax.extend.backend import ifrt_proxy

    connect = ifrt_proxy.get_client
    if hasattr(connect, "__wrapped__"):
        return

    @functools.wraps(connect)
    def get_client(address: str, *arguments: Any, **named: Any) -> Any:
        client = connect(address, *arguments, **named)
        if is_atoll(client):
            _prepare(address)
        return client

    ifrt_proxy.get_client = get_client


def _prepare(address: str) -> None:
    from atoll.client.backend import add_local_cpu
    from atoll.client.jax_patches import host_callbacks, install
    from atoll.errors import AddressError
    from atoll.wire.address import parse_address

    install()
    with contextlib.suppress(AddressError):  # a target of gRPC's that names no host
        host_callbacks.TABLE.proxy = parse_address(address)
    add_local_cpu()
