"""A session with a cluster, as any front end uses it: handles, programs, launches, functions, slices, data.

The session numbers everything itself, so that it waits for no number. It does no I/O: it sends over the seams of
`connection`, and `handle(message)` takes what the controller sends. All methods run on one thread.

Invariant: each wait, compilation and question is answered once, also where the session is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import count
from typing import Any

from atoll.cluster.slice_requests import SliceRequest
from atoll.errors import Code, Status, StatusError, not_found
from atoll.protocol import messages as m
from atoll.protocol.questions import DevicesAway
from atoll.session.call_recorder import CallRecorder
from atoll.session.controller_lease import ControllerLease
from atoll.session.downloads import Downloads
from atoll.session.host_availability import HostAvailability
from atoll.session.outgoing_messages import Outgoing
from atoll.session.registered_programs import ProgramCache
from atoll.session.session_functions import SessionFunctions
from atoll.session.session_interfaces import (
    CallbackHandler,
    DataChannels,
    OnBroken,
    OnFeed,
    ReplyFuture,
    Unreached,
)
from atoll.session.split_programs import SplitPrograms
from atoll.session.window import LaunchWindow

_log = logging.getLogger(__name__)

# For the data port of a host that is back to be reached: what waits for the host waits no longer.
DIAL_SECONDS = 30.0


class ClusterSession:
    """An open session.

    `open_channels` is called once, for the session's data channels; `make_future` makes futures of the loop on which
    the session runs. Handles that the session mints count up from `first_handle`.

    A front end may set: `on_lost(status)`, called once when the session ends without a call of `close`;
    `on_hosts_lost()`; `held()`, what `m.HandlesReported` says; `on_quiesce()` and `on_resume()`, between which it must
    not let its client send anything.
    """

    def __init__(
        self,
        welcome: m.Welcome,
        outgoing: Outgoing,
        open_channels: Callable[[OnFeed, OnBroken], DataChannels],
        make_future: Callable[[], ReplyFuture],
        first_handle: int = 1,
    ) -> None:
        self.welcome = welcome
        self.send = outgoing.send
        self.make_future = make_future
        self.window = LaunchWindow(welcome.launch_window)
        self.lost: Status | None = None  # why the session is over
        self.on_lost: Callable[[Status], None] = lambda status: None
        self.on_hosts_lost: Callable[[], None] = lambda: None
        self.on_quiesce: Callable[[], None] = lambda: None
        self.on_resume: Callable[[], None] = lambda: None
        self.held: Callable[[], dict[int, bool] | None] = lambda: None
        self.lease: ControllerLease | None = None
        self.recorder = CallRecorder()
        self._outgoing = outgoing
        self.downloads = Downloads()
        self._channels = open_channels(self.downloads.take, self._lose)
        self._channels.awaits = self.downloads.any
        self._functions = SessionFunctions()
        self._hosts = {device.id: device.host for device in welcome.devices}  # by virtual device
        self._split = split = SplitPrograms(self.send, self.number, self.mint, self._hosts.keys())
        self.register_program, self.release_program, self.credits = split.register, split.release, split.credits
        self.programs = ProgramCache(split.register, split.release)
        self._away = HostAvailability(self.send)
        self._waits: dict[int, Callable[[Status], None]] = {}
        self._replies: dict[int, ReplyFuture] = {}
        self._quiesced = 0  # by so many: each ends with a `_resume`
        self._resumed: list[ReplyFuture] = []
        self._unsent: set[int] = set()  # feeds of launches whose bytes the client has yet to send
        self._numbers, self._handles = count(2), count(first_handle)
        self._closed = False

    # ---- the end

    def close(self) -> None:
        """Ends the session. The cluster frees all that it owned."""
        self._closed = True
        if self.lease is not None:
            self.lease.end()
        self._outgoing.close()
        self._channels.close()

    def connection_lost(self, reason: str) -> None:
        """The control connection has ended."""
        self._lose(Status(Code.UNAVAILABLE, f"the Atoll controller is gone: {reason}"))

    def _lose(self, status: Status) -> None:
        if self._closed:
            return
        self.close()
        self.lost = status
        replies, self._replies = self._replies, {}
        for future in replies.values():
            if not future.done():
                future.set_result(m.QueryReply(0, status, b""))
        waits, self._waits = self._waits, {}
        for then in waits.values():
            then(status)
        self._wake_resumed()
        self.on_lost(status)

    # ---- numbers and handles

    def number(self) -> int:
        """A fresh number, for a program, a function, a feed, a wait or a question."""
        return next(self._numbers)

    def mint(self) -> int:
        """A fresh handle."""
        return next(self._handles)

    def feed(self) -> int:
        """Return a fresh number for a feed of a launch, which `upload` or `upload_file` sends sooner or later."""
        feed = next(self._numbers)
        self._unsent.add(feed)
        return feed

    # ---- programs and launches

    def launch(
        self,
        program: int,
        arguments: Sequence[int],
        results: Sequence[int],
        feeds: Sequence[int] = (),
        traceback_id: int = 0,
    ) -> None:
        """Runs a registered program; `results` are the handles of what it makes, which may be used at once.

        `traceback_id` is the client's number for the stack of its request.
        """
        if program in self._split:
            return self._split.launch(program, arguments, results, traceback_id, self.launch)
        credits = self._split.credits(program)
        self.window.take(credits)
        self._outgoing.launch(program, arguments, results, feeds, traceback_id, credits)

    def release(self, handles: Sequence[int], *, delete: bool = False) -> None:
        """The client needs these handles no more; with `delete`, nobody may use their memory either."""
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
        """Wait for the handles that one message could not name, unless an earlier one has failed."""
        if status.ok:
            self.wait(handles, then)
        else:
            then(status)

    # ---- compiled functions

    async def register_function(
        self, source: bytes, content: str, assignment: tuple[tuple[int, ...], ...]
    ) -> tuple[int, bytes]:
        """Compiles `source`, whose hash is `content`, for [replica][partition] of virtual devices.

        Returns the function's number and its `FunctionInfo`. Raises StatusError.
        """
        while self._quiesced and self.lost is None:
            self._resumed.append(self.make_future())
            await self._resumed[-1]
        function, feed = self.number(), self.number()
        devices = [device for partitions in assignment for device in partitions]
        hosts = self.hosts_of(devices)
        self._functions.add(function, source, devices)
        self._channels.upload(hosts, feed, [source])
        ready = await self._ask(function, m.RegisterFunction(function, content, feed, assignment))
        if not ready.status.ok:
            self._functions.remove(function)
        ready.status.raise_if_error()
        return function, ready.info

    def source(self, function: int) -> bytes:
        """What a function of the session was registered with. Raises NOT_FOUND."""
        source = self._functions.source(function)
        if source is None:
            raise not_found(f"function {function} does not exist in this session")
        return source

    def retain_functions(self, functions: Sequence[int]) -> None:
        """One more executable uses these functions."""
        self._functions.retain(functions)

    def drop_functions(self, functions: Sequence[int]) -> None:
        """One executable less uses these functions; those that none uses any more are released."""
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

    async def inquire(self, what: str, device: int, function: int = -1, payload: bytes = b"") -> bytes:
        """Asks the worker that holds `device`. Raises StatusError."""
        number = self.number()
        reply = await self._ask(number, m.Query(number, what, device, function, payload))
        reply.status.raise_if_error()
        return bytes(reply.payload)

    def _ask(self, number: int, message: Any) -> ReplyFuture:
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
        """Asks for a slice at once, and quiesces the session until the reply. The coroutine raises StatusError."""
        number = self.number()
        self._quiesce()
        return self._slice_added(self._ask(number, m.AddSlice(number, slice_request)))

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
        """Virtual devices may be moving: nothing that the client asks for may be sent."""
        return self._quiesced > 0

    def _quiesce(self) -> None:
        self._quiesced += 1
        if self._quiesced == 1:
            self.on_quiesce()

    def _resume(self) -> None:
        self._quiesced -= 1
        if not self._quiesced:
            self._wake_resumed()
            self.on_resume()

    def _wake_resumed(self) -> None:
        resumed, self._resumed = self._resumed, []
        for future in resumed:
            if not future.done():
                future.set_result(None)

    # ---- data

    def hosts_of(self, devices: Sequence[int]) -> list[int]:
        """The hosts that hold these virtual devices. Raises INVALID_ARGUMENT for one that does not exist."""
        hosts = set()
        for device in devices:
            host = self._hosts.get(device)
            if host is None:
                raise StatusError(Code.INVALID_ARGUMENT, f"device {device} does not exist")
            hosts.add(host)
        return sorted(hosts)

    def upload(self, hosts: Sequence[int], feed: int, contents: Sequence[Any], launch: int = 0) -> None:
        """Sends buffers as one feed. They must not change any more.

        Feeds of one launch have the same number `launch`, which counts up; 0: this is needed by itself.
        """
        self._unsent.discard(feed)
        self._channels.upload(hosts, feed, contents, launch)

    def upload_file(self, hosts: Sequence[int], feed: int, nbytes: int, descriptor: int, launch: int = 0) -> None:
        """Sends the first `nbytes` of a file as one feed, and closes the descriptor."""
        self._unsent.discard(feed)
        self._channels.upload_file(hosts, feed, nbytes, descriptor, launch)

    # ---- calls into the client's Python

    def set_callback_handler(self, calls: CallbackHandler) -> None:
        """Has the hosts' calls given to `calls`; each is to be answered by `answer`."""
        self._channels.calls = calls

    def answer(self, feed: int, contents: Sequence[Any]) -> None:
        """Sends the answer to a call. On any thread; waits while the host does not read."""
        self._channels.answer(feed, contents)

    # ---- hosts

    def connect(self, then: Callable[[Unreached], None]) -> None:
        """Opens the data channels of all hosts that the controller has named, and calls `then` once all were tried."""
        self._channels.connect(self.welcome.hosts, then)

    def devices_away(self, leaves: bool = False) -> DevicesAway:
        """Which devices cannot be used now, or not for long; whether the client `leaves` the latter by itself."""
        return self._away.devices(self._hosts, leaves)

    def _hosts_failed(self, hosts: tuple[int, ...]) -> None:
        """From here on nothing is sent to what is left of them: the controller waits for this acknowledgement."""
        self._away.lose(hosts)
        again = self._channels.disconnect(hosts)[-m.MOST_FEEDS_NAMED :]
        self.downloads.hosts_failed(hosts)
        unsent = sorted(self._unsent)[: m.MOST_FEEDS_NAMED]
        self.send(m.FailureAcknowledged(hosts, tuple(again), tuple(unsent)))
        self.on_hosts_lost()

    def _hosts_restarted(self, addresses: tuple[tuple[int, str], ...]) -> None:
        """They hold nothing of this session: the functions that run on them are compiled again.

        The session is lost where one of them cannot be reached.
        """
        back = {host for host, _ in addresses}
        self._away.come_back(back)

        def connected(unreached: Unreached) -> None:
            if self._closed:
                return
            for host, error in unreached.items():
                text = f"host {host} is back, but its data port was not reached for {DIAL_SECONDS:.0f} s: {error}"
                return self._lose(Status(Code.UNAVAILABLE, text))
            for function, devices in self._functions.devices():
                hosts = self.hosts_of(devices)
                if back.intersection(hosts) and self._away.lost.isdisjoint(hosts):
                    self._recompile(function, hosts)

        self._channels.connect(addresses, connected, DIAL_SECONDS)

    # ---- messages

    def handle(self, message: Any) -> None:
        """Takes a message of the controller."""
        match message:
            case m.Ping(lease=lease, seconds=seconds):
                self.send(m.Pong(seconds, self.recorder.now()))
                if self.lease is not None:
                    self.lease.renew(lease)
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
                held = self.held()
                is_short = held is not None and len(held) <= m.MOST_HANDLES_REPORTED
                self.send(m.HandlesReported(check, held if is_short else None))
            case m.Late(text=text):
                _log.warning("%s", text)
            case m.Closing(status=status):
                self._lose(status)
