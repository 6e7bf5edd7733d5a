"""`atoll.connect`: a cluster for a piece of Python, a notebook for instance."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from atoll.client import backend
from atoll.client.plugin import PLATFORM
from atoll.client.settings import Settings
from atoll.cluster.settings import DEFAULT_ISLANDS


@contextlib.contextmanager
def connect(
    address: str | None = None, islands: str = DEFAULT_ISLANDS, token: str | None = None
) -> Iterator[list[Any]]:
    """Makes JAX run on Atoll inside a `with` block; gives the list of `jax.Device`.

        with atoll.connect(islands="2x1x4") as devices:
            mesh = jax.make_mesh((4,), ("x",), devices=devices[:4])

    Args:
      address: a running cluster's, as `atoll up` prints it (`unix:/path` or `HOST:PORT`). None: as ATOLL_ADDRESS says,
        else an embedded cluster that ends with the block.
      islands: the embedded cluster's ISLANDSxHOSTSxDEVICES; the rest of it is as the environment says.
      token: what the cluster asks of its clients. None: as ATOLL_TOKEN says.

    JAX's platforms are "atoll,cpu" inside the block and what they were after it. Arrays and compiled functions of other
    backends are lost to JAX on both occasions, as by `jax.extend.backend.clear_backends`; those made inside the block
    end with it.

    Raises:
      atoll.errors.ConnectError: nobody answers at `address`, or refuses us.
      atoll.errors.ClusterError: the embedded cluster does not start.
      ValueError: `islands` is no topology.
    """
    import jax
    from jax.extend.backend import clear_backends

    from atoll.cluster.topology import Topology

    Topology.parse(islands)
    environment = Settings.from_environment()
    settings = Settings(
        environment.address if address is None else address,
        environment.token if token is None else token,
        msgspec.structs.replace(environment.cluster, islands=islands),
    )
    before = jax.config.jax_platforms
    clear_backends()
    jax.config.update("jax_platforms", f"{PLATFORM},cpu")
    backend.choose(settings)
    try:
        yield jax.devices(PLATFORM)
    finally:
        clear_backends()
        backend.choose(None)
        backend.disconnect()
        jax.config.update("jax_platforms", before)
