"""One session's link to the cluster: the control connection, and the data channels to its hosts.

All methods run on the event loop's thread; what threads learn comes back to it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from atoll._version import __version__
from atoll.cluster.slices import SliceRequest
from atoll.errors import AccessError, Code, ConnectError, Status, StatusError, VersionError, refusal
from atoll.frontends.session.channels import Channels
from atoll.protocol import messages as m
from atoll.transfers.channel import DataChannel
from atoll.transfers.engine import Piece
from atoll.wire.address import Address, parse_address
from atoll.wire.connection import Connection, connect

_log = logging.getLogger(__name__)

# Pieces up to this size are written to the socket on the loop's thread; its buffer holds many of them.
_DIRECT_BYTES = 16 * 1024
_WELCOME_SECONDS = 60.0
_EVERYWHERE = ("0.0.0.0", "::")

# Contents, whether more will follow, and what to call when they have been read.
OnData = Callable[[Any, bool, Callable[[], None]], None]


class Link:
    """An open session with the controller. `on_lost(status)` is called once, when it is over."""

    def __init__(self, label: str, pid: int) -> None:
        self.label = label
        self.pid = pid
        self.loop = asyncio.get_running_loop()
        self.welcome: m.Welcome
        self.on_lost: Callable[[Status], None] = lambda status: None
        self.on_hosts_lost: Callable[[], None] = lambda: None
        self.on_credit_returned: Callable[[int], None] = lambda count: None
        self.is_held = False
        self.on_hold: Callable[[], None] = lambda: None
        self.on_moved: Callable[[], None] = lambda: None
        self._connection: Connection
        self._opening: asyncio.Future[m.Welcome] = self.loop.create_future()
        self._functions: dict[int, asyncio.Future[m.FunctionReady]] = {}
        self._waits: dict[int, Callable[[Status], None]] = {}
        self._queries: dict[int, asyncio.Future[m.QueryReply]] = {}
        self._slices: dict[int, asyncio.Future[m.SliceAdded]] = {}
        self._hosts: dict[int, int] = {}  # on which each virtual device sits
        self._feeds: dict[int, OnData] = {}
        self._sources: dict[int, tuple[bytes, list[int]]] = {}  # of functions: what is compiled, for which devices
        self._channels = Channels(self.loop, self._arrived, self._lose)
        self._still = asyncio.Event()  # unless virtual devices may be changing places
        self._still.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._next = 1
        self._closed = False

    # ---- opening and closing

    async def open(self, controller: Address, token: str) -> None:
        """Opens the session. Raises ConnectError and its kin with what a user needs to know."""
        self._connection = await connect(
            controller, m.ToProxy, self._message, self._connection_lost, name="the Atoll controller"
        )
        self._connection.send(m.Hello(m.PROTOCOL, "proxy", token, self.pid, __version__, self.label))
        try:
            async with asyncio.timeout(_WELCOME_SECONDS):
                self.welcome = await self._opening
        except TimeoutError:
            raise ConnectError(
                f"the controller at {controller} opened no session within {_WELCOME_SECONDS:.0f} s: "
                "not all of its workers are up (atoll status shows which)"
            ) from None
        self._controller = controller
        self._hosts = {device.id: device.host for device in self.welcome.devices}
        for host, address in self.welcome.hosts:
            await self._open_channel(host, address)

    def close(self) -> None:
        """Ends the session; the cluster frees all it owned."""
        self._closed = True
        if hasattr(self, "_connection"):
            self._connection.close()
        self._channels.close()

    def _connection_lost(self, reason: str) -> None:
        self._lose(Status(Code.UNAVAILABLE, f"the Atoll controller is gone: {reason}"))

    def _lose(self, status: Status) -> None:
        if self._closed:
            return
        if not self._opening.done():
            self._opening.set_exception(ConnectError(status.message))
            return
        self.close()
        futures: chain[asyncio.Future[Any]] = chain(
            self._functions.values(), self._queries.values(), self._slices.values()
        )
        for future in futures:
            if not future.done():
                future.set_exception(StatusError(Code(status.code), status.message))
        waits, self._waits = self._waits, {}
        for wait in waits.values():
            wait(status)
        self.on_lost(status)

    # ---- control

    def number(self) -> int:
        """A fresh number, for whatever needs one in this session."""
        self._next += 1
        return self._next

    def send(self, message: Any) -> None:
        self._connection.send(message)

    def wait(self, handles: Sequence[int], then: Callable[[Status], None]) -> None:
        """Calls `then` once the buffers are ready, with their status."""
        number = self.number()
        self._waits[number] = then
        self._connection.send(m.Await(number, tuple(handles)))

    async def register_function(
        self, source: bytes, content: str, assignment: tuple[tuple[int, ...], ...]
    ) -> tuple[int, bytes]:
        """Compiles `source`, whose hash is `content`; returns the function's number and its `FunctionInfo`.

        Raises StatusError.
        """
        await self._still.wait()
        number, feed = self.number(), self.number()
        devices = [device for partitions in assignment for device in partitions]
        hosts = self.hosts_of(devices)
        self._sources[number] = (source, devices)
        future = self._functions[number] = self.loop.create_future()
        self.upload(hosts, feed, [source])
        self._connection.send(m.RegisterFunction(number, content, feed, assignment))
        ready = await future
        if not ready.status.ok:
            self._sources.pop(number, None)
        ready.status.raise_if_error()
        return number, ready.info

    def release_function(self, number: int) -> None:
        self._sources.pop(number, None)
        self._connection.send(m.ReleaseFunction(number))

    # ---- virtual devices that change places

    async def add_slice(self, slice_request: SliceRequest) -> m.SliceAdded:
        """Asks for a slice. The session holds its client back meanwhile. Raises StatusError."""
        number = self.number()
        future: asyncio.Future[m.SliceAdded] = self.loop.create_future()
        self._slices[number] = future
        self.send(m.AddSlice(number, slice_request))
        added = await future
        added.status.raise_if_error()
        return added

    def _send_sources(self, functions: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
        for function, hosts in functions:
            if function in self._sources:
                self._compile_again(function, hosts)

    def _compile_again(self, function: int, hosts: Sequence[int]) -> None:
        feed = self.number()
        self.upload(hosts, feed, [self._sources[function][0]])
        self.send(m.CompileAgain(function, feed))

    def hold(self) -> None:
        """Virtual devices may change places: nothing new is sent to where they are."""
        self._still.clear()

    def go_on(self) -> None:
        self._still.set()

    # ---- hosts that go and come back

    async def _open_channel(self, host: int, address: str) -> None:
        welcome = self.welcome
        await self._channels.open(host, _reachable(address, self._controller), welcome.session, welcome.secret)

    def _hosts_lost(self, hosts: tuple[int, ...]) -> None:
        """From here on, nothing is sent to what is left of them: the controller is told so."""
        self._channels.lose(hosts)
        self._connection.send(m.LossAcknowledged(hosts))
        self.on_hosts_lost()

    async def _hosts_back(self, hosts: tuple[tuple[int, str], ...]) -> None:
        """They have nothing of this session: all functions that run on them are compiled again."""
        try:
            for host, address in hosts:
                await self._open_channel(host, address)
        except ConnectError as error:
            _log.warning("%s", error)  # they are gone once more; the controller will tell
            return
        numbers = {host for host, _ in hosts}
        for function, (_, devices) in self._sources.items():
            places = self.hosts_of(devices)
            if numbers.intersection(places):
                self._compile_again(function, places)

    async def inquire(self, what: str, device: int, function: int = -1, payload: bytes = b"") -> bytes:
        """Asks the worker that holds `device`. Raises StatusError."""
        number = self.number()
        future = self._queries[number] = self.loop.create_future()
        self._connection.send(m.Query(number, what, device, function, payload))
        answer = await future
        answer.status.raise_if_error()
        return bytes(answer.payload)

    def _message(self, message: Any) -> None:
        match message:
            case m.CreditReturned(launches=launches):
                self.on_credit_returned(launches)
            case m.Awaited(wait=wait, status=status):
                then = self._waits.pop(wait, None)
                if then is not None:
                    then(status)
            case m.FunctionReady(function=function):
                pending = self._functions.pop(function, None)
                if pending is not None and not pending.done():
                    pending.set_result(message)
            case m.HostsLost(hosts=hosts):
                self._hosts_lost(hosts)
            case m.HostsBack(hosts=addresses):
                task = self.loop.create_task(self._hosts_back(addresses))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case m.QueryReply(query=query):
                asked = self._queries.pop(query, None)
                if asked is not None and not asked.done():
                    asked.set_result(message)
            case m.SliceAdded(request=request):
                self._hosts.update(message.hosts)
                added = self._slices.pop(request, None)
                if added is not None and not added.done():
                    added.set_result(message)
            case m.Quiesce(migration=migration):
                self.is_held = True
                self.on_hold()
                self.send(m.Quiesced(migration))
            case m.SendSources(functions=functions):
                self._send_sources(functions)
            case m.Migrated(hosts=locations):
                self._hosts.update(locations)
                self.is_held = False
                self.on_moved()
            case m.Welcome():
                self._opening.set_result(message)
            case m.Refused(status=status):
                self._opening.set_exception(refusal(status))
            case m.Closing(status=status):
                self._lose(status)

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

    def expect(self, feed: int, then: OnData) -> None:
        """Calls `then` with the contents that a worker sends as `feed`."""
        self._feeds[feed] = then

    def forget(self, feed: int) -> bool:
        """The contents will not come; True where they had not."""
        return self._feeds.pop(feed, None) is not None

    def upload(self, hosts: Sequence[int], feed: int, contents: Sequence[Any]) -> None:
        """Sends buffers as one feed. They must not change any more."""
        session = self.welcome.session
        small = sum(memoryview(part).nbytes for part in contents) <= _DIRECT_BYTES
        for host in hosts:
            self._channels.send(host, lambda channel: channel.send(session, feed, contents), small)

    def upload_file(self, hosts: Sequence[int], feed: int, nbytes: int, descriptor: int) -> None:
        """Sends a file's contents as one feed, by its descriptor where the host is on this machine."""
        session = self.welcome.session

        def send_and_close(channel: DataChannel, own: int) -> None:
            try:
                channel.send_file(session, feed, nbytes, own)
            finally:
                os.close(own)

        for host in hosts:
            self._channels.send(host, partial(send_and_close, own=os.dup(descriptor)), small=False)
        os.close(descriptor)

    def _arrived(self, piece: Piece, content: Any, done: Callable[[], None]) -> None:
        then = self._feeds.get(piece.feed)
        if then is None:
            done()
            return
        if not piece.more:
            del self._feeds[piece.feed]
        then(content, piece.more, done)


def _reachable(data_address: str, controller: Address) -> Address:
    """A data port's address as seen from here: one that listens everywhere is where its controller is."""
    address = parse_address(data_address)
    return replace(address, host=controller.host) if address.host in _EVERYWHERE else address


async def open_link(controller: Address, token: str, label: str, pid: int, patience: float) -> Link:
    """Opens a session with a controller that may still be starting: tries for `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        link = Link(label, pid)
        try:
            await link.open(controller, token)
            return link
        except (AccessError, VersionError):
            link.close()
            raise
        except ConnectError as error:
            link.close()
            if time.monotonic() > deadline or not str(error).startswith("cannot reach"):
                raise
            await asyncio.sleep(0.02)
