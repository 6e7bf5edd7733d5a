"""The entry point through which JAX finds Atoll; named in pyproject.toml, called by JAX at its first use.

A script that does not ask for Atoll must notice nothing of its being installed: registering a factory is all that
happens here, and its priority is below that of every backend of JAX's own.
"""

from __future__ import annotations

from typing import Any

PLATFORM = "atoll"
_PRIORITY = -100


def initialize() -> None:
    """Registers the platform `atoll`. Called by JAX."""
    from jax.extend.backend import register_backend_factory

    register_backend_factory(PLATFORM, _make_client, priority=_PRIORITY, fail_quietly=False)


def _make_client() -> Any:
    from atoll.client.backend import make_client

    return make_client()
