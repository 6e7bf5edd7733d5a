"""The listening socket of a data port. It survives a lack of descriptors, and closes connections that do not open.

One thread accepts connections, and each connection has its own thread.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from atoll.errors import AtollError
from atoll.retries import Reasons, Retry
from atoll.transfers.channel import DataChannel
from atoll.transfers.transfer_engine import TransferEngine
from atoll.transfers.transfer_kinds import KINDS
from atoll.wire.address import Address
from atoll.wire.byte_stream import accepted_stream
from atoll.wire.pending_connections import PendingConnections, Refusals
from atoll.wire.sockets import bind, peer_of
from atoll.wire.tls.identity import Identity

_log = logging.getLogger(__name__)

_BACKLOG = 128
# Delay before the next attempt to accept if the system has no more descriptors or memory.
_RETRY_SECONDS = 0.1


class Listener:
    """A listener at `address` that calls `serve(channel)` for each connection, on the connection's own thread.

    Port 0 stands for any free port. If the address has TLS, the listener shows the certificate of `identity`, and peers
    need certificates of the cluster. `serve` has to call `opened(channel)` once the peer is authenticated. If it does
    not in time, the channel is shut down and `on_shut_down()` is called. Errors that `serve` raises before that are
    logged as refusals. Raise OSError if the address cannot be bound.
    """

    def __init__(
        self,
        address: Address,
        serve: Callable[[DataChannel], None],
        on_shut_down: Callable[[], None],
        kinds: Sequence[type[TransferEngine]] = KINDS,
        identity: Identity | None = None,
    ) -> None:
        self._serve = serve
        self._on_shut_down = on_shut_down
        self._kinds = kinds
        self._pending: PendingConnections[DataChannel] = PendingConnections()
        self._addresses: dict[DataChannel, str] = {}  # of pending channels
        self._refusals = Refusals()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._identity = identity
        self._socket = bind(address)
        self.address = address if address.is_unix else replace(address, port=self._socket.getsockname()[1])
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        self._woken, self._wake = os.pipe()  # shutting down the socket would not end a poll with a deadline
        self._thread = threading.Thread(target=self._accept, name="atoll-data-port", daemon=True)
        self._thread.start()

    def opened(self, channel: DataChannel) -> bool:
        """Keep a connection whose peer is authenticated. Return False if its time to open was over."""
        with self._lock:
            self._addresses.pop(channel, None)
            return self._pending.remove(channel)

    def _accept(self) -> None:
        problems, retry = Reasons(_log, logging.ERROR), Retry(_RETRY_SECONDS)
        poller = select.poll()
        for descriptor in (self._socket.fileno(), self._woken):
            poller.register(descriptor, select.POLLIN)
        while not self._closing.is_set():
            poller.poll(self._close_expired())
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                problems.log(f"no connection can be accepted at {self.address} for now: {error}")
                self._close_oldest()
                self._closing.wait(retry.next_pause())
                continue
            problems.solved()
            self._start(sock)

    def _start(self, sock: socket.socket) -> None:
        try:
            channel = DataChannel(accepted_stream(sock, self.address, self._identity), self._kinds)
        except Exception as error:  # other connections are still served
            _log.error("a data connection cannot be served: %s", error)
            sock.close()
            return
        address = peer_of(sock)
        with self._lock:
            evicted = self._pending.add(channel, time.monotonic(), address)
            self._addresses[channel] = address
        if evicted is not None:
            self._refuse(evicted, "too many data connections have not been opened yet")
            self._shut_down(evicted)
        try:
            threading.Thread(target=self._run, args=(channel,), name="atoll-data", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads
            _log.error("a data connection cannot be served: %s", error)
            self._end(channel)

    def _run(self, channel: DataChannel) -> None:
        try:
            channel.secure()
        except (AtollError, OSError) as error:
            self._refuse(channel, str(error))
            self._end(channel)
            return
        try:
            self._serve(channel)
        except (AtollError, EOFError, OSError, MemoryError) as error:
            self._refuse(channel, str(error) or "it ended before it was opened")
        except Exception:  # while handling this peer's data: only its connection ends
            _log.exception("a data connection ends: its data cannot be handled")
            channel.shut_down()
        finally:
            self._end(channel)

    def _end(self, channel: DataChannel) -> None:
        with self._lock:
            self._pending.remove(channel)
            self._addresses.pop(channel, None)
        channel.close()

    def _refuse(self, channel: DataChannel, reason: str) -> None:
        """Log why a connection that has not opened ends."""
        with self._lock:
            address = self._addresses.pop(channel, None)
            line = None if address is None else self._refusals.line(address, reason, time.monotonic())
        if line is not None:
            _log.warning("%s", line)

    def _close_expired(self) -> int | None:
        """Close connections that have not opened in time. Return the milliseconds until the next one may expire."""
        now = time.monotonic()
        with self._lock:
            late = self._pending.expired(now)
            deadline = self._pending.next_deadline()
        for channel in late:
            self._refuse(channel, "its data connection was not opened in time")
            self._shut_down(channel)
        return None if deadline is None else max(1, int(1000 * (deadline - now)) + 1)

    def _close_oldest(self) -> None:
        with self._lock:
            oldest = self._pending.oldest()
            if oldest is not None:
                self._pending.remove(oldest)
        if oldest is not None:
            self._shut_down(oldest)

    def _shut_down(self, channel: DataChannel) -> None:
        channel.shut_down()
        self._on_shut_down()

    def close(self) -> None:
        """Stop accepting connections. Accepted connections continue."""
        self._closing.set()
        os.close(self._wake)
        self._thread.join()
        self._socket.close()
        os.close(self._woken)
