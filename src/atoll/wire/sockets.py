"""Blocking sockets at addresses: connected and bound."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator

from atoll.errors import ConnectError
from atoll.wire.address import Address

# Of several addresses of a process, until the next is tried.
NEXT_SECONDS = 3.0
# TCP_THIN_LINEAR_TIMEOUTS, for six attempts of a connection with little under way; and TCP_RTO_MAX_MS, of Linux 6.15.
_RETRANSMIT = ((16, 1), (44, 1000))
_UNSENT_BYTES = 64 * 1024
_CREDENTIALS = struct.Struct("3i")
# Who is silent is given up by leases. Left alone, the kernel does so after fifteen attempts, which are fifteen seconds.
_GIVE_UP_SECONDS = 600


def attempts(address: Address, timeout: float) -> Iterator[tuple[Address, float]]:
    """Where to dial, in turn, until one answers: each of the addresses, and for how many seconds."""
    *others, last = address.each
    for each in others:
        yield each, min(timeout, NEXT_SECONDS)
    yield last, timeout


def none_answered(address: Address, last: ConnectError) -> ConnectError:
    """The error of who has tried them all: that of the last, which names the others, too."""
    *others, _ = address.each
    return ConnectError(f"{last}, nor at {', '.join(map(str, others))}") if others else last


def dial(address: Address, *, what: str = "a process", timeout: float = 10.0) -> socket.socket:
    """A connected blocking socket, without TLS; waits `timeout` seconds at most for each address that a name has.

    Of several addresses, the first that answers. Raises ConnectError that names the address and `what` was expected
    there, such as "a data port".
    """
    for each, seconds in attempts(address, timeout):
        try:
            return _dial(each, what, seconds)
        except ConnectError as error:
            last = error
    raise none_answered(address, last) from None


def _dial(address: Address, what: str, timeout: float) -> socket.socket:
    try:
        if address.is_unix:
            sock = _dial_unix(address.path, timeout)
        else:
            sock = socket.create_connection((address.host, address.port), timeout)
    except OSError as error:
        raise ConnectError(f"cannot reach {what} at {address}: {error.strerror or error}") from None
    sock.settimeout(None)
    send_without_delay(sock)  # before a handshake, which waits for acknowledgements otherwise
    return sock


def _dial_unix(path: str, timeout: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def bind(address: Address) -> socket.socket:
    """A bound socket, which listens where it is of TCP. Port 0: any free port. Raises OSError.

    A name is bound at one of its addresses, of IPv4 where it has such. "::" is all addresses of IPv4, too.
    """
    if address.is_unix:
        return bind_unix(address.path)
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, where = min(found, key=lambda each: each[0] != socket.AF_INET)
    is_both = address.host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(where, family=family, dualstack_ipv6=is_both)


def bind_unix(path: str) -> socket.socket:
    """A bound unix socket that only this user can open, from the moment it exists. Replaces a stale one.

    Raises OSError.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)
    try:
        if os.path.exists(path):
            os.unlink(path)
        sock.bind(path)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(old_mask)
    return sock


def free_address(host: str) -> str:
    """HOST:PORT at which nothing listens now. It is not kept: who listens there next may find it taken.

    Raises OSError where the host is none of this machine's.
    """
    (family, *_, where), *_ = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind(where)
        return str(Address(host=host, port=sock.getsockname()[1]))


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a unix socket, according to the kernel."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid), int(uid)


def peer_of(sock: socket.socket | None) -> str:
    """Return the IP address of the peer of a connected socket, or "user UID" if it is a unix socket; "" if unknown."""
    if sock is None:
        return ""
    try:
        if sock.family == socket.AF_UNIX:
            return f"user {credentials(sock)[1]}"
        return str(sock.getpeername()[0]).removeprefix("::ffff:")
    except OSError:  # it has ended already
        return ""


def send_without_delay(sock: socket.socket) -> None:
    """Small messages over TCP leave at once, without waiting for the acknowledgement of those before.

    What is lost is sent again once a second, where the kernel can be told so: by itself it doubles the time between two
    attempts, and after eight seconds of silence it would wait for another six.
    """
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _GIVE_UP_SECONDS)
        for option, value in _RETRANSMIT:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def keep_little_unsent(sock: socket.socket) -> None:
    """The kernel takes no more than it sends soon, so that little is ahead of what is urgent (TCP_NOTSENT_LOWAT).

    By itself it takes some MiB on a slow link. What is on its way is as much as ever.
    """
    if sock.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def read_what_is_left(transport: asyncio.BaseTransport, protocol: asyncio.BufferedProtocol) -> None:
    """Gives the protocol what the peer has sent before it ended; while `connection_lost` runs.

    A loop whose write fails closes the socket at once, although what has arrived may not be read yet. What comes later,
    of a peer that does not read but goes on sending, is not waited for.
    """
    sock = transport.get_extra_info("socket")
    if sock is None:
        return
    with contextlib.suppress(OSError):  # it has ended, or there is no more
        left = _arrived(sock.fileno())
        while left > 0 and (count := os.readv(sock.fileno(), [protocol.get_buffer(-1)])):
            protocol.buffer_updated(count)
            left -= count


def _arrived(descriptor: int) -> int:
    """Bytes that can be read now."""
    (count,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return int(count)
