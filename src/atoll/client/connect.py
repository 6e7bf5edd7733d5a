"""`atoll.connect`: runs JAX on a cluster for a block of Python, or in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from msgspec.structs import replace

from atoll.client import backend
from atoll.client.plugin import PLATFORM
from atoll.client.processes import ClusterChoice
from atoll.cluster.named_runs import DEFAULT_ATTACH_SECONDS, DEFAULT_DETACHED_SECONDS
from atoll.cluster.settings import DEFAULT_ISLANDS, read_topology
from atoll.errors import AtollError
from atoll.quantities import counted

_open: ConnectedCluster | None = None


class ConnectedCluster:
    """A cluster on which JAX runs in this process until `close()`. Created by `connect`.

    As a context manager, it returns its `devices` and closes at the end of the block.
    """

    def __init__(self, devices: list[Any], address: str, on_close: Callable[[], None]) -> None:
        self.devices = devices
        self.address = address
        self._on_close: Callable[[], None] | None = on_close

    @property
    def is_closed(self) -> bool:
        return self._on_close is None

    def close(self) -> None:
        """Restore JAX's previous platforms, and end the cluster if it is embedded. A second call does nothing."""
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
        state = "closed" if self.is_closed else counted(len(self.devices), "device")
        return f"ConnectedCluster({self.address}, {state})"


def connect(
    address: str | None = None,
    islands: str = DEFAULT_ISLANDS,
    token: str | None = None,
    join: str | None = None,
    *,
    name: str | None = None,
    detach: bool | float | None = None,
    wait: float = DEFAULT_ATTACH_SECONDS,
) -> ConnectedCluster:
    """Make JAX in this process run on Atoll until the cluster is closed.

    In a script, for a block:

        with atoll.connect(islands="2x1x4") as devices:
            mesh = jax.make_mesh((4,), ("x",), devices=devices[:4])

    In a notebook, over many cells:

        cluster = atoll.connect(islands="2x1x4")
        mesh = jax.make_mesh((4,), ("x",), devices=cluster.devices[:4])
        ...
        cluster.close()

    Args:
      address: Address of a running cluster, as printed by `atoll up` (`unix:/path` or `HOST:PORT`), or the name of
        your cluster on this machine (`atoll up --name`). If None, the value of ATOLL_ADDRESS; without that, an embedded
        cluster, which ends when it is closed or this process ends.
      islands: ISLANDSxHOSTSxDEVICES of an embedded cluster. The environment has its other settings.
      token: Token of a cluster without a join token. If None, the value of ATOLL_TOKEN.
      join: Join token of a cluster on TCP, or a file with it (written by `atoll up --join-file FILE`). It includes the
        cluster's address. If None, the value of ATOLL_JOIN. Not needed for this user's own cluster on this machine.
      name: Name of this run, at most 128 letters, digits, `_`, `-` and `.`. If None, the value of ATOLL_RUN. At most
        one session of a tenant has the name, so a script attaches to a run with the name of the script that ended.
      detach: Whether the submitted work continues if this process ends or loses its network, and for how many seconds
        at most; True for 600. Needs a name. If None, the value of ATOLL_DETACH.
      wait: Seconds to wait for the end of the former session of this name, with its submitted work.

    Returns a `ConnectedCluster`, whose `devices` is the list of `jax.Device`. A process has one connection at a time:
    a new connection closes the previous one, for instance when a cell of a notebook runs again.

    JAX's platforms are "atoll,cpu" until the cluster is closed, and then the previous ones. Both changes drop the
    arrays and compiled functions of the other backends, like `jax.extend.backend.clear_backends`. Arrays on the cluster
    are deleted with the connection.

    Raises:
      atoll.AddressError: `address` cannot be parsed.
      atoll.ConnectError: No process answers at `address`, or the cluster refuses the connection, for example because
        another session has the name; its subclass AccessError if one side does not trust the other.
      atoll.ClusterError: The embedded cluster does not start.
      atoll.SettingsError: `islands` or a setting in the environment is invalid.
      atoll.StatusError: `name`, `detach` or `wait` is invalid.
    """
    global _open
    import jax
    from jax._src.api import clear_backends

    read_topology(islands)
    environment = ClusterChoice.from_environment()
    run = environment.run
    if detach is not None:
        run = replace(run, detach=DEFAULT_DETACHED_SECONDS if detach is True else float(detach))
    run = replace(run, name=run.name if name is None else name, wait=wait)
    run.check()
    choice = ClusterChoice(
        address if address is not None else "" if join else environment.address,
        environment.token if token is None else token,
        replace(environment.cluster, islands=islands, shapes=()),
        environment.join if join is None else join,
        run,
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
    backend.choose(choice)
    try:
        devices = jax.devices(PLATFORM)
        connected = backend.cluster()
        assert connected is not None
    except RuntimeError as error:
        restore()
        if isinstance(error.__context__, AtollError):  # JAX's error has only the text of the original
            raise error.__context__ from None
        raise
    except BaseException:
        restore()
        raise
    _open = ConnectedCluster(devices, connected[0], restore)
    return _open
