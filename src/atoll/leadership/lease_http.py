"""Requests with JSON over HTTP or HTTPS to the server of a lease, with the standard library."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from atoll.errors import LeaseError
from atoll.leadership.name_lookup import NameLookup, Resolve, resolve_name

# For a whole request, with the resolution of the server's name and the connection. A holder fences itself in time
# whatever a request does.
TIMEOUT_SECONDS = 3.0
_MAX_BYTES = 1 << 20  # of a reply


class NotConnectedError(LeaseError):
    """No connection to a server was made, so it has not received the request."""


class LeaseServer:
    """The server of a lease at HOST:PORT, with TLS if `tls` is given. `what` names it in errors.

    `resolve(host, port)` returns the addresses of the server, as `socket.getaddrinfo` does.
    """

    def __init__(
        self,
        address: str,
        what: str,
        tls: ssl.SSLContext | None = None,
        timeout: float = TIMEOUT_SECONDS,
        resolve: Resolve = resolve_name,
    ) -> None:
        self.address = address
        host, _, port = address.rpartition(":")
        self._host = host.removeprefix("[").removesuffix("]")
        self._names = NameLookup(self._host, int(port), resolve)
        self._what = what
        self._tls = tls
        self._timeout = timeout

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Return the status and the decoded JSON of a reply; None for a reply that is no JSON.

        Raise LeaseError if there is no reply, and NotConnectedError if the request was not sent.
        """
        content = None if body is None else msgspec.json.encode(body)
        sent = {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}
        connection = http.client.HTTPConnection(self.address)
        failure: type[LeaseError] = NotConnectedError
        deadline = time.monotonic() + self._timeout
        try:
            connection.sock = self._connected(deadline)
            failure = LeaseError
            connection.request(method, path, content, sent)
            reply = http.client.HTTPResponse(connection.sock, method=method)
            reply.fp.close()
            reply.fp = io.BufferedReader(_UntilDeadline(connection.sock, deadline))
            reply.begin()
            received = reply.read(_MAX_BYTES + 1)
            status = reply.status
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise failure(
                f"no reply from {self._what} at {self.address}: {str(error) or type(error).__name__}"
            ) from None
        finally:
            connection.close()
        if len(received) > _MAX_BYTES:
            raise LeaseError(f"{self._what} at {self.address} sent more than {_MAX_BYTES} bytes")
        try:
            return status, msgspec.json.decode(received)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return status, None

    def failure(self, request: str, status: int, reply: Any) -> LeaseError:
        """Return the error for a reply that says that a request failed."""
        message = reply.get("message") or reply.get("error") if isinstance(reply, dict) else None
        detail = f": {message[:200]}" if isinstance(message, str) else ""
        return LeaseError(f"{self._what} at {self.address} answers {request} with status {status}{detail}")

    def _connected(self, deadline: float) -> socket.socket:
        """Return a connection to the first address of the server that accepts one. Raise OSError."""
        found = self._names.addresses(deadline - time.monotonic())
        for index, (family, kind, protocol, _, where) in enumerate(found):
            is_last = index == len(found) - 1
            # An address that does not answer leaves time for the others.
            until = deadline if is_last else time.monotonic() + _left(deadline) / (len(found) - index)
            try:
                return self._connection(socket.socket(family, kind, protocol), where, until)
            except OSError:
                if is_last:
                    raise
        raise AssertionError("a name has an address")

    def _connection(self, sock: socket.socket, where: Any, deadline: float) -> socket.socket:
        try:
            sock.settimeout(_left(deadline))
            sock.connect(where)
            if self._tls is not None:
                sock.settimeout(_left(deadline))
                sock = self._tls.wrap_socket(sock, server_hostname=self._host)
            sock.settimeout(_left(deadline))
        except BaseException:
            sock.close()
            raise
        return sock


def _left(deadline: float) -> float:
    """Return the seconds until a deadline. Raise TimeoutError if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class _UntilDeadline(io.RawIOBase):
    """Reads from a socket, however slowly it receives, until a deadline."""

    def __init__(self, source: socket.socket, deadline: float) -> None:
        self._source = source
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._source.settimeout(_left(self._deadline))
        return self._source.recv_into(buffer)
