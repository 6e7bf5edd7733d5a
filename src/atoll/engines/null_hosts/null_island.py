"""An island of null devices: all of its hosts, on the event loop of this process."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from atoll._version import __version__
from atoll.cluster.processes.bugs import BugTrap
from atoll.cluster.processes.leases import LAPSED_STATUS
from atoll.cluster.processes.lifeline import Lease
from atoll.devices.null.model import NullModel, chosen_model
from atoll.devices.null.null_backend import Collectives
from atoll.devices.null.sim_events import FineClock
from atoll.engines.null_hosts.null_host import NullHost
from atoll.errors import AccessError, ConnectError
from atoll.peers.data_port import DataPort
from atoll.protocol import messages as m
from atoll.retries import Retry
from atoll.security.access import identity_for, token_for
from atoll.security.roles import Role
from atoll.transfers.inbox import Inbox
from atoll.wire.address import Address, check_may_listen, parse_address
from atoll.wire.resumption.dialed_connection import DialedConnection, dial
from atoll.wire.tls.identity import Identity
from atoll.worker.host_group import decoded
from atoll.worker.process_relay import ProcessRelay
from atoll.worker.read_threads import ReadThreads
from atoll.worker.worker_main import RETRY_SECONDS, advertised, introduction
from atoll.worker.worker_options import IslandOptions

_log = logging.getLogger(__name__)

_STACK_BYTES = 256 * 1024  # of each thread; most threads only wait on a socket


def raise_limits() -> None:
    """Let this process have many threads and descriptors. Call this before any thread starts."""
    threading.stack_size(_STACK_BYTES)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class IslandsRelay:
    """The connection of a process of several islands through which the controller starts gangs on their hosts.

    The process should end when it is lost: `on_lost` is called.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, bugs: BugTrap, on_lost: Callable[[], None]) -> None:
        self.process = secrets.token_hex(16)
        self.relay = ProcessRelay(self._report, loop.call_later)
        self._loop = loop
        self._bugs = bugs
        self._thread = threading.get_ident()
        self._on_lost = on_lost
        self._connection: DialedConnection | None = None

    async def open(self, controller: Address, identity: Identity | None, seconds: float) -> None:
        """Connect to the controller unless that has been done. Raise ConnectError if it does not listen in time."""
        if self._connection is not None:
            return
        self._connection = await _dial(
            controller, m.ToProcessRelay, self._handle, lambda _: self._on_lost(), identity, seconds
        )
        token, pid = token_for(controller, Role.HOST), os.getpid()
        self._report(
            m.Hello(m.PROTOCOL, "relay", token, pid, __version__, resumes=True, process=self.process, redials=True)
        )

    def _handle(self, message: Any) -> None:
        try:
            self.relay.handle(message)
        except Exception as error:  # ends the process, since all hosts share state
            self._bugs.end(error)
            raise

    def _report(self, *messages: Any) -> None:
        assert self._connection is not None
        for message in messages:
            self._connection.send(message)

    # ---- ends of units, from any thread

    def ended(self, host: int, runs: tuple[tuple[int, int, int], ...]) -> None:
        self._call(partial(self.relay.ended, host, runs))

    def failed(self, failure: m.MemberFailed) -> None:
        self._call(partial(self.relay.failed, failure))

    def answered(self, host: int, pong: m.Pong) -> None:
        self._call(partial(self.relay.answered, host, pong))

    def _call(self, call: Callable[[], None]) -> None:
        if threading.get_ident() == self._thread:
            call()
        else:
            self._loop.call_soon_threadsafe(call)


async def _dial(
    controller: Address,
    messages: Any,
    handle: Callable[[Any], None],
    on_lost: Callable[[str], None],
    identity: Identity | None,
    seconds: float,
) -> DialedConnection:
    """Connect to the controller. Retry for `seconds`, since it may still be starting."""
    reach = partial(
        dial, controller, messages, handle, on_lost, name="the controller", patience=seconds, identity=identity
    )
    return await Retry(RETRY_SECONDS, patience=seconds).call_async(reach, ConnectError, unless=AccessError)


@dataclass(frozen=True)
class NullProcess:
    """The common state of the islands of a process. Open it on the event loop."""

    bugs: BugTrap
    loop: asyncio.AbstractEventLoop
    clock: FineClock
    read_threads: ReadThreads
    model: NullModel
    relay: IslandsRelay | None = None  # of a process of several islands

    @classmethod
    def open(cls, name: str, on_relay_lost: Callable[[], None] | None = None) -> NullProcess:
        """Return the state of this process. It has a relay if `on_relay_lost` is given."""
        loop, bugs = asyncio.get_running_loop(), BugTrap(name)
        bugs.watch_threads()
        bugs.watch_loop(loop)
        relay = None if on_relay_lost is None else IslandsRelay(loop, bugs, on_relay_lost)
        return cls(bugs, loop, FineClock(loop), ReadThreads(), chosen_model(), relay)


class NullIsland:
    """The hosts of an island, each with its connection to the controller.

    `stop` is set when the controller ends a host or when a connection to it is lost.
    """

    def __init__(self, options: IslandOptions, process: NullProcess, stop: asyncio.Event) -> None:
        self._options = options
        self._process = process
        self._stop = stop
        self._loop = process.loop
        self._thread = threading.get_ident()
        self._collectives = Collectives()
        self._neighbors: dict[int, Inbox] = {}
        self._hosts: dict[int, NullHost] = {}
        self._connections: list[DialedConnection] = []
        self._lease = Lease(self._lapsed)
        self._is_closed = False
        self._identity: Identity | None = None
        self._sent = b""  # the last content between hosts, which `_message` decodes
        self._message: m.InGroup = m.MemberDone(0, ())

    async def start(self) -> None:
        options = self._options
        self._identity = await asyncio.to_thread(
            identity_for, parse_address(options.controller), Role.HOST, hosts_of(options), options.connect_seconds
        )
        if self._process.relay is not None:
            await self._process.relay.open(parse_address(options.controller), self._identity, options.connect_seconds)
        for rank in range(options.hosts):
            await self._start_host(rank)

    def close(self) -> None:
        """Close the hosts' connections and data ports. Idempotent."""
        self._is_closed = True
        for connection in self._connections:
            connection.close()
        for number, host in self._hosts.items():
            host.port.close()
            if self._process.relay is not None:
                self._process.relay.relay.host_ended(number, host.group)
        self._connections.clear()
        self._hosts.clear()

    async def _start_host(self, rank: int) -> None:
        options, relay = self._options, self._process.relay
        number = options.first + rank
        host: NullHost | None = None

        def handle(message: Any) -> None:
            assert host is not None
            try:
                continues = host.handle(message)
            except Exception as error:  # ends the process, since all hosts share state
                self._process.bugs.end(error)
                raise
            if not continues:
                self._stop.set()

        connection = await _dial(
            parse_address(options.controller),
            m.ToWorker,
            handle,
            lambda _: self._stop.set(),
            self._identity,
            options.connect_seconds,
        )
        self._connections.append(connection)
        address = parse_address(options.data_address.format(host=number))
        token = token_for(parse_address(options.controller), Role.HOST)
        check_may_listen(address, token)
        host = NullHost(
            number,
            rank,
            options.devices,
            model=self._process.model,
            clock=self._process.clock,
            collectives=self._collectives,
            neighbors=self._neighbors,
            make_port=lambda inbox: DataPort(address, inbox, identity=self._identity),
            report=self._reporter(connection),
            renew=self._lease.renew,
            call_soon=self._call_soon,
            read_threads=self._process.read_threads,
            send=self._send,
            process=relay,
        )
        self._hosts[number] = host
        if relay is not None:
            relay.relay.host_started(number, options.incarnation, host.group)
        where, process = advertised(host.port.address, options.advertise), "" if relay is None else relay.process
        for message in introduction(
            options.island, number, host.backend, where, options.incarnation, token, process=process
        ):
            connection.send(message)

    def _send(self, host: int, content: bytes, in_pieces: bool = False) -> None:
        """Deliver a message between hosts of a group, which are all in this process. Decode repeated content once."""
        if content != self._sent:
            self._sent, self._message = content, decoded(content)
        self._hosts[host].group.receive_message(self._message)

    def _call_soon(self, call: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(call)

    def _reporter(self, connection: DialedConnection) -> Callable[..., None]:
        def report(*messages: Any) -> None:
            if threading.get_ident() != self._thread:
                self._loop.call_soon_threadsafe(partial(report, *messages))
                return
            for message in messages:
                connection.send(message)

        return report

    def _lapsed(self) -> None:
        # The connections wait for the controller's grace time.
        if self._is_closed or any(each.can_resume for each in self._connections):
            return
        _log.error("the controller is silent: this island ends")
        os._exit(LAPSED_STATUS)


def hosts_of(options: IslandOptions) -> str:
    """Return the name of an island's hosts for messages."""
    return f"hosts {options.first} to {options.first + options.hosts - 1}"
