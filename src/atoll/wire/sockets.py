"""Sockets: dialing, binding, options, and facts about the peer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from atoll.errors import AccessError, ConnectError, HandshakeCutError, ListenError, UnreachableError
from atoll.wire.address import Address

_Result = TypeVar("_Result")

# Timeout for each of several addresses of a process except the last.
NEXT_SECONDS = 3.0
# Options and values: TCP_THIN_LINEAR_TIMEOUTS, which holds for six attempts if few packets are in flight, and
# TCP_RTO_MAX_MS, since Linux 6.15.
_RETRANSMIT = ((16, 1), (44, 1000))
_UNSENT_BYTES = 64 * 1024
_CREDENTIALS = struct.Struct("3i")
# Leases detect silent peers. Without this timeout, the kernel would close the connection after 15 attempts, which take
# 15 seconds with the options above.
_USER_TIMEOUT_SECONDS = 600
# Errors of a process that dials, which say nothing about the peer: it lacks files, memory, ports or a permission.
_OWN_ERRORS = frozenset(
    (
        errno.EACCES,
        errno.EADDRNOTAVAIL,
        errno.EAGAIN,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EPERM,
    )
)
# Advice for a process that cannot listen at a TCP address, by the error of the system.
_ADVICE = {
    errno.EADDRINUSE: ": another process listens there; choose another port, or end that process",
    errno.EADDRNOTAVAIL: ": this machine does not have the address; choose one that it has, or 0.0.0.0 for all",
    errno.EACCES: ": this user may not use the port; choose one above 1023",
    socket.EAI_NONAME: ": use an IP address of this machine, or a name that it can resolve",
}


def attempts(address: Address, timeout: float) -> Iterator[tuple[Address, float]]:
    """Yield each of the addresses with the number of seconds for which to dial it."""
    *others, last = address.each
    for each in others:
        yield each, min(timeout, NEXT_SECONDS)
    yield last, timeout


def try_each(address: Address, timeout: float, attempt: Callable[[Address, float], _Result]) -> _Result:
    """Return `attempt(address, seconds)` for the first of the addresses for which it raises no ConnectError.

    If it fails at all of them, raise the error of `none_answered`.
    """
    errors = []
    for each, seconds in attempts(address, timeout):
        try:
            return attempt(each, seconds)
        except ConnectError as error:
            errors.append(error)
    raise none_answered(address, errors) from None


def none_answered(address: Address, errors: Sequence[ConnectError]) -> ConnectError:
    """Return the error for failed attempts at all addresses, given their errors in the same order.

    It is the first one of a peer without trust, or else the last one, with the names of the other addresses. Such a
    peer may be any process, so it must not keep the caller from the next address, nor from later attempts there.
    """
    found = next((i for i, each in enumerate(errors) if lacks_trust(each)), len(errors) - 1)
    error = errors[found]
    others = ", ".join(str(each) for i, each in enumerate(address.each) if i != found)
    if not others:
        return error
    also = f". The attempt also failed at {others}" if lacks_trust(error) else f", nor at {others}"
    kind = type(error) if all(map(lacks_trust, errors)) or not lacks_trust(error) else _PartlyReachedError
    return kind(f"{error}{also}")


class _PartlyReachedError(AccessError):
    """There is no trust between this side and the peer at one address, and another address cannot be reached."""


def lacks_trust(error: ConnectError) -> bool:
    """Return whether one side does not trust the other at any address, so that further attempts are in vain."""
    return isinstance(error, AccessError) and not isinstance(error, (HandshakeCutError, _PartlyReachedError))


def dial(address: Address, *, what: str = "a process", timeout: float = 10.0) -> socket.socket:
    """Return a blocking socket, without TLS, that is connected to the first of the addresses that answers.

    If a host name has several IP addresses, each is tried for at most `timeout` seconds. Raise ConnectError, which
    names the address and `what` is expected there, such as "a data port".
    """
    return try_each(address, timeout, lambda each, seconds: _dial(each, what, seconds))


def _dial(address: Address, what: str, timeout: float) -> socket.socket:
    try:
        if address.is_unix:
            sock = _dial_unix(address.path, timeout)
        else:
            sock = socket.create_connection((address.host, address.port), timeout)
    except OSError as error:
        raise cannot_dial(f"{what} at {address}", error) from None
    sock.settimeout(None)
    send_without_delay(sock)  # before the TLS handshake, which would wait for acknowledgements otherwise
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
    """Return a socket that is bound to `address`; a TCP socket also listens. Port 0 means any free port.

    A host name is bound to one of its IP addresses, preferably of IPv4. "::" includes all IPv4 addresses. Raise OSError
    if the address is not available.
    """
    if address.is_unix:
        return bind_unix(address.path)
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, where = min(found, key=lambda each: each[0] != socket.AF_INET)
    is_both = address.host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(where, family=family, dualstack_ipv6=is_both)


def bind_unix(path: str) -> socket.socket:
    """Return a bound unix socket with mode 0600. Replace a file that exists. Raise OSError if that fails.

    Nobody can connect to the socket before it listens. The mode is set by `chmod`: a umask is that of the whole
    process, and would also apply to what other threads create meanwhile, and to the processes that they start.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path):
            os.unlink(path)
        sock.bind(path)
        os.chmod(path, 0o600)
    except OSError:
        sock.close()
        raise
    return sock


def reason_of(error: OSError) -> str:
    """Return the text of the system for an error of a socket, without the address."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)  # asyncio's own text repeats the address
    return error.strerror or str(error)  # errors of name resolution have no errno


def cannot_dial(what: str, error: OSError) -> ConnectError:
    """Return the exception for a failed attempt to dial. It is an UnreachableError if the peer may be the reason."""
    if error.errno in _OWN_ERRORS:
        return ConnectError(f"this process cannot open a connection to {what}: {reason_of(error)}")
    return UnreachableError(f"cannot reach {what}: {reason_of(error)}")


def cannot_listen(address: Address, error: OSError) -> ListenError:
    """Return the exception for an address at which this process cannot listen. Its message says what to do."""
    advice = "" if address.is_unix else _ADVICE.get(error.errno or 0, "")
    return ListenError(f"cannot listen at {address}: {reason_of(error)}{advice}")


def free_address(host: str) -> str:
    """Return a HOST:PORT at which nothing listens now. The port is not reserved.

    Raise OSError if the host is not an address of this machine.
    """
    with bind(Address(host=host)) as sock:
        return str(Address(host=host, port=sock.getsockname()[1]))


def check_can_listen(address: Address) -> None:
    """Raise AddressError, with what to do, if no process can listen at this TCP address now."""
    try:
        bind(address).close()
    except OSError as error:
        raise cannot_listen(address, error) from None


def check_is_free(address: Address) -> None:
    """Raise OSError if a process cannot listen at `address`, which may be taken a moment later.

    Remove the file of a unix socket that exists.
    """
    bind(address).close()
    if address.is_unix:
        os.unlink(address.path)


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the process ID and the user ID at the other end of a unix socket, according to the kernel.

    Raise OSError if the connection has ended, or if the system is not Linux.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        raise OSError(errno.ENOTSUP, "this system does not name the peer of a unix socket")
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
    except OSError:  # the connection has ended already
        return ""


def send_without_delay(sock: socket.socket) -> None:
    """Send small messages over TCP at once instead of waiting for acknowledgements of earlier ones.

    Lost packets are retransmitted once per second if the kernel supports it. By default, the kernel doubles the time
    between attempts, so that after eight seconds of silence it would wait for another six.
    """
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not hasattr(socket, "TCP_USER_TIMEOUT"):  # not Linux: its numbers of the options below mean others
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _USER_TIMEOUT_SECONDS)
        for option, value in _RETRANSMIT:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def keep_little_unsent(sock: socket.socket) -> None:
    """Limit the unsent bytes in the kernel (TCP_NOTSENT_LOWAT), so that few bytes are ahead of an urgent message.

    By default, the kernel accepts several MiB on a slow link. The number of bytes in flight does not change.
    """
    if sock.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def read_what_is_left(transport: asyncio.BaseTransport, protocol: asyncio.BufferedProtocol) -> None:
    """Pass bytes that arrived before the connection ended to the protocol. Call this from `connection_lost`.

    An event loop closes the socket at once if a write fails, even if it has not read everything that arrived. Bytes
    that a peer sends later are not read.
    """
    sock = transport.get_extra_info("socket")
    if sock is None:
        return
    with contextlib.suppress(OSError):  # the socket is closed, or nothing is left
        left = _arrived(sock.fileno())
        while left > 0 and (count := os.readv(sock.fileno(), [protocol.get_buffer(-1)])):
            protocol.buffer_updated(count)
            left -= count


def _arrived(descriptor: int) -> int:
    """Return the number of bytes that can be read now."""
    (count,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return int(count)
