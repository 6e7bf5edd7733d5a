"""Resolve the name of a server with a deadline.

The resolver of the C library has none: with name servers that do not answer, a lookup takes from 10 s to minutes. So it
runs on a thread, and callers wait for it only until their deadline.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

# An address as `socket.getaddrinfo` returns it: the family, the type, the protocol, the canonical name, and where.
Found = tuple[Any, Any, int, str, Any]
Resolve = Callable[[str, int], Sequence[Found]]


def resolve_name(host: str, port: int) -> Sequence[Found]:
    """Return the addresses of a TCP server, however long that takes. Raise OSError."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


class NameLookup:
    """The addresses of one server. Each call looks them up again, because they may change.

    A lookup that takes longer than a call serves later calls, so at most one thread waits for the resolver. Calls come
    from one thread at a time.
    """

    def __init__(self, host: str, port: int, resolve: Resolve = resolve_name) -> None:
        self._host = host
        self._port = port
        self._resolve = resolve
        self._running: _Lookup | None = None

    def addresses(self, seconds: float) -> Sequence[Found]:
        """Return the addresses, of which there is one at least. Raise OSError if that fails within `seconds`."""
        if self._running is None:
            self._running = _Lookup(lambda: self._resolve(self._host, self._port), f"lookup of {self._host}")
        lookup = self._running
        if not lookup.done.wait(max(0.0, seconds)):
            raise TimeoutError(f"the name {self._host} was not resolved in time")
        self._running = None
        if lookup.error is not None:
            raise lookup.error
        if not lookup.found:
            raise OSError(f"the name {self._host} has no address")
        return lookup.found


class _Lookup:
    def __init__(self, resolve: Callable[[], Sequence[Found]], name: str) -> None:
        self.done = threading.Event()
        self.found: Sequence[Found] = ()
        self.error: OSError | None = None
        self._resolve = resolve
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self.found = self._resolve()
        except OSError as error:
            self.error = error
        except UnicodeError as error:  # a name that no name server can have
            self.error = OSError(str(error))
        finally:
            self.done.set()
