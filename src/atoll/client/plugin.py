"""The entry point of the JAX plug-in, named in pyproject.toml. JAX calls it at its first use.

Atoll must not affect scripts that do not use it. If JAX_PLATFORMS (or `jax_platforms`) is not set, JAX tries every
registered factory. Therefore Atoll's factory fails quietly in that case; otherwise the platforms name Atoll.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any

PLATFORM = "atoll"
_PRIORITY = -100
_GOOGLES_PLATFORM = "proxy"


def initialize() -> None:
    """Register the platform `atoll`, and prepare JAX for clients of `atoll proxy`.

    JAX calls this before it creates its first client. If the script uses Atoll, the patches of JAX are installed before
    any other backend starts. If Atoll's backend is the first one, it installs them while its processes start.
    """
    import jax
    from jax._src.xla_bridge import register_backend_factory

    register_backend_factory(PLATFORM, _make_client, priority=_PRIORITY, fail_quietly=True)
    platforms = str(jax.config.jax_platforms).split(",")
    if PLATFORM in platforms:
        from atoll.devices.missing_modules import add_missing_modules

        add_missing_modules()
    if PLATFORM in platforms[1:]:
        from atoll.client.jax_patches import install

        install()
    if _GOOGLES_PLATFORM in platforms:
        _patch_google_proxy_client()


def _make_client() -> Any:
    import jax

    if not jax.config.jax_platforms:
        raise RuntimeError("this script does not use Atoll: to use it, set JAX_PLATFORMS=atoll (or atoll,cpu)")
    from atoll.client.backend import add_local_cpu, add_platform, make_client

    client = make_client()
    from atoll.client.jax_patches.cpu_devices import answer_running_lookup  # the client has imported the patches

    add_local_cpu()
    add_platform(client)
    answer_running_lookup()
    return client


def _patch_google_proxy_client() -> None:
    """Prepare JAX for the clients that Google's `pathwaysutils` (platform "proxy") connects to an `atoll proxy`.

    Such a client gets the same patches of JAX as Atoll's own client, so that callbacks work. Clients of other servers
    are not changed. A second call does nothing.
    """
    from jax._src.lib import ifrt_proxy

    from atoll.client.plugin_programs import is_atoll

    connect = ifrt_proxy.get_client
    if hasattr(connect, "__wrapped__"):
        return

    former: list[weakref.ref[Any]] = []

    @functools.wraps(connect)
    def get_client(address: str, *arguments: Any, **named: Any) -> Any:
        from atoll.client.backend import delete_arrays

        client = connect(address, *arguments, **named)
        if is_atoll(client):
            while former:  # JAX has dropped this client, and the script may still hold its arrays
                if (dropped := former.pop()()) is not None:
                    delete_arrays(dropped)
            former.append(weakref.ref(client))
            _prepare(address, client)
        return client

    ifrt_proxy.get_client = get_client


def _prepare(address: str, client: Any) -> None:
    from atoll.client.backend import add_local_cpu, add_platform
    from atoll.client.jax_patches import host_callbacks, install
    from atoll.client.jax_patches.cpu_devices import answer_running_lookup
    from atoll.errors import AddressError
    from atoll.wire.address import parse_address

    install()
    with contextlib.suppress(AddressError):  # a gRPC target without a host
        host_callbacks.CLIENT_CHANNEL.proxy = parse_address(address)
    add_local_cpu()
    add_platform(client)
    answer_running_lookup()
