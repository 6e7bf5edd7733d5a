"""The rendezvous of a session's Python processes, which run one JAX program on the hosts of an island or a world.

On one machine, the coordinator address is a socket in the session's directory. On several machines, it is a port of the
first host. That host's worker chooses the port and publishes it in the key-value store of these hosts. It keeps the
port while the port is free, so that processes find it again after a restart.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from atoll.retries import Retry
from atoll.wire.address import parse_address
from atoll.wire.sockets import free_address

# Returns the coordinator address. Called at each start of a process, on the process's own thread. Raises OSError, or
# StatusError if this host has left the world.
Rendezvous = Callable[[], str]

_PUBLISH_SECONDS = 60.0  # timeout for the first host to publish the address
_FREE_SECONDS = 2.0  # timeout for the previous process to release the port
_POLL_SECONDS = 0.05


class KeyValues(Protocol):
    """The key-value store of the hosts of an island or a world. Thread-safe; both methods may block."""

    def set(self, key: str, value: str) -> None:
        """Set a value. Raise OSError if a host fails."""

    def get(self, key: str, seconds: float) -> str:
        """Wait for a value. Raise OSError after a timeout of `seconds`, or if a host fails."""


class JoinedWorlds(Protocol):
    """The worlds that this host has joined. `hostname` is the name at which their other hosts reach this one."""

    hostname: str

    def key_values(self, world: int) -> KeyValues:
        """Return the key-value store of a world. Raise FAILED_PRECONDITION if the world was closed."""


def nowhere() -> str:
    """Return no address, for a session with one process."""
    return ""


def rendezvous_at_first_host(
    session: int, is_first: bool, hostname: str, key_values: Callable[[], KeyValues]
) -> Rendezvous:
    """Return a rendezvous at a port of the first host, which has the address `hostname`."""
    key = f"atoll/python/{session}"
    chosen = ""

    def choose() -> str:
        nonlocal chosen
        if not (chosen and _is_free_soon(chosen)):
            chosen = free_address(hostname)
            key_values().set(key, chosen)
        return chosen

    return choose if is_first else lambda: key_values().get(key, _PUBLISH_SECONDS)


def _is_free_soon(text: str) -> bool:
    address = parse_address(text)

    def bind() -> None:
        (family, *_, where), *_ = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        socket.create_server(where, family=family).close()

    try:
        Retry(_POLL_SECONDS, patience=_FREE_SECONDS).call(bind, OSError)
    except OSError:
        return False
    return True
