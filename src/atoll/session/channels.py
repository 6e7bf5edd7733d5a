"""The data channels of a session to the workers of all hosts, across restarts of the hosts.

Contents for a host without a channel wait until it has one. Unless a comment says otherwise, methods run on the event
loop's thread; other threads report to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from msgspec.structs import replace

from atoll.cluster.processes.bugs import start_in
from atoll.errors import AtollError, Code, ConnectError, Status
from atoll.host_services.calls.call_messages import (
    NO_CLIENT,
    ReadWanted,
    encode,
    first_call,
    host_of,
    is_call,
    is_notice,
)
from atoll.protocol.number_ranges import SCRIPT_FEEDS
from atoll.protocol.script_secrets import script_secret
from atoll.retries import Retry
from atoll.session.sent_uploads import SentUploads, Upload
from atoll.session.session_interfaces import CallbackHandler, HostAccess, OnBroken, OnFeed, Unreached
from atoll.transfers.channel import DataChannel
from atoll.transfers.liveness import SILENCE_SECONDS
from atoll.transfers.piece_contents import BufferContents, FileContents, as_views
from atoll.transfers.transfer_engine import Piece, nothing_to_release
from atoll.wire.address import Address, parse_address
from atoll.wire.tls.identity import Identity

# The loop's thread writes contents up to this size to the socket. The socket's buffer holds many of them.
_DIRECT_BYTES = 16 * 1024
# The controller reports a failed host within this time after its channel broke. Otherwise only the channel broke.
_REPORT_SECONDS = 3.0
_DIALS = 32  # concurrent attempts to connect
_RETRY_SECONDS = 0.1
_LOOK_SECONDS = 1.0


class Channels:
    """The `DataChannels` of `session` over sockets, one per host.

    If a channel breaks and the controller does not report the loss of the host, the session is over:
    `on_broken(status)` is called. While the controller `may_miss_losses()`, because the session is cut off from it or
    it has just continued after another one, the channels wait. After that, they give the controller time to detect the
    loss, since a host may be lost together with the previous controller. During a transfer a host may be silent for
    `lease` seconds. `awaits()` returns whether contents are awaited of any host.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        session: int,
        secret: str,
        controller: Address,
        *,
        on_feed: OnFeed,
        on_broken: OnBroken,
        awaits: Callable[[], bool],
        identity: Identity | None = None,
        lease: float = SILENCE_SECONDS,
        may_miss_losses: Callable[[], bool] = lambda: False,
    ) -> None:
        self._identity = identity
        self._may_miss_losses = may_miss_losses
        self._lease = lease
        self._loop = loop
        self._session = session
        self._secret = secret
        self._controller = controller
        self._on_feed = on_feed
        self._on_broken = on_broken
        self._handler: CallbackHandler | None = None
        self._awaits = awaits
        self._looking = loop.call_later(_LOOK_SECONDS, self._look)
        self._open: dict[int, DataChannel] = {}
        self._addresses: dict[int, str] = {}  # of the hosts' data ports
        self._absent: dict[int, dict[int, Upload]] = {}  # waiting uploads by host and feed
        self._sent = SentUploads()
        self._unexplained: dict[int, asyncio.TimerHandle] = {}  # broken channels by host, until its loss is reported
        self._dials: dict[int, object] = {}  # the latest attempt to connect by host, unless the host failed meanwhile
        self._senders = ThreadPoolExecutor(2, "atoll-upload")
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def set_callback_handler(self, handler: CallbackHandler) -> None:
        self._handler = handler

    # ---- opening and closing

    def connect(
        self, hosts: Sequence[tuple[int, str]], then: Callable[[Unreached], None], patience: float = 0.0
    ) -> None:
        """Connect to all hosts concurrently. Send the waiting uploads to each host when it is reached."""
        self._addresses.update(hosts)
        task = self._loop.create_task(self._connect(hosts, then, patience))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(
        self, hosts: Sequence[tuple[int, str]], then: Callable[[Unreached], None], patience: float
    ) -> None:
        unreached: dict[int, ConnectError] = {}
        dialers = ThreadPoolExecutor(max(1, min(_DIALS, len(hosts))), "atoll-dial")

        async def connect(host: int, address: str) -> None:
            dialed = self._dials[host] = object()

            def is_wanted() -> bool:
                return not self._closed and self._dials.get(host) is dialed

            retry = Retry(_RETRY_SECONDS, patience=patience)
            outcome = await self._loop.run_in_executor(dialers, self._dial, address)
            while isinstance(outcome, ConnectError) and is_wanted() and not retry.is_over:
                await asyncio.sleep(retry.next_pause())
                outcome = await self._loop.run_in_executor(dialers, self._dial, address)
            if isinstance(outcome, ConnectError):
                if is_wanted():
                    unreached[host] = outcome
            elif is_wanted():
                self._opened(host, outcome)
            else:
                outcome.close()

        try:
            await asyncio.gather(*(connect(host, address) for host, address in hosts))
        finally:
            dialers.shutdown(wait=False)
        then(unreached)

    def _dial(self, address: str) -> DataChannel | ConnectError:
        """Open a channel. Runs on any thread."""
        try:
            where = _reachable(address, self._controller)
            channel = DataChannel.connect(where, self._session, self._secret, self._identity, awaits=self._awaits)
        except ConnectError as error:
            return error
        except (AtollError, OSError) as error:
            return ConnectError(f"the data port at {address} cannot be opened: {error}")
        if channel.liveness is not None:
            channel.liveness.patience = self._lease
        return channel

    def _look(self) -> None:
        """Watch all hosts for silence while contents are awaited: a host that cannot send them does not report it."""
        self._looking = self._loop.call_later(_LOOK_SECONDS, self._look)
        if self._awaits():
            for channel in self._open.values():
                if channel.liveness is not None:
                    channel.liveness.watch()

    def _opened(self, host: int, channel: DataChannel) -> None:
        self._open[host] = channel
        self._explain(host)
        threading.Thread(target=self._receive, args=(host, channel), name="atoll-download", daemon=True).start()
        for feed, upload in self._absent.pop(host, {}).items():
            self._send(host, channel, feed, upload)
        if self._handler is not None:
            self._handler.host_opened(host, channel.is_local)

    def disconnect(self, hosts: Iterable[int]) -> list[tuple[int, int]]:
        again = []
        for host in hosts:
            self._dials.pop(host, None)
            self._explain(host)
            channel = self._open.pop(host, None)
            if channel is not None:
                channel.close()
                self._calls_lost(host, channel)
            uploads = self._absent[host] = self._sent.of_host(host) | self._absent.get(host, {})
            again += [(host, feed) for feed, upload in uploads.items() if upload.contents.launch]
        return again

    def forget_uploads(self) -> None:
        self._sent.clear()

    def close(self) -> None:
        self._closed = True
        self._looking.cancel()
        for channel in self._open.values():
            channel.close()
        self._open.clear()
        self._absent.clear()
        self._sent.clear()
        self._senders.shutdown(wait=False, cancel_futures=True)

    # ---- sending

    def upload(self, hosts: Sequence[int], feed: int, contents: Sequence[Any], launch: int = 0) -> None:
        upload = Upload(BufferContents(as_views(contents), launch), None)
        for host in hosts:
            self._upload(host, feed, upload)

    def upload_file(self, hosts: Sequence[int], feed: int, nbytes: int, descriptor: int, launch: int = 0) -> None:
        for host in hosts:
            file = _File(os.dup(descriptor))
            self._upload(host, feed, Upload(FileContents(nbytes, file.descriptor, launch), file))
        os.close(descriptor)

    def _upload(self, host: int, feed: int, upload: Upload) -> None:
        if upload.contents.launch:
            self._sent.add(host, feed, upload)
        channel = self._open.get(host)
        if channel is None:
            self._absent.setdefault(host, {})[feed] = upload
        else:
            self._send(host, channel, feed, upload)

    def _start(self, host: int, feed: int, upload: Upload, channel: DataChannel) -> None:
        """Start to send, on any thread, without waiting until the host can receive."""

        def on_end(error: BaseException | None, upload: Upload = upload) -> None:
            if error is None:
                if upload.contents.launch and self._sent.is_large(upload.contents.nbytes):
                    self._on_loop(self._sent.landed, host, feed)
            elif isinstance(error, OSError):
                self._on_loop(self._break, host, channel, f"bulk data cannot be sent to host {host}: {error}")

        channel.start(self._session, feed, upload.contents, on_end)

    def _send(self, host: int, channel: DataChannel, feed: int, upload: Upload) -> None:
        """Send a small upload immediately, and others on a thread, since the loop must not wait for a host."""
        send = partial(self._start, host, feed, upload)
        is_small = upload.file is None and upload.contents.nbytes <= _DIRECT_BYTES
        if is_small and channel.can_send_nowait(_DIRECT_BYTES):
            self._try(host, channel, send)
        else:
            start_in(self._senders, self._try, host, channel, send)

    def is_local(self, host: int) -> bool:
        channel = self._open.get(host)
        return channel is not None and channel.is_local

    def access(self, host: int) -> HostAccess | None:
        channel = self._open.get(host)
        if channel is None or channel.is_local:
            return None
        return HostAccess(
            str(_reachable(self._addresses[host], self._controller)),
            self._session,
            script_secret(self._secret),
            self._lease,
            None if self._identity is None else self._identity.certificate,
        )

    def read_directly(self, host: int, wanted: ReadWanted) -> bool:
        channel = self._open.get(host)
        if channel is None or not (channel.is_local and channel.takes_reads and channel.can_send_nowait(_DIRECT_BYTES)):
            return False
        notice = encode(wanted)
        self._try(host, channel, lambda channel: channel.send(self._session, first_call(host), notice))
        return True

    # ---- methods for any thread

    def _try(self, host: int, channel: DataChannel, send: Callable[[DataChannel], None]) -> None:
        try:
            send(channel)
        except (OSError, AtollError) as error:
            self._on_loop(self._break, host, channel, f"bulk data cannot be sent to host {host}: {error}")

    def answer(self, feed: int, contents: Sequence[Any]) -> None:
        channel = self._open.get(host_of(feed))
        if channel is not None:
            self._try(host_of(feed), channel, lambda channel: channel.send(self._session, feed, contents))

    def _receive(self, host: int, channel: DataChannel) -> None:
        def on_piece(piece: Piece, content: Any, done: Callable[[], None]) -> None:
            if is_call(piece.feed):  # the device waits, so bypass the loop, which may be busy
                if self._handler is None:  # the client has announced callables, but it has not asked for their calls
                    done()
                    if not is_notice(piece.feed):
                        self.answer(piece.feed, NO_CLIENT)
                else:
                    self._handler.call(piece.feed, content, done)
                return
            if piece.feed in SCRIPT_FEEDS:
                if self._handler is None:
                    done()
                else:
                    self._handler.forward(piece.feed, content, piece.more, done)
                if not piece.more:  # the session's downloads await it
                    self._on_loop(self._on_feed, piece.feed, b"", False, nothing_to_release)
                return
            self._on_loop(self._on_feed, piece.feed, content, piece.more, done)

        def on_socket(sock: socket.socket, _: int) -> None:
            with sock:
                if self._handler is not None:
                    self._handler.pass_socket(sock, host)

        try:
            channel.receive(on_piece, on_socket=on_socket)
            reason = "it closed the connection"
        except (AtollError, OSError) as error:
            reason = str(error)
        self._on_loop(self._break, host, channel, f"the data port of host {host} is gone: {reason}")

    def _on_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call, *arguments)

    # ---- broken channels

    def _break(self, host: int, channel: DataChannel, reason: str) -> None:
        if self._closed or self._open.get(host) is not channel:
            return
        del self._open[host]
        channel.close()
        self._calls_lost(host, channel)
        self._await_report(host, reason, _REPORT_SECONDS)

    def _calls_lost(self, host: int, channel: DataChannel) -> None:
        if self._handler is not None:
            self._handler.host_lost(host, channel.is_local)

    def _explain(self, host: int) -> None:
        """Forget the broken channel of a host, since its loss or restart is known."""
        timer = self._unexplained.pop(host, None)
        if timer is not None:
            timer.cancel()

    def _await_report(self, host: int, reason: str, seconds: float, may_be_missed: bool = False) -> None:
        arguments = host, reason, may_be_missed
        self._unexplained[host] = self._loop.call_later(seconds, self._channel_broken, *arguments)

    def _channel_broken(self, host: int, reason: str, may_be_missed: bool) -> None:
        del self._unexplained[host]
        if self._closed:
            return
        if self._may_miss_losses():
            self._await_report(host, reason, _LOOK_SECONDS, True)
        elif may_be_missed:  # the controller needs time to detect the host's silence
            self._await_report(host, reason, self._lease + _REPORT_SECONDS)
        else:
            self._on_broken(Status(Code.UNAVAILABLE, reason))


class _File:
    """A descriptor that is closed with its last reference, since an upload that waits for a host may never be sent."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def _reachable(data_address: str, controller: Address) -> Address:
    """Return a data port's address for this process. A port that listens everywhere is on the controller's machine."""
    address = parse_address(data_address)
    return replace(address, host=controller.host) if address.is_everywhere else address
