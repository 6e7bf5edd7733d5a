"""The worker's data port: feeds come in from proxies and other hosts, array contents go out.

Each connection has a thread that blocks on its socket, so that bulk bytes never touch the control loop. A connection is
let in by the secret of its session, which the controller gave to both ends, or by the cluster's own (between hosts).
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

from atoll.errors import AtollError, Code, Status, StatusError
from atoll.protocol.messages import OWN_NUMBERS
from atoll.transfers.channel import DataChannel, Piece, dial
from atoll.wire.address import Address, parse_address
from atoll.wire.connection import bind_unix

_log = logging.getLogger(__name__)

_OPEN_SECONDS = 10.0
# That one session may have waiting here.
MAX_INBOX_BYTES = 8 << 30
# Sessions that are over, whose bytes may still be on their way from other hosts.
_REMEMBERED = 4096


class Inbox:
    """Feeds that have arrived and wait for the plan that uses them.

    `on_arrival(session, feed)` tells of each feed of a client; those of other hosts are awaited here.
    """

    def __init__(self, on_arrival: Callable[[int, int], None]) -> None:
        self._on_arrival = on_arrival
        self._feeds: dict[int, dict[int, tuple[Any, Callable[[], None]]]] = {}
        self._failed: dict[int, dict[int, Status]] = {}
        self._awaited: dict[int, tuple[set[int], Callable[[], None]]] = {}  # by session: its first parked plan's
        self._lock = threading.Lock()
        self._bytes: dict[int, int] = {}  # by session
        self._over: dict[int, None] = {}  # the sessions that ended last

    def put(self, session: int, feed: int, content: Any, done: Callable[[], None] = lambda: None) -> None:
        with self._lock:
            unwanted = session in self._over or feed in self._failed.get(session, ())
            held = self._bytes.get(session, 0)
            if not unwanted and held > MAX_INBOX_BYTES:
                text = f"{held} bytes of session {session} wait at this data port"
                if feed < OWN_NUMBERS:
                    raise StatusError(Code.RESOURCE_EXHAUSTED, text)
                # All sessions share the connections between hosts: this must not end one.
                self._failed.setdefault(session, {})[feed] = Status(Code.RESOURCE_EXHAUSTED, text)
                unwanted = True
            if not unwanted:
                self._feeds.setdefault(session, {})[feed] = (content, done)
                self._bytes[session] = held + memoryview(content).nbytes
            then = self._settle(session, feed)
        if unwanted:
            done()
        if then is not None:
            then()
        if feed < OWN_NUMBERS:
            self._on_arrival(session, feed)

    def _settle(self, session: int, feed: int) -> Callable[[], None] | None:
        awaited = self._awaited.get(session)
        if awaited is None:
            return None
        missing, then = awaited
        missing.discard(feed)
        if missing:
            return None
        del self._awaited[session]
        return then

    def await_all(self, session: int, feeds: Iterable[int], then: Callable[[], None]) -> bool:
        """True where all are here, or known not to come; otherwise calls `then` once they are, on any thread.

        One wait a session: a new one takes the place of the one before.
        """
        with self._lock:
            here, failed = self._feeds.get(session, {}), self._failed.get(session, {})
            missing = {feed for feed in feeds if feed not in here and feed not in failed}
            if missing:
                self._awaited[session] = (missing, then)
            return not missing

    def take(self, session: int, feed: int) -> tuple[Any, Callable[[], None]]:
        """A feed that has arrived, and what to call when its memory has been read. Raises why it did not."""
        with self._lock:
            failure = self._failed.get(session, {}).get(feed)
            if failure is not None:
                raise StatusError(Code(failure.code), failure.message, failure.payloads)
            found = self._pop(session, feed)
            if found is None:
                raise StatusError(Code.INTERNAL, f"feed {feed} of session {session} is not here")
            return found

    def _pop(self, session: int, feed: int) -> tuple[Any, Callable[[], None]] | None:
        found = self._feeds.get(session, {}).pop(feed, None)
        if found is not None:
            self._bytes[session] -= memoryview(found[0]).nbytes
        return found

    def drop(self, session: int, feed: int) -> None:
        """The feed is for nobody."""
        try:
            _, done = self.take(session, feed)
        except StatusError:
            return  # its session has ended
        done()

    def fail(self, session: int, feeds: Iterable[int], status: Status) -> None:
        """These feeds will not come, or are for nobody if they do."""
        for feed in feeds:
            with self._lock:
                if session in self._over:
                    return
                _, done = self._pop(session, feed) or (None, lambda: None)
                self._failed.setdefault(session, {})[feed] = status
                then = self._settle(session, feed)
            done()
            if then is not None:
                then()

    def drop_session(self, session: int) -> None:
        with self._lock:
            feeds = self._feeds.pop(session, {})
            self._bytes.pop(session, None)
            self._failed.pop(session, None)
            self._awaited.pop(session, None)
            self._over[session] = None
            if len(self._over) > _REMEMBERED:
                del self._over[next(iter(self._over))]
        for _, done in feeds.values():
            done()

    @property
    def nbytes(self) -> int:
        return sum(self._bytes.values())


class DataPort:
    """Listens for proxies and other hosts; keeps the channel of each session."""

    def __init__(self, address: Address, inbox: Inbox) -> None:
        self.inbox = inbox
        self._secrets: dict[int, str] = {}
        self._channels: dict[int, DataChannel] = {}
        self._peers: dict[int, str] = {}  # addresses, by host
        self._to_peers: dict[int, DataChannel] = {}
        self._peer_secret = ""
        self._lock = threading.Lock()
        self._opened = threading.Condition(self._lock)
        if address.is_unix:
            self._socket = bind_unix(address.path)
            self.address = address
        else:
            self._socket = socket.create_server((address.host, address.port), family=address.family)
            self.address = Address(host=address.host, port=self._socket.getsockname()[1])
        self._socket.listen(128)
        threading.Thread(target=self._accept, name="atoll-data-port", daemon=True).start()

    # ---- who may come in

    def open_session(self, session: int, secret: str) -> None:
        with self._opened:
            self._secrets[session] = secret
            self._opened.notify_all()

    def close_session(self, session: int) -> None:
        """Nobody comes in for the session any more. What it has in the inbox goes with its store."""
        with self._opened:
            self._secrets.pop(session, None)
            channel = self._channels.pop(session, None)
            self._opened.notify_all()
        if channel is not None:
            channel.close()

    def set_peers(self, hosts: tuple[tuple[int, str], ...], secret: str) -> None:
        with self._lock:
            self._peer_secret = secret
            self._peers = dict(hosts)
            self._to_peers = {}

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), name="atoll-data", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(_OPEN_SECONDS)
        channel = DataChannel(sock)
        session = -1
        try:
            opening = channel.receive_open()
            if not self._admit(opening.session, opening.secret):
                raise AtollError("a data connection was refused: its secret is not the session's")
            session = opening.session
            sock.settimeout(None)
            if session:
                with self._opened:
                    self._channels[session] = channel
                    self._opened.notify_all()

            def on_piece(piece: Piece, content: Any, done: Callable[[], None]) -> None:
                self.inbox.put(session or piece.session, piece.feed, content, done)

            channel.receive(on_piece)
        except (AtollError, EOFError, OSError, MemoryError) as error:
            _log.warning("data connection of session %d ends: %s", session, error)
        finally:
            with self._lock:
                if self._channels.get(session) is channel:
                    del self._channels[session]
            channel.close()

    def _admit(self, session: int, secret: str) -> bool:
        with self._opened:
            if session == 0:
                expected = self._peer_secret
            else:
                # The controller tells the worker and the proxy at the same time; either may be first.
                self._opened.wait_for(lambda: session in self._secrets, _OPEN_SECONDS)
                expected = self._secrets.get(session, "")
        return bool(expected) and hmac.compare_digest(expected.encode(), secret.encode())

    # ---- sending

    def to_proxy(self, session: int) -> DataChannel:
        """The channel to a session's proxy; waits for it to open, not longer than a few seconds."""
        with self._opened:
            if not self._opened.wait_for(
                lambda: session in self._channels or session not in self._secrets, _OPEN_SECONDS
            ):
                raise StatusError(Code.DEADLINE_EXCEEDED, f"the proxy of session {session} opened no data channel")
            channel = self._channels.get(session)
        if channel is None:
            raise StatusError(Code.CANCELLED, f"session {session} has ended")
        return channel

    def takes_at_once(self, session: int, nbytes: int) -> bool:
        """Whether so much could be sent to the session's proxy without waiting for anybody."""
        channel = self._channels.get(session)
        return channel is not None and channel.takes_at_once(nbytes)

    def host_takes_at_once(self, host: int, nbytes: int) -> bool:
        """The same for another host; False where there is no channel to it yet."""
        channel = self._to_peers.get(host)
        return channel is not None and not channel.is_closed and channel.takes_at_once(nbytes)

    def to_host(self, host: int) -> DataChannel:
        """The channel to another host's data port, opened at first use."""
        with self._lock:
            channel = self._to_peers.get(host)
            if channel is not None and not channel.is_closed:
                return channel
            channel = DataChannel(dial(parse_address(self._peers[host])))
            channel.open(0, self._peer_secret)
            self._to_peers[host] = channel

        def read_returns() -> None:
            with contextlib.suppress(AtollError, OSError):
                channel.receive(lambda *_: None)
            channel.close()

        threading.Thread(target=read_returns, name="atoll-data-peer", daemon=True).start()
        return channel
