"""TLS on a blocking socket, for one thread that reads and others that send.

`ssl.SSLSocket` is not for several threads: OpenSSL's state is one for both directions. Here it stands between two
buffers in memory, and a lock is held only while bytes are converted, never while the socket waits. Invariant: what
OpenSSL has written to its buffer is taken from it by the one thread that sends, so it leaves in the order in which it
was made. The reading thread makes none that could not wait for the next message (TLS 1.3: answers to updates of keys).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any

from atoll.errors import AccessError
from atoll.wire.address import Address
from atoll.wire.sockets import send_without_delay
from atoll.wire.tls.identity import HANDSHAKE_SECONDS, Identity, name_of, role_of, server_name
from atoll.wire.tls.tls_errors import ALERT, explained, not_admitted

# So many bytes are encrypted at a time, and then sent: they are still in the CPU's cache.
_SEND_BYTES = 256 * 1024
_READ_BYTES = 256 * 1024


class TlsStream:
    """A `wire.byte_stream.Stream`. `who` names the peer in errors."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, role: str, who: str) -> None:
        """To be dialed: the `role` that the peer has to have; "" for one that was accepted."""
        self.socket = sock
        send_without_delay(sock)
        self.who = who
        self._was_accepted = not role
        self.peer_role = ""
        self.peer_name = ""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=not role, server_hostname=server_name(role) if role else None
        )
        self._lock = threading.Lock()  # of the four
        # The reading thread's: what it reads into, and whether there may be more to decrypt of what was read.
        self._encrypted = memoryview(bytearray(_READ_BYTES))
        self._has_more = True

    @classmethod
    def dialed(cls, sock: socket.socket, role: str, identity: Identity, who: str) -> TlsStream:
        return cls(sock, identity.dialing, role, who)

    @classmethod
    def accepted(cls, sock: socket.socket, identity: Identity) -> TlsStream:
        return cls(sock, identity.serving, "", "a peer")

    # ---- the handshake

    def secure(self, seconds: float = HANDSHAKE_SECONDS) -> None:
        """See `Stream.secure`. Its time is over `seconds` from now, however slowly the peer sends."""
        deadline = time.monotonic() + seconds
        try:
            while not self._shakes_hands():
                self._flush(deadline)
                self.socket.settimeout(max(0.001, deadline - time.monotonic()))
                count = self.socket.recv_into(self._encrypted)
                if count:
                    self._incoming.write(self._encrypted[:count])
                else:
                    self._incoming.write_eof()
            self._flush(deadline)
            self.socket.settimeout(None)
        except OSError as error:  # as SSLError and TimeoutError are
            with contextlib.suppress(OSError):  # an alert tells the peer why
                self._flush(deadline, ALERT if isinstance(error, ssl.SSLError) else b"")
            raise (not_admitted if self._was_accepted else explained)(error, self.who) from None
        certificate = self._tls.getpeercert()
        self.peer_role, self.peer_name = role_of(certificate), name_of(certificate)

    def _shakes_hands(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def _flush(self, deadline: float, otherwise: bytes = b"") -> None:
        """Sends what OpenSSL has to send, or where there is nothing, what is to be sent `otherwise`."""
        self.socket.settimeout(max(0.001, deadline - time.monotonic()))
        content = self._outgoing.read() or otherwise
        if content:
            self.socket.sendall(content)

    # ---- bytes

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        lock, write, take, send = self._lock, self._tls.write, self._outgoing.read, self.socket.sendall
        for part in parts:
            size = part.nbytes if isinstance(part, memoryview) else len(part)
            if not size:
                continue
            if size <= _SEND_BYTES:
                with lock:
                    write(part)
                    encrypted = take()
                send(encrypted)
                continue
            view = memoryview(part).cast("B")
            for start in range(0, size, _SEND_BYTES):
                with lock:
                    write(view[start : start + _SEND_BYTES])
                    encrypted = take()
                send(encrypted)

    def receive_into(self, view: memoryview) -> int:
        while True:
            if self._has_more:
                count = self._decrypt_into(view)
                if count:
                    return count
                if count is None:
                    return 0
            received = self.socket.recv_into(self._encrypted)
            with self._lock:
                if received:
                    self._incoming.write(self._encrypted[:received])
                else:
                    self._incoming.write_eof()
            self._has_more = True

    def _decrypt_into(self, view: memoryview) -> int | None:
        """How much of what has arrived was decrypted; None where the peer has closed.

        To ask in vain is an exception, which costs more than a small message: so it does not ask where nothing is left.
        """
        position, size, incoming, read = 0, view.nbytes, self._incoming, self._tls.read
        with self._lock:
            try:
                while position < size:
                    count: Any = read(size - position, view[position:] if position else view)
                    if not count:
                        return position or None
                    position += count
                    if not incoming.pending and not incoming.eof and position < size:
                        self._has_more = False
                        break
            except ssl.SSLWantReadError:
                self._has_more = False
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # frames say where they end: a cut is found by them
                return position or None
            except ssl.SSLError as error:
                raise explained(error, self.who, shaking_hands=False) from None
        return position

    # ---- the end

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut_down()
        self.socket.close()


def no_identity(address: Address, what: str, for_hosts: bool = False) -> AccessError:
    """There is nothing to prove this process with."""
    if for_hosts:
        needs = "this host needs the cluster's join token for hosts: give --join FILE, or set ATOLL_JOIN to FILE, which"
        return AccessError(
            f"{what} at {address.host_and_port} is reached by TLS, for which {needs} "
            "`atoll up --host-join-file FILE` has written"
        )
    return AccessError(
        f"{what} at {address.host_and_port} is reached by TLS, for which this process needs the cluster's join "
        "token: set ATOLL_JOIN to it, or to the file that `atoll up --join-file FILE` has written"
    )
