"""Byte streams on blocking sockets, with or without TLS (`wire.tls.tls_stream`), below all blocking connections."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence
from typing import Protocol

from atoll.wire.address import Address
from atoll.wire.sockets import dial, send_without_delay, try_each
from atoll.wire.tls.identity import HANDSHAKE_SECONDS, Identity
from atoll.wire.tls.tls_errors import no_identity
from atoll.wire.tls.tls_stream import TlsSender, TlsStream

_MAX_PARTS = 512  # per system call, which accepts at most 1,024


class Stream(Protocol):
    """One end of a byte stream. The methods raise OSError if the connection fails.

    One thread at a time may send and one may receive; any thread may call `shut_down`.
    """

    @property
    def socket(self) -> socket.socket:
        """The underlying socket, for its options, its queues and, without TLS, its descriptors."""

    @property
    def peer_role(self) -> str:
        """The role in the peer's certificate. It is "" without TLS, when the peer is not authenticated."""

    def secure(self, seconds: float = HANDSHAKE_SECONDS) -> None:
        """Perform the TLS handshake, before all other calls. Raise ConnectError or AccessError if it fails."""

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send the parts in order. Block while the peer does not read."""

    def receive_into(self, view: memoryview) -> int:
        """Wait for bytes, write them to the start of `view`, and return their number, or 0 if the peer closed.

        `view` must not be empty. Raise BlockingIOError if the socket has a timeout that expires.
        """

    def shut_down(self) -> None:
        """End the connection for both sides. Blocked calls of other threads return."""

    def close(self) -> None: ...


class SocketStream:
    """A stream without TLS."""

    peer_role = ""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        send_without_delay(sock)

    def secure(self, seconds: float = HANDSHAKE_SECONDS) -> None:
        """Do nothing, because there is no handshake without TLS."""

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        if len(parts) == 1:
            self.socket.sendall(parts[0])
            return
        for first in range(0, len(parts), _MAX_PARTS):
            some = parts[first : first + _MAX_PARTS]
            sent = self.socket.sendmsg(some)
            for part in some:  # send the rest if a signal interrupted the call
                nbytes = memoryview(part).nbytes
                if sent < nbytes:
                    self.socket.sendall(memoryview(part).cast("B")[sent:])
                sent = max(0, sent - nbytes)

    def receive_into(self, view: memoryview) -> int:
        return self.socket.recv_into(view)

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut_down()
        self.socket.close()


class ClosedStream:
    """Stands for a stream that is closed, so that its socket, TLS state and buffers can be freed."""

    def __init__(self, stream: Stream) -> None:
        self.socket = stream.socket
        self.peer_role = stream.peer_role

    def secure(self, seconds: float = HANDSHAKE_SECONDS) -> None:
        raise _closed()

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        raise _closed()

    def receive_into(self, view: memoryview) -> int:
        raise _closed()

    def shut_down(self) -> None:
        """Do nothing, because the connection has ended."""

    def close(self) -> None:
        """Do nothing, because the stream is closed."""


def _closed() -> OSError:
    return OSError(errno.EBADF, "the connection is closed")


def dial_stream(
    address: Address,
    role: str,
    identity: Identity | None,
    *,
    what: str = "a process",
    timeout: float = 10.0,
    one_way: bool = False,
) -> Stream:
    """Connect to `address` within `timeout` seconds, with TLS if the address has it.

    Of several addresses, use the first at which a peer answers and is trusted. Set `one_way` if this side only sends.
    With TLS, the peer's certificate must have `role`. Errors name the address and `what` is expected there. Raise
    ConnectError if the connection fails, and its subclass AccessError if one side does not trust the other.
    """
    if not address.tls:
        return SocketStream(dial(address, what=what, timeout=timeout))
    if identity is None:
        raise no_identity(address, what)
    identity.await_renewal()
    address = identity.ordered(address)
    kind = TlsSender if one_way else TlsStream

    def secured(each: Address, seconds: float) -> Stream:
        stream: Stream = kind.dialed(dial(each, what=what, timeout=seconds), role, identity, f"{what} at {each}")
        try:
            stream.secure(seconds)
        except BaseException:
            stream.close()
            raise
        return stream

    return try_each(address, timeout, secured)


def accepted_stream(sock: socket.socket, address: Address, identity: Identity | None) -> Stream:
    """Return the stream of a connection that was accepted at `address`. The caller must then call `secure`."""
    if not address.tls:
        return SocketStream(sock)
    assert identity is not None, "a process that listens with TLS has an identity"
    return TlsStream.accepted(sock, identity)
