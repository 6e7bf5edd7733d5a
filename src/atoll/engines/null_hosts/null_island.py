"""An island of null devices: all of its hosts, on the event loop of this process."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from atoll.wire.address import check_may_listen, parse_address
from atoll.wire.resumption.dialed_connection import DialedConnection, dial
from atoll.wire.tls.identity import Identity
from atoll.worker.host_group import decoded
from atoll.worker.read_threads import ReadThreads
from atoll.worker.worker_main import CONNECT_SECONDS, RETRY_SECONDS, advertised, introduction
from atoll.worker.worker_options import IslandOptions

_log = logging.getLogger(__name__)

_STACK_BYTES = 256 * 1024  # of each thread; most threads only wait on a socket


def raise_limits() -> None:
    """Let this process have many threads and descriptors. Call this before any thread starts."""
    threading.stack_size(_STACK_BYTES)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass(frozen=True)
class NullProcess:
    """The common state of the islands of a process. Open it on the event loop."""

    bugs: BugTrap
    loop: asyncio.AbstractEventLoop
    clock: FineClock
    readers: ReadThreads
    model: NullModel

    @classmethod
    def open(cls, name: str) -> NullProcess:
        loop, bugs = asyncio.get_running_loop(), BugTrap(name)
        bugs.watch_threads()
        bugs.watch_loop(loop)
        return cls(bugs, loop, FineClock(loop), ReadThreads(), chosen_model())


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
            identity_for, parse_address(options.controller), Role.HOST, hosts_of(options), CONNECT_SECONDS
        )
        for rank in range(options.hosts):
            await self._start_host(rank)

    def close(self) -> None:
        """Close the hosts' connections and data ports. Idempotent."""
        self._is_closed = True
        for connection in self._connections:
            connection.close()
        for host in self._hosts.values():
            host.port.close()
        self._connections.clear()
        self._hosts.clear()

    async def _start_host(self, rank: int) -> None:
        options = self._options
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

        connection = await self._connect(handle)
        self._connections.append(connection)
        address = parse_address(options.data_address.format(host=number))
        token = token_for(parse_address(options.controller), Role.HOST)
        check_may_listen(address, token)
        host = NullHost(
            number,
            rank,
            options.devices,
            self._process.model,
            self._process.clock,
            self._collectives,
            self._neighbors,
            lambda inbox: DataPort(address, inbox, identity=self._identity),
            self._reporter(connection),
            self._lease.renew,
            self._call_soon,
            self._process.readers,
            self._send,
        )
        self._hosts[number] = host
        where = advertised(host.port.address, options.advertise)
        for message in introduction(options.island, number, host.backend, where, options.incarnation, token):
            connection.send(message)

    async def _connect(self, handle: Callable[[Any], None]) -> DialedConnection:
        """Connect to the controller. Retry for CONNECT_SECONDS, since it may still be starting."""
        reach = partial(
            dial,
            parse_address(self._options.controller),
            m.ToWorker,
            handle,
            lambda _: self._stop.set(),
            name="the controller",
            identity=self._identity,
        )
        retry = Retry(RETRY_SECONDS, patience=CONNECT_SECONDS)
        return await retry.call_async(reach, ConnectError, unless=AccessError)

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
