"""TLS on blocking sockets."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any

from atoll.wire.sockets import send_without_delay
from atoll.wire.tls.identity import HANDSHAKE_SECONDS, Identity, name_of, role_of, server_name
from atoll.wire.tls.tls_errors import ALERT, explained, not_admitted

# Bytes that are encrypted at a time and then sent, while they are in the CPU cache.
_SEND_BYTES = 256 * 1024
_READ_BYTES = 256 * 1024


class TlsStream:
    """A `wire.byte_stream.Stream` for one thread that receives and one that sends.

    `ssl.SSLSocket` does not support several threads, because OpenSSL has one state for both directions. Here, OpenSSL
    works on two memory buffers, and threads hold a lock only while bytes are converted, never while the socket blocks.

    Invariant: only the sending thread takes OpenSSL's output from its buffer, so output is sent in order. The receiving
    thread creates only output that can wait for the next message (answers to key updates in TLS 1.3).

    The peer of a dialed connection must have `role`; for an accepted one, `role` is "". Errors name the peer as
    `target`.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, role: str, target: str) -> None:
        self.socket = sock
        send_without_delay(sock)
        self._target = target
        self._was_accepted = not role
        self.peer_role = ""
        self.peer_name = ""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=not role, server_hostname=server_name(role) if role else None
        )
        self._lock = threading.Lock()  # protects `_incoming`, `_outgoing` and `_tls`
        # Used only by the receiving thread. `_has_more` is false if all received bytes are decrypted.
        self._encrypted = memoryview(bytearray(_READ_BYTES))
        self._has_more = True

    @classmethod
    def dialed(cls, sock: socket.socket, role: str, identity: Identity, target: str) -> TlsStream:
        return cls(sock, identity.dialing, role, target)

    @classmethod
    def accepted(cls, sock: socket.socket, identity: Identity) -> TlsStream:
        return cls(sock, identity.serving, "", "a peer")

    # ---- handshake

    def secure(self, seconds: float = HANDSHAKE_SECONDS) -> None:
        """Perform the handshake within `seconds`, even if the peer sends slowly; see `Stream.secure`."""
        deadline = time.monotonic() + seconds
        try:
            while not self._do_handshake():
                self._flush(deadline)
                self.socket.settimeout(max(0.001, deadline - time.monotonic()))
                count = self.socket.recv_into(self._encrypted)
                if count:
                    self._incoming.write(self._encrypted[:count])
                else:
                    self._incoming.write_eof()
            self._flush(deadline)
            self.socket.settimeout(None)
        except OSError as error:  # includes SSLError and TimeoutError
            with contextlib.suppress(OSError):  # the alert states the reason to the peer
                self._flush(deadline, ALERT if isinstance(error, ssl.SSLError) else b"")
            raise (not_admitted if self._was_accepted else explained)(error, self._target) from None
        certificate = self._tls.getpeercert()
        self.peer_role, self.peer_name = role_of(certificate), name_of(certificate)

    def _do_handshake(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def _flush(self, deadline: float, otherwise: bytes = b"") -> None:
        """Send OpenSSL's output, or `otherwise` if it is empty."""
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
        """Decrypt received bytes into `view` and return their number, or None if the peer has closed.

        Do not read if no bytes are left, because the exception would cost more than a small message.
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
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # frames have a length, which reveals a truncation
                return position or None
            except ssl.SSLError as error:
                raise explained(error, self._target, shaking_hands=False) from None
        return position

    # ---- closing

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut_down()
        self.socket.close()


class TlsSender:
    """A `wire.byte_stream.Stream` that was dialed and only sends, from one thread.

    OpenSSL writes directly to the socket. This avoids the copies of `TlsStream` and saves a quarter of the sender's CPU
    time.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, role: str, target: str) -> None:
        self._target = target
        self.peer_role = ""
        self._tls = context.wrap_socket(sock, server_hostname=server_name(role), do_handshake_on_connect=False)
        self.socket: socket.socket = self._tls  # has the options of the underlying socket
        self._incoming = select.poll()
        self._incoming.register(self._tls, select.POLLIN | select.POLLRDHUP)

    @classmethod
    def dialed(cls, sock: socket.socket, role: str, identity: Identity, target: str) -> TlsSender:
        return cls(sock, identity.dialing, role, target)

    # ---- handshake

    def secure(self, seconds: float = HANDSHAKE_SECONDS) -> None:
        """Perform the handshake; see `Stream.secure`."""
        deadline = time.monotonic() + seconds
        self._tls.setblocking(False)
        try:
            while not self._do_handshake(deadline):
                pass
            self._tls.setblocking(True)
        except OSError as error:  # includes SSLError and TimeoutError
            if isinstance(error, ssl.SSLError):  # the alert states the reason to the peer
                with contextlib.suppress(OSError):
                    socket.socket.send(self._tls, ALERT)
            raise explained(error, self._target) from None
        self.peer_role = role_of(self._tls.getpeercert())

    def _do_handshake(self, deadline: float) -> bool:
        """Perform one step of the handshake. Return True if it is complete."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            awaited = select.POLLIN
        except ssl.SSLWantWriteError:
            awaited = select.POLLOUT
        else:
            return True
        poll = select.poll()
        poll.register(self._tls, awaited)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        return False

    # ---- bytes

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        for part in parts:
            if part:
                self._tls.sendall(part)

    def receive_into(self, view: memoryview) -> int:
        """Wait until the peer closes, and return 0, because the peer sends nothing."""
        self._incoming.poll()
        return 0

    # ---- closing

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._tls, socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut_down()
        self._tls.close()
