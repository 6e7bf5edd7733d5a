"""A session with a cluster for any front end: handles, programs, launches, functions, slices and data.

The session assigns all numbers itself, so it never waits for one. It does no I/O: it sends through the interfaces of
`session_interfaces`, and `handle(message)` takes the controller's messages. All methods run on one thread.

Invariant: each wait, compilation and question is answered once, even if the session is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import count
from typing import Any

from msgspec.structs import replace

from atoll.cluster.slice_requests import SliceRequest
from atoll.errors import Code, Kind, Status, StatusError, not_found
from atoll.host_services.calls.call_messages import ReadWanted
from atoll.ir.program import Program
from atoll.ir.types import ArraySpec
from atoll.protocol import messages as m
from atoll.protocol.questions import DevicesAway
from atoll.session.call_recorder import CallRecorder
from atoll.session.controller_lease import ControllerLease
from atoll.session.downloads import DirectDownload, Download, Downloads
from atoll.session.host_availability import HostAvailability
from atoll.session.outgoing_messages import LaunchWindow, OutgoingMessages
from atoll.session.registered_programs import RegisteredPrograms, SessionProgramCache
from atoll.session.session_functions import SessionFunctions
from atoll.session.session_interfaces import CallbackHandler, HostAccess, OpenChannels, ReplyFuture, Unreached

_log = logging.getLogger(__name__)

# Time to reach the data port of a restarted host. Contents for the host do not wait longer.
DIAL_SECONDS = 30.0


class ClusterSession:
    """An open session.

    `open_channels` is called once and returns the session's data channels. `make_future` creates futures of the
    session's event loop. New handles count up from `first_handle`. Pings renew the `lease`, and `close` ends it.

    `on_lost(status)` is called once if the session ends without a call of `close`, and `on_hosts_lost()` each time that
    hosts are lost. A front end calls `set_handlers`.
    """

    def __init__(
        self,
        welcome: m.Welcome,
        outgoing: OutgoingMessages,
        open_channels: OpenChannels,
        make_future: Callable[[], ReplyFuture],
        first_handle: int = 1,
        on_lost: Callable[[Status], None] = lambda status: None,
        on_hosts_lost: Callable[[], None] = lambda: None,
        lease: ControllerLease | None = None,
    ) -> None:
        self.welcome = welcome
        self.send = outgoing.send
        self.make_future = make_future
        self.window = LaunchWindow(welcome.launch_window)
        self.lost: Status | None = None  # the reason why the session is over
        self._on_lost = on_lost
        self._on_hosts_lost = on_hosts_lost
        self._before_loss: Callable[[], None] = lambda: None
        self._on_quiesced: Callable[[], None] = lambda: None
        self._on_recording: Callable[[bool], None] = lambda is_recording: None
        self._held: Callable[[], dict[int, bool] | None] = lambda: None
        self._lease = lease
        self.recorder = CallRecorder(lambda is_recording: self._on_recording(is_recording))
        self._outgoing = outgoing
        self.downloads = Downloads()
        self._channels = open_channels(self.downloads.take, self.fail, self.downloads.any)
        self._functions = SessionFunctions()
        self._hosts = {device.id: device.host for device in welcome.devices}  # by virtual device
        self._registered = RegisteredPrograms(self.send, self.number, self.mint, self._hosts.keys())
        self.programs = SessionProgramCache(self._registered.register, self._registered.release)
        self._away = HostAvailability(self.send)
        self._waits: dict[int, Callable[[Status], None]] = {}
        self._replies: dict[int, ReplyFuture] = {}
        self._quiesce_depth = 0  # calls of `_quiesce` without a `_resume`
        self._resumed: list[ReplyFuture] = []
        self._unsent: set[int] = set()  # feeds of launches whose bytes the client has not sent yet
        self._numbers, self._handles = count(2), count(first_handle)
        self._closed = False

    def set_handlers(
        self,
        on_lost: Callable[[Status], None],
        on_quiesced: Callable[[], None] = lambda: None,
        held: Callable[[], dict[int, bool] | None] = lambda: None,
        on_recording: Callable[[bool], None] = lambda is_recording: None,
    ) -> None:
        """Hand the session over to a front end, as asyncio's transports do with a new protocol.

        Args:
            on_lost: Replaces the handler that the session was opened with.
            on_quiesced: Called when `is_quiesced` changes. While it is true, hold the client's requests back.
            held: Returns the contents of `m.HandlesReported`.
            on_recording: Called when a recording starts and when it ends. Meanwhile, report calls to `recorder`.
        """
        self._on_lost, self._on_quiesced, self._held = on_lost, on_quiesced, held
        self._on_recording = on_recording

    # ---- the end

    def call_before_loss(self, then: Callable[[], None]) -> None:
        """Call `then` if the session is lost, before its client gets errors. It must not block for long."""
        self._before_loss = then

    def close(self) -> None:
        """End the session. The cluster frees everything that the session owned."""
        self._closed = True
        if self._lease is not None:
            self._lease.end()
        self._outgoing.close()
        self._channels.close()

    @property
    def has_left(self) -> bool:
        """Whether the controller knows that the session has ended, or cannot be reached."""
        return self._outgoing.is_closed

    def connection_lost(self, reason: str) -> None:
        """End the session, because its control connection has ended."""
        self.fail(Status(Code.UNAVAILABLE, f"the Atoll controller is gone: {reason}"))

    def fail(self, status: Status) -> None:
        """End the session with an error, for which its client is not to blame."""
        if self._closed:
            return
        self.close()
        self._before_loss()
        details = status.details
        if details.kind in (Kind.OTHER, Kind.LINK):  # otherwise the details say why the session ended
            status = status.with_details(replace(details, kind=Kind.SESSION, retriable=False))
        self.lost = status
        replies, self._replies = self._replies, {}
        for future in replies.values():
            if not future.done():
                future.set_result(m.QueryReply(0, status, b""))
        waits, self._waits = self._waits, {}
        for then in waits.values():
            then(status)
        self.downloads.fail_all(status)
        self._wake_resumed()
        self._on_lost(status)

    # ---- numbers and handles

    def number(self) -> int:
        """Return a new number for a program, a function, a feed, a wait or a question."""
        return next(self._numbers)

    def mint(self) -> int:
        """Return a new handle."""
        return next(self._handles)

    def feed(self) -> int:
        """Return a new number for a feed of a launch, which `upload` or `upload_file` will send."""
        feed = next(self._numbers)
        self._unsent.add(feed)
        return feed

    # ---- programs and launches

    def register_program(self, program: Program) -> int:
        """Register a program; return its number. Raise INVALID_ARGUMENT if it is invalid or cannot be split."""
        return self._registered.register(program)

    def release_program(self, program: int) -> None:
        """Release a registered program, which no later launch uses."""
        self._registered.release(program)

    def credits(self, program: int) -> int:
        """Return the credits that a launch of the program takes."""
        return self._registered.credits(program)

    def launch(
        self,
        program: int,
        arguments: Sequence[int],
        results: Sequence[int],
        feeds: Sequence[int] = (),
        traceback_id: int = 0,
        contents: bytes | None = None,
        wait: int = 0,
    ) -> None:
        """Launch a registered program. The handles `results` can be used immediately.

        `traceback_id` is the client's number for the stack of its request. `contents` are those of the only feed, which
        is then not uploaded: see `Welcome.most_carried`. `wait` is a number of `expect`, for a program without control
        flow.
        """
        if program in self._registered:
            assert not wait
            return self._registered.launch(program, arguments, results, traceback_id, self.launch)
        credits = self._registered.credits(program)
        self.window.take(credits)
        self._outgoing.launch(program, arguments, results, feeds, traceback_id, credits, contents, wait)

    def release(self, handles: Sequence[int], *, delete: bool = False) -> None:
        """Release handles of the client. With `delete`, delete their buffers, so that no later launch can use them."""
        self._outgoing.release(handles, delete)

    def wait(self, handles: Sequence[int], then: Callable[[Status], None]) -> None:
        """Call `then` when all of these handles are ready, or with their first error."""
        if self.lost is not None:
            then(self.lost)
            return
        number = self.number()
        if len(handles) > m.MAX_HANDLES:
            then = partial(self._wait_for_more, handles[m.MAX_HANDLES :], then)
        self._waits[number] = then
        self.send(m.Await(number, tuple(handles[: m.MAX_HANDLES])))

    def _wait_for_more(self, handles: Sequence[int], then: Callable[[Status], None], status: Status) -> None:
        """Wait for the handles that did not fit into the first message, unless an earlier handle has failed."""
        if status.ok:
            self.wait(handles, then)
        else:
            then(status)

    # ---- compiled functions

    async def register_function(
        self, source: bytes, content: str, assignment: tuple[tuple[int, ...], ...], runs_apart: bool = False
    ) -> tuple[int, bytes]:
        """Compile `source`, whose hash is `content`, for virtual devices by [replica][partition].

        With `runs_apart`, its parts on different islands do not communicate.
        Return the function's number and its `FunctionInfo`. Raise StatusError.
        """
        while self._quiesce_depth and self.lost is None:
            self._resumed.append(self.make_future())
            await self._resumed[-1]
        function, feed = self.number(), self.number()
        devices = [device for partitions in assignment for device in partitions]
        hosts = self.hosts_of(devices)
        source = self._functions.add(function, source, content, devices)
        self._channels.upload(hosts, feed, [source])
        ready = await self.ask(function, m.RegisterFunction(function, content, feed, assignment, runs_apart))
        if not ready.status.ok:
            self._functions.remove(function)
        ready.status.raise_if_error()
        return function, ready.info

    def source(self, function: int) -> bytes:
        """Return the source with which a function was registered. Raise NOT_FOUND."""
        source = self._functions.source(function)
        if source is None:
            raise not_found(f"function {function} does not exist in this session")
        return source

    def retain_functions(self, functions: Sequence[int]) -> None:
        """Count one more executable that uses these functions."""
        self._functions.retain(functions)

    def drop_functions(self, functions: Sequence[int]) -> None:
        """Count one executable less that uses these functions. Release the functions that no executable uses."""
        for function in self._functions.drop(functions):
            self._functions.remove(function)
            self.send(m.ReleaseFunction(function))

    def _recompile(self, function: int, hosts: Sequence[int]) -> None:
        source = self._functions.source(function)
        if source is not None:
            feed = self.number()
            self._channels.upload(hosts, feed, [source])
            self.send(m.Recompile(function, feed))

    # ---- questions

    async def inquire(self, what: m.QueryKind, device: int, function: int = -1, payload: bytes = b"") -> bytes:
        """Send a query to the worker that holds `device` and return the answer. Raise StatusError."""
        number = self.number()
        reply = await self.ask(number, m.Query(number, what, device, function, payload))
        reply.status.raise_if_error()
        return bytes(reply.payload)

    def ask(self, number: int, message: Any) -> ReplyFuture:
        """Send a message with a new number. Return the future of the reply with this number."""
        future = self.make_future()
        if self.lost is not None:
            future.set_result(m.QueryReply(0, self.lost, b""))
            return future
        self._replies[number] = future
        self.send(message)
        return future

    def _answer(self, number: int, message: Any) -> None:
        future = self._replies.pop(number, None)
        if future is not None and not future.done():
            future.set_result(message)

    # ---- slices and migrations

    def add_slice(self, slice_request: SliceRequest) -> Coroutine[Any, Any, m.SliceAdded]:
        """Request a slice immediately, and quiesce the session until the reply. The coroutine raises StatusError."""
        number = self.number()
        self._quiesce()
        return self._slice_added(self.ask(number, m.AddSlice(number, slice_request)))

    async def _slice_added(self, reply: ReplyFuture) -> m.SliceAdded:
        try:
            added = await reply
        finally:
            self._resume()
        added.status.raise_if_error()
        assert isinstance(added, m.SliceAdded)
        return added

    @property
    def is_quiesced(self) -> bool:
        """Whether virtual devices may be moving, so that the client's requests must not be sent."""
        return self._quiesce_depth > 0

    def _quiesce(self) -> None:
        self._quiesce_depth += 1
        if self._quiesce_depth == 1:
            self._on_quiesced()

    def _resume(self) -> None:
        self._quiesce_depth -= 1
        if not self._quiesce_depth:
            self._wake_resumed()
            self._on_quiesced()

    def _wake_resumed(self) -> None:
        resumed, self._resumed = self._resumed, []
        for future in resumed:
            if not future.done():
                future.set_result(None)

    # ---- published arrays

    def publish(
        self,
        name: str,
        keep: int,
        handles: Sequence[int],
        paths: Sequence[str],
        structure: bytes,
        replicas: int,
        on_disk: bool,
    ) -> Coroutine[Any, Any, int]:
        """Publish arrays, whose handles belong to the controller from now on.

        The coroutine returns the number of the version, or raises StatusError.
        """
        number = self.number()
        message = m.Publish(number, name, keep, tuple(handles), tuple(paths), structure, replicas, on_disk)
        return _published(self.ask(number, message))

    async def open_version(
        self, name: str, version: int, newer_than: int, seconds: float, in_files: bool = False
    ) -> m.VersionOpened:
        """Open a version of published arrays, or wait for its files: see `m.OpenVersion`. Raise StatusError."""
        number = self.number()
        reply = await self.ask(number, m.OpenVersion(number, name, version, newer_than, seconds, in_files))
        reply.status.raise_if_error()
        assert isinstance(reply, m.VersionOpened)
        return reply

    def read_version(
        self,
        reader: int,
        targets: Sequence[ArraySpec],
        results: Sequence[int],
        first: int = 0,
        is_original: bool = False,
    ) -> None:
        """Make arrays of an open version from number `first` on, with these types and handles: see `m.ReadVersion`."""
        for start in range(0, len(targets), m.MAX_READ):
            part = slice(start, start + m.MAX_READ)
            self.send(m.ReadVersion(reader, first + start, tuple(targets[part]), tuple(results[part]), is_original))

    # ---- data

    def hosts_of(self, devices: Sequence[int]) -> list[int]:
        """Return the hosts of virtual devices. Raise INVALID_ARGUMENT for a device that does not exist."""
        hosts = set()
        for device in devices:
            host = self._hosts.get(device)
            if host is None:
                raise StatusError(Code.INVALID_ARGUMENT, f"device {device} does not exist")
            hosts.add(host)
        return sorted(hosts)

    def devices_of(self, host: int) -> list[int]:
        """Return the virtual devices on a host."""
        return [device for device, its in self._hosts.items() if its == host]

    def upload(self, hosts: Sequence[int], feed: int, contents: Sequence[Any], launch: int = 0) -> None:
        """Send buffers as one feed. The buffers must not change afterwards.

        `launch` is a number that counts up and that all feeds of a launch share, or 0 if the feed is for no launch.
        """
        self._unsent.discard(feed)
        self._channels.upload(hosts, feed, contents, launch)

    def upload_file(self, hosts: Sequence[int], feed: int, nbytes: int, descriptor: int, launch: int = 0) -> None:
        """Send the first `nbytes` of a file as one feed, and close the descriptor."""
        self._unsent.discard(feed)
        self._channels.upload_file(hosts, feed, nbytes, descriptor, launch)

    def expect(self, *downloads: Download | DirectDownload) -> int:
        """Expect downloads that the next launch sends. Return a number to pass to `launch`, which awaits its results.

        The downloads fail with the launch. If it succeeds, the hosts have sent everything. In both cases the results,
        which are the completions of the downloads, are released.
        """
        for download in downloads:
            self.downloads.expect(download)
        if self.lost is not None:
            self._sent(downloads, self.lost)
            return 0
        number = self.number()
        self._waits[number] = partial(self._sent, downloads)
        return number

    def read_directly(self, device: int, wanted: ReadWanted) -> bool:
        """Request the contents of a small array from the host of `device`, which has it whole.

        The host sends them to the client's process, or notifies `CallbackHandler` with `Unread`. Return False
        if the host is on another machine or cannot be asked without waiting.
        """
        (host,) = self.hosts_of((device,))
        return self._channels.read_directly(host, wanted)

    def _sent(self, downloads: Sequence[Download | DirectDownload], status: Status) -> None:
        for each in downloads:
            if not status.ok:
                self.downloads.fail(each, status)
                continue
            hosts = self.hosts_of(each.devices)
            if isinstance(each, DirectDownload) and each.may_bypass and all(map(self._channels.is_local, hosts)):
                self.downloads.end(each.feed)
            else:
                self.downloads.sent(each, hosts)

    # ---- calls into the client's Python

    def set_callback_handler(self, handler: CallbackHandler) -> None:
        """Pass what hosts send to the client's process to `handler`, which answers each call by `answer`."""
        self._channels.set_callback_handler(handler)

    @property
    def local_hosts(self) -> list[int]:
        """The hosts that are on this machine and have a channel."""
        return [host for host in sorted(set(self._hosts.values())) if self._channels.is_local(host)]

    @property
    def far_hosts(self) -> dict[int, HostAccess]:
        """The hosts on other machines that have a channel, with how the client's process can reach them."""
        found = {host: self._channels.access(host) for host in sorted(set(self._hosts.values()))}
        return {host: access for host, access in found.items() if access is not None}

    def received_by_client(self, feed: int) -> None:
        """Note that the client has contents that bypass the proxy, or knows that it does not get them."""
        self.downloads.end(feed)

    def sent_by_client(self, feed: int) -> None:
        """Note that the client itself has sent a feed of `feed()` to its host."""
        self._unsent.discard(feed)

    def answer(self, feed: int, contents: Sequence[Any]) -> None:
        """Send the answer to a call. Thread-safe. Waits while the host does not read."""
        self._channels.answer(feed, contents)

    # ---- hosts

    def connect(self, then: Callable[[Unreached], None]) -> None:
        """Open the data channels to all hosts in the welcome. Call `then` after all attempts."""
        self._channels.connect(self.welcome.hosts, then)

    @property
    def losses(self) -> int:
        """The number of islands that the session has lost so far."""
        return self._away.losses

    def devices_away(self, leaves: bool = False) -> DevicesAway:
        """Return the devices that are lost or about to be lost. `leaves`: the client itself stops using the latter."""
        return self._away.devices(self._hosts, leaves)

    def _hosts_failed(self, hosts: tuple[int, ...]) -> None:
        """Close the channels to failed hosts and acknowledge the failure, for which the controller waits."""
        self._away.hosts_failed(hosts)
        again = self._channels.disconnect(hosts)[-m.MAX_FEEDS_NAMED :]
        self.downloads.hosts_failed(hosts)
        unsent = sorted(self._unsent)[: m.MAX_FEEDS_NAMED]
        self.send(m.FailureAcknowledged(hosts, tuple(again), tuple(unsent)))
        self._on_hosts_lost()

    def _hosts_restarted(self, addresses: tuple[tuple[int, str], ...]) -> None:
        """Connect to restarted hosts, which hold nothing of this session, and recompile the functions that run there.

        If a host cannot be reached, the session is lost.
        """
        restarted = {host for host, _ in addresses}
        self._away.restarted(restarted)

        def connected(unreached: Unreached) -> None:
            if self._closed:
                return
            for host, error in unreached.items():
                text = f"host {host} has restarted, but its data port was unreachable for {DIAL_SECONDS:.0f} s: {error}"
                return self.fail(Status(Code.UNAVAILABLE, text))
            for function, devices in self._functions.devices():
                hosts = self.hosts_of(devices)
                if restarted.intersection(hosts) and self._away.failed.isdisjoint(hosts):
                    self._recompile(function, hosts)

        self._channels.connect(addresses, connected, DIAL_SECONDS)

    # ---- messages

    def handle(self, message: Any) -> None:
        """Handle a message of the controller."""
        match message:
            case m.Ping(lease=lease, seconds=seconds):
                self.send(m.Pong(seconds, self.recorder.now()))
                if self._lease is not None:
                    self._lease.renew(lease)
            case m.CreditReturned(launches=credits):
                self.window.give_back(credits)
                if self.window.in_flight <= 0:
                    self._channels.forget_uploads()
            case m.Awaited(wait=wait, status=status):
                then = self._waits.pop(wait, None)
                if then is not None:
                    then(status)
            case m.FunctionReady(function=number) | m.QueryReply(query=number):
                self._answer(number, message)
            case m.RecordCalls() | m.SendCalls():
                self.recorder.handle(message, self.send)
            case m.Published(request=request) | m.VersionOpened(request=request):
                self._answer(request, message)
            case m.SliceAdded(request=request):
                self._hosts.update(message.hosts)
                self._answer(request, message)
            case m.HostsFailed(hosts=hosts):
                self._hosts_failed(hosts)
            case m.HostsLeave(hosts=hosts, stay=stay):
                self._away.leave(hosts, stay)
            case m.HostsRestarted(hosts=addresses):
                self._hosts_restarted(addresses)
            case m.Quiesce(migration):
                self._quiesce()
                self.send(m.Quiesced(migration))
            case m.SendSources(functions=functions):
                for function, hosts in functions:
                    self._recompile(function, hosts)
            case m.Migrated(hosts=hosts):
                self._hosts.update(hosts)
                self._resume()
            case m.ReportHandles(check=check):
                held = self._held()
                is_short = held is not None and len(held) <= m.MAX_HANDLES_REPORTED
                self.send(m.HandlesReported(check, held if is_short else None))
            case m.Late(text=text):
                _log.warning("%s", text)
            case m.Closing(status=status):
                self.fail(status)


async def _published(reply: ReplyFuture) -> int:
    published = await reply
    published.status.raise_if_error()
    version: int = published.version
    return version
