"""A stream of bytes on a blocking socket: what every blocking connection stands on, whether it is TLS or not.

A new way to carry bytes is a class with these methods; `wire.tls.tls_stream` has TLS. What is only there without TLS
(descriptors on unix sockets) is asked of `socket`, where `is_unix` says so.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Protocol

from atoll.wire.address import Address
from atoll.wire.sockets import dial, send_without_delay
from atoll.wire.tls.identity import HANDSHAKE_SECONDS, Identity
from atoll.wire.tls.one_way import TlsSender
from atoll.wire.tls.tls_stream import TlsStream, no_identity

_MAX_PARTS = 512  # of one system call, which takes 1,024 at most


class Stream(Protocol):
    """One end. One thread at a time sends, and one reads; any thread shuts down. Raises OSError where it fails."""

    @property
    def socket(self) -> socket.socket:
        """The socket beneath: for its options, its queues and, without TLS, its descriptors."""

    @property
    def peer_role(self) -> str:
        """The role that the peer's certificate has; "" without TLS: then it has proved nothing."""

    def secure(self, seconds: float = HANDSHAKE_SECONDS) -> None:
        """Shakes hands, before all else, within so many seconds. Raises AccessError, or ConnectError, that say why."""

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Sends them one after the other; waits while the peer does not read."""

    def receive_into(self, view: memoryview) -> int:
        """Waits for bytes and fills the beginning of `view`, which is not empty; 0 where the peer has closed.

        Raises BlockingIOError where the socket has a time to wait, and nothing came within it.
        """

    def shut_down(self) -> None:
        """Ends the connection for both sides; threads inside of other methods come out."""

    def close(self) -> None: ...


class SocketStream:
    """Bytes as they are."""

    peer_role = ""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        send_without_delay(sock)

    def secure(self, seconds: float = HANDSHAKE_SECONDS) -> None:
        """Nothing to do."""

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        if len(parts) == 1:
            self.socket.sendall(parts[0])
            return
        for first in range(0, len(parts), _MAX_PARTS):
            some = parts[first : first + _MAX_PARTS]
            sent = self.socket.sendmsg(some)
            for part in some:  # what is left: a signal came
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


def dial_stream(
    address: Address,
    role: str,
    identity: Identity | None,
    *,
    what: str = "a process",
    timeout: float = 10.0,
    one_way: bool = False,
) -> Stream:
    """A connected stream; with TLS where the address says so, to a process of that role. Waits `timeout` seconds at
    most. `one_way`: this side will only send.

    Raises ConnectError that names the address and `what` was expected there; of its kin AccessError where one side does
    not trust the other.
    """
    if not address.tls:
        return SocketStream(dial(address, what=what, timeout=timeout))
    if identity is None:
        raise no_identity(address, what)
    kind = TlsSender if one_way else TlsStream
    stream: Stream = kind.dialed(dial(address, what=what, timeout=timeout), role, identity, f"{what} at {address}")
    try:
        stream.secure(timeout)
    except BaseException:
        stream.close()
        raise
    return stream


def accepted_stream(sock: socket.socket, address: Address, identity: Identity | None) -> Stream:
    """The stream of a connection that was accepted at `address`; its handshake is yet to come."""
    if not address.tls:
        return SocketStream(sock)
    assert identity is not None, "who listens with TLS has an identity"
    return TlsStream.accepted(sock, identity)
