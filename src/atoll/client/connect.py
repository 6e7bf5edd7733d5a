"""`atoll.connect`: a cluster for a piece of Python, a notebook for instance."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec

from atoll.client import backend
from atoll.client.client_settings import Settings
from atoll.client.plugin import PLATFORM
from atoll.cluster.settings import DEFAULT_ISLANDS, read_topology
from atoll.errors import AtollError

_open: ConnectedCluster | None = None


class ConnectedCluster:
    """A cluster that JAX runs on in this process, until `close()`. Made by `connect`.

    As a context manager it gives its `devices`, and closes itself at the end of the block.
    """

    def __init__(self, devices: list[Any], address: str, on_close: Callable[[], None]) -> None:
        self.devices = devices
        self.address = address
        self._on_close: Callable[[], None] | None = on_close

    @property
    def is_closed(self) -> bool:
        return self._on_close is None

    def close(self) -> None:
        """JAX runs on what it ran on before; an embedded cluster ends. Closing again does nothing."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __enter__(self) -> list[Any]:
        return self.devices

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{len(self.devices)} devices"
        return f"ConnectedCluster({self.address}, {state})"


def connect(
    address: str | None = None,
    islands: str = DEFAULT_ISLANDS,
    token: str | None = None,
    join: str | None = None,
) -> ConnectedCluster:
    """Makes JAX in this process run on Atoll, until the cluster is closed.

    In a script, for a block:

        with atoll.connect(islands="2x1x4") as devices:
            mesh = jax.make_mesh((4,), ("x",), devices=devices[:4])

    In a notebook, over many cells:

        cluster = atoll.connect(islands="2x1x4")
        mesh = jax.make_mesh((4,), ("x",), devices=cluster.devices[:4])
        ...
        cluster.close()

    Args:
      address: a running cluster's, as `atoll up` prints it (`unix:/path` or `HOST:PORT`). None: as ATOLL_ADDRESS says,
        else an embedded cluster, which ends when it is closed or this process ends.
      islands: the embedded cluster's ISLANDSxHOSTSxDEVICES; everything else about it is as the environment says.
      token: what the cluster asks of its clients, where it has no join token. None: as ATOLL_TOKEN says.
      join: the join token of a cluster on TCP, or the file that has it (`atoll up --join-file FILE` writes it); it
        says where the cluster is, too. None: as ATOLL_JOIN says. This user's own cluster on this machine needs none.

    Returns a `ConnectedCluster`, whose `devices` is the list of `jax.Device`. A process has one at a time: connecting
    closes the one that is open, as when a cell of a notebook is run again.

    JAX's platforms are "atoll,cpu" meanwhile, and afterwards what they were. Arrays and compiled functions of other
    backends are lost to JAX on both occasions, as by `jax.extend.backend.clear_backends`; those made meanwhile end with
    the connection.

    Raises:
      atoll.AddressError: `address` cannot be parsed.
      atoll.ConnectError: nobody answers at `address`, or the cluster refuses the connection; AccessError, which is one,
        where one of the two does not trust the other.
      atoll.ClusterError: the embedded cluster does not start.
      atoll.SettingsError: `islands`, or what the environment says, is nothing that a cluster can have.
    """
    global _open
    import jax
    from jax.extend.backend import clear_backends

    read_topology(islands)
    environment = Settings.from_environment()
    settings = Settings(
        address if address is not None else "" if join else environment.address,
        environment.token if token is None else token,
        msgspec.structs.replace(environment.cluster, islands=islands, shapes=()),
        environment.join if join is None else join,
    )
    if _open is not None:
        _open.close()
    before = jax.config.jax_platforms

    def restore() -> None:
        global _open
        _open = None
        clear_backends()
        backend.choose(None)
        backend.disconnect()
        jax.config.update("jax_platforms", before)

    clear_backends()
    jax.config.update("jax_platforms", f"{PLATFORM},cpu")
    backend.choose(settings)
    try:
        devices = jax.devices(PLATFORM)
        connected = backend.cluster()
        assert connected is not None
    except RuntimeError as error:
        restore()
        if isinstance(error.__context__, AtollError):  # of which JAX keeps the text only
            raise error.__context__ from None
        raise
    except BaseException:
        restore()
        raise
    _open = ConnectedCluster(devices, connected[0], restore)
    return _open
