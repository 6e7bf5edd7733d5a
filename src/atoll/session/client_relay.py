"""Relays calls and contents of arrays between the workers' data channels and the clients' processes.

A client opens one data channel to its proxy, with `client.jax_patches.client_channel` at its end. The channels' threads
pass on calls, answers and contents, without the proxy's loop. If a client leaves the channel, the relay answers its
pending calls.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from atoll.errors import OK, AtollError, Code, Details, Kind, Status, failure, invalid
from atoll.host_services.calls.call_messages import (
    GREETING,
    NO_CLIENT,
    Arrived,
    CallMessage,
    Dial,
    DirectWanted,
    Landed,
    ReadWanted,
    Released,
    Retained,
    SlotsWanted,
    Unread,
    Wanted,
    Written,
    decode,
    encode,
    first_call,
    host_of,
    is_call,
    is_notice,
)
from atoll.peers.listener import Listener
from atoll.protocol.callbacks import CallbackAddress
from atoll.protocol.number_ranges import SCRIPT_FEEDS
from atoll.session.cluster_session import ClusterSession
from atoll.session.held_callables import HeldCallables
from atoll.session.script_writes import ScriptWrites
from atoll.session.session_interfaces import HostAccess
from atoll.transfers import sealed_memory
from atoll.transfers.channel import DataChannel, Open
from atoll.transfers.shared_slots import SharedSlots
from atoll.transfers.transfer_engine import Piece
from atoll.wire.address import Address

_log = logging.getLogger(__name__)

_NOTICE_BYTES = 4096  # of a notice that the loop's thread writes to the socket
_MAX_ARRIVING = 1024  # writes of which only a part has arrived
_MAX_READS = 256  # reads without a launch, for which there is another way


# Parts of writes that have arrived and their bytes, by write.
Arriving = dict[int, tuple[list[bytes], int]]

# Calls a function with arguments on the session's thread, soon. Called on any thread.
OnLoop = Callable[..., None]


class ClientPort:
    """The port at which clients open their channels. It listens at `address()` from the first call of `relay` on."""

    def __init__(self, address: Callable[[], Address]) -> None:
        self._address = address
        self._listener: Listener | None = None
        self._relays: dict[int, ClientRelay] = {}

    def relay(self, number: int, cluster: ClusterSession, on_loop: OnLoop) -> ClientRelay:
        """Relay the calls of a session to the client that opens a channel for `number`.

        Raise OSError if the port cannot listen.
        """
        if number in self._relays:
            return self._relays[number]
        if self._listener is None:
            self._listener = Listener(self._address(), self._serve, lambda: None)
        where = CallbackAddress(str(self._listener.address), number, secrets.token_hex(16))
        relay = ClientRelay(cluster, where, on_loop)
        self._relays[number] = relay
        cluster.set_callback_handler(relay)
        return relay

    def close_relay(self, number: int) -> None:
        relay = self._relays.pop(number, None)
        if relay is not None:
            relay.close()

    def _serve(self, channel: DataChannel) -> None:
        opening = channel.receive_open()
        relay = self._relays.get(opening.session)
        if relay is None or not hmac.compare_digest(relay.where.secret.encode(), opening.secret.encode()):
            raise AtollError("a connection for callbacks was refused: its secret is not the session's")
        assert self._listener is not None
        if not self._listener.opened(channel):
            return
        try:
            if opening.stream:
                relay.run_stream(opening, channel)
            else:
                relay.serve(channel, opening.channel)
        except (AtollError, EOFError, OSError, MemoryError) as error:
            _log.warning("a connection for callbacks has ended: %s", error)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


class ClientRelay:
    """Relays calls and contents between a session's workers and its client.

    Thread-safe, except for `writes` and `read_directly`.
    """

    def __init__(self, cluster: ClusterSession, where: CallbackAddress, on_loop: OnLoop) -> None:
        self.where = where
        self._on_loop = on_loop
        self.writes = ScriptWrites(self._ask, self._forget, cluster.sent_by_client, self._upload)
        self._otherwise: dict[int, Callable[[], None]] = {}  # other ways to read the last arrays, by feed
        self._wants_direct = False  # whether the client wants direct channels
        # Shared with the client after it has asked for them. Its later channels share the same slots, because launches
        # may arrive whose contents it has put there before the channel was replaced.
        self._slots: SharedSlots | None = None
        self._slots_channel: DataChannel | None = None  # the last channel on which they were shared
        self._cluster = cluster
        self._channel: DataChannel | None = None
        self._name = ""  # of the channel, by which its streams find it
        self._unanswered: dict[int, DataChannel | None] = {}  # the channel that took the call, by feed
        self._callables = HeldCallables()
        self._lock = threading.Lock()

    # ---- calls from the hosts: see `session.session_interfaces.CallbackHandler`

    def call(self, feed: int, content: Any, done: Callable[[], None]) -> None:
        if is_notice(feed):
            self._take_notice(host_of(feed), content)
            done()
            return
        with self._lock:
            channel = self._channel
            self._unanswered[feed] = channel
        try:
            if channel is None:
                raise BrokenPipeError
            channel.send(0, feed, [content])
        except (AtollError, OSError):
            self._answer(feed, NO_CLIENT)
        finally:
            done()

    def pass_socket(self, sock: socket.socket, host: int) -> None:
        """Pass a host's direct connection to the client, if the client is on this machine."""
        with self._lock:
            channel = self._channel
        if channel is not None and channel.is_local:
            with contextlib.suppress(OSError):
                channel.pass_socket(sock, host)

    def host_opened(self, host: int, is_local: bool) -> None:
        if not self._wants_direct:
            return
        if is_local:
            self._cluster.answer(first_call(host), encode(DirectWanted()))
        elif (access := self._cluster.far_hosts.get(host)) is not None:
            self._let_dial(host, access)

    def _let_dial(self, host: int, access: HostAccess) -> None:
        """Let the client open its own channel to a host on another machine. Its credentials stay on this machine."""
        found = access.certificate
        certificate = None if found is None else (found.certificate, found.key, found.authority)
        if self.is_local:
            self._notify(Dial(host, access.address, access.session, access.secret, access.lease, certificate))

    @property
    def channel(self) -> DataChannel | None:
        """The channel that the client has opened last, or None if it has none."""
        return self._channel

    @property
    def has_client(self) -> bool:
        """Whether the client has a channel, on which it can be asked for contents."""
        return self._channel is not None

    @property
    def is_local(self) -> bool:
        """Whether the client has a channel and is on this machine, so that hosts may send contents directly to it."""
        channel = self._channel
        return channel is not None and channel.is_local

    def forward(self, feed: int, content: Any, more: bool, done: Callable[[], None]) -> None:
        """Forward contents of an array to the client, or drop them if it has left."""
        with self._lock:
            channel = self._channel
        try:
            if channel is not None:
                channel.send(0, feed, [content], more)
        except (AtollError, OSError):
            pass  # the client has noticed as well
        finally:
            done()

    def cannot_read(self, feeds: tuple[int, ...] = (), error: Status = OK) -> None:
        """Notify the client that contents will not arrive: see `Unread`."""
        if not error.ok:  # jaxlib's exceptions contain the details as text
            error = Status(error.code, error.details.in_text(error.message))
        self._notify(Unread(feeds, error=error))

    def read_directly(self, device: int, wanted: ReadWanted, otherwise: Callable[[], None]) -> bool:
        """Request that the host of `device` sends the contents of a small array to the client.

        Return False if that is impossible. If the host does not send them, call `otherwise` on the session's thread.
        If the host is lost, the client is notified.
        """
        if not self.is_local or not self._cluster.read_directly(device, wanted):
            return False
        self._otherwise[wanted.feed] = otherwise
        if len(self._otherwise) > _MAX_READS:  # the host has sent the contents of the oldest one, as a rule
            del self._otherwise[next(iter(self._otherwise))]
        return True

    def _not_sent(self, feeds: Sequence[int]) -> None:
        """Note that a host cannot send contents, or that the client's own channel to it has ended meanwhile."""
        for feed in feeds:
            otherwise = self._otherwise.pop(feed, None)
            if otherwise is not None:
                otherwise()
                continue
            self._cluster.received_by_client(feed)
            self.cannot_read((feed,))

    def _notify(self, message: CallMessage) -> None:
        """Send a notice to the client without waiting for it."""
        with self._lock:
            channel = self._channel
        contents = encode(message)

        def notify(channel: DataChannel) -> None:
            with contextlib.suppress(AtollError, OSError, ValueError):
                channel.send(0, first_call(0), contents)

        if channel is None:
            return
        if channel.can_send_nowait(_NOTICE_BYTES) and len(contents[0]) <= _NOTICE_BYTES:
            notify(channel)
        else:
            threading.Thread(target=notify, args=(channel,), name="atoll-notice", daemon=True).start()

    # ---- contents that the client sends

    def _ask(self, write: int, feed: int, host: int) -> None:
        self._notify(Wanted(write, feed, host))

    def _forget(self, write: int) -> None:
        self._notify(Written(write))

    def _upload(self, hosts: tuple[int, ...], feed: int, contents: Sequence[Any]) -> None:
        self._cluster.upload(hosts, feed, contents, feed)

    def _take_part(self, arriving: Arriving, write: int, content: Any, more: bool) -> None:
        """Take a part of contents that the client sends here. Drop what is more than was announced."""
        parts, held = arriving.pop(write, ([], 0))
        part = memoryview(content).cast("B")[: max(0, self.writes.nbytes(write) - held)]
        if part.nbytes:
            parts.append(bytes(part))
        if more:
            if len(arriving) < _MAX_ARRIVING:
                arriving[write] = parts, held + part.nbytes
            return
        self._on_loop(self.writes.arrived, write, parts)

    def take_small(self, write: int, nbytes: int) -> bytes:
        """Return small contents that the client has put into a slot. Raise INVALID_ARGUMENT if it has not."""
        contents = None if self._slots is None else self._slots.take(write, nbytes)
        if contents is None:
            raise invalid(f"the client has sent no contents for its write {write}")
        return contents

    def _share_slots(self, channel: DataChannel) -> None:
        is_new = self._channel is channel and self._slots_channel is not channel
        if channel.is_local and is_new and sealed_memory.is_available():
            self._slots_channel = channel
            self._slots = self._slots or SharedSlots()
            channel.pass_memory(self._slots.descriptor)

    def _take_notice_of_client(self, channel: DataChannel, content: Any) -> None:
        notice, _ = decode(content)
        if isinstance(notice, Landed):
            self._on_loop(self.writes.landed, notice.write)
        elif isinstance(notice, Arrived):
            self._on_loop(self._cluster.received_by_client, notice.feed)
        elif isinstance(notice, DirectWanted):
            self._on_loop(self._open_direct_channels)
        elif isinstance(notice, SlotsWanted):
            self._share_slots(channel)

    def _open_direct_channels(self) -> None:
        if not self.is_local:
            return
        if not self._wants_direct:
            self._wants_direct = True
            for host in self._cluster.local_hosts:
                self.host_opened(host, True)
        for host, access in self._cluster.far_hosts.items():  # each time, because the client may have lost its channel
            self._let_dial(host, access)

    def _take_notice(self, host: int, content: Any) -> None:
        notice, _ = decode(content)
        if isinstance(notice, Unread):
            self._on_loop(self._not_sent, notice.feeds)
            return
        first = notice.callbacks[0]
        if isinstance(notice, Retained):
            self._callables.hold(first, (host,))
            return
        self._callables.release(first, host)
        self._release_unheld()

    def host_lost(self, host: int, was_local: bool) -> None:
        with self._lock:
            self._unanswered = {feed: each for feed, each in self._unanswered.items() if host_of(feed) != host}
        self._callables.host_lost(host)
        self.writes.hosts_failed({host})
        self._release_unheld()
        if was_local:  # contents may have been lost that count as arrived: see `DirectDownload`
            self.cannot_read()

    # ---- unused callables

    def compiled(self, callbacks: tuple[int, ...], hosts: Sequence[int]) -> None:
        """Note that `hosts` have a function that calls `callbacks`, before the notices of the hosts arrive."""
        self._callables.hold(callbacks[0], hosts)

    def unloaded(self, callbacks: tuple[int, ...]) -> None:
        """Release `callbacks`, whose executable the client has dropped, as soon as no host can run it any more."""
        self._callables.drop(callbacks)
        self._release_unheld()

    def _release_unheld(self) -> None:
        with self._lock:
            channel = self._channel
        unheld = self._callables.take_unheld()
        if channel is not None:
            for callbacks in unheld:
                with contextlib.suppress(AtollError, OSError):
                    channel.send(0, first_call(0), encode(Released(callbacks)))

    # ---- to and from the client

    def _answer(self, feed: int, contents: Sequence[Any]) -> None:
        with self._lock:
            if feed not in self._unanswered:
                return  # the host has been lost
            del self._unanswered[feed]
        self._cluster.answer(feed, contents)

    def run_stream(self, opening: Open, stream: DataChannel) -> None:
        """Serve a further connection of the client's channel, for large contents, until it ends.

        The client opens one only after its channel is served. Close a stream of a former channel.
        """
        with self._lock:
            channel = self._channel if opening.channel and opening.channel == self._name else None
        if channel is not None:
            channel.run_stream(stream, sends=opening.stream == "receives")

    def serve(self, channel: DataChannel, name: str = "") -> None:
        """Send calls to the client and receive its answers, until the client closes the channel."""
        with self._lock:
            before, self._channel, self._name = self._channel, channel, name
        if before is not None:
            before.close()
        channel.send(0, first_call(0), encode(GREETING))
        self._on_loop(self.writes.ask_again)

        arriving: Arriving = {}  # of this channel: on the next one, the client sends all contents from the start

        def on_piece(piece: Piece, content: Any, done: Callable[[], None]) -> None:
            try:
                if piece.feed in SCRIPT_FEEDS:
                    self._take_part(arriving, piece.feed, content, piece.more)
                elif is_notice(piece.feed):
                    self._take_notice_of_client(channel, content)
                elif is_call(piece.feed):
                    self._answer(piece.feed, [content])
            finally:
                done()

        try:
            channel.receive(on_piece)
        finally:
            with self._lock:
                if self._channel is channel:
                    self._channel = None
                    self._on_loop(self._client_left)
                unanswered = [feed for feed, each in self._unanswered.items() if each is channel]
            for feed in unanswered:
                self._answer(feed, NO_CLIENT)

    def _client_left(self) -> None:
        """End the session if hosts await contents that the client cannot send any more."""
        if len(self.writes) and self._channel is None:
            text = "the connection on which the client sends contents of arrays has ended"
            self._cluster.fail(failure(Code.UNAVAILABLE, text, Details(Kind.LINK)))

    def close(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
            self._slots = self._slots_channel = None
        if channel is not None:
            channel.close()
