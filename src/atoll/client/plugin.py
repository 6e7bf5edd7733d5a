"""The entry point through which JAX finds Atoll; named in pyproject.toml, called by JAX at its first use.

A script that does not ask for Atoll must notice nothing of its being installed. JAX tries every factory that is
registered unless it is told which platforms to use: so this one makes a client only where JAX_PLATFORMS (or
`jax_platforms`) is set, and then names it, and fails quietly otherwise.
"""

from __future__ import annotations

from typing import Any

PLATFORM = "atoll"
_PRIORITY = -100


def initialize() -> None:
    """Registers the platform `atoll`. Called by JAX."""
    from jax.extend.backend import register_backend_factory

    register_backend_factory(PLATFORM, _make_client, priority=_PRIORITY, fail_quietly=True)


def _make_client() -> Any:
    import jax

    if not jax.config.jax_platforms:
        raise RuntimeError("this script does not ask for it: set JAX_PLATFORMS=atoll (or atoll,cpu)")
    from atoll.client.backend import make_client

    return make_client()
