"""Where the Python processes of a session meet, one on each host of an island: they are one JAX program.

On one machine that is a socket in the session's directory. On several it is a port of the first of these hosts, whose
worker chooses it and tells the others by the island's key-value store. It keeps that port: who comes back finds it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Protocol

from atoll.wire.address import parse_address
from atoll.wire.sockets import free_address

Rendezvous = Callable[[], str]  # the address; asked at each start of a process, on its own thread. Raises OSError.

_TOLD_SECONDS = 60.0  # for the first host to say where: it is asked at the same time
_FREE_SECONDS = 2.0  # for the process before to be gone
_LOOKS = 0.05


class KeyValues(Protocol):
    """What the hosts of an island tell one another. Any thread; both may block."""

    def set(self, key: str, value: str) -> None:
        """Replaces what was there. Raises OSError where the island fails."""

    def get(self, key: str, seconds: float) -> str:
        """Waits until it is there. Raises OSError where it does not come in time, or the island fails."""


def nowhere() -> str:
    """A session with one process, which meets nobody."""
    return ""


def told_by_the_first(session: int, is_first: bool, hostname: str, key_values: KeyValues) -> Rendezvous:
    """At a port of the first host, whose own address is `hostname` there."""
    key = f"atoll/python/{session}"
    chosen = ""

    def choose() -> str:
        nonlocal chosen
        if not (chosen and _is_free_soon(chosen)):
            chosen = free_address(hostname)
            key_values.set(key, chosen)
        return chosen

    return choose if is_first else lambda: key_values.get(key, _TOLD_SECONDS)


def _is_free_soon(text: str) -> bool:
    address = parse_address(text)
    deadline = time.monotonic() + _FREE_SECONDS
    while True:
        try:
            (family, *_, where), *_ = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            socket.create_server(where, family=family).close()
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOKS)
        else:
            return True
