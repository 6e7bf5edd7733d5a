"""Where this machine is, and what memory it has; `devices.accelerators` has its devices."""

from __future__ import annotations

import os
import socket

from atoll.wire.address import Address


def memory_bytes() -> int:
    """Of the machine; of devices, their workers report."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_address(host: str) -> str:
    """HOST:PORT at which nothing listens now. It is not kept: who listens there next may find it taken.

    Raises OSError where the host is none of this machine's.
    """
    (family, *_, where), *_ = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind(where)
        return str(Address(host=host, port=sock.getsockname()[1]))
