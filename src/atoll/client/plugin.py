"""The entry point through which JAX finds Atoll; named in pyproject.toml, called by JAX at its first use.

A script that does not ask for Atoll must not notice that it is installed. JAX tries every registered factory unless
JAX_PLATFORMS (or `jax_platforms`) names the platforms to use. So this one makes a client only where that is set, which
then names Atoll, and fails quietly otherwise.
"""

from __future__ import annotations

from typing import Any

PLATFORM = "atoll"
_PRIORITY = -100
_GOOGLES_PLATFORM = "proxy"


def initialize() -> None:
    """Registers the platform `atoll`; looks after clients of `atoll proxy`. Called by JAX."""
    import jax
    from jax._src.xla_bridge import register_backend_factory  # `jax.extend` would import Pallas in every script

    register_backend_factory(PLATFORM, _make_client, priority=_PRIORITY, fail_quietly=True)
    if _GOOGLES_PLATFORM in str(jax.config.jax_platforms).split(","):
        from atoll.client import proxy_clients

        proxy_clients.patch_google_proxy_client()


def _make_client() -> Any:
    import jax

    if not jax.config.jax_platforms:
        raise RuntimeError("this script does not ask for it: set JAX_PLATFORMS=atoll (or atoll,cpu)")
    from atoll.client.backend import add_local_cpu, add_platform, make_client

    client = make_client()
    add_local_cpu()
    add_platform(client)
    return client
