"""TLS on a blocking socket that one thread only sends on: OpenSSL writes to the socket itself.

`TlsStream` takes what is encrypted out of a buffer in memory, because two threads share it. Here there is one, so those
copies are saved: a quarter of a sender's CPU time.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Sequence

from atoll.wire.tls.identity import HANDSHAKE_SECONDS, Identity, role_of, server_name
from atoll.wire.tls.tls_errors import ALERT, explained


class TlsSender:
    """A `wire.byte_stream.Stream` that was dialed, to a peer that sends nothing. `who` names it in errors."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, role: str, who: str) -> None:
        self.who = who
        self.peer_role = ""
        self._tls = context.wrap_socket(sock, server_hostname=server_name(role), do_handshake_on_connect=False)
        self.socket: socket.socket = self._tls  # whose options are those of the socket beneath
        self._incoming = select.poll()
        self._incoming.register(self._tls, select.POLLIN | select.POLLRDHUP)

    @classmethod
    def dialed(cls, sock: socket.socket, role: str, identity: Identity, who: str) -> TlsSender:
        return cls(sock, identity.dialing, role, who)

    def secure(self, seconds: float = HANDSHAKE_SECONDS) -> None:
        """See `Stream.secure`."""
        deadline = time.monotonic() + seconds
        self._tls.setblocking(False)
        try:
            while not self._shakes_hands(deadline):
                pass
            self._tls.setblocking(True)
        except OSError as error:  # as SSLError and TimeoutError are
            if isinstance(error, ssl.SSLError):  # an alert tells the peer why
                with contextlib.suppress(OSError):
                    socket.socket.send(self._tls, ALERT)
            raise explained(error, self.who) from None
        self.peer_role = role_of(self._tls.getpeercert())

    def _shakes_hands(self, deadline: float) -> bool:
        """Takes it one step further; True where it is done."""
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
        """Waits for the end, which is all that can come; returns 0."""
        self._incoming.poll()
        return 0

    # ---- the end

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._tls, socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut_down()
        self._tls.close()
