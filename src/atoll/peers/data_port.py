"""The worker's data port, which receives feeds from clients and other hosts and sends array contents.

Each connection has a thread that blocks on its socket, so bulk bytes never pass through the control loop. A proxy is
admitted by the secret of its session, a host by the secret between hosts. The controller sends a secret to both ends.
The process of a client on another machine can open a channel as well, with a secret that its proxy passes to it.
"""

from __future__ import annotations

import enum
import hmac
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from atoll.cluster.processes.leases import CLIENT_LEASES
from atoll.errors import AtollError, Code, Details, FrameError, Kind, Status, StatusError, failed
from atoll.peers.host_channels import HostChannels, OnLost
from atoll.peers.host_watch import HostWatch, OnSilent
from atoll.peers.listener import Listener
from atoll.protocol.number_ranges import CLIENT_FEEDS
from atoll.protocol.script_secrets import script_secret
from atoll.transfers.channel import CONTROL, ChannelStatistics, DataChannel, Open
from atoll.transfers.inbox import Inbox, InboxStatistics
from atoll.transfers.liveness import SILENCE_SECONDS
from atoll.transfers.streams import MAX_STREAMS, STREAM_THRESHOLD
from atoll.transfers.transfer_engine import Contents, Piece, TransferEngine, group_of
from atoll.transfers.transfer_kinds import KINDS
from atoll.wire.address import Address, parse_address
from atoll.wire.pending_connections import OPEN_SECONDS
from atoll.wire.tls.identity import Identity

_log = logging.getLogger(__name__)

NEWS_SECONDS = 5.0  # by which all hosts have received what the controller sent to one of them


class Opener(enum.Enum):
    """The process that has opened a channel, as its secret shows."""

    HOST = "host"
    PROXY = "proxy"
    SCRIPT = "script"  # the client's process, for large contents that bypass its proxy


class DataPortStatistics(msgspec.Struct, frozen=True):
    inbox: InboxStatistics
    channels: dict[int, ChannelStatistics]  # by session


class Answers(Protocol):
    """A receiver of the pieces with which clients answer calls, and request arrays. Such pieces are not feeds."""

    def takes(self, feed: int) -> bool:
        """Return whether a piece with this number is an answer."""

    def awaits(self, session: int, feed: int, nbytes: int) -> bool:
        """Return whether a call of the session waits for this answer.

        An answer with more bytes than the call's results have is not awaited, and the call fails.
        """

    def answered(self, session: int, feed: int, content: Any, done: Callable[[], None]) -> None:
        """Handle an answer that has arrived, and call `done` once its content has been read."""

    def fail(self, session: int) -> None:
        """Fail the session's calls, because its channel has ended."""

    def unread(self, session: int, feed: int) -> None:
        """Notify the session that contents will not arrive on the client's own channel, which has ended."""

    def channel(self, session: int, proxy: DataChannel) -> DataChannel:
        """Return the shortest channel to the session's client: directly to its process, or `proxy`. May wait."""

    def channel_nowait(self, session: int, proxy: DataChannel) -> DataChannel | None:
        """Return what `channel` returns, or None if that might wait for the client. Never waits."""


class DataPort:
    """A listener for proxies and other hosts that holds the channel of each session. Safe to use from any thread.

    Args:
        kinds: The kinds of transfer that peers use.
        identity: For addresses with TLS, this host's and others'.
        neighbors: The hosts that are always watched.
        on_lost: Called if the channel to a host breaks; see `HostChannels`.
        on_silent: Called if a host is silent; see `HostWatch`.
        on_control: Receives other hosts' messages, each on its connection's thread. FrameError ends the connection.
        answers: Receives the clients' answers to calls, if this host calls clients.

    Hosts connect after `set_peers`, so no callback is called before it.
    """

    def __init__(
        self,
        address: Address,
        inbox: Inbox,
        kinds: Sequence[type[TransferEngine]] = KINDS,
        identity: Identity | None = None,
        neighbors: frozenset[int] = frozenset(),
        on_lost: OnLost = lambda host, lost, why: None,
        on_silent: OnSilent = lambda host, seconds: None,
        on_control: Callable[[Any], None] = lambda content: None,
        answers: Answers | None = None,
    ) -> None:
        self.inbox = inbox
        self.answers = answers
        self._secrets: dict[int, str] = {}
        self._channels: dict[int, DataChannel] = {}
        self._scripts: dict[int, DataChannel] = {}  # channels that clients' processes have opened themselves
        # By session, opener, and the name that the dialer chose:
        self._named: dict[tuple[int, Opener, str], DataChannel] = {}
        self._early: Counter[tuple[int, Opener]] = Counter()  # streams that wait for their channel
        self._hosts = HostChannels(on_lost, identity, lambda host: self._watch.add(host))
        self._watch = HostWatch(self._hosts, on_silent)
        self._lease = SILENCE_SECONDS
        self._neighbors = neighbors
        self._on_control = on_control
        self._admitted: frozenset[str] = frozenset()  # secrets of hosts
        self._from_hosts: dict[DataChannel, str] = {}  # channels that hosts have opened, with the secret they showed
        self._opened = threading.Condition()
        self._listener = Listener(address, self._serve, self._wake_waiters, kinds, identity)
        self.address = self._listener.address

    # ---- admission

    def open_session(self, session: int, secret: str) -> None:
        """Admit the session's proxy if it shows `secret`, and the client's process if it shows `script_secret`."""
        with self._opened:
            self._secrets[session] = secret
            self._opened.notify_all()

    def close_session(self, session: int) -> None:
        """Stop admitting the session, and close its channels with all their shared memory.

        The store frees the session's pieces in the inbox.
        """
        with self._opened:
            self._secrets.pop(session, None)
            channels = self._channels.pop(session, None), self._scripts.pop(session, None)
            self._opened.notify_all()
        for channel in channels:
            if channel is not None:
                channel.close()
        self._fail_calls(session)

    def _fail_calls(self, session: int) -> None:
        if self.answers is not None:
            self.answers.fail(session)

    def set_peers(
        self,
        hosts: tuple[tuple[int, str], ...],
        secret: str,
        admitted: frozenset[str] | None = None,
        lease: float = SILENCE_SECONDS,
    ) -> None:
        """Set the data port addresses of all hosts, and the secret that this host shows them. Never blocks.

        A host is admitted if it shows one of the `admitted` secrets, or by default `secret`. Channels of hosts that
        showed another secret are closed, because they belong to earlier incarnations. A host may be silent for `lease`
        seconds.
        """
        self._lease = self._hosts.patience = lease
        self._hosts.set_hosts(hosts, secret)
        # The kernel reports the end of hosts on this machine.
        far = frozenset(host for host, address in hosts if not parse_address(address).is_unix)
        self._watch.set_hosts(far, self._neighbors & far, lease)
        with self._opened:
            self._admitted = frozenset({secret}) if admitted is None else admitted
            stale = [channel for channel, shown in self._from_hosts.items() if shown not in self._admitted]
            self._opened.notify_all()
        for channel in stale:
            channel.shut_down()

    def _serve(self, channel: DataChannel) -> None:
        session, has_opened = -1, False
        try:
            opening = channel.receive_open()
            if opening.session == 0 and channel.peer_role not in ("", "host"):
                raise AtollError(f"a data connection was refused: a {channel.peer_role} is not a host")
            opener = self._admit(channel, opening.session, opening.secret)
            if opener is None:
                raise AtollError("a data connection was refused: its secret is not the session's")
            has_opened = self._listener.opened(channel)
            if not has_opened:
                return  # its time to open was over
            if opening.stream:
                self._run_stream(opening, opener, channel)
                return
            session = opening.session
            if channel.liveness is not None:
                # If a client's own channel is silent, its proxy may still be reachable.
                channel.liveness.patience = CLIENT_LEASES * self._lease if opener is Opener.PROXY else self._lease
            if opener is not Opener.HOST:
                self._set_channel(self._scripts if opener is Opener.SCRIPT else self._channels, session, channel)
            self._name(opening, opener, channel)
            if opener is Opener.PROXY and self.answers is not None:
                channel.offer_reads()

            def on_answer(feed: int, content: Any, done: Callable[[], None]) -> None:
                assert self.answers is not None
                self.answers.answered(session, feed, content, done)

            # Calls and their answers never use the client's own channel.
            self.receive(session, channel, None if opener is Opener.SCRIPT else on_answer)
        except (AtollError, EOFError, OSError, MemoryError) as error:
            if not has_opened:
                raise  # the listener logs it
            _log.warning("data connection of session %d ends: %s", session, error)
        finally:
            with self._opened:
                self._from_hosts.pop(channel, None)
                self._named = {name: each for name, each in self._named.items() if each is not channel}
                is_last = self._channels.get(session) is channel
                if is_last:
                    del self._channels[session]
                if self._scripts.get(session) is channel:
                    del self._scripts[session]
            channel.shut_down()  # before calls fail, so that a call that is just being sent fails as well
            if is_last:
                self._fail_calls(session)

    def receive(
        self, session: int, channel: DataChannel, on_answer: Callable[[int, Any, Callable[[], None]], None] | None
    ) -> None:
        """Receive the feeds of a session's channel, or of another host's (0), until it ends.

        Answers of calls are passed to `on_answer(feed, content, done)`. Without it, they end the channel. Raise what
        `DataChannel.receive` raises.
        """

        def on_piece(piece: Piece, content: Any, done: Callable[[], None]) -> None:
            if piece.feed == CONTROL and not session:
                self._on_control(content)
                done()
            elif on_answer is not None and self.takes_call(session, piece.feed):
                on_answer(piece.feed, content, done)
            elif group := group_of(piece):
                self.inbox.put_group(piece.session, group, content, done)
            else:
                self.inbox.put(session or piece.session, piece.feed, content, done)

        def on_failure(piece: Piece, status: Status) -> None:
            for feed, _ in group_of(piece) or ((piece.feed, 0),):
                self.inbox.put_failed(session or piece.session, feed, status)

        def expects(feed: int, nbytes: int) -> bool:
            return not session or (self.answers is not None and self.answers.awaits(session, feed, nbytes))

        budget = _InboxBudget(self, session)
        channel.receive(
            on_piece,
            on_failure,
            budget=budget,
            feeds_only=on_answer is None,
            expects=expects,
            groups=not session,
            feeds=CLIENT_FEEDS if session else None,
        )

    def _name(self, opening: Open, opener: Opener, channel: DataChannel) -> None:
        """Let the channel's streams find the channel by its name."""
        if opening.channel:
            with self._opened:
                self._named.setdefault((opening.session, opener, opening.channel), channel)
                self._opened.notify_all()

    def _run_stream(self, opening: Open, opener: Opener, stream: DataChannel) -> None:
        """Serve a further connection of a channel. It was opened with the same secret."""
        name, owner = (opening.session, opener, opening.channel), (opening.session, opener)
        with self._opened:
            if opener is not Opener.HOST and self._early[owner] >= MAX_STREAMS:
                raise FrameError(f"{MAX_STREAMS} streams of this session wait for their channel")
            self._early[owner] += 1
            # If both waited for this host to receive the secret, the stream may be admitted before its channel.
            self._opened.wait_for(lambda: name in self._named or stream.is_closed, NEWS_SECONDS)
            self._early -= Counter((owner,))
            channel = self._named.get(name)
        if channel is not None:
            channel.run_stream(stream, sends=opening.stream == "receives")

    def _set_channel(self, channels: dict[int, DataChannel], session: int, channel: DataChannel) -> None:
        """Make `channel` the session's one of `channels`, and close the one that it replaces."""
        with self._opened:
            if session in self._secrets:
                before = channels.get(session)
                channels[session] = channel
            else:  # the session was closed meanwhile
                before = channel
            self._opened.notify_all()
        if before is not None:
            before.close()

    def _admit(self, channel: DataChannel, session: int, secret: str) -> Opener | None:
        """Return who opens a channel, after waiting a few seconds for its secret. None: it shows a wrong one."""
        with self._opened:
            # The controller sends secrets to both ends at the same time, so a peer may connect before its secret
            # arrives here.
            if session == 0:
                seconds = NEWS_SECONDS if self._admitted else OPEN_SECONDS
                if not secret or not self._opened.wait_for(
                    lambda: secret in self._admitted or channel.is_closed, seconds
                ):
                    return None
                self._from_hosts[channel] = secret
                return Opener.HOST
            self._opened.wait_for(lambda: session in self._secrets or channel.is_closed, OPEN_SECONDS)
            expected = self._secrets.get(session, "")
        if not expected:
            return None
        known = {Opener.PROXY: expected, Opener.SCRIPT: script_secret(expected)}
        found = [opener for opener, its in known.items() if hmac.compare_digest(its.encode(), secret.encode())]
        return found[0] if found else None

    def _wake_waiters(self) -> None:
        with self._opened:
            self._opened.notify_all()

    def takes_call(self, session: int, feed: int) -> bool:
        """Return whether a piece with this number answers a call, so that it is not a feed."""
        return bool(session and self.answers is not None and self.answers.takes(feed))

    # ---- sending

    def to_proxy(self, session: int) -> DataChannel:
        """Return the channel to a session's proxy, after waiting up to `OPEN_SECONDS` for it to open.

        Raise StatusError if the proxy opens none, or if the session has ended.
        """
        with self._opened:
            if not self._opened.wait_for(
                lambda: session in self._channels or session not in self._secrets, OPEN_SECONDS
            ):
                text = f"the proxy of session {session} opened no data channel"
                raise failed(Code.DEADLINE_EXCEEDED, text, Details(Kind.LINK))
            channel = self._channels.get(session)
        if channel is None:
            raise StatusError(Code.CANCELLED, f"session {session} has ended")
        return channel

    def to_client(self, session: int) -> DataChannel:
        """Return the shortest channel to the process of a session's client. Raise as `to_proxy` does."""
        proxy = self.to_proxy(session)
        return proxy if self.answers is None else self.answers.channel(session, proxy)

    def send_to_script(self, session: int, feed: int, parts: Sequence[Contents]) -> bool:
        """Send contents on the channel that the client's process has opened itself, and wait until they have arrived.

        Return False without sending anything if there is no such channel, or if a part is so small that its arrival
        would not be confirmed. If the channel ends, notify the session. Raise StatusError if the contents fail.
        """
        channel = self._scripts.get(session)
        if channel is None or self.answers is None or min([part.nbytes for part in parts]) < STREAM_THRESHOLD:
            return False
        try:
            for part in parts:
                channel.send_contents(session, feed, part, more=part is not parts[-1])
        except OSError:
            self.answers.unread(session, feed)
        return True

    def to_host(self, host: int) -> DataChannel:
        """Return the channel to another host's data port, which the first use opens. Raise ConnectError if it fails."""
        return self._hosts.to(host)

    def to_proxy_nowait(self, session: int) -> DataChannel | None:
        """Return the channel to a session's proxy, or None if it is not open. Never waits."""
        return self._channels.get(session)

    def to_client_nowait(self, session: int) -> DataChannel | None:
        """Return the channel of `to_client`, or None if the call of that might wait for the client. Never waits."""
        proxy = self._channels.get(session)
        return proxy if proxy is None or self.answers is None else self.answers.channel_nowait(session, proxy)

    def to_host_nowait(self, host: int) -> DataChannel | None:
        """Return the channel to another host's data port, or None if it is not open. Never waits."""
        return self._hosts.opened(host)

    def can_send_to_host_nowait(self, host: int, nbytes: int) -> bool:
        """Return whether `nbytes` can be sent to the host without waiting. False if it has no open channel."""
        return self._hosts.can_send_nowait(host, nbytes)

    # ---- the end

    def close(self) -> None:
        """Stop accepting connections, and close all channels."""
        self._listener.close()
        self._watch.close()
        self._hosts.close()
        with self._opened:
            sessions = {*self._channels, *self._scripts}
        for session in sessions:
            self.close_session(session)

    def statistics(self) -> DataPortStatistics:
        with self._opened:
            channels = dict(self._channels)
        return DataPortStatistics(
            self.inbox.statistics(), {session: channel.statistics() for session, channel in channels.items()}
        )


class _InboxBudget:
    """The inbox as the budget of one channel's transfers. `session` is 0 for a channel from another host."""

    def __init__(self, port: DataPort, session: int) -> None:
        self._port = port
        self._session = session

    def admit(self, piece: Piece, launch: int, grant: Callable[[], None], refuse: Callable[[Status], None]) -> None:
        if self._port.takes_call(self._session, piece.feed):
            raise FrameError("an answer of a call was announced like a feed, whose bytes may wait")
        also = [feed for feed, _ in group_of(piece)]
        self._port.inbox.admit(
            self._session or piece.session, piece.feed, piece.nbytes, launch, grant, also, piece, refuse
        )

    def withdraw(self, piece: Piece) -> None:
        self._port.inbox.withdraw(self._session or piece.session, piece.feed, piece)
